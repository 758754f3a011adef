"""A step whose loss is not finite on one rank changes no parameter on any."""

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import HERE, TINY

from pool import run_on
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import load
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.status import FINISHED
from torchtitan_graph.trainer import NonFiniteError, Trainer


def after_one_step(folder: Path, model: str, optimizer: str) -> tuple[bool, bool]:
    """Tell whether a run of one step ended as one that is not finite does, and whether any parameter changed."""
    sys.path.insert(0, str(HERE))  # where my_models is
    options = ("--job.config_file", TINY, "--job.dump_folder", str(folder), "--checkpoint.no-enable")
    options += ("--training.steps", "1", "--model.name", model, "--optimizer.implementation", optimizer)
    trainer = Trainer(Blueprint(load(options), dist.get_world_size()))
    parameters = [p.detach().to_local() for p in trainer.model.parameters()]  # type: ignore[attr-defined]
    before, run, ended = [p.clone() for p in parameters], RunFolder(trainer.config), False
    try:
        trainer.train(run)
    except NonFiniteError:
        ended = True
    assert gc.isenabled(), "training keeps Python's collector off, and leaves it as it was"
    run.close(FINISHED)
    return ended, not all(map(torch.equal, before, parameters))


@pytest.mark.parametrize("optimizer", ["fused", pytest.param("foreach", marks=pytest.mark.slow)])
def test_no_parameter_is_touched(optimizer: str, tmp_path: Path) -> None:
    """Launched before the host knows the loss, or after."""
    assert run_on(2, after_one_step, tmp_path, "my_models.infinite", optimizer) == [(True, False)] * 2


@pytest.mark.slow
def test_a_step_that_is_taken_is_seen(tmp_path: Path) -> None:
    """Negative control."""
    assert run_on(2, after_one_step, tmp_path, "my_models.tiny", "fused") == [(False, True)] * 2
