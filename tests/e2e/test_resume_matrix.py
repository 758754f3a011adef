"""A run saved in one layout goes on in any other: parameters, optimizer, schedule, the position in the data, and the
next loss."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from runs import HERE, TINY, digest
from torch.distributed.tensor import DTensor

from pool import run_on
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.checkpoint.checkpointer import tensors_of
from torchtitan_graph.config import load
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.status import FINISHED
from torchtitan_graph.trainer import Trainer

TWO_RANKS = {"CP 2": ParallelDims(cp=2), "EP 2": ParallelDims(dp_shard=2, ep=2), "PP 2": ParallelDims(pp=2)}
FOUR_RANKS = {
    "one rank": ParallelDims(),
    "FSDP 4": ParallelDims(dp_shard=4),
    "CP 2 x FSDP 2": ParallelDims(dp_shard=2, cp=2),
    "TP 2 x EP 2": ParallelDims(tp=2, ep=2),
    "EP 2 x FSDP 2": ParallelDims(dp_shard=4, ep=2),
    "EP 2 x FSDP 2 x TP 2": ParallelDims(dp_shard=2, tp=2, ep=2, etp=2),
    "PP 2 x FSDP 2": ParallelDims(dp_shard=2, pp=2),
}
LAYOUTS = TWO_RANKS | FOUR_RANKS
FAST = [("EP 2", ["PP 2"])]
SLOW = [
    pytest.param(saved, layouts, marks=pytest.mark.slow)
    for saved, layouts in [("CP 2", ["EP 2"]), ("PP 2", ["CP 2"]), *((saved, list(FOUR_RANKS)) for saved in FOUR_RANKS)]
]


def trainer_of(layout: str, folder: Path, *options: str) -> Trainer:
    import sys

    sys.path.insert(0, str(HERE))  # where my_models is
    dims = LAYOUTS[layout]
    degrees = {"tensor": dims.tp, "context": dims.cp, "pipeline": dims.pp, "expert": dims.ep, "expert_tensor": dims.etp}
    options = ("--job.config_file", TINY, "--job.dump_folder", str(folder), *options)
    options += ("--model.name", "my_models.experts", "--training.mixed_precision_param", "float32")
    options += ("--checkpoint.async_mode", "async")
    for axis, degree in degrees.items():
        options += (f"--parallelism.{axis}_parallel_degree", str(degree))
    return Trainer(Blueprint(load(options), dist.get_world_size()))


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return all that the next step depends on, its rows and its loss; tensors as digests of the whole."""
    state: dict[str, Any] = {
        name: digest((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach())
        for name, tensor in tensors_of(trainer.model, trainer.optimizer).items()
    }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, state)  # stages hold different tensors
    state = {name: x for of_rank in by_rank for name, x in of_rank.items()}
    assert all(of_rank.items() <= state.items() for of_rank in by_rank), "ranks differ in what several hold"
    state |= trainer._train_state() | trainer.lr_scheduler.state_dict()
    batches = trainer.feed.next()
    assert batches is not None
    microbatches, num_tokens = batches.on_device, batches.num_tokens
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [[row_digest(b, row) for row in range(len(b.tokens_BL))] for b in microbatches])
    dims = trainer.blueprint.dims
    of_data_rank = rows[: len(rows) // dims.pp : dims.cp * dims.tp]
    state["rows"] = [row for microbatch in zip(*of_data_rank, strict=True) for rows in microbatch for row in rows]
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, trainer.steps.train(microbatches, num_tokens).loss.item())
    return state | {"num_tokens": int(num_tokens), "loss": trainer.layout.total_loss(losses)}


def row_digest(batch: Any, row: int) -> str:
    return hashlib.sha256(b"".join(part[row].numpy().tobytes() for part in batch)).hexdigest()


def train_two_steps(layout: str, folder: Path) -> dict[str, Any]:
    trainer = trainer_of(layout, folder, "--training.steps", "2", "--lr_scheduler.total_steps", "5")
    run = RunFolder(trainer.config)
    trainer.train(run)
    run.close(FINISHED)
    return state_of(trainer)


def resume(layout: str, folder: Path) -> dict[str, Any]:
    return state_of(trainer_of(layout, folder, "--training.steps", "5", "--checkpoint.load_only"))


@pytest.mark.parametrize(("saved", "layouts"), FAST + SLOW)
def test_goes_on_in_other_layouts(saved: str, layouts: list[str], tmp_path: Path) -> None:
    expected, *others = run_on(world_size(saved), train_two_steps, saved, tmp_path, timeout=250)
    assert all(other == expected for other in others) and expected["loss"] > 0
    assert expected["step"] == 2 and len(set(expected["rows"])) == 8
    for layout in layouts:
        for rank, found in enumerate(run_on(world_size(layout), resume, layout, tmp_path, timeout=250)):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            wrong = [name for name in expected if name != "loss" and found.get(name) != expected[name]]
            assert not wrong, f"{saved} to {layout}, rank {rank}"


@pytest.mark.slow
def test_the_comparison_sees_another_position_and_another_step(tmp_path: Path) -> None:
    """Negative control."""
    (two,) = run_on(1, train_two_steps, "one rank", tmp_path)
    (fresh,) = run_on(1, resume, "one rank", tmp_path / "nothing")
    assert {"rows", "data", "step", "model.norm.weight", "optim.norm.weight.exp_avg"} <= {
        n for n in two if two[n] != fresh[n]
    }


def world_size(layout: str) -> int:
    return LAYOUTS[layout].num_ranks
