"""The mapping from a model's tensors to tensors of Hugging Face's files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf.files import Ranges
from torchtitan_graph.models.layers.lora import adapter_parameters, packed_weights
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.ops.packed import wide_shape
from torchtitan_graph.parallel.chunk import chunk_of
from torchtitan_graph.torch_private.distributed import dtensor_spec, make_dtensor


class Files(Protocol):
    """A folder's tensors."""

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, ranges: Ranges) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of ours and its place in the files; `stored.name` has its layer's number, and "#" where experts are
    separate."""

    ours: str
    tensor: Tensor
    stored: Stored

    def file_names(self) -> list[str]:
        """Return the names of the file tensors that contain it, one for each expert if they are separate."""
        if "#" not in self.stored.name:
            return [self.stored.name]
        return [self.stored.name.replace("#", str(expert)) for expert in range(self.tensor.shape[0])]

    def under(self, prefix: str) -> Place:
        """Return the place where the files' names have a prefix."""
        return dataclasses.replace(self, stored=dataclasses.replace(self.stored, name=prefix + self.stored.name))

    def expected(self, files: object) -> dict[str, tuple[int, ...]]:
        """Return the shapes that its file tensors must have."""
        return dict.fromkeys(self.file_names(), self.stored.file_shape(tuple(self.tensor.shape)))

    def pieces(self, folder: Files) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of this rank's shard, live, and what the files hold of them: an expert at a time, or the whole
        shard where there are none."""
        local, offsets, shape = chunk_of(self.tensor)
        if local.numel() == 0:
            return
        ranges = [(begin, begin + size) for begin, size in zip(offsets, local.shape, strict=True)]
        if "#" in self.stored.name:
            for i, target in enumerate(local):
                one = dataclasses.replace(self.stored, name=self.stored.name.replace("#", str(offsets[0] + i)))
                yield target, _read(folder, one, shape[1:], ranges[1:])
        elif local.dim() == 3:
            for i in range(local.shape[0]):
                expert = offsets[0] + i
                yield local[i : i + 1], _read(folder, self.stored, shape, [(expert, expert + 1), *ranges[1:]])
        else:
            yield local, _read(folder, self.stored, shape, ranges)


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that files store: every parameter but adapters', tied ones once, and every
    persistent buffer. A packed weight is a stand-in on meta, as files have it."""
    kept, of_adapters = model.state_dict().keys(), adapter_parameters(model)  # without buffers that are computed again
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if name not in of_adapters}
    parameters |= {name: unpacked(parameters[name], how, "meta") for name, how in packed_weights(model).items()}
    return {**parameters, **{name: b for name, b in model.named_buffers() if name in kept}}


def unpacked(packed: Tensor, packing: str, device: torch.device | str) -> nn.Parameter:
    """Return new memory for the numbers of a packed weight, cut as it is, in fp32."""
    shape, local = wide_shape(packed.shape, packing), chunk_of(packed).local
    new = torch.empty(wide_shape(local.shape, packing), device=device)
    if isinstance(packed, DTensor):
        new = make_dtensor(new, dtensor_spec(packed.device_mesh, packed.placements, shape, new.dtype))
    return nn.Parameter(new, requires_grad=False)


def places(family: ModuleType, model: nn.Module) -> list[Place]:
    """Return the place of every parameter, in the model's order, and of the buffers in `HF_KEYS`.

    Raises:
        UserError: the family's `HF_KEYS` lacks parameters.
    """
    found, lacking = [], []
    parameters = dict(model.named_parameters())
    for name, tensor in live_tensors(model).items():
        stored = stored_as(family.HF_KEYS, name)
        if stored is not None:
            found.append(Place(name, tensor, stored))
        elif name in parameters:
            lacking.append(name)
    if lacking:
        raise UserError(f"HF_KEYS of {family.__name__} has no entry for {', '.join(lacking[:5])}")
    return found


def stored_as(keys: Mapping[str, str | Stored], name: str) -> Stored | None:
    """Return the entry of one of our names in a family's `HF_KEYS`, with its layer's number filled in."""
    entry = keys.get(re.sub(r"\.\d+(?=\.)", ".*", name))
    if entry is None:
        return None
    stored = entry if isinstance(entry, Stored) else Stored(entry)
    layer = re.search(r"\.(\d+)(?=\.)", name)
    return dataclasses.replace(stored, name=stored.name.replace("*", layer[1])) if layer else stored


def tied_places(family: ModuleType, model: nn.Module) -> list[Place]:
    """Return the places of the second names of tied parameters, which some releases also store."""
    once = dict(model.named_parameters())
    twice = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in once}
    stored = {name: stored_as(family.HF_KEYS, name) for name in twice}
    return [Place(name, p, stored[name]) for name, p in twice.items() if stored[name] is not None]  # type: ignore[arg-type]


def _read(folder: Files, stored: Stored, shape: tuple[int, ...], ranges: Ranges) -> Tensor:
    """Return a slice of one of our tensors, of full size `shape`, from the file tensor that contains it."""
    box, sizes = list(ranges), list(shape)
    if stored.transpose:
        box[-2:], sizes[-2:] = reversed(box[-2:]), reversed(sizes[-2:])
    step, first = 1, 0
    if stored.part is not None:
        i, n = stored.part
        begin, end = box[-1]
        if stored.interleaved:
            box[-1], step, first = (begin * n, end * n), n, i
        else:
            box[-1] = (begin + i * sizes[-1], end + i * sizes[-1])
    found = folder.read(stored.name, box)
    found = found[..., first::step] if step > 1 else found
    return found.transpose(-1, -2) if stored.transpose else found
