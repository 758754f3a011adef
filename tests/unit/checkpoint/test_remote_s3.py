"""Checkpoints in a real S3 server that fails, stalls and throttles: they come back whole, with few requests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from s3 import ACTIONS, Store, at_first
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer


def checkpointer_of(folder: Path, store: Store, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    given = {"enable": True, "last_save_model_only": False, "remote_folder": f"{store.address}/run"} | options
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, job.Checkpoint(**given), model, optimizer, scheduler)


def save(run: Checkpointer, step: int) -> None:
    with torch.no_grad():
        run.model.weight.fill_(step)
    run.save(step, {"step": step})


def load(folder: Path, store: Store) -> int | None:
    run = checkpointer_of(folder, store)
    state = run.load()
    assert state is None or torch.all(run.model.weight == state["step"])
    return state and state["step"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(store: Store) -> dict[str, bytes]:
    return {key.removeprefix("run/"): store.get(key) for key in store.list_keys()}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_fault_at_each_request_of_a_save_and_a_load(action: str, store: Store, tmp_path: Path) -> None:
    run = checkpointer_of(tmp_path / "a", store)
    store.plan = at_first([action])
    save(run, 1)
    assert stored(store) == content(tmp_path / "a")
    store.plan = at_first([action])
    assert load(tmp_path / "b", store) == 1
