"""Every form in which files keep a tensor, on one rank and in uneven parts on four; and files of another model."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pool import mesh, run_on
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import load_weights, save_weights
from torchtitan_graph.models.hf.files import Folder, NewFolder, read_json
from torchtitan_graph.models.hf.places import live_tensors
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.parallel.chunk import box_of

E, F, D = 5, 6, 7
SHAPES = {
    "layers.0.matrix": (F, D),
    "layers.0.scale": (D,),
    "layers.1.w1": (E, D, F),
    "layers.1.w3": (E, D, F),
    "layers.1.b1": (E, F),
    "layers.1.b3": (E, F),
    "layers.1.v1": (E, F, D),
    "layers.1.v3": (E, F, D),
    "layers.1.down": (E, F, D),
    "layers.1.turned": (E, F, D),
}
HF_KEYS: dict[str, str | Stored] = {
    "layers.*.matrix": "model.*.matrix.weight",
    "layers.*.scale": "model.*.scale",
    "layers.*.w1": Stored("model.*.experts.w13", part=(0, 2), interleaved=True),
    "layers.*.w3": Stored("model.*.experts.w13", part=(1, 2), interleaved=True),
    "layers.*.b1": Stored("model.*.experts.b13", part=(0, 2), interleaved=True),
    "layers.*.b3": Stored("model.*.experts.b13", part=(1, 2), interleaved=True),
    "layers.*.v1": Stored("model.*.experts.v13", transpose=True, part=(0, 2)),
    "layers.*.v3": Stored("model.*.experts.v13", transpose=True, part=(1, 2)),
    "layers.*.down": Stored("model.*.experts.#.down.weight"),
    "layers.*.turned": Stored("model.*.experts.#.turned.weight", transpose=True),
    "layers.*.load": "model.*.load",
}


def family(**attributes: object) -> ModuleType:
    module = ModuleType("toy")
    module.__dict__.update({"HF_KEYS": HF_KEYS, "to_hf_config": lambda config: {}, **attributes})
    return module


def in_files() -> dict[str, Tensor]:
    """Make the file tensors, every number in them another one."""
    shapes = {
        "model.0.matrix.weight": (F, D),
        "model.0.scale": (D,),
        "model.1.experts.w13": (E, D, 2 * F),
        "model.1.experts.b13": (E, 2 * F),
        "model.1.experts.v13": (E, D, 2 * F),
        **{f"model.1.experts.{e}.down.weight": (F, D) for e in range(E)},
        **{f"model.1.experts.{e}.turned.weight": (D, F) for e in range(E)},
        "model.1.load": (E,),
    }
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    numbers = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    return {name: x.clone().view(shape) for (name, shape), x in zip(shapes.items(), numbers, strict=True)}


def in_model() -> dict[str, Tensor]:
    """Say by hand what is to arrive of those."""
    x = in_files()
    w13, b13, v13 = (x[f"model.1.experts.{name}"] for name in ("w13", "b13", "v13"))
    return {
        "layers.0.matrix": x["model.0.matrix.weight"],
        "layers.0.scale": x["model.0.scale"],
        "layers.1.w1": w13[..., ::2],
        "layers.1.w3": w13[..., 1::2],
        "layers.1.b1": b13[:, ::2],
        "layers.1.b3": b13[:, 1::2],
        "layers.1.v1": v13[:, :, :F].mT,
        "layers.1.v3": v13[:, :, F:].mT,
        "layers.1.down": torch.stack([x[f"model.1.experts.{e}.down.weight"] for e in range(E)]),
        "layers.1.turned": torch.stack([x[f"model.1.experts.{e}.turned.weight"].T for e in range(E)]),
        "layers.1.load": x["model.1.load"],
    }


class Toy(nn.Module):
    """A module with the parameters of SHAPES and a buffer, of zeros, and what `save_weights` asks of a model."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = None
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for name, value in parameters.items():
            _, layer, leaf = name.split(".")
            self.layers[int(layer)].register_parameter(leaf, nn.Parameter(value))
        self.layers[1].register_buffer("load", torch.zeros(E))
        self.layers[1].register_buffer("counted_anew", torch.zeros(2), persistent=False)


def plain() -> Toy:
    return Toy({name: torch.zeros(shape) for name, shape in SHAPES.items()})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "files"
    path.mkdir()
    save_file(in_files(), path / "model.safetensors")
    yield path


def test_every_form_is_read(folder: Path) -> None:
    model = plain()
    load_weights(model, family(), folder)
    for name, expected in in_model().items():
        assert torch.equal(live_tensors(model)[name], expected), name


def test_every_form_is_written(folder: Path, tmp_path: Path) -> None:
    model = plain()
    load_weights(model, family(), folder)
    save_weights(model, family(), tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == in_files().keys()
    for name, expected in in_files().items():
        assert torch.equal(written[name], expected), name


# Placements of the axes dp_shard and tp, or dp_replicate and dp_shard, that cut rows twice, rows and columns, or once.
LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "rows by both": (_StridedShard(0, split_factor=2), Shard(0)),
    "rows and last dim": (Shard(0), Shard(-1)),
    "rows by one": (Replicate(), Shard(0)),
    "second dim": (Shard(1), Replicate()),
}


# Of layouts on two ranks, and on four.
ON_RANKS = [("rows by both", (1, 2)), ("rows and last dim", (1, 2)), ("second dim", (2, 1))]
ON_RANKS += [pytest.param(layout, (2, 2), marks=pytest.mark.slow) for layout in LAYOUTS]


def sharded(layout: str, degrees: tuple[int, int]) -> Toy:
    axes = mesh(degrees, ("outer", "inner"))
    parameters: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        last = len(shape) - 1
        placements = tuple(
            Shard(last if p.dim == -1 else min(p.dim, last)) if type(p) is Shard else p for p in LAYOUTS[layout]
        )
        coordinate = tuple(axes.get_coordinate() or ())
        _, sizes = box_of(shape, placements, degrees, coordinate)
        local, stride = torch.zeros(sizes), torch.empty(shape, device="meta").stride()
        parameters[name] = DTensor.from_local(
            local, axes, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return Toy(parameters)


def read_and_write(layout: str, degrees: tuple[int, int], folder: Path, out: Path) -> tuple[list[str], int]:
    """Read into a layout and write it again; give the tensors that came wrong, and how many numbers were read."""
    model, numbers = sharded(layout, degrees), 0
    read = Folder.read

    def counted(self: Folder, *args: object) -> Tensor:
        nonlocal numbers
        found = read(self, *args)  # type: ignore[arg-type]
        numbers += found.numel()
        return found

    Folder.read = counted  # type: ignore[method-assign, assignment]
    try:
        load_weights(model, family(), folder)
    finally:
        Folder.read = read  # type: ignore[method-assign]
    wrong = []
    for name, whole in in_model().items():
        tensor = live_tensors(model)[name]
        if isinstance(tensor, DTensor):
            coordinate = tuple(tensor.device_mesh.get_coordinate() or ())
            offsets, sizes = box_of(tuple(tensor.shape), tensor.placements, degrees, coordinate)
            whole = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            tensor = cast(DTensor, tensor).to_local()
        if not torch.equal(tensor, whole):
            wrong.append(name)
    save_weights(model, family(), out)
    return wrong, numbers


@pytest.mark.parametrize(("layout", "degrees"), ON_RANKS)
def test_each_rank_reads_its_part_and_rank_0_writes_the_whole(
    layout: str, degrees: tuple[int, int], folder: Path, tmp_path: Path
) -> None:
    results = run_on(math.prod(degrees), read_and_write, layout, degrees, folder, tmp_path / "again")
    assert [wrong for wrong, _ in results] == [[]] * math.prod(degrees)
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == in_files().keys()
    for name, expected in in_files().items():
        assert torch.equal(written[name], expected), name


@pytest.mark.parametrize("degrees", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_ranks_that_share_a_model_read_it_once_together(degrees: tuple[int, int], folder: Path, tmp_path: Path) -> None:
    num_ranks = math.prod(degrees)
    results = run_on(num_ranks, read_and_write, "rows by both", degrees, folder, tmp_path / "again")
    whole = sum(x.numel() for x in in_files().values())
    # Interleaved halves are read together, once for each; the buffer is everybody's.
    twice = sum(in_files()[name].numel() for name in ("model.1.experts.w13", "model.1.experts.b13"))
    assert sum(numbers for _, numbers in results) == whole + twice + (num_ranks - 1) * E


# --- files of another model -------------------------------------------------------------------------------------------


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    kept = {name: x for name, x in {**in_files(), **changes}.items() if x is not None}
    save_file(kept, folder / "model.safetensors")


def error_of(folder: Path, **attributes: object) -> str:
    model = plain()
    with pytest.raises(UserError) as caught:
        load_weights(model, family(**attributes), folder)
    assert not any(x.any() for x in live_tensors(model).values()), "something was loaded"
    return str(caught.value)


def test_everything_that_is_wrong_is_listed_in_one_error(folder: Path) -> None:
    rewrite(folder, {"model.0.scale": None, "model.1.experts.3.down.weight": torch.zeros(F, D + 1), "z": torch.ones(1)})
    lines = error_of(folder).splitlines()
    no_config = "it has no config.json; the model is that of model.name and model.flavor"
    assert lines[0] == f"{folder} is of another model ({no_config}):"
    assert [line.strip() for line in lines[1:]] == [
        "missing: model.0.scale",
        "unknown: z",
        f"model.1.experts.3.down.weight: shape [{F}, {D + 1}], but here [{F}, {D}]",
    ]


def test_a_missing_expert_is_named(folder: Path) -> None:
    rewrite(folder, {"model.1.experts.4.turned.weight": None})
    assert "missing: model.1.experts.4.turned.weight" in error_of(folder)


def test_known_extras_are_skipped_with_one_notice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, {"vision.0.w": torch.ones(1), "vision.1.w": torch.ones(1)})
    with caplog.at_level("INFO"):
        load_weights(plain(), family(HF_SKIPPED=("vision.*",)), folder)
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder}: 2 tensors are no part of this model, such as vision.0.w"
    ]
    assert "unknown: vision.0.w" in error_of(folder)


def test_a_prefix_of_all_names_is_found(folder: Path) -> None:
    save_file({f"language_model.{name}": x for name, x in in_files().items()}, folder / "model.safetensors")
    model = plain()
    load_weights(model, family(HF_PREFIXES=("", "language_model.")), folder)
    assert torch.equal(live_tensors(model)["layers.1.w3"], in_model()["layers.1.w3"])
    assert "missing: model.0.scale" in error_of(folder)


def test_a_parameter_that_the_family_forgot_is_named(folder: Path) -> None:
    keys = {name: entry for name, entry in HF_KEYS.items() if name != "layers.*.scale"}
    assert "HF_KEYS of toy has no entry for layers.0.scale" in error_of(folder, HF_KEYS=keys)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither model.safetensors nor model.safetensors.index.json"),
        ({"pytorch_model.bin": "x"}, "pytorch_model.bin are pickles, which can run code"),
        ({"model.safetensors": "x"}, "model.safetensors can't be read"),
        ({"model.safetensors.index.json": "{}"}, "missing required field `weight_map`"),
        ({"model.safetensors.index.json": {"a": 1}}, "weight_map[...]: Expected `str`, got `int`"),
        ({"model.safetensors.index.json": "{"}, "is not JSON"),
        ({"model.safetensors.index.json": "[" * 100_000}, "deep"),
        ({"model.safetensors.index.json": {str(i): str(i) for i in range(10_001)}}, "names 10,001 files, more than"),
        ({"model.safetensors.index.json": {"a": "x" * 300}}, "files that are not there: xxx"),
        ({"model.safetensors.index.json": {"a": "b.safetensors"}}, "files that are not there: b.safetensors"),
        ({"model.safetensors.index.json": {"a": "../b.safetensors"}}, "files outside its folder: ../b.safetensors"),
    ],
    ids=lambda value: "",
)
def test_a_folder_that_is_none_is_refused(files: dict[str, str | dict], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps({"weight_map": content})
        (tmp_path / name).write_text(text)
    assert message in error_of(tmp_path)


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    """A million tensors' names, or a length that the file has not."""
    for size in (40 * 2**20, 2**62):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(size.to_bytes(8, "little"))
            file.truncate(48 * 2**20)
        with pytest.raises(UserError, match="its header has .* bytes; legal are 2 to 33,554,432"):
            Folder(tmp_path)


def test_too_many_tensors_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_graph.models.hf.files._MOST_TENSORS", 5)
    with pytest.raises(UserError, match="holds more than 5 tensors"):
        Folder(folder)


@pytest.mark.slow
def test_an_index_of_millions_of_names_is_not_read(tmp_path: Path) -> None:
    names = b",".join(b'"%d": "x"' % i for i in range(2_500_000))
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": {' + names + b"}}")
    with pytest.raises(UserError, match="holds more than 4,000,000 values"):
        Folder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_what_is_no_regular_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is not a regular file, but a FIFO|holds neither model.safetensors nor"):
        read_json(tmp_path / name) if name == "config.json" else Folder(tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_is_written_where_a_link_leads(is_there: bool, tmp_path: Path) -> None:
    disk, link = tmp_path / "disk", tmp_path / "link"
    link.symlink_to(disk)
    if is_there:
        disk.mkdir()
    for content in ({}, {"again": 1}):
        new = NewFolder(link, replace=True)
        new.write_json("config.json", content)
        new.commit()
        assert json.loads((disk / "config.json").read_text()) == content
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link"} and link.is_symlink()


def test_parameters_get_the_dtype_that_is_asked_and_buffers_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()  # an empty folder is no obstacle
    save_weights(plain(), family(), tmp_path / "hf", dtype=torch.bfloat16)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wide = [name for name, x in found.items() if x.dtype != torch.bfloat16]
    assert wide == ["model.1.load"] and found[wide[0]].dtype == torch.float32


def test_a_folder_that_is_there_is_not_written_over(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is there already: name a new folder"):
        save_weights(plain(), family(), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_what_is_not_finished_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_graph.small_files.sync", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_weights(plain(), family(), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf.tmp"]
    monkeypatch.undo()
    save_weights(plain(), family(), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_is_replaced_where_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    save_weights(plain(), family(), folder, replace=True)
    assert not load_file(folder / "model.safetensors")["model.0.scale"].any()
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
