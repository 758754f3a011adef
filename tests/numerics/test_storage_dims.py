"""A parameter that is cut on another dim than its first rests, is gathered and reduced as FSDP2 does, bit for bit."""

import dataclasses

import pytest
import torch
from matrix import CPU, bits_that_differ, layout_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from pool import run_on
from torchtitan_graph.capture.step import SideOutputs, StepOutput, bind_train_step, make_eager_step, trace_train_step
from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import (
    Precision,
    buckets,
    cast_parameters,
    materialize,
    plan_storage,
    set_local,
)

VOCAB, WIDTH, HIDDEN = 11, 6, 10
PRECISION = Precision(compute=torch.bfloat16)


class Stacked(nn.Module):
    """Weights as experts have them: (2, HIDDEN, WIDTH), cut on their second dim; others on their first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Parameter(torch.empty(2, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(2, WIDTH, HIDDEN))
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: None, *, side_outputs: bool) -> object:
        x = self.table(tokens_BL)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + (x @ up.T).tanh() @ down.T
        return self.output(x), SideOutputs({}, {})


def dim_of(parameter: Tensor) -> int:
    return 1 if parameter.dim() == 3 else 0


def results(output: StepOutput, model: nn.Module) -> dict[str, Tensor]:
    return {"loss": output.loss} | {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def differences(wrong: bool) -> list[str]:
    layout = layout_of(ParallelDims(dp_shard=2))
    generator = torch.Generator().manual_seed(5)
    with torch.device("meta"):
        graph, eager = Stacked(), Stacked()
    full = {name: torch.randn(p.shape, generator=generator) for name, p in graph.named_parameters()}
    tokens = torch.randint(VOCAB, (2, 2, 8), generator=generator)[layout.data_rank]
    inputs = (Batch(tokens, tokens.flip(0), tokens, tokens), None, torch.tensor(32))

    policy = MixedPrecisionPolicy(param_dtype=PRECISION.compute, reduce_dtype=PRECISION.reduce)
    fully_shard(eager, mesh=layout.mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(dim_of(p)))
    eager.set_gradient_divide_factor(1.0)
    eager.set_force_sum_reduction_for_comms(True)
    eager.to_empty(device=CPU)

    cast_parameters(graph, PRECISION.compute)
    storages = {
        name: dataclasses.replace(storage, dim=dim_of(p), placements=(Shard(dim_of(p)),))
        for (name, storage), p in zip(plan_storage(graph, layout, PRECISION).items(), graph.parameters(), strict=True)
    }
    traced = trace_train_step(graph, cross_entropy, *inputs, device=CPU)
    plan = PassPlan(storages, (), buckets(graph, ()))
    gm = run_passes(traced.gm, passes(plan), (), CPU, Inspection())
    cast_parameters(graph, PRECISION.storage)
    materialize(graph, storages, CPU)
    for model in (graph, eager):
        for name, parameter in model.named_parameters():
            set_local(parameter, full[name])
    found = results(bind_train_step(dataclasses.replace(traced, gm=gm), graph)(*inputs), graph)
    if wrong:
        found["up"] = found["up"].neg()
    return bits_that_differ(results(make_eager_step(eager, cross_entropy)(*inputs), eager), found)


@pytest.mark.parametrize("wrong", [False, True])
def test_stacked_weights_cut_on_their_second_dim(wrong: bool) -> None:
    assert run_on(2, differences, wrong) == [["up"] if wrong else []] * 2
