"""Muon, for matrices that ranks hold shards of; AdamW for the other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.optim.adam import step_adam
from torchtitan_graph.optim.owners import Piece, Plan, Round, Unit, plan_owners

_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the polynomial: https://kellerjordan.github.io/posts/muon/
_EPS = 1e-7  # least norm that a matrix is divided by


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) as torch.optim.Muon computes it, on whole matrices that ranks
    hold shards of, and on each matrix of a stack (E, M, N). AdamW steps the groups whose `is_matrix` is false.

    Each matrix is computed once, by its owner. See owners.py.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr: str,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Take groups that say whether they are of matrices; `plan` has to be called before the first step.

        ns_dtype: of the Newton-Schulz iteration; parameters in fp64 are computed in that.
        """
        own = dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr=adjust_lr)
        adamw = dict(betas=betas, eps=eps, decoupled_weight_decay=True, fused=True, foreach=False)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, **own, **adamw))
        self._plan: Plan | None = None
        self._ns_dtype = ns_dtype

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has too."""
        return {**super().__getstate__(), "_plan": self._plan, "_ns_dtype": self._ns_dtype}

    def plan(self) -> None:
        """Decide which rank computes what. All ranks call it together, when the parameters are laid out."""
        self._plan = plan_owners([p for p, _ in self._matrices()])

    def _matrices(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups if group["is_matrix"] for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, unless `found_inf` is 1.0."""
        assert self._plan is not None, "planned when it was built"
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if not group["is_matrix"]:
                step_adam(group["params"], self.state, group, found_inf)
        _Step(self._matrices(), self.state, self._plan, self._ns_dtype, found_inf).take()


class _Step:
    """One step of the matrices, on this rank's shards of them."""

    def __init__(
        self,
        matrices: list[tuple[Tensor, dict[str, Any]]],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        plan: Plan,
        ns_dtype: torch.dtype,
        found_inf: Tensor | None,
    ) -> None:
        self._ns_dtype = ns_dtype
        self._plan, self._groups, self._stops = plan, [group for _, group in matrices], found_inf
        groups = {id(group): group for group in self._groups}
        self._rates = {key: _number(group["lr"]) for key, group in groups.items()}
        self._shards = [local_part(p).detach() for p, _ in matrices]
        self._gradients = [None if p.grad is None else local_part(p.grad) for p, _ in matrices]
        self._momenta = [local_part(state[p]["momentum_buffer"]) for p, _ in matrices]

    def take(self) -> None:
        for gradient, momentum, group in zip(self._gradients, self._momenta, self._groups, strict=True):
            if gradient is not None:
                wide, gradient = _widened(momentum, gradient)
                self._write(momentum, wide.lerp(gradient, 1 - group["momentum"]))
        for unit in self._taken(self._plan.alone):
            piece = unit.pieces[self._plan.rank]
            self._apply(unit, piece, self._orthogonalized(unit.parameter, self._direction(unit, piece)))
        rounds = [units for each in self._plan.rounds if (units := self._taken(each))]
        arriving = self._send(rounds[0]) if rounds else None
        for number in range(1, len(rounds) + 1):
            here, arriving = arriving, None
            assert here is not None
            whole = here.whole()
            if number < len(rounds):  # on its way while this one is computed
                arriving = self._send(rounds[number])
            update = None
            if whole is not None and here.own is not None:
                update = self._orthogonalized(here.own.parameter, whole)
            for unit, piece, part in here.spread(update):
                self._apply(unit, piece, part)

    def _taken(self, units: list[Unit]) -> list[Unit]:
        """Return those that have a gradient; they have it on all ranks, or on none."""
        return [unit for unit in units if self._gradients[unit.parameter] is not None]

    def _send(self, units: list[Unit]) -> Round:
        shard = self._shards[units[0].parameter]
        return Round(self._plan, units, self._dtype_of_products(shard), self._place(shard), self._direction)

    def _dtype_of_products(self, shard: Tensor) -> torch.dtype:
        return torch.float64 if shard.dtype == torch.float64 else self._ns_dtype

    def _place(self, shard: Tensor) -> torch.device | str:
        """Return the device of products and messages: the mesh's, where shards rest on the host."""
        return self._plan.device if shard.device.type == "cpu" and self._plan.device else shard.device

    def _direction(self, unit: Unit, piece: Piece) -> Tensor:
        """Return a piece of the update before it is orthogonalized, as it is sent."""
        number, group = unit.parameter, self._groups[unit.parameter]
        gradient, momentum = self._gradients[number], self._momenta[number]
        assert gradient is not None, "units without one are left out"
        momentum, gradient = _widened(piece.of_shard(momentum), piece.of_shard(gradient))
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        shard = self._shards[number]
        return direction.to(self._place(shard), self._dtype_of_products(shard))

    def _orthogonalized(self, number: int, whole: Tensor) -> Tensor:
        return orthogonalize(whole, self._groups[number]["ns_steps"])

    def _apply(self, unit: Unit, piece: Piece, update: Tensor) -> None:
        group, shard = self._groups[unit.parameter], piece.of_shard(self._shards[unit.parameter])
        lr, shape = self._rates[id(group)], unit.shape
        decayed = shard.mul(1 - lr * group["weight_decay"])
        adjusted = lr * _ratio(group["adjust_lr"], *shape[-2:])
        self._write(shard, decayed.add(update.to(shard.device), alpha=-adjusted))

    def _write(self, old: Tensor, new: Tensor) -> None:
        old.copy_(new if self._stops is None else torch.where(self._stops > 0, old, new.to(old.dtype)))


def orthogonalize(x: Tensor, num_steps: int) -> Tensor:
    """Return an approximation of U V^T for matrices U S V^T, (M, N) or (E, M, N), by the Newton-Schulz iteration in
    their own dtype; the same operations as torch.optim.Muon's."""
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    norm = x.norm() if x.dim() == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div(norm.clamp(min=_EPS))
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(num_steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


def _ratio(adjust_lr: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's learning rate, as torch.optim.Muon's `adjust_lr_fn`."""
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    assert adjust_lr == "match_rms_adamw", adjust_lr
    return 0.2 * math.sqrt(max(rows, columns))


def _widened(momentum: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(momentum.dtype, gradient.dtype)
    return momentum.to(wide), gradient.to(wide)


def _number(rate: float | Tensor) -> float:
    return rate.item() if isinstance(rate, Tensor) else rate


def matrices_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon steps: matrices, and stacks of them, in blocks. Embeddings, the
    output, convolutions, and vectors and stacks of vectors are AdamW's."""
    blocks, found = getattr(model, "blocks", {}), set()
    for owner, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            continue
        stacked = any(p.dim() == 3 for p in own.values())  # then what has two dims is a stack of biases
        for leaf, p in own.items():
            name = f"{owner}.{leaf}"
            if block_of(name, blocks) and p.dim() == (3 if stacked else 2) and min(p.shape[-2:]) > 1:
                found.add(name)
    return found
