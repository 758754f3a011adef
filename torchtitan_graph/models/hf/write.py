"""Write a live model, in any layout, as a folder that transformers loads.

All ranks take part; rank 0 gathers one tensor after the other and writes. It holds one file's tensors at a time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf.assets import Content
from torchtitan_graph.models.hf.files import INDEX, SINGLE, NewFolder, num_bytes
from torchtitan_graph.models.hf.places import Place, live_tensors, places
from torchtitan_graph.models.layers.lora import Adapter, adapters_of, merged
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.ops.packed import unpack
from torchtitan_graph.parallel.agree import on_rank_0
from torchtitan_graph.parallel.chunk import gather_whole

FILE_BYTES = 5 * 10**9
NONE: Mapping[str, Any] = MappingProxyType({})


def save_weights(
    model: nn.Module,
    family: ModuleType,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    files: Mapping[str, Content] = NONE,
    config: Mapping[str, Any] = NONE,
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write config.json and the weights as the folder `path`, atomically; all ranks together. Adapters are merged into
    their weights.

    Args:
        dtype: the parameters' dtype; None leaves it. Buffers keep theirs.
        files: other files of the folder by name, as the tokenizer's; rank 0 reads them.
        config: keys of config.json that are not the architecture.
        replace: replace an existing folder.
        file_bytes: a larger model is split into files of about this size.

    Raises:
        UserError: `path` is not empty and `replace` is false, or the family has no `to_hf_config`.
        OSError or SafetensorError: it can't be written. Raised on all ranks, like the others.
    """
    if not hasattr(family, "to_hf_config"):
        raise UserError(f"{family.__name__} defines no to_hf_config, which a config.json is written by: see llama3.py")
    units, adapters = _units(family, model, dtype), adapters_of(model)
    packs = _pack(units, file_bytes)
    names = [f"model-{i + 1:05}-of-{len(packs):05}.safetensors" for i in range(len(packs))] if packs[1:] else [SINGLE]
    writer = _Writer(path, replace)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    on_rank_0(writer.begin)
    for name, content in zip(names, packs, strict=True):
        for unit in content:
            found = unit.gather(model, adapters)
            if is_writer:
                writer.take(unit, found)
        on_rank_0(functools.partial(writer.write, name))

    def finish() -> None:
        if len(packs) > 1:
            writer.write_index(sum(unit.num_bytes for unit in units))
        writer.folder.write_json("config.json", {**family.to_hf_config(model.config), **config, **_dtype(units)})
        writer.folder.write_files(files)
        if code := getattr(model.config, "code", ""):  # without it the folder's model can't be built
            writer.folder.write_files({file.name: file for file in sorted(Path(code).glob("*.py"))})
        writer.folder.commit()

    on_rank_0(finish)


class _Writer:
    """Rank 0's work between the collectives. An error is stored until it can be raised on all ranks."""

    def __init__(self, path: Path, replace: bool):
        self.path, self.replace = path, replace
        self.tensors: dict[str, Tensor] = {}
        self.index: dict[str, str] = {}
        self.error: Exception | None = None

    def begin(self) -> None:
        self.folder = NewFolder(self.path, self.replace)

    def take(self, unit: _Unit, found: list[Any]) -> None:
        try:
            self.tensors |= unit.file_tensors(found)
        except Exception as error:
            self.error = self.error or error

    def write(self, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.folder.write_tensors(name, self.tensors)
        self.index |= dict.fromkeys(self.tensors, name)
        self.tensors = {}

    def write_index(self, total_size: int) -> None:
        self.folder.write_json(INDEX, {"metadata": {"total_size": total_size}, "weight_map": self.index})


class _Unit:
    """File tensors that are written together: several of ours may share one, and one of ours may fill many."""

    def __init__(self, name: str, dtype: torch.dtype | None):
        self.name = name
        self.parts: list[Place] = []
        self._dtype = dtype

    def dtype_of(self, place: Place) -> torch.dtype:
        return self._dtype if self._dtype is not None and isinstance(place.tensor, nn.Parameter) else place.tensor.dtype

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(tuple(place.tensor.shape), self.dtype_of(place)) for place in self.parts)

    def gather(self, model: nn.Module, adapters: Mapping[str, Adapter]) -> list[Tensor | None]:
        """Gather our tensors, all ranks together: rank 0 gets all of them, whole, with their adapters' changes."""
        return [self._gathered(place, model, adapters.get(place.ours)) for place in self.parts]

    def _gathered(self, place: Place, model: nn.Module, adapter: Adapter | None) -> Tensor | None:
        if adapter is None:
            return gather_whole(place.tensor, self.dtype_of(place))
        every = (model.get_parameter(name).detach() for name in (place.ours, adapter.A, adapter.B))
        weight, A, B = (gather_whole(x, x.dtype) for x in every)
        if weight is None or A is None or B is None:
            return None
        if adapter.packing:
            weight = unpack(weight, adapter.packing, torch.float32)
        return merged(weight, A, B, adapter).to(self.dtype_of(place))

    def file_tensors(self, found: list[Tensor]) -> dict[str, Tensor]:
        """Return the file tensors made of our whole tensors."""
        columns = [
            x.cpu().transpose(-1, -2) if place.stored.transpose else x.cpu()
            for place, x in zip(self.parts, found, strict=True)
        ]
        stored = self.parts[0].stored
        if len(columns) == 1:
            whole = columns[0]
        elif stored.interleaved:
            whole = torch.stack(columns, dim=-1).flatten(-2)
        else:
            whole = torch.cat(columns, dim=-1)
        names = self.parts[0].file_names()
        if "#" in stored.name:
            copies = (expert.clone(memory_format=torch.contiguous_format) for expert in whole)
            return dict(zip(names, copies, strict=True))
        return {names[0]: whole.contiguous()}


class _ConvertedUnit(_Unit):
    """Tensors of a model that its own conversion turns into those of files, together."""

    def __init__(self, conversion: Any, tensors: dict[str, Tensor], dtype: torch.dtype | None):
        super().__init__(next(iter(tensors)), dtype)
        self.parts = [Place(name, x, Stored(name)) for name, x in tensors.items()]
        self._conversion = conversion

    def file_tensors(self, found: list[Tensor]) -> dict[str, Tensor]:
        whole = {place.ours: x.cpu() for place, x in zip(self.parts, found, strict=True)}
        copies = self._conversion.to_files(whole)
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in copies.items()}


def _units(family: ModuleType, model: nn.Module, dtype: torch.dtype | None) -> list[_Unit]:
    if (conversion := getattr(model, "conversion", None)) is not None:
        tensors = live_tensors(model)
        groups = conversion.written_together(tensors)
        return [_ConvertedUnit(conversion, {name: tensors[name] for name in group}, dtype) for group in groups]
    units: dict[str, _Unit] = {}
    for place in places(family, model):
        units.setdefault(place.stored.name, _Unit(place.stored.name, dtype)).parts.append(place)
    for unit in units.values():
        unit.parts.sort(key=lambda place: place.stored.part or (0, 1))
        have = [place.stored.part or (0, 1) for place in unit.parts]
        assert have == [(i, len(have)) for i in range(len(have))], f"{unit.name} is made of the parts {have}"
    return list(units.values())


def _pack(units: list[_Unit], file_bytes: int) -> list[list[_Unit]]:
    """Return the units by file, each with `file_bytes` at most, or one unit."""
    files: list[list[_Unit]] = [[]]
    room = file_bytes
    for unit in units:
        if files[-1] and unit.num_bytes > room:
            files.append([])
            room = file_bytes
        files[-1].append(unit)
        room -= unit.num_bytes
    return files


def _dtype(units: list[_Unit]) -> dict[str, str]:
    """Return the keys of config.json that say the dtype of most weights, by its new name and its old one."""
    num_elements: Counter[str] = Counter()
    for unit in units:
        for place in unit.parts:
            num_elements[str(unit.dtype_of(place)).removeprefix("torch.")] += place.tensor.numel()
    ((most, _),) = num_elements.most_common(1)
    return {"dtype": most, "torch_dtype": most}
