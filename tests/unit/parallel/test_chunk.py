"""The box of a tensor that a rank holds, against cutting the tensor with torch.chunk."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_graph.parallel.chunk import box_of, chunk_of

FSDP_AND_TP_ON_ROWS = (lambda tp: (_StridedShard(0, split_factor=tp), Shard(0)), (1, 0))
FSDP_ON_ROWS_TP_ON_COLUMNS = (lambda tp: (Shard(0), Shard(1)), (0, 1))
TWO_AXES_LEFT_TO_RIGHT = (lambda tp: (Shard(0), Shard(0)), (0, 1))


def cut(rows: torch.Tensor, dim: int, degree: int, index: int) -> torch.Tensor:
    pieces = rows.chunk(degree, dim)
    return pieces[index] if index < len(pieces) else rows.narrow(dim, 0, 0)


@pytest.mark.parametrize("layout", [FSDP_AND_TP_ON_ROWS, FSDP_ON_ROWS_TP_ON_COLUMNS, TWO_AXES_LEFT_TO_RIGHT])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (4, 2), (2, 4)])
def test_boxes_are_what_cutting_axis_by_axis_gives(layout: tuple, mesh_shape: tuple[int, int]) -> None:
    make_placements, order = layout
    placements: tuple[Placement, ...] = make_placements(mesh_shape[1])
    for num_rows in range(1, 40):
        whole = torch.arange(num_rows * 5).reshape(num_rows, 5)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            expected = whole
            for axis in order:
                expected = cut(expected, placements[axis].dim, mesh_shape[axis], coordinate[axis])
            (row, column), sizes = box_of((num_rows, 5), placements, mesh_shape, coordinate)
            assert torch.equal(whole[row : row + sizes[0], column : column + sizes[1]], expected)


def test_a_replicated_axis_cuts_nothing() -> None:
    assert box_of((5, 3), (Replicate(), Shard(0)), (2, 2), (1, 1)) == ((3, 0), (2, 3))


def test_a_plain_tensor_is_held_whole_and_shared() -> None:
    tensor = torch.zeros(2, 3)
    chunk = chunk_of(tensor)
    assert (chunk.offsets, chunk.shape) == ((0, 0), (2, 3))
    chunk.local.fill_(1)
    assert tensor.sum() == 6


def test_unreduced_tensors_and_impossible_orders_are_refused() -> None:
    with pytest.raises(AssertionError, match="can't save"):
        box_of((4,), (Partial(),), (2,), (0,))
    with pytest.raises(AssertionError, match="no order"):
        box_of((4,), (_StridedShard(0, split_factor=3), Shard(0)), (2, 2), (0, 0))
