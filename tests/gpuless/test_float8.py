"""Products in float8 on the null GPU: a GPU's own kernels take what they are given, and nothing waits for the host."""

import null_gpu
import pytest
import torch

from torchtitan_graph.quantize.grouped import grouped_linear
from torchtitan_graph.quantize.products import E4M3, MX, MX_WIDE, ROWWISE, ROWWISE_WIDE, Recipe

ENDS = (7, 7, 30, 40)  # the second group has no row


def step(recipe: Recipe, width: int) -> null_gpu.Counts:
    """Multiply rows by their groups' matrices, forward and backward; give what the GPU was asked for."""
    offsets_E = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    leaves = [
        torch.ones(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((40, width), (4, 32, width))
    ]
    null_gpu.take()
    y, *_ = grouped_linear(*leaves, offsets_E, recipe)
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    return null_gpu.take()


@pytest.mark.parametrize("width", [48, 40])
@pytest.mark.parametrize(("scaling", "in_float8"), [(ROWWISE, 3), (ROWWISE_WIDE, 2)])
def test_experts_in_float8_take_the_grouped_kernels_and_wait_for_nothing(
    scaling: str, in_float8: int, width: int
) -> None:
    asked = step(Recipe(scaling, E4M3), width)
    assert not [what for what in asked if what.startswith("wait")]
    assert sum(n for what, n in asked.items() if "GemmUniversal" in what and "float_e4m3" in what) == in_float8


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize(("scaling", "in_blocks"), [(MX, 3), (MX_WIDE, 2)])
def test_experts_in_mx_take_the_grouped_kernels_of_a_b200_and_wait_for_nothing(
    scaling: str, in_blocks: int, width: int
) -> None:
    null_gpu.become("B200")
    asked = step(Recipe(scaling, E4M3), width)
    assert not [what for what in asked if what.startswith("wait")]
    assert sum(n for what, n in asked.items() if "GemmUniversal" in what and "BlockScaled" in what) == in_blocks
    of_rows, of_columns = (sum(n for what, n in asked.items() if name in what) for name in ("_scaled_b", "_columns_in"))
    assert of_rows == 4 and of_columns == 2 * (in_blocks - 2)


def test_emulation_that_waits_is_found() -> None:
    asked = step(Recipe(ROWWISE, E4M3, emulate=True), 48)
    assert [what for what in asked if what.startswith("wait")]
    assert not [what for what in asked if "GemmUniversal" in what]
