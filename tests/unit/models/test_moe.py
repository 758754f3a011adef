"""A mixture of experts against a loop over tokens; auxiliary losses and bias updates against their formulas."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import Results, largest_gap, loss_of
from torch import Tensor, nn

from pool import run_on
from torchtitan_graph.capture.step import Real
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, check_experts_see_padding
from torchtitan_graph.models.layers.moe import (
    AuxiliaryLoss,
    ExpertTraining,
    MoE,
    MoEConfig,
    move_correction_bias,
    set_up_experts,
)

B, L, D, E = 2, 9, 12, 8
CONFIGS = {
    "softmax": MoEConfig(E, 3, 10),
    "softmax, renormalised": MoEConfig(E, 3, 10, renormalize=True, scale=2.5),
    "one expert per token, score on the input, shared": MoEConfig(
        E, 1, 10, score="sigmoid", score_input=True, shared_dim=7
    ),
    "sigmoid, correction bias, shared": MoEConfig(
        E, 2, 10, score="sigmoid", renormalize=True, correction_bias=True, shared_dim=7
    ),
    "groups by their best two": MoEConfig(
        E, 2, 10, score="sigmoid", num_groups=2, num_chosen_groups=1, group_score="top2", correction_bias=True
    ),
    "groups by their best": MoEConfig(E, 3, 10, num_groups=4, num_chosen_groups=2),
    "softmax of the chosen, biased, clamped": MoEConfig(
        E, 2, 10, score="softmax_of_chosen", biased=True, clamped_swiglu=True
    ),
    "every expert": MoEConfig(E, E, 10),
}


def build(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoE:
    moe = MoE(D, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*moe.named_parameters(), *moe.named_buffers()]:
            scale = 4.0 if name.endswith(("b1", "b3")) else 0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return moe.to(dtype)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, L, D, generator=generator, dtype=torch.float64).requires_grad_()


def one_token(moe: MoE, x_D: Tensor) -> tuple[Tensor, list[int]]:
    """Give a token's output and its experts, chosen and weighed with Python's lists."""
    c, router, experts = moe.config, moe.router, moe.experts
    logits = router.gate.weight @ x_D + (router.gate.bias if c.biased else 0)
    scores = {"sigmoid": torch.sigmoid, "softmax": lambda x: x.exp() / x.exp().sum()}.get(c.score, lambda x: x)(logits)
    rank = (scores + (router.bias_E if c.correction_bias else 0)).tolist()
    size = c.num_experts // c.num_groups
    groups = [range(size * g, size * (g + 1)) for g in range(c.num_groups)]
    best = 2 if c.group_score == "top2" else 1
    groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:best]))
    legal = [e for group in groups[: c.num_chosen_groups] for e in group]
    chosen = sorted(legal, key=lambda e: -rank[e])[: c.top_k]
    shares = torch.stack([scores[e] for e in chosen])
    if c.score == "softmax_of_chosen":
        shares = shares.exp() / shares.exp().sum()
    if c.renormalize:
        shares = shares / shares.sum()
    out_D = torch.zeros_like(x_D)
    for share, e in zip(shares * c.scale, chosen, strict=True):
        in_D = share * x_D if c.score_input else x_D
        gate, up = experts.w1[e] @ in_D, experts.w3[e] @ in_D
        if c.biased:
            gate, up = gate + experts.b1[e], up + experts.b3[e]
        if c.clamped_swiglu:
            gate, up = torch.where(gate > 7, 7.0, gate), torch.where(up.abs() > 7, 7 * up.sign(), up)
            hidden = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
        else:
            hidden = gate / (1 + torch.exp(-gate)) * up
        y_D = experts.w2[e] @ hidden + (experts.b2[e] if c.biased else 0)
        out_D = out_D + (y_D if c.score_input else share * y_D)
    if moe.shared_experts is not None:
        shared = moe.shared_experts
        out_D = out_D + shared.w2.weight @ (F.silu(shared.w1.weight @ x_D) * (shared.w3.weight @ x_D))
    return out_D, chosen


def with_gradients(moe: MoE, x_BLD: Tensor, y_BLD: Tensor) -> Results:
    named = {"x": x_BLD, **dict(moe.named_parameters())}
    return {
        "y": y_BLD.detach(),
        **dict(zip(named, torch.autograd.grad(loss_of(y_BLD), list(named.values())), strict=True)),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_compute_what_a_loop_over_tokens_does(name: str) -> None:
    moe, x_BLD = build(CONFIGS[name]), tokens()
    y_BLD, routing = moe(x_BLD)
    by_token = [one_token(moe, x_D) for x_D in x_BLD.flatten(0, 1)]
    expected = torch.stack([y_D for y_D, _ in by_token]).view_as(x_BLD)
    assert largest_gap(with_gradients(moe, x_BLD, y_BLD), with_gradients(moe, x_BLD, expected)) < 1e-12
    chosen = [e for _, experts in by_token for e in experts]
    assert routing.load_E.tolist() == [chosen.count(e) for e in range(E)] and routing.loss is None


def test_an_expert_that_no_token_goes_to_gets_zeros_for_gradients() -> None:
    moe = build(CONFIGS["sigmoid, correction bias, shared"])
    moe.router.bias_E[3] = -10.0
    y_BLD, routing = moe(tokens())
    loss_of(y_BLD).backward()
    assert routing.load_E[3] == 0 and routing.load_E.sum() == B * L * 2
    assert all(w.grad[3].eq(0).all() for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))


@pytest.mark.parametrize("name", ["softmax", "sigmoid, correction bias, shared"])
def test_forced_balance_gives_every_expert_the_same_load(name: str) -> None:
    moe = build(CONFIGS[name])
    moe.router.forced_balance = True
    load_E = moe(torch.randn(B, 4 * E, D, dtype=torch.float64))[1].load_E
    assert load_E.unique().numel() == 1


def test_in_half_precision_the_gate_is_computed_in_fp32() -> None:
    moe = build(CONFIGS["softmax"], torch.bfloat16)
    x_TD = tokens().detach().bfloat16().flatten(0, 1)
    scores, chosen, logits = moe.router(x_TD)
    assert scores.dtype == logits.dtype == torch.float32
    assert torch.equal(logits, x_TD.float() @ moe.router.gate.weight.float().T)
    assert moe(x_TD.unsqueeze(0))[0].dtype == torch.bfloat16


# --- auxiliary losses -------------------------------------------------------------------------------------------------


def by_hand(
    moe: MoE,
    x_BLD: Tensor,
    *,
    load_balance: float = 0.0,
    by_sequence: bool = False,
    router_z: float = 0.0,
    ends: Sequence[int] = (L,) * B,
) -> float:
    """Work the formulas out in Python's numbers: Switch Transformer's equation 4 over the batch or, row by row,
    DeepSeek-V3's 17 to 20; ST-MoE's 5. Behind `ends` is padding."""
    of_rows = [list(range(i * L, i * L + end)) for i, end in enumerate(ends)]
    rows = of_rows if by_sequence else [sum(of_rows, [])]
    x_TD, A = x_BLD.flatten(0, 1), moe.config.top_k
    logits = (x_TD @ moe.router.gate.weight.T).tolist()
    chosen = [one_token(moe, x_D)[1] for x_D in x_TD]
    probability = []
    for of_token in logits:
        scores = [1 / (1 + math.exp(-x)) if moe.config.score == "sigmoid" else math.exp(x) for x in of_token]
        probability.append([score / sum(scores) for score in scores])
    balance = 0.0
    for row in rows:
        for e in range(E):
            share = sum(chosen[t].count(e) for t in row) / (len(row) * A)
            balance += E * share * sum(probability[t][e] for t in row) / len(row) / len(rows)
    z = sum(math.log(sum(math.exp(x) for x in logits[t])) ** 2 for row in rows for t in row) / sum(ends)
    return load_balance * balance + router_z * z


@pytest.mark.parametrize("name", ["softmax", "sigmoid, correction bias, shared"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"load_balance": 0.3},
        {"load_balance": 0.3, "by_sequence": True},
        {"router_z": 0.2},
        {"load_balance": 0.3, "router_z": 0.2},
    ],
)
def test_an_auxiliary_loss_is_its_formula(knobs: dict, name: str) -> None:
    moe, x_BLD = build(CONFIGS[name]), tokens()
    moe.auxiliary_loss = AuxiliaryLoss(**knobs)
    assert moe(x_BLD)[1].loss.item() == pytest.approx(by_hand(moe, x_BLD, **knobs), rel=1e-12)
    with torch.no_grad():
        assert moe(x_BLD)[1].loss is None


def test_experts_in_balance_cost_the_coefficient() -> None:
    logits_TE = torch.zeros(E, E, dtype=torch.float64)
    chosen_TA, load_E = torch.arange(E).view(E, 1), torch.ones(E, dtype=torch.int64)
    real = Real.of(torch.ones(1, E, dtype=torch.bool))
    loss = AuxiliaryLoss(load_balance=0.3)(logits_TE, logits_TE.softmax(-1), chosen_TA, load_E, real)
    assert loss.item() == pytest.approx(0.3, rel=1e-12)


def test_the_balance_loss_moves_the_gate_towards_balance() -> None:
    moe, x_BLD = build(CONFIGS["softmax"]), tokens()
    moe.auxiliary_loss = AuxiliaryLoss(load_balance=1.0)
    before = moe(x_BLD)[1].loss
    (gradient,) = torch.autograd.grad(before, moe.router.gate.weight)
    with torch.no_grad():
        moe.router.gate.weight -= 0.01 * gradient
    assert moe(x_BLD)[1].loss < before


def loss_with_half_the_rows() -> float:
    moe, x_BLD = build(CONFIGS["softmax"]), tokens()
    moe.auxiliary_loss = AuxiliaryLoss(load_balance=0.3, groups=(dist.group.WORLD.group_name,))
    real = Real(torch.ones(1, L, dtype=torch.bool), torch.tensor(B * L), torch.tensor(B))
    loss = moe(x_BLD[dist.get_rank()].unsqueeze(0), real)[1].loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def test_ranks_that_share_a_batch_have_the_balance_loss_of_all_of_it() -> None:
    moe, x_BLD = build(CONFIGS["softmax"]), tokens()
    assert run_on(2, loss_with_half_the_rows)[0] == pytest.approx(by_hand(moe, x_BLD, load_balance=0.3), rel=1e-12)


# --- correction biases ------------------------------------------------------------------------------------------------


def test_correction_biases_move_against_the_load() -> None:
    moe, without = MoE(D, CONFIGS["sigmoid, correction bias, shared"]), MoE(D, CONFIGS["softmax"])
    set_up_experts(nn.ModuleList([moe, without]), ExpertTraining(bias_update_speed=0.5))
    load_E = torch.tensor([4, 0, 2, 2, 3, 1, 2, 2])  # the mean is 2
    for _ in range(2):
        for each in (moe, without):
            move_correction_bias(each.router.bias_E, each.bias_update_speed, load_E)
    assert moe.router.bias_E.tolist() == [-1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0]


def test_correction_biases_bring_the_load_into_balance() -> None:
    moe = build(CONFIGS["sigmoid, correction bias, shared"])
    moe.bias_update_speed = 0.01
    x_BLD = torch.randn(4, 64, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def spread() -> float:
        load_E = moe(x_BLD)[1].load_E.double()
        return (load_E.max() / load_E.mean()).item()

    before = spread()
    for _ in range(200):
        move_correction_bias(moe.router.bias_E, moe.bias_update_speed, moe(x_BLD)[1].load_E)
    assert before > 1.5 and spread() < 1.1


@pytest.mark.parametrize(
    ("experts", "groups", "chosen", "top_k", "number"),
    [
        (16, 4, 2, 3, 4),
        (16, 4, 2, 3, 8),
        (16, 4, 2, 3, 2),
        (24, 4, 2, 3, 3),
        (160, 8, 3, 6, 5),
        (160, 8, 3, 6, 10),
        (160, 8, 3, 6, 20),
        (8, 1, 1, 2, 4),
    ],
)
def test_mean_parts_is_the_mean_of_many_tokens(experts: int, groups: int, chosen: int, top_k: int, number: int) -> None:
    config = MoEConfig(experts, top_k, 10, num_groups=groups, num_chosen_groups=chosen)
    generator = random.Random(0)
    of_group, of_part, drawn = experts // groups, experts // number, []
    for _ in range(4000):
        picked = generator.sample(range(groups), chosen)
        legal = [group * of_group + i for group in picked for i in range(of_group)]
        drawn.append(len({e // of_part for e in generator.sample(legal, top_k)}))
    mean = sum(drawn) / len(drawn)
    assert config.mean_parts(number) == pytest.approx(mean, rel=0.02)


# --- padding ----------------------------------------------------------------------------------------------------------

ENDS = (5, 9)  # where the padding of the two rows begins


def with_padding() -> tuple[Tensor, Tensor, Real]:
    x_BLD = tokens()
    is_token_BL = torch.arange(L) < torch.tensor(ENDS).unsqueeze(1)
    return x_BLD, is_token_BL, Real.of(is_token_BL)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_has_no_expert_and_no_gradient(name: str) -> None:
    moe = build(CONFIGS[name])
    x_BLD, is_token_BL, real = with_padding()
    y_BLD, routing = moe(x_BLD, real)
    y_BLD[is_token_BL].square().sum().backward()
    found, gradients = x_BLD.grad, [p.grad.clone() for p in moe.parameters()]
    moe.zero_grad()
    x_TD = tokens().detach()[is_token_BL].requires_grad_()
    y_TD, alone = moe(x_TD.unsqueeze(0))
    y_TD.square().sum().backward()
    assert torch.equal(routing.load_E, alone.load_E) and routing.load_E.sum() == sum(ENDS) * moe.config.top_k
    torch.testing.assert_close(y_BLD[is_token_BL], y_TD[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[is_token_BL], x_TD.grad, rtol=1e-12, atol=1e-12)
    assert not found[~is_token_BL].any()
    for gradient, parameter in zip(gradients, moe.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("knobs", [{"load_balance": 0.3}, {"load_balance": 0.3, "by_sequence": True, "router_z": 0.2}])
@pytest.mark.parametrize("name", ["softmax", "sigmoid, correction bias, shared"])
def test_an_auxiliary_loss_of_padded_rows_is_the_formula_of_their_tokens(knobs: dict, name: str) -> None:
    moe = build(CONFIGS[name])
    x_BLD, _, real = with_padding()
    moe.auxiliary_loss = AuxiliaryLoss(**knobs)
    expected = by_hand(moe, x_BLD, ends=ENDS, **knobs)
    assert moe(x_BLD, real)[1].loss.item() == pytest.approx(expected, rel=1e-12)
    assert moe(x_BLD)[1].loss.item() != pytest.approx(expected, rel=1e-3)  # with the padding


def test_the_balance_loss_of_padded_rows_is_that_of_transformers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    moe = build(CONFIGS["softmax"])
    x_BLD, is_token_BL, real = with_padding()
    moe.auxiliary_loss = AuxiliaryLoss(load_balance=1.0)
    logits_TE, A = moe.router.gate(x_BLD.flatten(0, 1)), moe.config.top_k
    theirs = load_balancing_loss_func((logits_TE,), E, A, is_token_BL.long())  # of tokens, not of slots; in fp32
    assert moe(x_BLD, real)[1].loss.item() == pytest.approx(theirs.item() / A, rel=1e-6)


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int
    tied: bool = False
    norm_eps: float = 1e-6


def mixture(block: type[Block] = Block, moe: type[MoE] = MoE) -> Decoder:
    attention, config = Attention(D, 2, 2, 6), Config(dim=D, num_layers=1, num_heads=2, vocab_size=9)
    return Decoder(config, "sdpa", [block(D, 1e-6, attention, moe(D, CONFIGS["softmax"]))])


def test_layers_that_could_not_leave_padding_out_are_refused() -> None:
    class Blind(Block):
        def forward(self, x_BLD: Tensor, *, rope: Any, mask: Any) -> Any: ...

    class Passing(Block):
        def forward(self, x_BLD: Tensor, **kwargs: Any) -> Any: ...

    class Unnamed(Block):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.feed_forward, self.moe = self.moe, None

    class BlindMoE(MoE):
        def forward(self, x_BLD: Tensor) -> Any: ...

    check_experts_see_padding(mixture())
    check_experts_see_padding(mixture(Passing))
    for model, words in (
        (mixture(Blind), "Blind.forward: has no argument `real`, by which the experts of layers.0 leave padding out"),
        (mixture(moe=BlindMoE), "BlindMoE.forward: has no argument `real`"),
        (mixture(Unnamed), "Unnamed, the block layers.0: has a MoE, and no attribute `moe`"),
    ):
        with pytest.raises(UserError, match=f"^{words}.*see docs/extend/family.md$"):
            check_experts_see_padding(model)
