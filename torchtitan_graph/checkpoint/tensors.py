"""Tensors to and from a folder in the format of torch.distributed.checkpoint (DCP).

DCP is given tensors and nothing else, each as the box of it that a rank holds, so that what was saved in one layout
can be read in any other. Reading runs no code from the folder: its `.metadata` is a pickle, which is opened by an
unpickler that knows a fixed list of records, and tensors are read with `weights_only=True`.
"""

import io
import math
import pickle
import warnings
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

from torchtitan_graph.graph.torch_private import METADATA_GLOBALS, StorageInfo
from torchtitan_graph.parallel.chunk import Chunk, chunk_of


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors, DTensors or plain, to `folder`; all ranks together, with the same names. Returns once on disk."""
    chunks = {name: chunk_of(tensor) for name, tensor in tensors.items()}
    with _quiet_about_a_single_process():
        dcp.save(chunks, storage_writer=_Writer(folder), planner=_SavePlanner(), no_dist=not dist.is_initialized())


def load_tensors(folder: Path, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors in place from `folder`, whatever the layout they were saved in; all ranks together."""
    chunks = {name: chunk_of(tensor) for name, tensor in tensors.items()}
    reader = _Reader(folder, metadata)
    with _quiet_about_a_single_process():
        dcp.load(chunks, storage_reader=reader, planner=_LoadPlanner(), no_dist=not dist.is_initialized())


def read_metadata(folder: Path) -> Metadata:
    """Read which tensors `folder` holds, and where.

    Raises:
        ValueError: the file names anything but records of tensors; nothing of it has been run.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # garbage makes an unpickler raise nearly anything
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds no index of tensors")
    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(f"{path}: {name} is not a tensor; pickled objects are not loaded")
    for info in metadata.storage_data.values():
        if not isinstance(info, StorageInfo) or Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{path}: a tensor's file {info!r} is not in the checkpoint's folder")
    return metadata


def saved_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return dtype, shape and boxes of each tensor, by name."""
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs; nothing was run")


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


def _read_items(name: str, chunk: Chunk, saved: TensorStorageMetadata) -> list[dcp.ReadItem]:
    if not chunk.local.numel():
        return []
    items = create_read_items_for_chunk_list(name, saved, [_box(chunk)])
    # DCP leaves what no saved box covers as it was, without a word.
    num_read = sum(math.prod(item.lengths) for item in items)
    if num_read != chunk.local.numel():
        raise ValueError(f"{name}: the checkpoint holds {num_read} of this rank's {chunk.local.numel()} numbers")
    return items


class _quiet_about_a_single_process(warnings.catch_warnings):
    """Drop DCP's warning that there is no process group: a run of one process has none."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
