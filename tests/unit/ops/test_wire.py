"""Rows in float8 for the way: each 128 numbers have a scale, zeros stay, and what is not finite is not hidden."""

import pytest
import torch

from torchtitan_graph.ops.wire import Wire, of_float8_bytes, to_float8_bytes


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("width", [1, 5, 128, 130, 512])
def test_rows_come_back_within_half_a_step_of_e4m3(num_rows: int, width: int) -> None:
    scales = torch.logspace(-20, 20, width)  # of very different sizes
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)) * scales
    wire = Wire(width)
    rows = wire.packed(x)
    found = wire.unpacked(rows, torch.float32)
    largest = torch.stack([part.abs().amax(1) for part in x.split(128, 1)], 1).repeat_interleave(128, 1)[:, :width]
    # 3 bits of mantissa; below 2**-6 of the format's range of 448 steps are even.
    step = torch.maximum(x.abs() / 16, largest / 448 * 2**-10)
    assert ((found - x).abs() <= step * 1.001).all()
    assert rows.shape == (num_rows, width + -width % 4 + 4 * -(-width // 128)) and rows.dtype is torch.uint8


def test_a_number_that_is_not_finite_makes_its_block_not_numbers() -> None:
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    found = Wire(256).unpacked(Wire(256).packed(x), torch.float32)
    assert not found[0, 3].isfinite() and found[1, 200].isnan()
    assert found[0, 128:].eq(1).all() and found[1, :128].eq(1).all()


def test_no_wire_leaves_rows_as_they_are() -> None:
    x = torch.randn(3, 5)
    assert Wire().unpacked(Wire().packed(x), x.dtype) is x


@pytest.mark.parametrize("width", [5, 128])
def test_the_operators_are_what_they_declare(width: int) -> None:
    x = torch.randn(3, width)
    torch.library.opcheck(to_float8_bytes, (x,))
    torch.library.opcheck(of_float8_bytes, (to_float8_bytes(x), width, torch.bfloat16))
