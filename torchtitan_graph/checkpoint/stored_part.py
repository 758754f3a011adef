"""Read one stored tensor from a checkpoint's file, as `torch.save` writes a plain tensor.

It is read without `torch.load`: that has a zip reader of its own, which may find another archive in the same bytes than
the one that was checked, and decompresses entries. Nothing of the file is run.
"""

import io
import math
import os
import pickle
import pickletools
import sys
import zipfile
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from torchtitan_graph.errors import UserError

_MOST_BYTES = 4096  # of the pickle that describes a tensor; it takes 200
_BLOCK = 2**24
_INSTRUCTIONS = {
    *("PROTO", "GLOBAL", "BINPUT", "BINGET", "MARK", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NONE"),
    *("NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPERSID", "REDUCE", "STOP"),
}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _Slice(io.RawIOBase):
    """A part of a file, as a file. torch's own counts from the wrong end."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._begin + self._at)
        size: int = self._file.readinto(room)  # type: ignore[attr-defined]
        self._at += size
        return size


class _Described(NamedTuple):
    """A tensor in `torch.save`'s format: the arguments of `torch._utils._rebuild_tensor_v2` and `_v3`."""

    storage: Any
    offset: Any
    size: Any
    stride: Any
    requires_grad: Any
    hooks: Any
    dtype: Any = None
    metadata: Any = None


def _data_of(data: Any, *_: Any) -> Any:
    return data


class _Unpickler(pickle.Unpickler):
    """Builds a description of a tensor from names in a fixed list."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _Described,
            ("torch._utils", "_rebuild_tensor_v3"): _Described,
            ("torch._utils", "_rebuild_parameter"): _data_of,
            ("collections", "OrderedDict"): dict,
            ("torch.storage", "UntypedStorage"): None,  # the tensor's dtype is another argument
            **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise UserError(f"it names {module} {name:.100}, which no tensor needs; nothing was run")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_stored(whole: BinaryIO, begin: int, length: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `length` bytes of a file, from `begin` on.

    Raises UserError if they are not one plain tensor of this shape and dtype.
    """
    with zipfile.ZipFile(cast(IO[bytes], _Slice(whole, begin, length))) as archive:
        entries = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
            raise UserError("its numbers are compressed, which torch.save does not do")
        if sum(each.file_size for each in entries) > length:
            raise UserError("it says that it holds more than its file has")
        pickles = [each for each in entries if each.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _MOST_BYTES:
            raise UserError("it is not what torch.save writes of a tensor")
        found, key = _description(archive.read(pickles[0]))
        if found.dtype != dtype or found.size != tuple(shape):
            raise UserError(f"it is no {dtype} tensor of shape {list(shape)}")
        folder = pickles[0].filename.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != sys.byteorder.encode():
            raise UserError("its numbers are in another order of bytes than this machine's")
        entry = archive.getinfo(f"{folder}data/{key}")
        # All that the strides reach, and at least as many numbers as it has: an expanded one could be of any size.
        reach = found.offset + sum((n - 1) * step for n, step in zip(found.size, found.stride, strict=True)) + 1
        if max(reach if math.prod(shape) else 0, math.prod(shape)) * dtype.itemsize > entry.file_size:
            raise UserError("it says that it holds more than its file has")
        content = torch.empty(entry.file_size - entry.file_size % dtype.itemsize, dtype=torch.uint8)
        _fill(content, archive, entry)
    return content.view(dtype).as_strided(found.size, found.stride, found.offset)


def _fill(content: Tensor, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    buffer, at = memoryview(cast(Any, content.numpy())), 0
    with archive.open(entry) as file:
        while block := file.read(min(_BLOCK, len(buffer) - at)):
            buffer[at : at + len(block)] = block
            at += len(block)
    if at < len(buffer):
        raise UserError("it ends early")


def _description(content: bytes) -> tuple[_Described, str]:
    """Return a pickle's description of a tensor, checked, and the archive's name of its data."""
    for instruction, _, _ in pickletools.genops(content):
        if instruction.name not in _INSTRUCTIONS:
            raise UserError(f"it is not what torch.save writes of a tensor ({instruction.name}); nothing was run")
    found = _Unpickler(io.BytesIO(content)).load()
    match found:
        case _Described(("storage", kind, str(key), "cpu", int()), int(), tuple(), tuple()):
            numbers = [found.offset, *found.size, *found.stride]
            if len(found.size) == len(found.stride) and all(type(x) is int and 0 <= x < 2**48 for x in numbers):
                return (found if found.dtype is not None else found._replace(dtype=kind)), key
    raise UserError("it is not what torch.save writes of a tensor")
