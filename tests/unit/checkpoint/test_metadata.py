"""A checkpoint's index that somebody forged ends in an error, and takes next to no memory on the way."""

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_graph.checkpoint.metadata import read_metadata
from torchtitan_graph.checkpoint.stored_part import read_stored
from torchtitan_graph.checkpoint.tensors import load_tensors, saved_tensors
from torchtitan_graph.errors import UserError
from torchtitan_graph.torch_private.distributed import StorageInfo


def index_of(num_tensors: int, num_parts: int, **changes: Any) -> Metadata:
    """The index of matrices that ranks hold row by row."""
    tensors, places = {}, {}
    for i in range(num_tensors):
        name, chunks = f"model.layers.{i}.weight", []
        for rank in range(num_parts):
            offset = torch.Size([rank, 0])
            chunks.append(ChunkStorageMetadata(offset, torch.Size([1, 3])))
            places[MetadataIndex(name, offset)] = StorageInfo(f"__{rank}_0.distcp", 2**33 + i, 1000, [])
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([num_parts, 3]), chunks)
    return Metadata(**{"state_dict_metadata": tensors, "storage_data": places, **changes})


def written(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(content)
    return folder


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_index_of_many_parts_is_read(tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, and with more values than a byte counts."""
    metadata = index_of(5, 300, planner_data={"model.weight": ("model", "weight")})
    content = pickle.dumps(metadata, protocol)
    for block in (2**17, len(content) - 2):  # all but the protocol
        monkeypatch.setattr("torchtitan_graph.checkpoint.metadata._BLOCK", block)
        found = read_metadata(written(tmp_path / "step-1", content))
        assert found.state_dict_metadata == metadata.state_dict_metadata
        assert found.storage_data == metadata.storage_data


def text(x: str) -> bytes:
    return b"\x8c" + bytes([len(x)]) + x.encode()


def name(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


START, STOP = b"\x80\x04", b"."
TORCH = "torch.distributed.checkpoint.metadata"
# A tuple of itself twice, 60 times over: 2^60 leaves for whoever goes through it.
DOUBLED = b")\x94" + b"".join(
    b"j" + struct.pack("<I", i) * 1 + b"j" + struct.pack("<I", i) + b"\x86\x94" for i in range(60)
)
EMPTY = name(TORCH, "Metadata") + b")\x81"

BOMBS = {
    "a memo of 4 GiB": START + b"Nr\xff\xff\xff\x7f" + STOP,
    "a memo by text": START + b"Np2000000000\n" + STOP,
    "a frame without end": START + b"\x95" + b"\xff" * 8 + b"N" + STOP,
    "a long number": START + b"\x8b\xff\xff\xff\x7f" + b"\x01" + STOP,
    "a number of digits": START + b"I" + b"1" * 100_000 + b"\n" + STOP,
    "bytes without end": START + b"\x8e" + struct.pack("<Q", 2**40) + STOP,
    "a text without end": START + b"X\xff\xff\xff\x7f" + STOP,
    "deep tuples": START + b")" + b"\x85" * 200_000 + STOP,
    "deep tuples as a key": START + b"})" + b"\x85" * 200_000 + b"Ns" + STOP,
    "deep marks": START + b"(" * 200_000 + STOP,
    "many empty lists": START + b"]" * 200_000 + STOP,
    "a doubled tuple as a key": START + b"}" + DOUBLED + b"Ns" + STOP,
    "a doubled tuple as the index": START + DOUBLED + STOP,
    "a doubled tuple as a name": START + DOUBLED + text("x") + b"\x93" + STOP,
    "a doubled tuple as a size": START + name("torch", "Size") + DOUBLED + b"\x85R" + STOP,
    "a doubled tuple as a dtype": START + name(TORCH, "TensorProperties") + b")\x81" + DOUBLED + b"\x85b" + STOP,
    "a doubled tuple as an enumeration": START + name("builtins", "getattr") + DOUBLED + text("x") + b"\x86R" + STOP,
    "a doubled tuple among the tensors": START + EMPTY + b"}("
    + text("state_dict_metadata") + b"}" + text("x") + DOUBLED + b"s" + text("storage_data") + b"}ub" + STOP,
    "a class that is changed": START + name(TORCH, "Metadata") + b"N}" + text("x") + b"Ns\x86b" + STOP,
    "a function that is changed": START + name("torch.serialization", "_get_layout") + b"}" + text("x") + b"Nsb" + STOP,
    "a key without its fields": START + b"}" + name(TORCH, "MetadataIndex") + b")\x81Ns" + STOP,
    "an old protocol": b"\x80\x02N.",
    "no end": START + b"N",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = written(tmp_path / "step-1", content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"\.metadata can't be read: ") as error:
            read_metadata(folder)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 600
    assert not hasattr(Metadata, "x")


def test_the_stock_unpickler_takes_a_bomb() -> None:
    """Negative control: an index of 9 bytes may take 4 GiB; here of 9 bytes 256 MiB."""
    tracemalloc.start()
    try:
        pickle.loads(START + b"Nr\xff\xff\xff\x00" + STOP)
        assert tracemalloc.get_traced_memory()[1] > 200 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_or_is_larger_than_its_tensors_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(UserError, match="is not a regular file, but a FIFO"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file, but a device"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").unlink()
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="has 1,099,511,627,776 bytes, more than"):
        read_metadata(tmp_path)


def place(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(fields)


def tensor(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(next(iter(metadata.state_dict_metadata.values()))).update(fields)


def chunk(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(next(iter(metadata.state_dict_metadata.values())).chunks[0]).update(fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda metadata: metadata.storage_data.update({"x": 1}), "does not say where"),
        (place(relative_path="x" * 300), "not in the checkpoint's folder"),
        (place(relative_path=".."), "not in the checkpoint's folder"),
        (place(length=-1), "does not say where"),
        (place(length="1"), "length is 1"),
        (place(transform_descriptors=["zstd"]), "in a form of their own"),
        (lambda metadata: metadata.state_dict_metadata.update({"x" * 30_000: 3}), "is not a tensor"),
        (tensor(chunks=[3]), "parts of another shape"),
        (tensor(size=torch.Size([1])), "parts of another shape"),
        (tensor(size=[1, 3]), "size is something of list"),
        (
            chunk(offsets=torch.Size([-1, 0])),
            r"of shape \[2, 3\] has a part of shape \[1, 3\] at \[-1, 0\], which is not",
        ),
        (chunk(offsets=torch.Size([2, 0])), "which is not inside"),
        (chunk(offsets=torch.Size([0, 2**62])), "which is not inside"),
        (chunk(sizes=torch.Size([1, 4])), "which is not inside"),
        (chunk(sizes=torch.Size([-1, 3])), "which is not inside"),
        (tensor(size=torch.Size([2, -3])), "which is not inside"),
    ],
)
def test_an_index_with_wrong_fields_is_refused(tmp_path: Path, change: Callable[[Metadata], None], why: str) -> None:
    metadata = index_of(2, 2)
    change(metadata)
    with pytest.raises(UserError, match=why) as error:
        read_metadata(written(tmp_path / "step-1", pickle.dumps(metadata)))
    assert len(str(error.value)) < 600


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_of_torchs_own_writer_is_read(tmp_path: Path, kind: type) -> None:
    """Its index says where it was written, as a text or a path, and nobody looks there."""
    saved = {"model": {"weight": torch.randn(3, 4), "bias": torch.randn(3)}}
    dcp.save(saved, checkpoint_id=kind(tmp_path / "old"), no_dist=True)
    folder = (tmp_path / "old").rename(tmp_path / "moved")
    metadata = read_metadata(folder)
    assert metadata.storage_meta is None
    found = {name: torch.zeros(tuple(each.size)) for name, each in saved_tensors(metadata).items()}
    load_tensors(folder, metadata, found)
    assert all(torch.equal(found[f"model.{name}"], x) for name, x in saved["model"].items()) and len(found) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_pickled_object_of_torchs_own_writer_is_named(tmp_path: Path) -> None:
    dcp.save({"step": 3, "x": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(UserError, match="step is not a tensor; pickled objects are not loaded"):
        read_metadata(tmp_path / "step-1")


@pytest.mark.slow
def test_random_changes_of_an_index_end_in_an_error_or_an_index(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    content = pickle.dumps(index_of(3, 3))
    for _ in range(1000):
        changed = bytearray(content)
        for place in torch.randint(len(content), (3,), generator=generator).tolist():
            changed[place] = int(torch.randint(256, (), generator=generator))
        try:
            read_metadata(written(tmp_path / "step-1", bytes(changed)))
        except UserError:
            continue


# --- a part of a tensor ---------------------------------------------------------------------------------------------


def saved(x: Any) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def packed_anew(content: bytes, how: int = zipfile.ZIP_STORED, **changes: bytes) -> bytes:
    """Write the archive again with other contents, by their names."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", how) as new:
        for each in old.infolist():
            leaf = each.filename.rpartition("/")[2].replace(".", "_")
            new.writestr(each.filename, changes.get(leaf, old.read(each)))
    return file.getvalue()


def read(content: bytes, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    file = io.BytesIO(b"before" + content + b"after")
    return read_stored(file, len(b"before"), len(content), torch.Size(shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_part_is_read(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(read(saved(x), dtype=dtype), x)
    assert torch.equal(read(saved(torch.nn.Parameter(x, requires_grad=False)), dtype=dtype), x)
    assert torch.equal(read(saved(x.t()), (3, 2), dtype), x.t()), "whatever its strides"


X = saved(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (saved(torch.zeros(3, 2)), "no torch.float32 tensor of shape"),
        (saved(torch.zeros(2, 3, dtype=torch.float64)), "no torch.float32 tensor of shape"),
        (saved(torch.zeros(1).expand(2, 3)), "more than its file has"),
        (packed_anew(saved(torch.zeros(2, 3)), zipfile.ZIP_DEFLATED), "compressed"),
        (saved([torch.zeros(2, 3)]), "is not what torch.save writes of a tensor"),
        (packed_anew(X, data_pkl=b"\x80\x02" + b"N" * 5000 + b"."), "is not what torch.save writes of a tensor"),
        (packed_anew(X, data_pkl=b"\x80\x02}Nr\xff\xff\xff\x7f."), "EMPTY_DICT"),
        (packed_anew(X, data_pkl=b"\x80\x02cbuiltins\nbytearray\n."), "it names builtins bytearray"),
        (X[:-30], "not a zip"),
        (b"", "not a zip"),
    ],
)
def test_a_part_that_is_something_else_is_refused(content: bytes, why: str) -> None:
    with pytest.raises((UserError, zipfile.BadZipFile), match=why):
        read(content)


def test_of_two_archives_in_one_part_the_checked_one_is_read() -> None:
    """torch's own reader may take the other one, which nobody has checked."""
    other = packed_anew(saved(torch.ones(50_000)), zipfile.ZIP_DEFLATED)
    assert torch.equal(read(other + X), torch.arange(6.0).reshape(2, 3))
