"""Mixture of experts: every token is routed to a few of many feed-forward layers; none is dropped.

Note [Experts in a static graph]
The T*A routed slots are sorted by expert and multiplied in groups (see ops.py). There are always T*A of them, whatever
their distribution over the experts: no shape depends on data and nothing is padded. The cost is one sort of integers
and two permutations of rows.

Note [Padding]
Padding has no expert: its slots are sorted behind those of all experts, so that they are in no load, no product and no
exchange, and scores of zero multiply them. Means in losses are over the tokens of the whole step: a microbatch and rank
adds its part of the sum, so the loss is the same however a step's rows are divided.

Note [Load balance without a loss]
DeepSeek-V3's correction bias takes part in the choice of experts only. After each optimizer step it moves against the
load of that step (`move_correction_bias`). The load is a result of the forward pass, like the activations:
recomputation can't count it twice, and it is an output of the graph.

Note [Early scores]
A score's gradient needs what it multiplied: an expert's output, on the expert's rank, so that no result is sent again
in backward; but with recomputation the last product is computed again. Where a score multiplies what the last product
reads, it is not: a product less. The sum is the same but for rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.capture.step import Real
from torchtitan_graph.models.layers.feed_forward import FeedForward, SwiGLU
from torchtitan_graph.models.layers.init import RESIDUAL
from torchtitan_graph.models.layers.lora import product_of_stack
from torchtitan_graph.ops.elementwise import LIMIT, STEEPNESS, swiglu
from torchtitan_graph.ops.experts import grouped_add
from torchtitan_graph.ops.route import Route, Slots, Spread, at_home, slots_of

c10d = torch.ops._c10d_functional


class Routing(NamedTuple):
    """Results of a mixture's forward pass other than its output.

    load_E   int64, number of slots of each expert, without padding
    loss     to add to the training loss, or None
    """

    load_E: Tensor
    loss: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts.

    score        "softmax" over all experts; "sigmoid" of each; "softmax_of_chosen": over the chosen ones
    renormalize  divide the chosen scores by their sum
    scale        multiplies the chosen scores
    num_groups, num_chosen_groups, group_score   experts are chosen from the groups that score highest: by the "max" of
                 their experts, or the sum of the "top2"
    correction_bias  see Note [Load balance without a loss]
    score_input  scores multiply the experts' inputs, not their outputs
    shared_dim   width of the feed-forward layer for every token; 0: none
    biased       router and experts have biases
    clamped_swiglu  gpt_oss' activation in place of SwiGLU
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    score_input: bool = False
    shared_dim: int = 0
    biased: bool = False
    clamped_swiglu: bool = False

    def mean_parts(self, number: int) -> float:
        """Return in how many of a number of equal parts of the experts a token's experts are, on average: each expert
        is as likely, within the groups that are chosen, each as likely."""
        of_part, of_group = self.num_experts // number, self.num_experts // self.num_groups
        may = self.num_chosen_groups * of_group  # experts of the chosen groups
        parts: Counter[tuple[int, ...]] = Counter()  # how many experts a part has of each group
        for part in range(number):
            of_each = Counter(expert // of_group for expert in range(part * of_part, (part + 1) * of_part))
            parts[tuple(sorted(of_each.values()))] += 1
        found = 0.0
        for shares, count in parts.items():
            # (groups chosen, experts of the part in them) -> ways to choose so
            ways = Counter({(k, 0): math.comb(self.num_groups - len(shares), k) for k in range(self.num_groups + 1)})
            for share in shares:
                ways += Counter({(k + 1, inside + share): number for (k, inside), number in ways.items()})
            chosen = {inside: number for (k, inside), number in ways.items() if k == self.num_chosen_groups}
            missed = sum(number * math.comb(may - inside, self.top_k) for inside, number in chosen.items())
            found += count * (1 - missed / (sum(chosen.values()) * math.comb(may, self.top_k)))
        return found


@dataclasses.dataclass(frozen=True)
class AuxiliaryLoss:
    """Auxiliary losses of a mixture of experts; none by default.

    load_balance   times E * sum_e (share of the slots that go to e) * (mean probability of e): 1 times it in balance
    by_sequence    the shares are each row's own (DeepSeek-V3, equation 17), not the whole step's (Switch Transformer)
    router_z       times the mean of logsumexp(logits)^2 (ST-MoE): keeps the gate's logits small
    groups         names of the process groups over which a microbatch's loads are summed for the shares
    row_groups     names of the groups over which a row's own loads are summed: their ranks have its parts
    """

    load_balance: float = 0.0
    by_sequence: bool = False
    router_z: float = 0.0
    groups: tuple[str, ...] = ()
    row_groups: tuple[str, ...] = ()

    def __call__(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TA: Tensor, load_E: Tensor, real: Real) -> Tensor:
        """Return a microbatch's part of the loss of one layer."""
        loss, E, is_padding_T1 = logits_TE.new_zeros(()), load_E.shape[0], ~real.is_token_BL.reshape(-1, 1)
        if self.load_balance:
            probabilities_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
            sums_E = probabilities_TE.masked_fill(is_padding_T1, 0)
            if self.by_sequence:
                B = real.is_token_BL.shape[0]
                chosen_BS, sums_BE = chosen_TA.reshape(B, -1), sums_E.unflatten(0, (B, -1)).sum(1)
                load_BE = (
                    load_E.new_zeros(B, E + 1).scatter_add(1, chosen_BS, torch.ones_like(chosen_BS)).narrow(1, 0, E)
                )
                shares_BE, slots_B1 = self._shares(load_BE, self.row_groups, logits_TE.dtype)
                means_BE = sums_BE * chosen_TA.shape[1] / slots_B1
                loss = loss + self.load_balance * E * (shares_BE * means_BE).sum() / real.num_rows
            else:
                shares_E, _ = self._shares(load_E, self.groups, logits_TE.dtype)
                loss = loss + self.load_balance * E * (shares_E * sums_E.sum(0)).sum() / real.num_tokens
        if self.router_z:
            squares_T1 = logits_TE.logsumexp(-1, keepdim=True).square().masked_fill(is_padding_T1, 0)
            loss = loss + self.router_z * squares_T1.sum() / real.num_tokens
        return loss

    def _shares(self, load: Tensor, groups: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the experts' shares of the slots of groups of ranks, and the number of slots, at least one."""
        for group in groups:
            load = c10d.wait_tensor(c10d.all_reduce(load, "sum", group))
        slots = load.sum(-1, keepdim=True).clamp(min=1)
        return load.to(dtype) / slots, slots


class Gate(nn.Linear):
    """A linear layer that computes in fp32 (fp64 stays fp64) for any dtype: close scores choose the experts."""

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias = self.bias.to(wide) if self.bias is not None else None
        return F.linear(x_TD.to(wide), self.weight.to(wide), bias)


class Router(nn.Module):
    """The choice of `top_k` experts for every token, and their scores."""

    bias_E: Tensor | None

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.gate = Gate(dim, config.num_experts, bias=config.biased)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.correction_bias else None
        self.register_buffer("bias_E", bias_E)
        self.forced_balance = False

    def init_buffers(self) -> None:
        """Set the correction bias to zero."""
        if self.bias_E is not None:
            self.bias_E.zero_()

    def forward(self, x_TD: Tensor, is_token_BL: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, fp32, and the indices of the chosen experts, both (T, A); and the logits (T, E). See Note
        [Padding]."""
        config, logits_TE = self.config, self.gate(x_TD)
        scores_TE = self.scores(logits_TE) if config.score != "softmax_of_chosen" else logits_TE
        chosen_TA = self._choose(scores_TE.detach(), is_token_BL)
        scores_TA = scores_TE.gather(1, chosen_TA)
        if config.score == "softmax_of_chosen":
            scores_TA = scores_TA.softmax(-1)
        if config.renormalize:
            scores_TA = scores_TA / (scores_TA.sum(-1, keepdim=True) + 1e-20)
        scores_TA = scores_TA * config.scale
        if is_token_BL is not None:
            scores_TA, chosen_TA = without_padding(scores_TA, chosen_TA, is_token_BL, config.num_experts)
        return scores_TA, chosen_TA, logits_TE

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the score of every expert."""
        return logits_TE.sigmoid() if self.config.score == "sigmoid" else logits_TE.softmax(-1)

    def _choose(self, scores_TE: Tensor, is_token_BL: Tensor | None) -> Tensor:
        config = self.config
        T, E = scores_TE.shape
        if self.forced_balance:
            return in_turn(T, config.top_k, E, scores_TE.device, is_token_BL)
        if self.bias_E is not None:
            scores_TE = scores_TE + self.bias_E
        if config.num_chosen_groups < config.num_groups:
            by_group = scores_TE.view(T, config.num_groups, -1)
            best = by_group.topk(2 if config.group_score == "top2" else 1).values.sum(-1)
            in_best = torch.zeros_like(best, dtype=torch.bool)
            in_best = in_best.scatter(1, best.topk(config.num_chosen_groups).indices, True)
            scores_TE = by_group.masked_fill(~in_best.unsqueeze(-1), float("-inf")).view(T, E)
        return scores_TE.topk(config.top_k).indices


class ClampedSwiGLU(SwiGLU):
    """gpt_oss' activation: a steeper gate, clamped from above; the linear half is clamped, plus one."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.is_one_operator(gate, up):
            return swiglu(gate, up, True)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)


class Experts(nn.Module):
    """Feed-forward layers of experts, stacked on dim 0. Each row goes through its expert's."""

    INITIAL = {"w2": RESIDUAL, "b1": 0.0, "b2": 0.0, "b3": 0.0}

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        E, F_ = config.num_experts, config.ffn_dim
        self.activation = ClampedSwiGLU() if config.clamped_swiglu else SwiGLU()
        self.w1 = nn.Parameter(torch.empty(E, F_, dim))
        self.w2 = nn.Parameter(torch.empty(E, dim, F_))
        self.w3 = nn.Parameter(torch.empty(E, F_, dim))
        self.b1 = nn.Parameter(torch.empty(E, F_)) if config.biased else None
        self.b2 = nn.Parameter(torch.empty(E, dim)) if config.biased else None
        self.b3 = nn.Parameter(torch.empty(E, F_)) if config.biased else None
        self.route: Callable[[Slots, Spread], Route] = at_home

    def forward(self, x_SD: Tensor, load_E: Tensor, scores_S1: Tensor | None = None) -> Tensor:
        """Run the experts on rows sorted by expert, `load_E` of them for each. Scores multiply what the last product
        reads. See Note [Early scores]."""
        offsets_E = load_E.cumsum(0).to(torch.int32)

        def linear(x: Tensor, weight: str, b: Tensor | None) -> Tensor:
            y = self.product(x, weight, offsets_E)
            return y if b is None else grouped_add(y, b, offsets_E)

        gate_SF, up_SF = linear(x_SD, "w1", self.b1), linear(x_SD, "w3", self.b3)
        hidden_SF = self.activation(gate_SF, up_SF)
        return linear(hidden_SF if scores_S1 is None else hidden_SF * scores_S1, "w2", self.b2)

    def product(self, x: Tensor, weight: str, offsets_E: Tensor) -> Tensor:
        """Return rows times the transposed weight of that name, and its adapter's; `offsets_E[e]` is where expert e's
        rows end."""
        return product_of_stack(self, weight, x, offsets_E)


def in_turn(T: int, A: int, E: int, device: torch.device, is_token_BL: Tensor | None = None) -> Tensor:
    """Return a choice (T, A) that gives every expert equally many slots of tokens, for measuring speed."""
    if is_token_BL is None:
        return (torch.arange(T * A, device=device) % E).view(T, A)
    number_T1 = is_token_BL.reshape(-1, 1).cumsum(0) - 1  # of each token, without padding
    return (number_T1.clamp(min=0) * A + torch.arange(A, device=device)) % E


def without_padding(
    scores_TA: Tensor, chosen_TA: Tensor, is_token_BL: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return scores and choice, of padding zeros and no expert. See Note [Padding]."""
    is_padding_T1 = ~is_token_BL.reshape(-1, 1)
    return scores_TA.masked_fill(is_padding_T1, 0), chosen_TA.masked_fill(is_padding_T1, num_experts)


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer. See Note [Experts in a static graph].

    Under tensor parallelism every rank holds a part of every expert, routes all tokens alike, and returns its term of
    the experts' outputs. Under expert parallelism every rank holds some of the experts, and routes its own tokens.
    """

    PLAN = {
        "": {"tp": "partial", "ep": "apart"},
        "router.gate.weight": {"tp": "replicate"},
        "router.gate.bias": {"tp": "replicate"},
        "experts": {"ep": "route"},
        "experts.w1": {"tp": "shard 1", "ep": "expert"},
        "experts.w2": {"tp": "shard 2", "ep": "expert"},
        "experts.w3": {"tp": "shard 1", "ep": "expert"},
        "experts.b1": {"tp": "shard 1", "ep": "expert"},
        "experts.b2": {"tp": "share", "ep": "expert"},
        "experts.b3": {"tp": "shard 1", "ep": "expert"},
        "shared_experts": {"ep": "partial"},
        "shared_experts.w1.weight": {"tp": "shard 0"},
        "shared_experts.w2.weight": {"tp": "shard 1"},
        "shared_experts.w3.weight": {"tp": "shard 0"},
    }

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.router = Router(dim, config)
        self.experts = Experts(dim, config)
        self.shared_experts = FeedForward(dim, config.shared_dim) if config.shared_dim else None
        self.auxiliary_loss: AuxiliaryLoss | None = None
        self.bias_update_speed = ExpertTraining.bias_update_speed
        self.early_scores = False  # see Note [Early scores]

    def forward(self, x_BLD: Tensor, real: Real | None = None) -> tuple[Tensor, Routing]:
        """Return the layer's result, and its routing; `real` says which positions are tokens, None: all."""
        x_TD = x_BLD.flatten(0, 1)
        is_token_BL = None if real is None else real.is_token_BL
        scores_TA, chosen_TA, logits_TE = self.router(x_TD, is_token_BL)
        slots = slots_of(chosen_TA, self.config.num_experts)
        route = self.experts.route(slots, self.config.mean_parts)
        x_SD, scores_S1 = route.out(x_TD), route.numbers(scores_TA.to(x_TD.dtype))
        if self.config.score_input:
            returned = route.back(self.experts(x_SD * scores_S1, route.load_E))
        elif self.early_scores:
            returned = route.back(self.experts(x_SD, route.load_E, scores_S1))
        else:
            returned = route.back(self.experts(x_SD, route.load_E), scores_S1)
        shared_BLD = None
        if self.shared_experts is not None:  # here, while the results are in transit
            shared_BLD = self.shared_experts(x_TD.view_as(x_BLD))
        y_TD = route.home(*returned)
        if shared_BLD is not None:
            y_TD = y_TD + shared_BLD.flatten(0, 1)
        loss = None
        if self.auxiliary_loss is not None and torch.is_grad_enabled():  # evaluation reports the cross entropy alone
            scores_TE = self.router.scores(logits_TE)
            real = real or Real.of(torch.ones_like(x_BLD[..., 0], dtype=torch.bool))
            loss = self.auxiliary_loss(logits_TE, scores_TE, chosen_TA, slots.load_E, real)
        return y_TD.view_as(x_BLD), Routing(slots.load_E, loss)


@dataclasses.dataclass(frozen=True)
class ExpertTraining:
    """Training options of mixtures of experts, which are no part of the model.

    auxiliary          losses to add
    bias_update_speed  step size of a correction bias, up or down
    forced_balance     every expert gets equally many slots, whatever its scores: for measuring speed
    early_scores       see Note [Early scores]
    """

    auxiliary: AuxiliaryLoss | None = None
    bias_update_speed: float = 1e-3
    forced_balance: bool = False
    early_scores: bool = False


def set_up_experts(
    model: nn.Module, training: ExpertTraining, groups: Sequence[str] = (), row_groups: Sequence[str] = ()
) -> None:
    """Set training options on a model's mixtures of experts: on all modules that have attributes for them.

    Args:
        groups, row_groups: as in `AuxiliaryLoss`.
    """
    loss = training.auxiliary
    if loss is not None:
        loss = dataclasses.replace(loss, groups=tuple(groups), row_groups=tuple(row_groups))
    for module in model.modules():
        if hasattr(module, "auxiliary_loss"):
            module.auxiliary_loss = loss  # type: ignore[assignment]
        if hasattr(module, "bias_update_speed"):
            module.bias_update_speed = training.bias_update_speed  # type: ignore[assignment]
        if hasattr(module, "forced_balance"):
            module.forced_balance = training.forced_balance  # type: ignore[assignment]
        if isinstance(module, MoE):
            module.early_scores = training.early_scores


@torch.no_grad()
def move_correction_bias(bias_E: Tensor | None, speed: float, load_E: Tensor) -> None:
    """Lower the correction bias, where there is one, of experts that had more than the mean load in a step, and raise
    the others'.

    Args:
        load_E: the slots of each expert, over all microbatches and ranks.
    """
    if bias_E is not None:
        load = load_E.to(bias_E.dtype)
        bias_E += speed * torch.sign(load.mean() - load)
