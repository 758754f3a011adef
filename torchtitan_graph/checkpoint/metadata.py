"""Read `.metadata`, the index of a checkpoint in the format of torch.distributed.checkpoint, as data.

The file is a pickle, and a pickle can run code, and fill any memory, when Python's unpickler opens it. Here it is read
by an interpreter of the few instructions that torch's writer uses, with the types of each record's fields. Nothing else
is called, imported or changed. Memory grows with the bytes that are read, and values are never nested deeper than the
index itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.errors import UserError
from torchtitan_graph.small_files import open_small
from torchtitan_graph.torch_private.distributed import METADATA_GETTERS, StorageInfo

METADATA = ".metadata"

# Added to the size of the tensors' files together. An index takes 200 bytes for a part of a tensor, whose own file
# takes more than 1,000 before its first number.
_MOST_BYTES = 8 * 2**20
_MOST_STACKED = 10_000  # values in no container yet: a writer appends them by the thousand
_LONGEST = 2**16  # bytes of a string
_DEEPEST = 20  # marks: an index has six
_BLOCK = 2**20  # bytes per read


class _Name(NamedTuple):
    """A global name in a pickle: a module and an attribute of it."""

    module: str
    name: str


_Text, _Int, _Size, _Nothing = str, int, torch.Size, type(None)
# The fields of each record and their types; unread ones may be of any.
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {"state_dict_metadata": (dict,), "storage_data": (dict,)},
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (_Size,), "chunks": (list,)},
    ChunkStorageMetadata: {"offsets": (_Size,), "sizes": (_Size,)},
    MetadataIndex: {"fqn": (_Text,), "offset": (_Size, _Nothing), "index": (_Int, _Nothing)},
    StorageInfo: {
        **{"relative_path": (_Text,), "offset": (_Int,), "length": (_Int,)},
        **{"transform_descriptors": (list, _Nothing)},
    },
    StorageMeta: {},  # where torch's own writer put the checkpoint: it may have been moved since
    BytesStorageMetadata: {},  # a pickled object; refused by name
}
_RECORDS = {_Name(kind.__module__, kind.__qualname__): kind for kind in (*_FIELDS, TensorProperties)}
_SIZE, _GETATTR = _Name("torch", "Size"), _Name("builtins", "getattr")
# A path in StorageMeta, by its names in versions of Python. None is created.
_PATHS = {_Name(module, f"{of}Path") for module in ("pathlib", "pathlib._local") for of in ("Posix", "Windows")}


def read_metadata(folder: Path) -> Metadata:
    """Return the index of the tensors in `folder`; raise UserError if the file is not one. Nothing of it is run."""
    path = folder / METADATA
    try:
        room = sum(each.stat().st_size for each in folder.iterdir() if each.name != METADATA)
        with open_small(path, _MOST_BYTES + room) as file, uncollected():
            metadata = _Reader(file).read()
            _check(metadata)
    except (OSError, UserError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    except Exception as error:  # invalid input can raise nearly anything, with a value of any size
        raise UserError(f"{path} can't be read: it is not what was written ({type(error).__name__})") from error
    return metadata


def _check(metadata: Any) -> None:
    """Check that an index has tensors with parts inside their shapes, each in a file of the folder."""
    if type(metadata) is not Metadata:
        raise UserError("it holds no index of tensors")
    for name, saved in metadata.state_dict_metadata.items():
        if type(name) is not str or type(saved) is not TensorStorageMetadata:
            raise UserError(f"{_shown(name)} is not a tensor; pickled objects are not loaded")
        for chunk in saved.chunks:
            if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(saved.size):
                raise UserError(f"{_shown(name)} has parts of another shape")
            for begin, size, whole in zip(chunk.offsets, chunk.sizes, saved.size, strict=True):
                if min(begin, size) < 0 or begin + size > whole:
                    raise UserError(
                        f"{_shown(name)} of shape {[*saved.size]!s:.100} has a part of shape {[*chunk.sizes]!s:.100} at"
                        f" {[*chunk.offsets]!s:.100}, which is not inside"
                    )
    for index, info in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo or min(info.offset, info.length) < 0:
            raise UserError("it does not say where its tensors are")
        file = info.relative_path
        if Path(file).name != file or file == ".." or len(file) > 255:
            raise UserError(f"a tensor's file {_shown(file)} is not in the checkpoint's folder")
        if info.transform_descriptors:
            raise UserError("its tensors are stored in a form of their own, compressed perhaps, that is not read here")


def _shown(x: Any) -> str:
    """Return a value for a message: the beginning of a string, the type of anything else, as it may be of any size."""
    if isinstance(x, _Name):
        return f"{_shown(x.module)}.{_shown(x.name)}"
    if isinstance(x, type):
        return x.__name__
    if isinstance(x, str):
        return x[:100] if x.isprintable() else repr(x[:100])
    return f"something of {type(x).__name__}"


class _Reader:
    """The stack and the memo of a pickle's instructions, which Python's pickletools.py describes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: list[Any] = []

    def read(self) -> Any:
        """Return the object in the file."""
        if self._file.read(2) not in (b"\x80\x04", b"\x80\x05"):
            raise UserError("it is not a pickle of protocol 4 or 5, as torch writes them")
        rest, is_last = b"", False
        while not is_last:
            block = self._file.read(_BLOCK)
            content, is_last = rest + block, len(block) < _BLOCK
            # Before the file's end, an instruction that begins before this place is complete.
            begin = self._run(content, len(content) if is_last else len(content) - _LONGEST)
            if begin is None:
                (found,) = self._stack
                return found
            rest = content[begin:]
        raise UserError("it is cut off")

    def _run(self, content: bytes, end: int) -> int | None:
        """Run the instructions that begin before `end`; return where the next begins, or None after the last."""
        memo, i = self._memo, 0
        while i < end:
            op, stack = content[i], self._stack
            i += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op in _INT_SIZES:
                size = _INT_SIZES[op]
                number = int.from_bytes(content[i : i + size], "little", signed=op == 0x4A)
                stack.append(memo[number] if op in (0x68, 0x6A) else number)  # BINGET, LONG_BINGET
                i += size
            elif op in _ACTIONS:
                _ACTIONS[op](self)
            elif op in _TEXT_SIZES:
                begin = i + _TEXT_SIZES[op]
                i = begin + int.from_bytes(content[i:begin], "little")
                if i - begin > _LONGEST // 2:
                    raise UserError("it holds a text that is longer than a tensor's name")
                stack.append(content[begin:i].decode())
            elif op == 0x8A:  # LONG1
                size = content[i]
                stack.append(int.from_bytes(content[i + 1 : i + 1 + size], "little", signed=True))
                i += 1 + size
            elif op == 0x95:  # FRAME: a hint for readers that prefetch
                i += 8
            elif op == 0x2E:  # STOP
                return None
            else:
                raise UserError(f"it has an instruction ({op:#x}) that no index of tensors needs; nothing was run")
            if len(stack) > _MOST_STACKED:
                raise UserError("it holds more values at once than an index of tensors does")
        return i

    def mark(self) -> None:
        if len(self._below) > _DEEPEST:
            raise UserError("it is deeper than an index of tensors is")
        self._below.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def pop(self, size: int) -> list[Any]:
        """Pop the last values."""
        values = self._stack[-size:]
        del self._stack[-size:]
        return values

    def push(self, x: Any) -> None:
        self._stack.append(x)

    def find_global(self) -> None:
        """Push the object of a global name."""
        module, name = self.pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise UserError("it names something without a name; nothing was run")
        found = _Name(module, name)
        if found in _RECORDS:
            self.push(_RECORDS[found])
        elif found in (_SIZE, _GETATTR) or found in METADATA_GETTERS or found in _PATHS:
            self.push(found)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            self.push(getattr(torch, name))
        else:
            raise UserError(f"it names {_shown(found)}, which no index of tensors needs; nothing was run")

    def new(self) -> None:
        """Push an empty record."""
        kind, given = self.pop(2)
        if not isinstance(kind, type) or given != ():
            raise UserError(f"it makes {_shown(kind)}, which is not a record; nothing was run")
        self.push(object.__new__(kind))

    def reduce(self) -> None:
        """Push a tensor's size. Layouts, memory formats and paths are None: they are not read."""
        what, given = self.pop(2)
        if not isinstance(what, _Name):
            raise UserError(f"it calls {_shown(what)}; nothing was run")
        if what == _SIZE:
            self.push(torch.Size(*given))
            return
        if what == _GETATTR:  # Python 3.11.0 to 3.11.3 writes a member of an enumeration so
            kind, name = given
            if not isinstance(kind, _Name) or kind not in METADATA_GETTERS:
                raise UserError(f"it wants {_shown(name)} of {_shown(kind)}, not an enumeration; nothing was run")
        self.push(None)

    def build(self) -> None:
        """Set the fields of a record."""
        (state,), record = self.pop(1), self._stack[-1]
        if type(record) is TensorProperties:
            dtype, *_ = state
            if not isinstance(dtype, torch.dtype):
                raise UserError(f"a dtype is {_shown(dtype)}")
            TensorProperties.__init__(record, dtype)
            return
        for name, types in _FIELDS[type(record)].items():
            value = state.get(name)
            if not isinstance(value, types):
                raise UserError(f"{name} is {_shown(value)}")
            object.__setattr__(record, name, value)

    def set_items(self, pairs: list[Any]) -> None:
        """Add keys and values to a dictionary."""
        into, keys = self._stack[-1], pairs[::2]
        # The hash of anything else may never end.
        if type(into) is not dict or any(type(key) is not str and type(key) is not MetadataIndex for key in keys):
            raise UserError("it has keys that are no names")
        into.update(zip(keys, pairs[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        into = self._stack[-1]
        if type(into) is not list:
            raise UserError(f"it appends to {_shown(into)}")
        into += values


_INT_SIZES = {0x68: 1, 0x6A: 4, 0x4A: 4, 0x4B: 1, 0x4D: 2}  # of BINGET, LONG_BINGET, BININT, BININT1, BININT2
_TEXT_SIZES = {0x8C: 1, 0x58: 4}  # of the lengths of SHORT_BINUNICODE and BINUNICODE
_ACTIONS: dict[int, Callable[[_Reader], None]] = {
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("]"): lambda reader: reader.push([]),
    ord("}"): lambda reader: reader.push({}),
    ord(")"): lambda reader: reader.push(()),
    0x85: lambda reader: reader.push(tuple(reader.pop(1))),
    0x86: lambda reader: reader.push(tuple(reader.pop(2))),
    0x87: lambda reader: reader.push(tuple(reader.pop(3))),
    ord("t"): lambda reader: reader.push(tuple(reader.since_mark())),
    ord("("): _Reader.mark,
    ord("s"): lambda reader: reader.set_items(reader.pop(2)),
    ord("u"): lambda reader: reader.set_items(reader.since_mark()),
    ord("a"): lambda reader: reader.append(reader.pop(1)),
    ord("e"): lambda reader: reader.append(reader.since_mark()),
    ord("R"): _Reader.reduce,
    ord("b"): _Reader.build,
    0x81: _Reader.new,
    0x93: _Reader.find_global,
}
