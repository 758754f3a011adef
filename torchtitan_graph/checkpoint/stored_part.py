"""A part of a tensor as a checkpoint's file has it: what `torch.save` wrote, read by `torch.load` within bounds.

`weights_only=True` runs no code of the file, but it unpacks what is compressed, and works through whatever a pickle
asks of it. A plain tensor asks for little, and is not compressed: anything else is refused before it is loaded.
"""

import io
import math
import os
import pickletools
import zipfile
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from torchtitan_graph.errors import UserError

_MOST_BYTES = 4096  # of the pickle that says what a tensor is; it takes 200
_INSTRUCTIONS = {
    *("PROTO", "GLOBAL", "BINPUT", "BINGET", "MARK", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NONE"),
    *("NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPERSID", "REDUCE", "STOP"),
}
_MODULES = ("torch", "torch._utils", "torch.storage", "collections")


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


def read_stored(whole: BinaryIO, begin: int, length: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Read the tensor that `length` bytes of a file hold, from `begin` on.

    Raises:
        UserError: they hold something else than one plain tensor of this shape and dtype.
    """
    file = _Slice(whole, begin, length)
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        entries = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
            raise UserError("its numbers are compressed, which torch.save does not do")
        if sum(each.file_size for each in entries) > length:
            raise UserError("it says that it holds more than its file has")
        pickles = [each for each in entries if each.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _MOST_BYTES:
            raise UserError("it is not what torch.save writes of a tensor")
        _check_pickle(archive.read(pickles[0]))
    file.seek(0)
    tensor = torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
    is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.shape != shape or tensor.dtype != dtype:
        raise UserError(f"it is no {dtype} tensor of shape {list(shape)}")
    if not math.prod(shape) * dtype.itemsize <= tensor.untyped_storage().nbytes() <= length:
        raise UserError("it says that it holds more than its file has")
    return tensor


def _check_pickle(content: bytes) -> None:
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name not in _INSTRUCTIONS:
            raise UserError(f"it is not what torch.save writes of a tensor ({instruction.name}); nothing was run")
        if instruction.name == "GLOBAL" and str(argument).split(" ")[0] not in _MODULES:
            raise UserError(f"it names {argument!s:.100}, which no tensor needs; nothing was run")
