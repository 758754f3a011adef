"""A model of transformers under pipeline, tensor and expert parallelism at once, with losses of its routers.

Its parameters are small beside what Adam makes of the rounding errors of gradients near zero: so the steps are gradient
descent, and the gradients are compared.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from matrix import FP64, ONE, Cell, build_graph, build_plain, far_apart, gathered, train

from pool import run_on
from torchtitan_graph.config import job
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.optim import build_lr_scheduler
from torchtitan_graph.parallel.layout import ParallelDims

# Experts and a shared one, whose parts of the sequence are those of the ranks of tensor parallelism.
CELL = Cell(
    ParallelDims(pp=2, tp=2, ep=2),
    family="transformers",
    flavor="qwen2_moe",
    precision=FP64,
    auxiliary=AuxiliaryLoss(load_balance=0.1, router_z=0.1),
    changes=(("num_layers", 2),),
    num_microbatches=2,
    num_steps=2,
)


def descent(model, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), num_steps)


def of_graph(cell: Cell):
    steps = build_graph(cell)
    return gathered(cell, train(cell, steps, using=descent(steps.model, cell.num_steps)))


def of_plain(cell: Cell):
    steps = build_plain(cell)
    return train(cell, steps, using=descent(steps.model, cell.num_steps))


@pytest.mark.slow
def test_losses_of_routers_where_expert_parallelism_spans_tensor_parallelism():
    (expected,) = run_on(1, of_plain, dataclasses.replace(CELL, dims=ONE))
    for found in run_on(4, of_graph, CELL):
        assert far_apart(expected, found, 1e-12) == []


@pytest.mark.slow
def test_a_loss_with_another_weight_is_found():
    (expected,) = run_on(1, of_plain, dataclasses.replace(CELL, dims=ONE))
    other = dataclasses.replace(CELL, auxiliary=AuxiliaryLoss(load_balance=0.1001, router_z=0.1))
    assert all(far_apart(expected, found, 1e-12) for found in run_on(4, of_graph, other))
