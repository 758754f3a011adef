"""Write and read tensors in a folder in the format of torch.distributed.checkpoint (DCP).

DCP gets tensors and nothing else, each as a rank's box of it, so that a checkpoint of one layout can be read in any
other. Reading runs no code from the folder: see metadata.py and stored_part.py.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from torchtitan_graph.checkpoint.stored_part import read_stored
from torchtitan_graph.checkpoint.whole import Box, Part, find_gaps, make_up, unite
from torchtitan_graph.errors import UserError
from torchtitan_graph.parallel.agree import RanksFailed, describe, describe_ranks
from torchtitan_graph.parallel.chunk import Chunk, chunk_of
from torchtitan_graph.small_files import ANY_SIZE, open_small
from torchtitan_graph.transient import is_transient


def save_tensors(folder: Path, chunks: dict[str, Chunk], group: dist.ProcessGroup | None = None) -> None:
    """Write each rank's boxes of tensors to disk in `folder`; all ranks together, which may hold different ones.

    Raises RanksFailed on every rank if one of them failed, or all boxes together don't cover every tensor once.
    """
    writer, no_dist = _Writer(folder), not dist.is_initialized()
    with _failures_of_ranks(), _quiet_about_a_single_process(no_dist):
        dcp.save(chunks, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=no_dist)


def load_tensors(
    folder: Path,
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor | Chunk],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load tensors in place from `folder`, whatever the layout they were saved in; all ranks together.

    Raises RanksFailed on every rank if one of them failed.
    """
    chunks = {name: chunk_of(tensor) for name, tensor in tensors.items()}
    reader, no_dist = _Reader(folder, metadata), not dist.is_initialized()
    with _failures_of_ranks(), _quiet_about_a_single_process(no_dist):
        dcp.load(chunks, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=no_dist)


def saved_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return dtype, shape and boxes of each tensor, by name."""
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """Return None, instead of the folder's own path: a checkpoint can be moved."""


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, metadata

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read file by file, as the base class does, but with checks."""
        by_file: dict[str, list[dcp.ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open_small(self.folder / name, ANY_SIZE) as file:
                for item in items:
                    planner.resolve_tensor(item).detach().copy_(self._read(file, item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BinaryIO, item: dcp.ReadItem) -> torch.Tensor:
        index = item.storage_index
        saved, info = saved_tensors(self.metadata)[index.fqn], self.metadata.storage_data[index]
        assert index.index is not None, "of the box, which _read_items has found"
        shape = saved.chunks[index.index].sizes
        try:
            stored = read_stored(file, info.offset, info.length, shape, saved.properties.dtype)
        except Exception as error:  # invalid input can raise nearly anything
            raise UserError(f"{index.fqn} in {info.relative_path} can't be read: {error!s:.300}") from error
        return _narrow(stored, item.storage_offsets, item.lengths)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans each rank's boxes; of equal ones, the base class writes one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=False)

    def create_local_plan(self) -> dcp.SavePlan:
        chunks = self.state_dict.items()
        self.plan = dcp.SavePlan([_write_item(name, chunk) for name, chunk in chunks if chunk.local.numel()])
        return self.plan

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        """Check, on rank 0, that the tensors can be loaded again; the base class would too, but without their names."""
        if gaps := find_gaps(unite({item.index.fqn: _part(item) for item in plan.items} for plan in all_plans)):
            raise RuntimeError("; ".join(gaps))
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor:
        return self.state_dict[write_item.index.fqn].local


class _LoadPlanner(dcp.LoadPlanner):
    """Plans reads of all saved boxes that overlap each rank's boxes."""

    def set_up_planner(
        self, state_dict: dict[str, Chunk], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.chunks, self.saved = state_dict, saved_tensors(metadata)

    def create_local_plan(self) -> dcp.LoadPlan:
        chunks = self.chunks.items()
        return dcp.LoadPlan([item for name, chunk in chunks for item in _read_items(name, chunk, self.saved[name])])

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("read_metadata refuses everything but tensors")

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        return _narrow(self.chunks[read_item.dest_index.fqn].local, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the reader has written into the live tensor."""


def _narrow(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=chunk.local.shape)


def _write_item(name: str, chunk: Chunk) -> dcp.WriteItem:
    return dcp.WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_box(chunk), properties=TensorProperties(dtype=chunk.local.dtype), size=torch.Size(chunk.shape)
        ),
    )


def _part(item: dcp.WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None, "only tensors are written"
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Part(box, tuple(data.size), data.properties.dtype)


def _read_items(name: str, chunk: Chunk, saved: TensorStorageMetadata) -> list[dcp.ReadItem]:
    if not chunk.local.numel():
        return []
    items = create_read_items_for_chunk_list(name, saved, [_box(chunk)])
    # DCP leaves what no saved box covers unchanged, and lets one box overwrite another, silently.
    boxes = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in items]
    if not make_up(boxes, chunk.local.shape):
        num_read, wanted = sum(math.prod(box.sizes) for box in boxes), chunk.local.numel()
        raise UserError(
            f"{name}: the checkpoint's parts hold {num_read} numbers for this rank's {wanted}, not each once"
        )
    return items


@contextlib.contextmanager
def _failures_of_ranks() -> Iterator[None]:
    """Convert DCP's error, which is no `Exception`, into RanksFailed; errors that end a process stay as they are."""
    try:
        yield
    except dcp.CheckpointException as error:
        for wrapped, _ in error.failures.values():
            if not isinstance(wrapped, Exception):  # such as `stop.Stopped`: nothing has failed
                raise wrapped from error
        failures = {rank: describe(wrapped[0]) for rank, wrapped in error.failures.items()}
        transient = all(is_transient(wrapped[0]) for wrapped in error.failures.values())
        raise RanksFailed(describe_ranks(failures), transient) from error


@contextlib.contextmanager
def _quiet_about_a_single_process(alone: bool) -> Iterator[None]:
    """Suppress DCP's warning that there is no process group. With one, filters are unchanged, as all threads share
    them."""
    with warnings.catch_warnings() if alone else contextlib.nullcontext():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
