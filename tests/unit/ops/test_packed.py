"""Weights in 4 and 8 bits."""

import pytest
import torch

from torchtitan_graph.ops.packed import BLOCK, PACKINGS, bytes_of_block, pack, packed_shape, unpack, wide_shape

LEVELS = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    + [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
)  # of the paper, to four digits


def there_and_back(wide: torch.Tensor, packing: str) -> torch.Tensor:
    packed = pack(wide, packing)
    assert packed.dtype == torch.uint8 and packed.shape == packed_shape(wide.shape, packing)
    assert wide_shape(packed.shape, packing) == wide.shape
    return unpack(packed, packing, torch.float32)  # type: ignore[no-any-return]


def test_a_number_takes_the_nearest_level() -> None:
    wide = torch.randn(5, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    blocks = wide.view(5, 3, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    nearest = LEVELS[(blocks[..., None] / largest[..., None] - LEVELS).abs().argmin(-1)] * largest
    torch.testing.assert_close(there_and_back(wide, "nf4").view_as(blocks), nearest, rtol=0, atol=1e-4 * 5)


def test_float8_rounds_by_its_mantissa() -> None:
    wide = torch.randn(4, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    found = there_and_back(wide, "float8")
    assert ((found - wide).abs() <= wide.abs() / 16 + wide.abs().amax() * 2**-17).all()  # 3 bits of mantissa


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_is_packed_twice_has_the_same_bits(packing: str) -> None:
    once = there_and_back(torch.randn(6, BLOCK), packing)
    assert torch.equal(there_and_back(once, packing), once)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_cut_between_blocks_changes_nothing(packing: str) -> None:
    wide = torch.randn(2, 3, 4 * BLOCK, generator=torch.Generator().manual_seed(2))
    whole, size = pack(wide, packing), 2 * bytes_of_block(packing)
    assert torch.equal(whole[..., :size], pack(wide[..., : 2 * BLOCK], packing))
    assert torch.equal(
        unpack(whole[..., size:], packing, torch.float32), there_and_back(wide[..., 2 * BLOCK :], packing)
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_zeros_are_zeros_and_no_block_reads_another(packing: str) -> None:
    wide = torch.zeros(2, 2 * BLOCK)
    wide[0, BLOCK + 3] = 5e-30
    assert torch.equal(there_and_back(wide, packing)[1], torch.zeros(2 * BLOCK))
    assert there_and_back(wide, packing)[0, BLOCK + 3] > 0
    assert torch.equal(there_and_back(wide, packing)[0, :BLOCK], torch.zeros(BLOCK))
