"""Initial weights depend on the seed and on a parameter's name, and on nothing else."""

import pytest
import torch
from matrix import CPU, FSDP2, FSDP2_TP2, FSDP4, ONE, SEED, TP2, Cell, build_eager, build_graph, gathered
from torch.distributed.tensor import DTensor

from pool import run_on
from torchtitan_graph.models.layers.init import initial_weight, initialize
from torchtitan_graph.parallel.mesh import ParallelDims

FSDP3 = ParallelDims(dp_shard=3)
VOCAB = 510  # divides by TP 2, and leaves 255 rows to cut


def weights(dims: ParallelDims, seed: int = SEED, build=build_graph) -> dict[str, torch.Tensor]:
    cell = Cell(dims, vocab_size=VOCAB)
    model, _ = build(cell)
    initialize(model, seed)
    return gathered(cell, {name: p.detach() for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def one_rank() -> dict[str, torch.Tensor]:
    return run_on(1, weights, ONE)[0]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    "dims", [FSDP2, TP2, FSDP3, FSDP4, FSDP2_TP2], ids=["FSDP-2", "TP-2", "FSDP-3", "FSDP-4", "FSDP-2-x-TP-2"]
)
def test_every_layout_starts_from_the_weights_of_one_rank(dims, one_rank):
    for found in run_on(dims.num_ranks, weights, dims):
        assert differing(one_rank, found) == []


@pytest.mark.parametrize("dims", [FSDP2, TP2], ids=["FSDP-2", "TP-2"])
def test_the_eager_model_starts_from_the_same_weights(dims, one_rank):
    for found in run_on(dims.num_ranks, weights, dims, build=build_eager):
        assert differing(one_rank, found) == []


def shards(dims: ParallelDims) -> dict[str, torch.Tensor]:
    """Give this rank's part of every parameter that the two ranks do not hold alike."""
    model, _ = build_graph(Cell(dims, vocab_size=VOCAB))
    parts = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        if not all(placement.is_replicate() or p.device_mesh.size(i) == 1 for i, placement in enumerate(p.placements)):
            parts[name] = p.to_local().detach()
    return parts


@pytest.mark.parametrize("dims", [FSDP2, TP2], ids=["FSDP-2", "TP-2"])
def test_shards_differ(dims):
    """`nn.init` on a sharded DTensor gives every rank of a CPU job the same numbers."""
    first, second = run_on(2, shards, dims)
    drawn = [name for name in first if "norm" not in name]
    assert len(drawn) == 3 * 7 + 2
    for name in drawn:
        rows = min(len(first[name]), len(second[name]))
        assert not torch.equal(first[name][:rows], second[name][:rows]), name


def test_another_seed_gives_other_weights(one_rank):
    (other,) = run_on(1, weights, ONE, seed=SEED + 1)
    assert differing(one_rank, other) == [name for name in one_rank if "norm" not in name]


def test_no_two_parameters_are_alike(one_rank):
    drawn = [x.flatten()[:64] for name, x in one_rank.items() if "norm" not in name]
    directions = torch.nn.functional.normalize(torch.stack(drawn), dim=1)
    assert (directions @ directions.T).fill_diagonal_(0).abs().max() < 0.6


def test_a_parameter_does_not_depend_on_the_others(one_rank):
    """Drawn alone, after other numbers were drawn from torch's own generator."""
    torch.rand(7)
    name = "layers.2.attention.wq.weight"
    alone = initial_weight(name, torch.Size((64, 64)), 0.02, SEED, CPU, torch.float32)
    assert torch.equal(alone, one_rank[name])
