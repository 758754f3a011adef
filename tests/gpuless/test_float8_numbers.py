"""The numbers of the kernels of rows in float8, by Triton's interpreter on a CPU."""

import os
from typing import Any

import pytest
import torch


@pytest.fixture
def kernels() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: this process does so only now
    from torchtitan_graph.ops import float8_kernels

    return float8_kernels


def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, shape[-2])[:, None]
    x[..., 0, :] = 0
    return x.to(dtype)


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether numbers of a format are a step apart at most: the interpreter cuts off where a GPU rounds to the
    nearest; what is below the smallest normal number it makes zero; and where a number is rounded up to a power of two
    it loses the carry, and gives the half."""
    a, b, facts = found.float(), expected.float(), torch.finfo(expected.dtype)
    has_lost_carry = (2 * a == b) & (b.abs().frexp().mantissa == 0.5)
    gap = (a - b).abs()
    step = torch.maximum(b.abs() * facts.eps, torch.tensor(facts.smallest_normal))
    return bool(((gap <= step) | has_lost_carry).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_are_the_cpus(kernels: Any, dtype: torch.dtype, form: torch.dtype) -> None:
    from torchtitan_graph.ops.float8 import scaled_rows

    for shape in ((5, 64), (3, 1500), (2, 3, 40)):
        for x in (rows(*shape, dtype=dtype), rows(*shape, dtype=dtype).transpose(-1, -2)):
            expected, scales = scaled_rows(x, form)
            out, found = torch.empty_like(expected), torch.empty_like(scales)
            kernels.write_scaled_rows(out, found, x, 1e-12)
            assert torch.equal(found, scales)
            assert is_near(out, expected)
            kernels.write_scaled_rows(out, found, x.flip(-1), 1e-12)
            assert torch.equal(found, scales) and not is_near(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_blocks_are_the_cpus(kernels: Any, dtype: torch.dtype, form: torch.dtype) -> None:
    from torchtitan_graph.ops.blocks import scaled_blocks

    exponent = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}[form]
    for shape in ((5, 64), (2, 1100), (2, 3, 40)):
        given = rows(*shape, dtype=dtype)
        for x in (given, given.transpose(-1, -2)) if shape[-1] < 100 else (given,):
            expected, scales = scaled_blocks(x, form)
            out, found = torch.empty_like(expected), torch.empty_like(scales)
            kernels.write_scaled_blocks(out, found, x, exponent)
            assert torch.equal(found, scales)
            assert is_near(out, expected)
            kernels.write_scaled_blocks(out, found, x.flip(-1), exponent)
            assert not is_near(out, expected)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2, 64, dtype=dtype)
        x[1, 40] = bad
        out, found = torch.empty(2, 64, dtype=form), torch.empty(2, 2)
        kernels.write_scaled_blocks(out, found, x, exponent)
        assert torch.equal(found.isnan(), scaled_blocks(x, form)[1].isnan()) and found.isnan().sum() == 1


COUNTS = (((7, 0, 33, 32), 70), ((0, 0), 5), ((64, 1, 0), 64))  # rows of each group, and columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_are_the_cpus(kernels: Any, dtype: torch.dtype) -> None:
    from torchtitan_graph.ops.float8 import aligned_ends, scaled_columns

    form = torch.float8_e4m3fn
    for counts, width in COUNTS:
        x, ends_E = rows(sum(counts) + 1, width, dtype=dtype)[1:], torch.tensor(counts).cumsum(0).int()
        for strided in (x, x.t().contiguous().t()):
            expected, scales = scaled_columns(strided, ends_E, form)
            out, found = torch.full_like(expected, 1), torch.empty_like(scales)
            kernels.write_scaled_columns(out, found, strided, ends_E, aligned_ends(ends_E, 16), 1e-12)
            assert torch.equal(found, scales)
            assert is_near(out, expected)
        if len(x):
            kernels.write_scaled_columns(out, found, x.flip(0), ends_E, aligned_ends(ends_E, 16), 1e-12)
            assert not is_near(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_in_blocks_are_the_cpus(kernels: Any, dtype: torch.dtype) -> None:
    from torchtitan_graph.ops.blocks import columns_in_blocks, rows_of_blocks

    form = torch.float8_e4m3fn
    for counts, width in COUNTS:
        x, ends_E = rows(sum(counts) + 1, width, dtype=dtype)[1:], torch.tensor(counts).cumsum(0).int()
        for strided in (x, x.t().contiguous().t()):
            expected, scales = columns_in_blocks(strided, ends_E, form)
            out, found = torch.empty_like(expected), torch.empty_like(scales)
            rows_B = rows_of_blocks(ends_E, scales.shape[1])
            kernels.write_columns_in_blocks(out, found, strided, *rows_B, 8)
            assert torch.equal(found, scales)
            assert is_near(out, expected)
        if len(x):
            kernels.write_columns_in_blocks(out, found, x.flip(0), *rows_B, 8)
            assert not is_near(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_travels_is_the_cpus(kernels: Any, dtype: torch.dtype) -> None:
    from torchtitan_graph.ops.wire import BLOCK, of_float8_bytes, to_float8_bytes

    for S, D in ((4, 128), (3, 130), (5, 300), (2, 5)):
        x, width = rows(S, D, dtype=dtype), D + -D % 4
        expected = to_float8_bytes(x)
        out = torch.empty_like(expected)
        kernels.write_bytes(out, x, width, BLOCK, 1e-30)
        assert torch.equal(out[:, width:], expected[:, width:]), "scales"
        numbers = (each[:, :width].view(torch.float8_e4m3fn) for each in (out, expected))
        assert is_near(*numbers) and out[:, D:width].eq(0).all()
        back = torch.empty_like(x)
        kernels.write_of_bytes(back, expected, width, BLOCK)
        exact = of_float8_bytes(expected, D, dtype)
        assert (back - exact).abs().max() <= exact.abs().max() * 8e-3, "bf16 is cut off too"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_stays_so(kernels: Any) -> None:
    from torchtitan_graph.ops.wire import BLOCK, of_float8_bytes, to_float8_bytes

    x = torch.ones(3, 256)
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    out = torch.empty_like(to_float8_bytes(x))
    kernels.write_bytes(out, x, 256, BLOCK, 1e-30)
    found = of_float8_bytes(out, 256, torch.float32)
    assert not found[0, 3].isfinite() and found[1, 200].isnan() and found[2].eq(1).all()
    scaled, scales = torch.empty(3, 256, dtype=torch.float8_e4m3fn), torch.empty(3, 1)
    kernels.write_scaled_rows(scaled, scales, x, 1e-12)
    meant = scaled.float() * scales
    assert not meant[0].isfinite().all() and meant[1].isnan().any() and meant[2].eq(1).all()
