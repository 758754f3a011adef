"""Ranks that hold different parameters, as stages and experts do: what counts is what all of them hold together."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer, SaveError
from torchtitan_graph.checkpoint.whole import Box, Held, find_gaps
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.parallel.chunk import Chunk

BOTH = (("first", "shared"), ("shared", "second"))  # the parameters of rank 0, and of rank 1


def checkpointer(folder: Path, names: tuple[str, ...], width: int = 2) -> Checkpointer:
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.full((3, width), float(len(name)))))
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(), total_steps=100)
    return Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, scheduler)


def save_on(folder: Path, names: tuple[tuple[str, ...], ...]) -> str | None:
    try:
        checkpointer(folder, names[dist.get_rank()]).save(7, {"step": 7})
    except SaveError as error:
        return str(error)
    return None


def load_on(folder: Path, names: tuple[tuple[str, ...], ...], widths: tuple[int, int] = (2, 2)) -> str | list[float]:
    """Load into zeros; return what the parameters hold then, or the error."""
    run = checkpointer(folder, names[dist.get_rank()], widths[dist.get_rank()])
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    try:
        run.load()
    except UserError as error:
        return str(error)
    return [p.detach().mean().item() for p in run.model.parameters()]


def test_each_rank_saves_and_loads_its_own(tmp_path: Path) -> None:
    assert run_on(2, save_on, tmp_path, BOTH) == [None, None]
    assert run_on(2, load_on, tmp_path, BOTH) == [[5.0, 6.0], [6.0, 6.0]]
    moved = (("second",), ("shared", "first"))
    assert run_on(2, load_on, tmp_path, moved) == [[6.0], [6.0, 5.0]]


@pytest.mark.parametrize(
    ("names", "widths", "parts"),
    [
        ((("first", "shared"), ("shared",)), (2, 2), ["unexpected: model.second\n", "optim.second.exp_avg"]),
        ((("first", "shared"), ("shared", "second", "third")), (2, 2), ["missing: model.third\n"]),
        (BOTH, (2, 3), ["model.shared: the ranks disagree on its shape or dtype: [3, 2], [3, 3], torch.float32"]),
    ],
    ids=["lacking", "unknown", "different"],
)
def test_what_no_rank_holds_or_none_saved_is_named_on_all_ranks(
    names: tuple[tuple[str, ...], ...], widths: tuple[int, int], parts: list[str], tmp_path: Path
) -> None:
    run_on(2, save_on, tmp_path, BOTH)
    errors = run_on(2, load_on, tmp_path, names, widths)
    assert errors[0] == errors[1]
    for part in parts:
        assert part in errors[0]
    assert "shared" not in errors[0] or widths == (2, 3)


def save_halves(folder: Path, num_rows: int) -> str | None:
    """Save a tensor of four rows, of which each rank holds the first ones that are not its neighbour's."""
    rows = torch.zeros(num_rows, 2)
    run = checkpointer(folder, ("other",))
    chunks = {"model.halves": Chunk(rows, (2 * dist.get_rank(), 0), (4, 2))}
    try:
        run.saver.save(folder / "step-1", {}, {})  # an empty save is fine
        run.saver._write(folder / "step-2", chunks, {}, 0.0, last=False)
    except SaveError as error:
        return str(error)
    return None


def test_a_tensor_of_which_a_part_is_nobodys_is_not_saved(tmp_path: Path) -> None:
    assert run_on(2, save_halves, tmp_path / "whole", 2) == [None, None]
    errors = run_on(2, save_halves, tmp_path / "torn", 1)
    assert errors[0] == errors[1]
    assert "model.halves: all ranks' parts together are 4 of 8 numbers" in errors[0]
    assert not (tmp_path / "torn" / "step-2").exists()


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (3, 4))], True),
        ([((0, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (0, 4))], True),  # a rank that holds nothing
        ([((0, 0), (3, 1)), ((0, 1), (1, 3)), ((1, 1), (2, 3))], True),
        ([((0, 0), (2, 4))], False),
        ([((0, 0), (2, 4)), ((1, 0), (1, 4))], False),  # as many numbers as there are, but some twice
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ([((0, 0), (3, 4)), ((2, 0), (1, 4))], False),
        ([((1, 0), (3, 4))], False),  # outside
        ([], False),
    ],
)
def test_boxes_make_up_a_tensor_or_not(boxes: list[tuple], whole: bool) -> None:
    held = Held(frozenset(Box(*box) for box in boxes), frozenset({(3, 4)}), frozenset({torch.float32}))
    assert (not find_gaps({"w": held})) == whole
