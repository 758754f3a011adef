"""A run saved in one layout goes on in any other: parameters, optimizer, schedule, and the position in the data."""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from runs import HERE, TINY, digest
from torch.distributed.tensor import DTensor

from pool import run_on
from torchtitan_graph.config import load
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.status import FINISHED
from torchtitan_graph.trainer import Trainer

LAYOUTS = {  # shards, context parallel, tensor parallel, pipeline stages
    "one rank": (1, 1, 1, 1),
    "FSDP 2": (2, 1, 1, 1),
    "FSDP 2 x TP 2": (2, 1, 2, 1),
    "FSDP 2 x CP 2": (2, 2, 1, 1),
    "FSDP 4": (4, 1, 1, 1),
    "PP 2": (1, 1, 1, 2),
    "PP 2 x FSDP 2": (2, 1, 1, 2),
}
FAST = [
    ("FSDP 2 x TP 2", ["PP 2"]),
    ("PP 2 x FSDP 2", ["one rank"]),
    ("FSDP 2 x CP 2", ["FSDP 2 x TP 2"]),
    ("one rank", ["FSDP 2 x CP 2"]),
]
SLOW = [pytest.param(saved, list(LAYOUTS), marks=pytest.mark.slow) for saved in LAYOUTS]


def trainer_of(layout: str, folder: Path, *options: str) -> Trainer:
    import sys

    sys.path.insert(0, str(HERE))  # where my_models is
    _, cp, tp, pp = LAYOUTS[layout]
    options = ("--job.config_file", TINY, "--job.dump_folder", str(folder), *options)
    options += ("--parallelism.tensor_parallel_degree", str(tp), "--checkpoint.async_mode", "async")
    options += ("--parallelism.context_parallel_degree", str(cp), "--parallelism.pipeline_parallel_degree", str(pp))
    trainer = Trainer(load(options), dist.get_world_size())
    trainer.setup()
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return all that the next step depends on, and the rows that it will take; tensors as digests of the whole."""
    state: dict[str, Any] = {
        name: digest((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach())
        for name, tensor in trainer.checkpointer._tensors(model_only=False).items()
    }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, state)  # stages hold different tensors
    state = {name: x for of_rank in by_rank for name, x in of_rank.items()}
    assert all(of_rank.items() <= state.items() for of_rank in by_rank), "ranks differ in what several hold"
    state |= trainer._train_state() | trainer.lr_scheduler.state_dict()
    microbatches, num_tokens = trainer._next_step()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [[row_digest(b, row) for row in range(len(b.tokens_BL))] for b in microbatches])
    of_data_rank = rows[: len(rows) // trainer.dims.pp : trainer.dims.cp * trainer.dims.tp]
    state["rows"] = [row for microbatch in zip(*of_data_rank, strict=True) for rows in microbatch for row in rows]
    return state | {"num_tokens": int(num_tokens)}


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
    assert all(other == expected for other in others)
    assert expected["step"] == 2 and len(set(expected["rows"])) == 8
    for layout in layouts:
        for rank, found in enumerate(run_on(world_size(layout), resume, layout, tmp_path, timeout=250)):
            wrong = [name for name in expected if found.get(name) != expected[name]]
            assert not wrong, f"{saved} to {layout}, rank {rank}"


def test_the_comparison_sees_another_position_and_another_step(tmp_path: Path) -> None:
    """Negative control."""
    (two,) = run_on(1, train_two_steps, "one rank", tmp_path)
    (fresh,) = run_on(1, resume, "one rank", tmp_path / "nothing")
    assert {"rows", "data", "step", "model.norm.weight", "optim.norm.weight.exp_avg"} <= {
        n for n in two if two[n] != fresh[n]
    }


def world_size(layout: str) -> int:
    return math.prod(LAYOUTS[layout])
