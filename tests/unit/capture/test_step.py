"""The training step in both its forms: traced and bound, and eager."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.capture.step import (
    SideOutputs,
    bind_train_step,
    combine,
    make_eager_step,
    make_eval_step,
    make_train_step,
    trace_eval_step,
    trace_train_step,
)
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.loss import cross_entropy


class Batch(NamedTuple):
    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor


class Tiny(nn.Module):
    """It reads all three inputs of a step beside the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.output = nn.Linear(3, 7, bias=False)

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: Tensor, *, side_outputs: bool = False) -> Any:
        logits = self.output((self.table(tokens_BL) + positions_BL.unsqueeze(-1)) * masks)
        return (logits, SideOutputs({}, {})) if side_outputs else logits


def inputs(seed: int) -> tuple[Batch, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(7, (2, 4), generator=generator) for _ in range(2))
    mask = torch.rand(2, 4, 1, generator=generator)
    return Batch(tokens, labels, torch.arange(4).expand(2, 4), torch.zeros(2, 4).long()), mask, torch.tensor(8.0 + seed)


def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def test_gradients_come_by_name_in_parameter_order() -> None:
    tiny = model()
    loss, gradients, _ = make_train_step(tiny, cross_entropy)(*inputs(0))
    assert list(gradients) == ["table.weight", "output.weight"]
    expected = torch.autograd.grad(
        cross_entropy(tiny(*inputs(0)[0][::2], inputs(0)[1]), inputs(0)[0][1], inputs(0)[2]), list(tiny.parameters())
    )
    assert all(torch.equal(g, e) for g, e in zip(gradients.values(), expected, strict=True))
    traced = trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu")
    assert [(s.kind, s.name) for s in signature_of(traced.gm).outputs] == [
        ("loss", "loss"),
        ("grad", "table.weight"),
        ("grad", "output.weight"),
    ]


def test_the_bound_step_is_the_eager_step_bit_for_bit_and_adds_gradients_up() -> None:
    eager, tiny = model(), model()
    eager_step = make_eager_step(eager, cross_entropy)
    step = bind_train_step(trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu"), tiny)
    for microbatch in (1, 2):
        assert torch.equal(step(*inputs(microbatch)).loss, eager_step(*inputs(microbatch)).loss)
    for p, q in zip(tiny.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


class Returned(torch.autograd.Function):
    """Scales by a weight, and gives what it was given as the weight's gradient: no new memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0]


class Sharing(Tiny):
    """Gradients that are one tensor (two biases), one number repeated (a sum's), and an input of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.summed = (nn.Parameter(torch.ones(2, 4, 1)) for _ in range(3))
        self.returned = nn.Parameter(torch.ones(2, 4, 1))

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: Tensor, *, side_outputs: bool = False) -> Any:
        logits, routings = super().forward(tokens_BL, positions_BL, masks, side_outputs=True)
        logits = logits * (self.one + self.two) + self.summed.sum() + Returned.apply(masks, self.returned)
        return (logits, routings) if side_outputs else logits


def test_parameters_whose_gradients_share_memory_keep_gradients_of_their_own() -> None:
    torch.manual_seed(0)
    eager = Sharing()
    tiny = copy.deepcopy(eager)
    eager_step = make_eager_step(eager, cross_entropy)
    step = bind_train_step(trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu"), tiny)
    for microbatch in (1, 2, 3):
        given = inputs(microbatch)
        mask = given[1].clone()
        step(*given)
        eager_step(*inputs(microbatch))
        assert torch.equal(given[1], mask)
    assert tiny.one.grad is not tiny.two.grad
    for (name, p), q in zip(tiny.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_a_frozen_parameter_and_an_unused_one_have_no_gradient() -> None:
    eager = model()
    eager.table.weight.requires_grad_(False)
    eager.unused = nn.Linear(2, 2)
    tiny = copy.deepcopy(eager)
    make_eager_step(eager, cross_entropy)(*inputs(1))
    bind_train_step(trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu"), tiny)(*inputs(1))
    assert [name for name, p in tiny.named_parameters() if p.grad is not None] == ["output.weight"]
    assert torch.equal(tiny.output.weight.grad, eager.output.weight.grad)  # type: ignore[arg-type]


def test_gradients_of_one_step_are_no_part_of_the_next() -> None:
    tiny = model()
    step = bind_train_step(trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu"), tiny)
    step(*inputs(1))
    first = [p.grad for p in tiny.parameters()]
    copies = [g.clone() for g in first]  # type: ignore[union-attr]
    for p in tiny.parameters():
        p.grad = None
    step(*inputs(2))
    assert all(torch.equal(g, c) for g, c in zip(first, copies, strict=True))  # type: ignore[arg-type]


def test_another_loss_is_another_trace() -> None:
    def doubled(logits: Tensor, labels: Tensor, num_tokens: Tensor, *more: Any) -> Tensor:
        return 2 * cross_entropy(logits, labels, num_tokens)

    tiny = model()
    losses = [
        run_traced(trace_train_step(tiny, loss, *inputs(0), device="cpu"), module=tiny)(*inputs(0))[0]
        for loss in (cross_entropy, doubled)
    ]
    assert losses[1] == 2 * losses[0]


def test_evaluation_is_a_graph_of_its_own_without_backward() -> None:
    tiny = model()
    traced = trace_eval_step(tiny, cross_entropy, *inputs(0), device="cpu")
    assert [(s.kind, s.name) for s in signature_of(traced.gm).outputs] == [("loss", "loss")]
    assert not any("backward" in str(node.target) for node in traced.gm.graph.nodes)
    found = run_traced(traced, module=tiny)(*inputs(3))
    assert torch.equal(found, make_eval_step(tiny, cross_entropy)(*inputs(3)))
    assert torch.equal(found, make_train_step(tiny, cross_entropy)(*inputs(3))[0])


def test_counts_of_microbatches_add_up_and_of_magnitudes_the_larger_counts() -> None:
    first = {"load": torch.tensor([1, 2]), "wq.amax": torch.tensor([3.0, 1.0])}
    term = {"loss/my.amax": torch.tensor(2.0)}
    assert combine(combine({}, term), term)["loss/my.amax"] == 4.0, "a term, whatever its name"
    found = combine(combine({}, first), {"wq.amax": torch.tensor([2.0, 4.0])})
    assert {name: x.tolist() for name, x in found.items()} == {"load": [1, 2], "wq.amax": [3.0, 4.0]}
    assert combine(found, first)["load"].tolist() == [2, 4]


class Telling(Tiny):
    """With slots: one that tells what it is given, and one of a layer that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("told", torch.ones(2, 4, 1, requires_grad=True))
        self.register_buffer("unused", torch.ones(2, requires_grad=True))

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: Tensor, *, side_outputs: bool = False) -> Any:
        logits, beside = super().forward(tokens_BL, positions_BL, masks, side_outputs=True)
        return (logits + Returned.apply(masks, self.told), beside) if side_outputs else logits


def test_a_layer_that_the_loss_does_not_depend_on_tells_nothing() -> None:
    tiny = Telling()
    traced = bind_train_step(trace_train_step(tiny, cross_entropy, *inputs(0), device="cpu"), tiny)
    for step in (traced, make_eager_step(tiny, cross_entropy)):
        state = step(*inputs(1)).state
        assert torch.equal(state["told"], inputs(1)[1]) and torch.equal(state["unused"], torch.zeros(2))


@pytest.mark.parametrize("wrong", [torch.mean, torch.sum, lambda x: x.mean(1), lambda x: x[:, 1:]])
def test_a_term_that_is_no_number_for_each_token_is_refused(wrong: Callable[[Tensor], Tensor]) -> None:
    class Own(Tiny):
        def forward(self, *args: Any, side_outputs: bool = False) -> Any:
            logits_BLV, beside = super().forward(*args, side_outputs=side_outputs)
            return logits_BLV, beside._replace(losses={"z": wrong(logits_BLV.logsumexp(-1).square())})

    for build in (make_eager_step, lambda *x: lambda *y: trace_train_step(*x, *y, device="cpu")):
        with pytest.raises(
            UserError, match=r"Own: SideOutputs.losses: z has .* each must have a number for each token, \(2, 4\)"
        ):
            build(Own(), cross_entropy)(*inputs(0))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x, z: x, "must return the pair .*, not Tensor"),
        (lambda x, z: (x, {"z": z}), r"must return the pair .*, not \(Tensor, dict\)"),
        (lambda x, z: (x, SideOutputs([z])), r"must return the pair .*, not \(Tensor, SideOutputs\(list, "),
        (lambda x, z: (x, SideOutputs({"z": z}, None)), "SideOutputs.dict, NoneType"),
        (lambda x, z: (x, SideOutputs({}, {"loss/z": z})), "SideOutputs.state: loss/z: names that begin with loss/"),
        (
            lambda x, z: (x, SideOutputs({}, {"metric/z": z})),
            "state: metric/z: names .*with metric/ metrics",
        ),
        (
            lambda x, z: (x, SideOutputs(metrics={"m": z.mean()})),
            r"metrics: m has the shape \(\); each must",
        ),
        (lambda x, z: (x, SideOutputs(metrics=[z])), "its losses, state and metrics each a dict"),
        (lambda x, z: (x, SideOutputs({1: z})), "losses: 1 can't be a metric's name"),
        (lambda x, z: (x, SideOutputs({"a/b": z})), "losses: 'a/b' can't be a metric's name"),
        (lambda x, z: (x, SideOutputs({"": z})), "losses: '' can't be a metric's name"),
        (lambda x, z: (x, SideOutputs({"ahead": z})), "losses: ahead is a term that the loss itself may have"),
        (lambda x, z: (x, SideOutputs({"z": 0.1})), r"losses: z is float: must be a floating-point tensor \(2, 4\)"),
        (lambda x, z: (x, SideOutputs({"z": z.long()})), "losses: z is torch.int64: must be a floating-point tensor"),
    ],
)
def test_side_outputs_of_other_kinds_are_refused(returned: Callable[[Tensor, Tensor], Any], message: str) -> None:
    class Own(Tiny):
        def forward(self, *args: Any, side_outputs: bool = False) -> Any:
            logits_BLV, _ = super().forward(*args, side_outputs=side_outputs)
            return returned(logits_BLV, logits_BLV.logsumexp(-1))

    with pytest.raises(UserError, match=message):
        make_eager_step(Own(), cross_entropy)(*inputs(0))


def test_a_term_is_a_mean_over_the_tokens_of_the_step_without_padding() -> None:
    class Own(Tiny):
        def plain_term(self, name: str, term: Tensor) -> Tensor:
            return term

        def forward(self, *args: Any, side_outputs: bool = False) -> Any:
            logits_BLV, beside = super().forward(*args, side_outputs=side_outputs)
            return logits_BLV, beside._replace(losses={"z": logits_BLV.logsumexp(-1) / zeros})

    zeros = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])  # padding's numbers are infinite
    batch, mask, num_tokens = inputs(0)
    documents, own = torch.where(zeros == 0, -1, 0), Own()
    z_BL = own(batch.tokens_BL, batch.positions_BL, mask, side_outputs=True)[0].logsumexp(-1)
    _, state, *_ = make_eager_step(own, cross_entropy)(batch._replace(documents_BL=documents), mask, num_tokens)
    torch.testing.assert_close(state["loss/z"], z_BL[documents == 0].mean(), rtol=1e-6, atol=0)
