"""A recorded step that is replayed is the step that was recorded, bit for bit, whatever happens between two of them.

There is no GPU: what stands in for one keeps the work itself, does it again at each replay, and writes the results to
the memory of the first ones.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import (
    BF16,
    FSDP2,
    MAX_NORM,
    ONE,
    ONE_LAYER,
    SEED,
    Cell,
    Seen,
    assemble,
    bits_that_differ,
    microbatches,
    optimizing,
    trace_once,
    train,
)
from test_every_family import MODELS
from torch import Tensor

from pool import run_on
from torchtitan_graph.device import Recorders
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.runtime.pieces import overwrite
from torchtitan_graph.steps import GraphUpdate, Steps, build_steps

EP2 = ParallelDims(dp_shard=2, ep=2)


class StandIn:
    """Work that is done again; it counts how often."""

    recorded, replayed, reset_ = 0, 0, 0

    def __init__(self, pool: Any) -> None:
        assert pool is None

    def record(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        StandIn.recorded += 1
        self.run, self.results = run, run()
        return self.results

    def replay(self) -> None:
        StandIn.replayed += 1
        for old, new in zip(self.results, self.run(), strict=True):
            overwrite(old, new)

    def reset(self) -> None:
        StandIn.reset_ += 1
        self.run, self.results = list, []


def build(cell: Cell, replays: bool, evaluates: bool = False) -> Steps:
    StandIn.recorded = StandIn.replayed = StandIn.reset_ = 0
    options = dataclasses.replace(
        cell.options("graph"),
        recorders=Recorders(StandIn) if replays else None,
        eval_rows=cell.options("graph").rows if evaluates else None,
    )
    steps = build_steps(assemble(cell, options, trace_once(cell)))
    initialize(steps.model, SEED)
    return steps


def state_of(steps: Steps, optimizer: torch.optim.Optimizer) -> Seen:
    found: Seen = {}
    for name, p in steps.model.named_parameters():
        found |= {f"{name}.{key}": x.clone() for key, x in optimizer.state[p].items()}
    return found


def differences(cell: Cell, in_graph: bool) -> tuple[list[str], int, int]:
    seen = []
    for replays in (False, True):
        steps = build(cell, replays)
        using = optimizing(steps.model)
        seen.append(train(cell, steps, using=using, in_graph=in_graph) | state_of(steps, using[0]))
    return bits_that_differ(*seen), StandIn.recorded, StandIn.replayed


@pytest.mark.parametrize(
    ("cell", "in_graph", "num_pieces"),
    [
        (Cell(ONE), True, 1),
        pytest.param(Cell(FSDP2, precision=BF16, num_microbatches=2, **ONE_LAYER), True, 1, marks=pytest.mark.slow),
        pytest.param(Cell(FSDP2, tied=True), False, 1, marks=pytest.mark.slow),
        pytest.param(
            Cell(num_microbatches=2, attn="flex", **MODELS["gpt_oss-debugmodel"]), True, None, marks=pytest.mark.slow
        ),
        pytest.param(Cell(EP2, **MODELS["deepseek_v3-debugmodel"]), True, None, marks=pytest.mark.slow),
        (Cell(EP2, **MODELS["deepseek_v3-debugmodel"], changes=(("num_layers", 2),), num_steps=4), True, None),
    ],
    ids=[
        "one-rank",
        "FSDP-2, accumulated",
        "FSDP-2, tied",
        "flex and experts",
        "exchanged experts",
        "exchanged experts, two layers",
    ],
)
def test_five_steps(cell: Cell, in_graph: bool, num_pieces: int | None) -> None:
    """The first call runs as it is, the second is recorded, the others replay it: with other batches and rates."""
    for different, recorded, replayed in run_on(cell.dims.num_ranks, differences, cell, in_graph):
        assert different == []
        calls = cell.num_steps * cell.num_microbatches
        if num_pieces is None:  # experts are read on the host of a CPU
            assert recorded > 2 and replayed >= recorded * (cell.num_steps - 2)
        else:
            assert (recorded, replayed) == (num_pieces + in_graph, (calls - 2) * num_pieces + in_graph * 3)


# --- what happens between two steps ---------------------------------------------------------------------------------


def go_on(replays: bool) -> tuple[Seen, int]:
    """Take ten steps, with something else before most of the last seven."""
    cell = Cell(**ONE_LAYER)
    steps = build(cell, replays, evaluates=True)
    optimizer, _ = optimizing(steps.model)
    update, seen = GraphUpdate(steps, optimizer, MAX_NORM), {}
    for k in range(1, 11):
        batches, num_tokens = microbatches(cell, 0, k)
        what = BETWEEN.get(k)
        seen |= {f"{name} before {k}": x for name, x in (what(steps, optimizer, batches[0]) if what else {}).items()}
        loss = steps.train(batches, num_tokens).loss
        seen[f"norm {k}"] = update.clip(loss * (float("nan") if k == NOT_FINITE else 1.0))
        seen[f"loss {k}"] = loss
        optimizer.zero_grad()
        seen[f"parameter after {k}"] = steps.model.norm.weight.detach().clone()
    steps.close()
    seen |= {name: p.detach().clone() for name, p in steps.model.named_parameters()}
    return seen | state_of(steps, optimizer), StandIn.recorded


def evaluate(steps: Steps, optimizer: torch.optim.Optimizer, batch: Any) -> Seen:
    return {"evaluation": steps.evaluate(batch)}


@torch.no_grad()
def load(steps: Steps, optimizer: torch.optim.Optimizer, batch: Any) -> Seen:
    """Read a checkpoint into what is there."""
    for p in steps.model.parameters():
        for x in (p, *optimizer.state[p].values()):
            x.mul_(0.5)
    return {}


def set_rate(steps: Steps, optimizer: torch.optim.Optimizer, batch: Any) -> Seen:
    optimizer.param_groups[0]["lr"] = 3e-2
    return {}


def move(steps: Steps, optimizer: torch.optim.Optimizer, batch: Any) -> Seen:
    """Put other memory in the place of a parameter's state."""
    state = optimizer.state[steps.model.norm.weight]
    state["exp_avg"] = state["exp_avg"].clone()
    return {}


NOT_FINITE = 9
BETWEEN: dict[int, Callable[..., Seen]] = {**dict.fromkeys((4, 5, 6), evaluate), 7: load, 8: set_rate, 10: move}


def differences_after_all() -> tuple[list[str], bool, int, int]:
    (expected, _), (found, recorded) = (go_on(replays) for replays in (False, True))
    is_skipped = torch.equal(*(found[f"parameter after {k}"].to_local() for k in (NOT_FINITE - 1, NOT_FINITE)))
    return bits_that_differ(expected, found), is_skipped, recorded, StandIn.reset_


def test_what_happens_between_two_steps_is_seen_by_the_next() -> None:
    """Evaluations, the last of which is a replay, a checkpoint that is loaded, another learning rate, a loss that is
    not finite, a tensor of the optimizer's state in other memory."""
    ((different, is_skipped, recorded, reset),) = run_on(1, differences_after_all)
    assert different == [] and is_skipped
    assert recorded == 4, "training, evaluation, and the optimizer's step, once more for the tensor that moved"
    assert reset >= recorded, "the end forgets all recordings"


def places_of_gradients(num_microbatches: int) -> list[list[int]]:
    cell = Cell(num_microbatches=num_microbatches, **ONE_LAYER)
    steps, places = build(cell, True), []
    for k in range(1, 5):
        steps.train(*microbatches(cell, 0, k))
        places.append([p.grad.to_local().data_ptr() for p in steps.model.parameters()])
        for p in steps.model.parameters():
            p.grad = None
    return places


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_lie_in_the_same_memory_in_every_replay(num_microbatches: int) -> None:
    (places,) = run_on(1, places_of_gradients, num_microbatches)
    assert places[1] == places[2] == places[3]


# --- the checks can fail ----------------------------------------------------------------------------------------------


def differences_with_inputs_forgotten() -> list[str]:
    expected, _ = go_on(False)
    copy = Tensor.copy_
    try:
        Tensor.copy_ = lambda self, x, *rest: self if x.dtype == torch.int64 else copy(self, x, *rest)  # type: ignore
        found, _ = go_on(True)
    finally:
        Tensor.copy_ = copy  # type: ignore[method-assign]
    return bits_that_differ(expected, found)


def test_a_batch_that_is_not_copied_is_seen_in_the_first_replay() -> None:
    (different,) = run_on(1, differences_with_inputs_forgotten)
    assert different[0] in ("norm 3", "loss 3")
