"""Loading a checkpoint runs nothing from it."""

import dataclasses
import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_graph.checkpoint.metadata import read_metadata
from torchtitan_graph.checkpoint.tensors import load_tensors, save_tensors
from torchtitan_graph.errors import UserError
from torchtitan_graph.parallel.agree import RanksFailed
from torchtitan_graph.parallel.chunk import chunk_of
from torchtitan_graph.stop import Stopped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-1"
    save_tensors(folder, {"model.weight": chunk_of(torch.arange(4.0))})
    return folder


def test_an_honest_checkpoint_loads(checkpoint: Path) -> None:
    weight = torch.zeros(4)
    load_tensors(checkpoint, read_metadata(checkpoint), {"model.weight": weight})
    assert weight.tolist() == [0, 1, 2, 3]


def test_the_payload_works_on_the_stock_reader(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(checkpoint).read_metadata()
    assert (tmp_path / "mark").exists()


def test_a_payload_as_index_is_refused_and_not_run(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    with pytest.raises(UserError, match=r"\.metadata can't be read: it names (posix|nt)\.mkdir"):
        read_metadata(checkpoint)
    assert not (tmp_path / "mark").exists()


def test_a_payload_inside_an_honest_index_is_refused_and_not_run(checkpoint: Path, tmp_path: Path) -> None:
    metadata = read_metadata(checkpoint)
    metadata.planner_data = Payload(tmp_path / "mark")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"it names (posix|nt)\.mkdir.*nothing was run"):
        read_metadata(checkpoint)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["system", "os.system", "load", "serialization.load", "hub.load"])
def test_torch_lends_its_dtypes_and_nothing_else(checkpoint: Path, name: str) -> None:
    # A hand-made pickle that asks for the global torch.NAME.
    module, attribute = b"torch", name.encode()
    (checkpoint / ".metadata").write_bytes(
        b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(attribute)]) + attribute + b"\x93."
    )
    with pytest.raises(UserError, match="nothing was run"):
        read_metadata(checkpoint)


class OfEarly311(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, x: Any) -> Any:
        return (getattr, (type(x), x.name)) if isinstance(x, enum.Enum) else NotImplemented


def test_members_of_enumerations_are_read_as_every_python_writes_them(checkpoint: Path) -> None:
    metadata, file = read_metadata(checkpoint), io.BytesIO()
    OfEarly311(file).dump(metadata)
    assert b"getattr" in file.getvalue()
    (checkpoint / ".metadata").write_bytes(file.getvalue())
    assert read_metadata(checkpoint) == metadata


@pytest.mark.parametrize("kind", [torch.Size, Metadata])
def test_attributes_of_anything_else_are_refused(checkpoint: Path, kind: type) -> None:
    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (kind, "__init__")

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(UserError, match="__init__ of .*, not an enumeration; nothing was run"):
        read_metadata(checkpoint)


def test_a_payload_as_tensor_is_refused_and_not_run(checkpoint: Path, tmp_path: Path) -> None:
    metadata = read_metadata(checkpoint)
    (info,) = metadata.storage_data.values()
    torch.save(Payload(tmp_path / "mark"), checkpoint / info.relative_path)
    info.offset, info.length = 0, (checkpoint / info.relative_path).stat().st_size
    with pytest.raises(RanksFailed, match=r"it names (posix|nt) mkdir, .*nothing was run"):
        load_tensors(checkpoint, metadata, {"model.weight": torch.zeros(4)})
    assert not (tmp_path / "mark").exists()


def test_pickled_objects_beside_the_tensors_are_refused(tmp_path: Path) -> None:
    dcp.save({"weight": torch.zeros(2), "object": [1, 2, {"a": object}]}, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(UserError, match="nothing was run|is not a tensor"):
        read_metadata(tmp_path / "step-1")


def test_files_outside_the_checkpoint_are_refused(checkpoint: Path) -> None:
    metadata = read_metadata(checkpoint)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="not in the checkpoint's folder"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps([1, 2])[:-3]])
def test_garbage_is_refused_with_its_path(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata"):
        read_metadata(checkpoint)


def test_boxes_that_do_not_cover_a_tensor_are_refused(checkpoint: Path) -> None:
    metadata = read_metadata(checkpoint)
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([3])
    with pytest.raises(RanksFailed, match="hold 3 numbers for this rank's 4, not each once"):
        load_tensors(checkpoint, metadata, {"model.weight": torch.zeros(4)})


def test_equal_boxes_whose_sizes_add_up_are_refused(tmp_path: Path) -> None:
    """Of two halves one is there twice, the other never: it would stay as it was."""
    folder = tmp_path / "step-1"
    save_tensors(folder, {"model.weight": chunk_of(torch.arange(8.0))})
    metadata = read_metadata(folder)
    (chunk,) = metadata.state_dict_metadata["model.weight"].chunks
    half = dataclasses.replace(chunk, sizes=torch.Size([4]))
    metadata.state_dict_metadata["model.weight"].chunks = [half, half]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RanksFailed, match="hold 8 numbers for this rank's 8, not each once"):
        load_tensors(folder, read_metadata(folder), {"model.weight": torch.zeros(8)})


@pytest.mark.parametrize(("raised", "found"), [(Stopped, Stopped), (OSError, RanksFailed)])
def test_a_save_that_is_stopped_has_not_failed(
    raised: type, found: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP catches whatever comes, a second Ctrl-C too."""

    def write(*args: object) -> None:
        raise raised

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write)
    with pytest.raises(found):
        save_tensors(tmp_path / "step-1", {"model.weight": chunk_of(torch.arange(4.0))})
