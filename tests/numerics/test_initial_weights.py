"""Initial weights depend on the seed and on a parameter's name, and on nothing else."""

import pytest
import torch
from matrix import CPU, FSDP2, FSDP2_TP2, FSDP4, ONE, ONE_LAYER, SEED, TP2, Cell, build_eager, build_graph, gathered

from pool import run_on
from torchtitan_graph.models.layers.init import initial_weight, initialize
from torchtitan_graph.parallel.layout import ParallelDims

FSDP3 = ParallelDims(dp_shard=3)
VOCAB = 510  # divides by TP 2, and leaves 255 rows to cut


def weights(dims: ParallelDims, seed: int = SEED, build=build_graph) -> dict[str, torch.Tensor]:
    cell = Cell(dims, vocab_size=VOCAB, **ONE_LAYER)
    model = build(cell).model
    initialize(model, seed)
    return gathered(cell, {name: p.detach() for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def one_rank() -> dict[str, torch.Tensor]:
    return run_on(1, weights, ONE)[0]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    "dims",
    [FSDP2, TP2, *(pytest.param(dims, marks=pytest.mark.slow) for dims in (FSDP4, FSDP3, FSDP2_TP2))],
    ids=["FSDP-2", "TP-2", "FSDP-4", "FSDP-3", "FSDP-2-x-TP-2"],
)
def test_every_layout_starts_from_the_weights_of_one_rank(dims, one_rank):
    for found in run_on(dims.num_ranks, weights, dims):
        assert differing(one_rank, found) == []


@pytest.mark.parametrize("dims", [FSDP2, TP2], ids=["FSDP-2", "TP-2"])
def test_the_eager_model_starts_from_the_same_weights(dims, one_rank):
    for found in run_on(dims.num_ranks, weights, dims, build=build_eager):
        assert differing(one_rank, found) == []


def drawn_shards(dims: ParallelDims, one_generator: bool = False) -> dict[str, torch.Tensor]:
    """Give this rank's part of every random parameter, or what it would be if every rank drew its part for itself."""
    model = build_graph(Cell(dims, vocab_size=VOCAB, **ONE_LAYER)).model
    parts = {name: p.to_local().detach() for name, p in model.named_parameters() if "norm" not in name}
    if one_generator:
        for part in parts.values():
            part.normal_(generator=torch.Generator().manual_seed(SEED))
    return parts


def alike(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Name the parameters of which two ranks hold the same numbers, as far as both have rows."""
    rows = {name: min(len(first[name]), len(second[name])) for name in first}
    return [name for name, n in rows.items() if torch.equal(first[name][:n], second[name][:n])]


@pytest.mark.parametrize("dims", [FSDP2, TP2], ids=["FSDP-2", "TP-2"])
def test_shards_differ(dims):
    assert alike(*run_on(2, drawn_shards, dims)) == []


def test_shards_drawn_alike_are_seen():
    """As `nn.init` on a sharded DTensor draws them on a CPU."""
    first, second = run_on(2, drawn_shards, FSDP2, one_generator=True)
    assert len(first) == 7 + 2
    assert alike(first, second) == list(first)


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
    name = "layers.0.attention.wq.weight"
    alone = initial_weight(name, torch.Size((64, 64)), 0.02, SEED, CPU, torch.float32)
    assert torch.equal(alone, one_rank[name])
