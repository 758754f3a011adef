"""Muon on one rank is torch.optim.Muon with torch.optim.AdamW, bit for bit; and what it steps, and who computes it."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.optim import build_optimizer
from torchtitan_graph.optim.muon import Muon, matrices_of, orthogonalize
from torchtitan_graph.optim.owners import _balanced, _candidates
from torchtitan_graph.parallel.chunk import box_of


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(11, 8)
        of_block = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False), "norm": nn.LayerNorm(8)}
        self.layers = nn.ModuleList([nn.ModuleDict(of_block)])
        self.output = nn.Linear(8, 11, bias=False)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return {"layers.0": self.layers[0]}


MATRICES = {"layers.0.up.weight", "layers.0.down.weight"}


def draw_gradients(*models: nn.Module, step: int) -> None:
    for model in models:
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_bitwise_torchs_own(adjust_lr: str, nesterov: bool) -> None:
    ours, theirs = Tiny(), Tiny()
    settings = job.Muon(lr=3e-2, adjust_lr=adjust_lr, nesterov=nesterov, momentum=0.9, ns_steps=4)
    optimizer = build_optimizer(ours, job.Optimizer("Muon", lr=1e-2, weight_decay=0.2, muon=settings))
    named = dict(theirs.named_parameters())
    of_muon = torch.optim.Muon(
        [named[name] for name in named if name in MATRICES],
        lr=3e-2, weight_decay=0.2, momentum=0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust_lr,
    )  # fmt: skip
    others = [p for name, p in named.items() if name not in MATRICES]
    adamw = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.2, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        draw_gradients(ours, theirs, step=step)
        for each in (optimizer, of_muon, adamw):
            each.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_may_have_another_dtype(dtype: torch.dtype) -> None:
    """Rounding the momentum to 8 bits changes what is rounded after it little."""
    model, plain = Tiny().to(dtype), Tiny().to(dtype)
    other = "bfloat16" if dtype == torch.float32 else "float32"
    optimizer = build_optimizer(model, job.Optimizer("Muon", lr=1e-2, state_dtype=other))
    reference = build_optimizer(plain, job.Optimizer("Muon", lr=1e-2))
    draw_gradients(model, plain, step=0)
    optimizer.step()
    reference.step()
    for name, p in model.named_parameters():
        assert all(x.dtype == getattr(torch, other) for key, x in optimizer.state[p].items() if key != "step")
        assert p.dtype == dtype
        torch.testing.assert_close(p, dict(plain.named_parameters())[name], atol=2e-3, rtol=0)


def test_a_stack_is_matrix_by_matrix() -> None:
    x_EMN = torch.randn(3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(x_EMN, 5), torch.stack([orthogonalize(x, 5) for x in x_EMN]))


def test_fp64_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(6, 10, dtype=torch.float64), 5))
    assert values.min() > 0.6 and values.max() < 1.3


def test_embeddings_output_norms_biases_and_routers_biases_are_AdamWs() -> None:
    family = load_family("gpt_oss")
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS["debugmodel"]), "sdpa")
    found = {name.removeprefix("layers.0.") for name in matrices_of(model) if name.startswith("layers.0.")}
    assert {"attention.wq.weight", "attention.wo.weight", "moe.experts.w1", "moe.experts.w2"} <= found
    left = {name.removeprefix("layers.0.") for name, _ in model.named_parameters()} - found
    assert {"tok_embeddings.weight", "output.weight", "moe.experts.b1", "attention.wq.bias", "attention.sinks"} <= left
    assert not any("norm" in name for name in found)


def test_an_entry_chooses_and_has_its_own_rate() -> None:
    entries = [job.ParamGroup("layers.0.up.*", name="AdamW"), job.ParamGroup("output.*", name="Muon", lr=0.5)]
    config = job.Optimizer("Muon", lr=1e-2, muon=job.Muon(lr=3e-2), param_groups=entries)
    model = Tiny()
    optimizer = build_optimizer(model, config)
    shown = {
        name: (set(optimizer.state[p]) == {"momentum_buffer"}, group["lr"])
        for name, p in model.named_parameters()
        for group in optimizer.param_groups
        if any(p is each for each in group["params"])
    }
    assert shown["layers.0.down.weight"] == (True, 3e-2)
    assert shown["layers.0.up.weight"] == shown["tok_embeddings.weight"] == (False, 1e-2)
    assert shown["output.weight"] == (True, 0.5)
    with pytest.raises(UserError, match="layers.0.up.bias, which layers.0.up.\\* matches, is no matrix"):
        build_optimizer(model, job.Optimizer("Muon", param_groups=[job.ParamGroup("layers.0.up.*", name="Muon")]))


GEOMETRIES = {
    "rows, unevenly": ((7, 5), (Shard(0),), (4,)),
    "fewer rows than ranks": ((3, 5), (Shard(0),), (4,)),
    "rows and columns": ((7, 6), (Shard(0), Shard(1)), (2, 3)),
    "copies": ((7, 6), (Replicate(), Shard(0)), (2, 2)),
    "experts": ((6, 4, 5), (Shard(0),), (4,)),
    "copies of experts": ((6, 4, 5), (Replicate(), Shard(0)), (3, 2)),
    "experts and their rows": ((5, 4, 6), (Shard(0), Shard(1)), (2, 2)),
    "rows of experts": ((5, 4, 6), (Shard(1), Shard(0)), (2, 5)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_number_of_a_unit_comes_once_and_its_update_goes_to_all_that_hold_it(name: str) -> None:
    shape, placements, mesh_shape = GEOMETRIES[name]
    num_ranks, whole = math.prod(mesh_shape), torch.arange(math.prod(shape)).view(shape)
    shards = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        offsets, sizes = box_of(shape, placements, mesh_shape, coordinate)
        shards.append(whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone())
    candidates = _candidates(GEOMETRIES[name])
    owners = _balanced(candidates, num_ranks)
    computed = []
    for each, owner in zip(candidates, owners, strict=True):
        unit, count = torch.full(each.shape, -1), torch.zeros(each.shape)
        pieces = each.of(owner, owner).pieces
        for rank, piece in pieces.items():
            if piece.sends:
                piece.of_unit(unit).copy_(piece.of_shard(shards[rank]))
                piece.of_unit(count).add_(1)
        assert torch.all(count == 1)
        computed.append(unit)
        for rank, piece in pieces.items():
            piece.of_shard(shards[rank]).copy_(-1 - piece.of_unit(unit))
            assert each.of(owner, rank).pieces[rank] == piece
    assert sorted(torch.cat([unit.flatten() for unit in computed]).tolist()) == whole.flatten().tolist()
    assert all((shard < 0).all() for shard in shards)  # every number of every rank was updated, once


def test_the_work_is_balanced() -> None:
    candidates = _candidates(((8, 8), (Shard(0),), (4,))) * 10
    owners = _balanced(candidates, 4)
    assert sorted(owners.count(rank) for rank in range(4)) == [2, 2, 3, 3]


def test_rounding_of_a_gradient_is_magnified_by_bfloat16_alone() -> None:
    """Other numbers of ranks add a gradient in another order; in bfloat16 some numbers then round to another one."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 96)
    other = gradient.clone()
    gradient[0, 0], other[0, 0] = 1 + 2**-8 - 1e-6, 1 + 2**-8 + 1e-6  # next to where bfloat16 rounds up

    def moved(dtype: torch.dtype) -> float:
        own, found = (orthogonalize(x.to(dtype), 5).double() for x in (gradient, other))
        return float((own - found).norm() / own.norm())

    assert moved(torch.float32) < 1e-5
    assert moved(torch.bfloat16) > 1e-4


def test_the_iteration_may_be_in_float32() -> None:
    updates = []
    for dtype in ("bfloat16", "float32"):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 16, bias=False)])})
        torch.manual_seed(0)
        weight = model["layers"][0].weight
        weight.data = torch.randn(16, 8)
        before, weight.grad = weight.detach().clone(), torch.randn(16, 8)
        optimizer = Muon(
            [{"params": [weight], "is_matrix": True}], lr=1.0, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8,
            momentum=0.0, nesterov=False, ns_steps=5, adjust_lr="original", ns_dtype=getattr(torch, dtype),
        )  # fmt: skip
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(16, 8)
        optimizer.plan()
        optimizer.step()
        updates.append((before - weight.detach()) / 2**0.5)
        assert torch.allclose(updates[-1], orthogonalize(weight.grad.to(getattr(torch, dtype)), 5).float(), atol=1e-6)
    assert not torch.equal(*updates)
