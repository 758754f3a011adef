"""Folders of safetensors files: read any slice of any tensor, and nothing else; write folders atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_graph import small_files
from torchtitan_graph.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# A tensor takes 100 bytes of its file's header. The largest releases have 200,000 tensors, in hundreds of files.
_MOST_BYTES_OF_HEADER, _MOST_TENSORS, _MOST_FILES = 32 * 2**20, 1_000_000, 10_000

Ranges = Sequence[tuple[int, int]]  # (begin, end) in each dim


class Folder:
    """The tensors of a folder, by name. The files are memory-mapped: a slice is copied from disk when it is read."""

    def __init__(self, path: Path, single: str = SINGLE):
        """Open the folder; `single` is the name of its file where it has one.

        Raises:
            UserError: it has no safetensors files, lacks some that its index names, or they can't be read.
        """
        self.path = path
        self._file_of: dict[str, Any] = {}
        for name in _file_names(path, single):
            file = _open(path / name)
            self._file_of |= dict.fromkeys(file.keys(), file)
            if len(self._file_of) > _MOST_TENSORS:
                raise UserError(f"{path} holds more than {_MOST_TENSORS:,} tensors")

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype by the format's name: F32, BF16, F8_E4M3, U8, ..."""
        return self._file_of[name].get_slice(name).get_dtype()

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """Return a copy of a slice of a tensor, in its stored dtype."""
        if not ranges:
            return self._file_of[name].get_tensor(name)
        return self._file_of[name].get_slice(name)[tuple(slice(*r) for r in ranges)]


def read_json(file: Path, whose: str = "a Hugging Face model") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: there is no such file, or it is no JSON object.
    """
    try:
        return small_files.read_json(file, dict[str, Any])
    except FileNotFoundError:
        raise UserError(f"{file.parent} holds no {file.name}: it is no folder of {whose}") from None
    except OSError as error:
        raise UserError(f"{file} can't be read: {error}") from error


class _Index(TypedDict):
    weight_map: dict[str, str]


def _file_names(path: Path, single: str) -> list[str]:
    if os.path.isfile(path / single):  # false for a name that is too long, too
        return [single]
    if not os.path.isfile(path / INDEX):
        if not os.path.isdir(path):
            raise UserError(f"{path} holds neither {single} nor {INDEX}: there is no such folder")
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        why = f"; {', '.join(pickles[:3])} are pickles, which can run code: convert them first" if pickles else ""
        raise UserError(f"{path} holds neither {single} nor {INDEX}{why}")
    names = small_files.read_json(path / INDEX, _Index)["weight_map"]
    files = sorted(set(names.values()))
    if len(files) > _MOST_FILES:
        raise UserError(f"{path / INDEX} names {len(files):,} files, more than the {_MOST_FILES:,} that are opened")
    if elsewhere := [name[:100] for name in files if Path(name).name != name]:
        raise UserError(f"{path / INDEX} names files outside its folder: {', '.join(elsewhere[:5])}")
    if missing := [name[:100] for name in files if not os.path.isfile(path / name)]:
        raise UserError(f"{path / INDEX} names files that are not there: {', '.join(missing[:5])}")
    return files


def _open(file: Path) -> Any:
    try:
        with small_files.open_small(file, small_files.ANY_SIZE) as begin:
            size = int.from_bytes(begin.read(8), "little")
        if not 2 <= size <= _MOST_BYTES_OF_HEADER:
            raise UserError(f"its header has {size:,} bytes; legal are 2 to {_MOST_BYTES_OF_HEADER:,}")
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError, UserError) as error:
        raise UserError(f"{file} can't be read: {error}") from error


class NewFolder:
    """A folder that is written as `NAME.tmp` next to its destination, and renamed once it is whole and on disk."""

    def __init__(self, path: Path, replace: bool = False):
        """Create the empty `NAME.tmp`; leftovers of killed saves are deleted.

        Raises:
            UserError: `path` is a file, or not empty and `replace` is false.
        """
        path = path.resolve()  # a link stays, and its target is created
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not replace):
            raise UserError(f"{path} is there already: name a new folder")
        self.path = path
        self.tmp, self.old = (path.with_name(path.name + suffix) for suffix in (".tmp", ".deleting"))
        for leftover in (self.tmp, self.old):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.tmp.mkdir(parents=True)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        (self.tmp / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self.tmp / name, metadata={"format": "pt"})  # transformers refuses a file without it

    def write_files(self, files: Mapping[str, bytes | Path]) -> None:
        """Write files by their names, which may be in a folder: these bytes, or a copy of another file."""
        for name, content in files.items():
            (self.tmp / name).parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, self.tmp / name)
            else:
                (self.tmp / name).write_bytes(content)

    def commit(self) -> None:
        """Flush everything to disk, and rename the folder to its final name."""
        for file in (*self.tmp.rglob("*"), self.tmp):
            small_files.sync(file)
        if self.path.exists():
            os.rename(self.path, self.old)
        os.rename(self.tmp, self.path)
        small_files.sync(self.path.parent)
        if self.old.exists():
            shutil.rmtree(self.old)


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
