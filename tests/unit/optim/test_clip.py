"""Clipping: one global norm, whatever the layout of the gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pool import mesh, run_on
from torchtitan_graph.optim import clip_grad_norm, ranks_with_non_finite_gradients

SHAPES = {"embedding": (5, 4), "up": (6, 4), "down": (4, 6), "norm": (4,), "expert": (4, 3)}


def full_gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 10 for name, shape in SHAPES.items()}


def full_norm() -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in full_gradients().values()]))


def with_gradient(grad: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


# Of data and tensor parallelism.
SHAPES_OF_MESHES = pytest.mark.parametrize("shape", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])


def clip_on_a_mesh(
    shape: tuple[int, int], max_norm: float, forget_tp: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clip gradients of four layouts, one of them on another mesh, as tensor parallel and experts make them."""
    dense = mesh(shape, ("dp_shard", "tp"))
    experts = mesh((math.prod(shape),), ("ep",))
    layouts = {
        "embedding": (dense, [Shard(0), Replicate()]),  # 5 rows on 2 ranks: uneven
        "up": (dense, [Shard(1), Shard(0)]),
        "down": (dense, [Shard(0), Shard(1)]),
        "norm": (dense, [Shard(0), Replicate()]),
        "expert": (experts, [Shard(0)]),
    }
    grads = {name: distribute_tensor(grad, *layouts[name]) for name, grad in full_gradients().items()}
    if forget_tp:  # the fault this test is to find: each tensor-parallel rank takes its shard for the whole
        grads["up"] = DTensor.from_local(grads["up"].to_local(), dense, [Shard(1), Replicate()], run_check=False)
    params = {name: with_gradient(grad) for name, grad in grads.items()}
    norm = clip_grad_norm(params.values(), max_norm)
    assert type(norm) is torch.Tensor and norm.shape == ()
    return norm, {name: param.grad.full_tensor() for name, param in params.items()}


@SHAPES_OF_MESHES
def test_norm_and_clipped_gradients_are_those_of_one_process(shape: tuple[int, int]) -> None:
    for norm, clipped in run_on(math.prod(shape), clip_on_a_mesh, shape, 1.0, False):
        torch.testing.assert_close(norm, full_norm(), rtol=1e-14, atol=0)
        for name, grad in full_gradients().items():
            torch.testing.assert_close(clipped[name], grad / full_norm(), rtol=1e-6, atol=0)


def norms_on_one_mesh_and_on_two(shape: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Measure gradients on one mesh, and some of them on another of the same ranks: what torch caches by what a mesh is
    like may come from an earlier one."""
    mine, other = (init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp")) for _ in range(2))
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(20):
        locals_ = [torch.randn(7, 3, generator=generator, dtype=torch.float64) + dist.get_rank() for _ in range(6)]
        both = [
            [DTensor.from_local(x, m, [Shard(0), Shard(i % 2)], run_check=False) for i, (x, m) in enumerate(on)]
            for on in (
                [(x, mine) for x in locals_],
                [(x, (mine, other)[i % 2]) for i, x in enumerate(locals_)],
            )
        ]
        found.append(tuple(clip_grad_norm(map(with_gradient, grads), 0.0) for grads in both))
    return found


@SHAPES_OF_MESHES
def test_the_norm_has_the_same_bits_whichever_mesh_of_the_same_ranks_holds_a_gradient(shape: tuple[int, int]) -> None:
    for found in run_on(math.prod(shape), norms_on_one_mesh_and_on_two, shape):
        assert all(torch.equal(one, two) for one, two in found)


def clip_on_two_stages() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Each stage has half of the gradients; the embedding is tied, and there twice."""
    rank, stages = dist.get_rank(), mesh((2,), ("pp",)).get_group()
    params = {name: with_gradient(grad) for name, grad in full_gradients().items()}
    names = ["embedding", "up", "down"] if rank == 0 else ["norm", "expert", "embedding"]
    mine = [params[name] for name in names]
    norm = clip_grad_norm(mine, 1.0, stages, frozenset([params["embedding"]] if rank else []))
    return norm, [param.grad / full_gradients()[name] for name, param in zip(names, mine, strict=True)]


def test_norm_of_a_pipeline_is_that_of_one_process() -> None:
    for norm, scales in run_on(2, clip_on_two_stages):
        torch.testing.assert_close(norm, full_norm(), rtol=1e-14, atol=0)
        for scale in scales:
            torch.testing.assert_close(scale, (1 / full_norm()).expand_as(scale), rtol=1e-6, atol=0)


def norms_where_a_stage_has_no_gradient() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Clip one on the first stage; what the second has is frozen, or the loss does not depend on it."""
    stages = mesh((2,), ("pp",)).get_group()
    params = [with_gradient(torch.full((4,), 3.0)) if dist.get_rank() == 0 else torch.nn.Parameter(torch.ones(4))]
    norm = clip_grad_norm(params, 1.0, stages, device="cpu")
    return norm, clip_grad_norm(params, 1.0, stages, device="cpu"), ranks_with_non_finite_gradients(params)


def test_a_stage_may_have_no_gradient() -> None:
    for before, after, ranks in run_on(2, norms_where_a_stage_has_no_gradient):
        assert (before.item(), after.item(), ranks) == (6.0, pytest.approx(1.0), [])


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_shard_taken_for_the_whole_changes_the_norm(shape: tuple[int, int]) -> None:
    norm, _ = run_on(math.prod(shape), clip_on_a_mesh, shape, 0.0, True)[0]
    assert abs(norm - full_norm()) > 1e-3


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("equal numbers", "normal")), "log-normal"]
)
def test_forty_million_elements_have_the_norm_that_fp64_gives_however_they_are_cut(kind: str) -> None:
    grad = torch.full((40_000_000,), 0.1)
    if kind != "equal numbers":
        grad = torch.randn(len(grad), generator=torch.Generator().manual_seed(0))
    if kind == "log-normal":
        grad.mul_(2).exp_()
    exact = torch.linalg.vector_norm(grad, dtype=torch.float64)
    for num_parts in (1, 3):
        norm = clip_grad_norm([with_gradient(part) for part in grad.chunk(num_parts)], max_norm=0.0)
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    clip_grad_norm([with_gradient(grad)], max_norm=1.0)
    assert torch.linalg.vector_norm(grad, dtype=torch.float64).item() == pytest.approx(1.0, rel=2e-6)


def test_gradients_in_half_precision_have_a_norm_in_fp32() -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.linalg.vector_norm(grad.double())
    param = with_gradient(grad)
    norm = clip_grad_norm([param], max_norm=1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    assert param.grad.dtype == torch.bfloat16


def test_plain_gradients_are_clipped_in_place() -> None:
    params = [with_gradient(grad) for grad in full_gradients().values()]
    norm = clip_grad_norm(params, max_norm=2.0)
    torch.testing.assert_close(norm, full_norm())
    after = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in params]))
    assert after.item() == pytest.approx(2.0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 1e6])
def test_gradients_below_the_limit_or_without_one_keep_their_bits(max_norm: float) -> None:
    params = [with_gradient(grad) for grad in full_gradients().values()]
    torch.testing.assert_close(clip_grad_norm(params, max_norm), full_norm())
    for param, grad in zip(params, full_gradients().values(), strict=True):
        assert torch.equal(param.grad, grad)


def test_parameters_without_a_gradient_are_left_out() -> None:
    params = [with_gradient(torch.full((4,), 3.0)), torch.nn.Parameter(torch.ones(2))]
    assert clip_grad_norm(params, 1.0).item() == pytest.approx(6.0)


def test_a_non_finite_norm_is_returned_not_raised() -> None:
    assert clip_grad_norm([with_gradient(torch.tensor([1.0, float("nan")]))], 1.0).isnan()


def ranks_named(max_norm: float) -> list[int]:
    """Clip a gradient whose part on rank 1 is not finite."""
    world = mesh((2,), ("dp_shard",))
    local = torch.ones(3)
    if world.get_local_rank() == 1:
        local[1] = float("nan")
    params = [with_gradient(DTensor.from_local(each, world, [Shard(0)])) for each in (torch.ones(3), local)]
    params.append(torch.nn.Parameter(torch.ones(2)))  # frozen
    assert clip_grad_norm(params, max_norm).isnan()
    return ranks_with_non_finite_gradients(params)


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_the_rank_that_is_named_is_the_one_whose_gradient_is_not_finite(max_norm: float) -> None:
    assert run_on(2, ranks_named, max_norm) == [[1], [1]]
