"""Tensors to and from a folder in the format of torch.distributed.checkpoint (DCP).

DCP is given tensors and nothing else, each as the box of it that a rank holds, so that what was saved in one layout
can be read in any other. Reading runs no code from the folder: its `.metadata` is a pickle, which is opened by an
unpickler that knows a fixed list of records, and tensors are read with `weights_only=True`.
"""

import contextlib
import enum
import io
import math
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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

from torchtitan_graph.checkpoint.whole import Box, Part, find_gaps, unite
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.torch_private.distributed import METADATA_GLOBALS, StorageInfo
from torchtitan_graph.parallel.agree import RanksFailed, describe, describe_ranks
from torchtitan_graph.parallel.chunk import Chunk, chunk_of

METADATA = ".metadata"


def save_tensors(folder: Path, chunks: dict[str, Chunk], group: dist.ProcessGroup | None = None) -> None:
    """Write each rank's boxes of tensors to `folder`; all ranks together, which may hold different ones.

    Returns once on disk.

    Raises:
        RanksFailed: on every rank, where one of them failed, or where all boxes don't make up every tensor.
    """
    writer, no_dist = _Writer(folder), not dist.is_initialized()
    with _failures_of_ranks(), _quiet_about_a_single_process(no_dist):
        dcp.save(chunks, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=no_dist)


def load_tensors(
    folder: Path, metadata: Metadata, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors in place from `folder`, whatever the layout they were saved in; all ranks together.

    Raises:
        RanksFailed: on every rank, where one of them failed.
    """
    chunks = {name: chunk_of(tensor) for name, tensor in tensors.items()}
    reader, no_dist = _Reader(folder, metadata), not dist.is_initialized()
    with _failures_of_ranks(), _quiet_about_a_single_process(no_dist):
        dcp.load(chunks, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=no_dist)


def read_metadata(folder: Path) -> Metadata:
    """Read which tensors `folder` holds, and where.

    Raises:
        UserError: the file names anything but records of tensors; nothing of it has been run.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        _check_metadata(metadata)
    except Exception as error:  # garbage makes an unpickler raise nearly anything
        raise UserError(f"{path} can't be read: {error}") from error
    return metadata


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise UserError("it holds no index of tensors")
    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            raise UserError(f"{name} is not a tensor; pickled objects are not loaded")
        if not isinstance(saved.size, torch.Size) or not isinstance(saved.properties.dtype, torch.dtype):
            raise UserError(f"{name} has no shape and dtype")
    for info in metadata.storage_data.values():
        if not isinstance(info, StorageInfo) or Path(info.relative_path).name != info.relative_path:
            raise UserError(f"a tensor's file {info!r} is not in the checkpoint's folder")


def saved_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return dtype, shape and boxes of each tensor, by name."""
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs; nothing was run")


def _member(kind: Any, name: str) -> Any:
    """Give a member of an enumeration, which Python 3.11.0 to 3.11.3 writes as what `getattr` gives."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it wants {name} of {kind!r:.80}, which is no enumeration; nothing was run")
    return kind[name]


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """Keep the folder's own path out of it: a checkpoint can be moved."""


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self.metadata


class _SavePlanner(dcp.DefaultSavePlanner):
    """Write each rank's boxes; of equal ones, the base class keeps one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=False)

    def create_local_plan(self) -> dcp.SavePlan:
        chunks = self.state_dict.items()
        self.plan = dcp.SavePlan([_write_item(name, chunk) for name, chunk in chunks if chunk.local.numel()])
        return self.plan

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        """Refuse, on rank 0, what could not be loaded again; the base class would too, but not by name."""
        if gaps := find_gaps(unite({item.index.fqn: _part(item) for item in plan.items} for plan in all_plans)):
            raise RuntimeError("; ".join(gaps))
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor:
        return self.state_dict[write_item.index.fqn].local


class _LoadPlanner(dcp.LoadPlanner):
    """Read into each rank's boxes whatever saved boxes overlap them."""

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
        tensor = self.chunks[read_item.dest_index.fqn].local
        for dim, (begin, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, begin, size)
        return tensor

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the reader has written into the live tensor."""


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
    # DCP leaves what no saved box covers as it was, without a word.
    num_read = sum(math.prod(item.lengths) for item in items)
    if num_read != chunk.local.numel():
        raise UserError(f"{name}: the checkpoint holds {num_read} of this rank's {chunk.local.numel()} numbers")
    return items


@contextlib.contextmanager
def _failures_of_ranks() -> Iterator[None]:
    """Turn what DCP raises on all ranks into an `Exception`, which it is not; what ends a process stays that."""
    try:
        yield
    except dcp.CheckpointException as error:
        for wrapped, _ in error.failures.values():
            if not isinstance(wrapped, Exception):  # such as `stop.Stopped`: nothing has failed
                raise wrapped from error
        failures = {rank: describe(wrapped[0]) for rank, wrapped in error.failures.items()}
        raise RanksFailed(describe_ranks(failures)) from error


@contextlib.contextmanager
def _quiet_about_a_single_process(alone: bool) -> Iterator[None]:
    """Drop DCP's warning that there is no process group. Filters are of all threads: let them be where there is one."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
