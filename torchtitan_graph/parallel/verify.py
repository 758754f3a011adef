"""Verification of a pass by running the graph before and after it on the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.formats.show import name_of_group
from torchtitan_graph.graph.signature import Slot, input_nodes, inputs_of, outputs_of, signature_of
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.torch_private.distributed import ranks_of_group


class BrokenPromise(RuntimeError):
    """Error: a pass changes numbers that it promises to keep, or makes ranks send in different orders."""


class Numbers(NamedTuple):
    """Inputs for verifying passes.

    tensors       the graph's inputs that are no parameters (batch, mask, number of tokens), as plain tensors
    has_gradients of one data-parallel rank's loss alone: to its gradients the others add zeros, which is exact in any
                  order and dtype. Otherwise a pass that packs gradients in another order, or reduces them in a wider
                  dtype, would seem broken.
    """

    tensors: list[Tensor]
    has_gradients: bool = True


class Given(NamedTuple):
    """The results of a graph, its parameters' storage layouts, and whether one rank's loss alone had gradients."""

    storages: dict[str, Storage]
    results: dict[str, Tensor]
    of_one: bool


@torch.no_grad()
def verify_pass(
    name: str,
    before: GraphModule,
    after: GraphModule,
    numbers: Numbers,
    device: torch.device,
    exact: bool = True,
    is_changed: bool = True,
    given: Given | None = None,
) -> Given:
    """Run the graph before and after a pass, and return the second one's results.

    It raises unless both give the same loss and, gathered, the same gradients, bit for bit. Every parameter starts from
    one full tensor, seeded by its name: in the compute layout whole, at rest as this rank's shard. A gradient in the
    compute layout is summed over data parallel as storage would sum it.

    Args:
        exact: if not, each output may be off, as a whole, by the square root of the compute dtype's spacing.
        is_changed: if not, on any rank, `after` is the same graph, which is not run.
        given: results of `before` from verifying the previous pass, if there are any.

    Raises:
        BrokenPromise: names the pass and the first outputs that differ, with the largest difference, or the
            ranks' first messages in different orders.
    """
    _check_order(name, after)
    storages = {s.name: s.layout for s in signature_of(after).inputs if isinstance(s.layout, Storage)}
    of_one = bool(_begins(before)) and bool(_begins(after))  # else backward begins inside compiled code
    mine = (given is None or given.storages != storages, is_changed, not of_one)
    flags: list[tuple[bool, bool, bool]] = [mine] * dist.get_world_size()
    dist.all_gather_object(flags, mine)  # a graph communicates: it runs on all ranks, or on none
    runs_before, runs_after, of_all = map(any, zip(*flags, strict=True))
    has_gradients = numbers.has_gradients or of_all
    if given is None or runs_before or given.of_one == of_all:
        given = Given(storages, _run(before, numbers.tensors, storages, device, has_gradients), not of_all)
    if not runs_after:
        return given
    results = _run(after, numbers.tensors, storages, device, has_gradients)
    allowed = 0.0 if exact else max(map(tolerance, _compute_dtypes(after, storages)))
    different = []
    for key, expected in given.results.items():
        dtype = torch.promote_types(expected.dtype, results[key].dtype)  # gradients are widened on the way
        expected, found = expected.to(dtype), results[key].to(dtype)
        if not same_bits(expected, found) and (exact or not distance(expected, found) <= allowed):
            gap = (found.double() - expected.double()).abs().max()
            different.append(f"{key} (by {gap.item():.3g})")
    by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, different)  # a fault may show on one rank only: all stop, none is left waiting
    if any(by_rank):
        rank, different = next((rank, names) for rank, names in enumerate(by_rank) if names)
        promise = "bit for bit" if exact else "up to rounding"
        raise BrokenPromise(
            f"pass {name} promises the same numbers {promise}, but {len(different)} outputs differ on rank {rank}: "
            f"{', '.join(different[:5])}; the graphs before and after it are in the dump folder with debug.dump_graphs"
        )
    return Given(storages, results, not of_all)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in every bit; any two NaNs are."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to that of `a`."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-300))


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of an inexact pass: rounding stays far below it, a wrong or missing term far above."""
    return float(torch.finfo(dtype).eps ** 0.5) if dtype.is_floating_point else 0.0


def _compute_dtypes(gm: GraphModule, storages: dict[str, Storage]) -> set[torch.dtype]:
    """Return the dtypes that parameters are computed in; fp64 where there are none."""
    if storages:
        return {s.precision.compute for s in storages.values()}
    return {node.meta["val"].dtype for node in input_nodes(gm, "param").values()} or {torch.float64}


def collectives(gm: GraphModule, axes: Mapping[str, str]) -> list[str]:
    """Return a graph's collectives, in order: operator, axis, shape. All ranks of a group must have the same."""
    return [_message(node, axes.get(group) or name_of_group(group)) for node, group in _sent(gm)]


def first_difference(by_rank: Mapping[int, Sequence[str]]) -> str:
    """Return where the collectives of ranks first differ, as text; "" if they are equal."""
    (first, expected), *others = by_rank.items()
    for rank, sent in others:
        if sent != expected:
            place = next((i for i, (a, b) in enumerate(zip(expected, sent, strict=False)) if a != b), None)
            if place is None:
                return f"rank {first} sends {len(expected)} times, rank {rank} {len(sent)}"
            return f"number {place + 1} on rank {first} is {expected[place]}, on rank {rank} {sent[place]}"
    return ""


def _sent(gm: GraphModule) -> list[tuple[Node, str]]:
    return [(node, group) for node in gm.graph.nodes if (group := group_of(node)) is not None]


def _message(node: Node, where: str) -> str:
    val = node.meta["val"]
    shape = "" if operator_of(node.target).dynamic_rows else f" {str(val.dtype)[6:]}{list(val.shape)}"
    return f"{node.target} over {where}{shape}"


def _check_order(name: str, gm: GraphModule) -> None:
    """Raise unless the ranks of each group have the same collectives in one order: else the graph would hang."""
    mine: dict[tuple[int, ...], list[str]] = {}
    for node, group in _sent(gm):
        mine.setdefault(tuple(ranks_of_group(group)), []).append(_message(node, name_of_group(group)))
    by_rank: list[dict[tuple[int, ...], list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    for ranks in sorted({ranks for sent in by_rank for ranks in sent}):
        if said := first_difference({rank: by_rank[rank].get(ranks, []) for rank in ranks}):
            raise BrokenPromise(f"pass {name} lets ranks send in different orders, so that a job would hang: {said}")


def _begins(gm: GraphModule) -> list[Node]:
    """Return the nodes that backward begins with: the 1 that is a loss's own gradient."""
    losses = {_undetached(node) for slot, node in outputs_of(gm) if slot.kind == "loss"}
    ones = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.ones_like.default)
    return [node for node in ones if _undetached(node.args[0]) in losses]


def _undetached(node: Any) -> Any:
    while isinstance(node, Node) and node.target is torch.ops.aten.detach.default:
        node = node.args[0]
    return node


class _WithoutGradients(Interpreter):
    """An interpreter of a graph that begins its backward with 0."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self._begins = _begins(gm)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return torch.zeros_like(result) if n in self._begins else result


def _run(
    gm: GraphModule, inputs: list[Tensor], storages: dict[str, Storage], device: torch.device, has_gradients: bool
) -> dict[str, Tensor]:
    slots, rest = inputs_of(gm), iter(inputs)
    flat: list[Tensor] = [
        _parameter(slot, node.meta["val"], storages, device) if slot.kind in ("param", "buffer") else next(rest).clone()
        for slot, node in slots
    ]
    values = gm(*flat) if has_gradients else _WithoutGradients(gm).run(*flat)
    found = {
        f"{slot.kind} {slot.name}": _full(slot, value.to(device), storages)
        for (slot, _), value in zip(outputs_of(gm), values, strict=True)
    }
    if any(slot.kind == "optim" for slot, _ in slots):
        found |= {f"{slot.kind} {slot.name} afterwards": x for (slot, _), x in zip(slots, flat, strict=True)}
    return found


def _parameter(slot: Slot, val: Any, storages: dict[str, Storage], device: torch.device) -> Tensor:
    storage = storages.get(slot.name)
    shape, dtype = (storage.compute_shape, storage.precision.compute) if storage else (val.shape, val.dtype)
    generator = torch.Generator(device).manual_seed(zlib.crc32(slot.name.encode()))
    full = (torch.randn(shape, generator=generator, device=device) * 0.05).to(dtype)
    if not isinstance(slot.layout, Storage):
        return full
    padded = torch.zeros(slot.layout.padded_shape, dtype=dtype, device=device)
    begin, size = slot.layout.local_range
    padded.narrow(slot.layout.dim, 0, size).copy_(full.narrow(slot.layout.dim, begin, size))
    return padded.to(val.device, val.dtype)  # at rest the dtype is wider: no bit is lost


def _full(slot: Slot, value: Tensor, storages: dict[str, Storage]) -> Tensor:
    storage = storages.get(slot.name)
    if slot.kind != "grad" or storage is None:
        return value
    if isinstance(slot.layout, Storage):
        parts = [torch.empty_like(value) for _ in range(storage.shard_degree)]
        dist.all_gather(parts, value.contiguous(), group=storage.shard_group)
        return torch.cat(parts, storage.dim).narrow(storage.dim, 0, storage.compute_shape[storage.dim])
    full = value.to(storage.precision.reduce)
    for degree, axis in (
        (storage.shard_degree, storage.shard_axis),
        (storage.replicate_degree, storage.replicate_axis),
    ):
        if degree > 1:
            dist.all_reduce(full, group=storage.mesh.get_group(axis))
    return full.to(storage.precision.storage)
