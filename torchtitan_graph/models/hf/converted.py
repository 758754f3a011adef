"""Tensors of a model that its own conversion makes of those in Hugging Face's files, renamed, stacked or fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchtitan_graph.models.hf.places import Files, live_tensors
from torchtitan_graph.parallel.chunk import chunk_of

# Of a model that is one part of several, such as a language model next to a vision tower: before its names, in place of
# what a name then begins with.
PREFIXES = (("", ""), ("language_model.", ""), ("model.language_model.", "model."))


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor of ours and the group of files' tensors that it is made of; `real` are their names in the files."""

    ours: str
    tensor: Tensor
    group: Any
    real: dict[str, str]

    def file_names(self) -> list[str]:
        return [self.real[name] for name in self.group.names]

    def expected(self, files: Files) -> dict[str, tuple[int, ...]]:
        """Return the shapes that its file tensors have: `problem` compares what they become."""
        return {name: files.shape(name) for name in self.file_names()}

    def problem(self) -> str | None:
        """Return in words that what the files make has another shape."""
        found, wanted = self.group.outputs[self.ours], tuple(self.tensor.shape)
        return (
            None if found == wanted else f"{self.ours}: files make the shape {list(found)!s:.100}, here {list(wanted)}"
        )

    def pieces(self, files: Files) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of this rank's shard and their values: an expert at a time where each is a tensor of the files,
        so that no more is read than the rank has."""
        local, offsets, _ = chunk_of(self.tensor)
        if local.numel() == 0:
            return
        ranges = [(begin, begin + size) for begin, size in zip(offsets, local.shape, strict=True)]
        if self.group.convert is None:
            yield local, files.read(self.file_names()[0], ranges)
        elif self.group.by_row:
            for i in range(*ranges[0]):
                made = self._made(files, i)
                yield local[i - ranges[0][0]].unsqueeze(0), _part(made, [(0, 1), *ranges[1:]])
        else:
            yield local, _part(self._made(files, None), ranges)

    def _made(self, files: Files, row: int | None) -> Tensor:
        chosen = slice(None) if row is None else slice(row, row + 1)
        tensors = {
            pattern: [_whole(files, self.real[name]) for name in names[chosen]]
            for pattern, names in self.group.files.items()
        }
        return self.group.convert(tensors)[self.ours]  # type: ignore[no-any-return]


def _whole(files: Files, name: str) -> Tensor:
    return files.read(name, [(0, size) for size in files.shape(name)])


def _part(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return x[tuple(slice(*each) for each in ranges)]


def converted_places(model: nn.Module, files: Files) -> tuple[list[Converted], list[Converted], set[str]]:
    """Return the places of a model's tensors in a folder; of the second names of tied ones; and the names of the
    folder's tensors that are known to be no part of the model."""
    conversion: Any = model.conversion
    every, shapes = conversion.names, {name: files.shape(name) for name in files.names()}
    found = []
    for prefix, instead in PREFIXES:
        real = {instead + name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
        # The output layer stands alongside the language model.
        real |= {name: name for name in shapes if prefix and name.startswith("lm_head.")}
        groups = conversion.groups({name: shapes[old] for name, old in real.items()})
        found.append((sum(name in every for group in groups for name in group.outputs), groups, real, prefix))
        if not prefix and all(name in {x for group in groups for x in group.outputs} for name in every):
            break
    _, groups, real, prefix = max(found, key=lambda each: each[0])
    of_output = {name: group for group in groups for name in group.outputs}
    once = live_tensors(model)
    twice = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n not in once}
    for name, x in once.items():
        other = next((n for n, p in twice.items() if p is x and n in of_output), None)
        if name not in of_output and other is not None:  # the files have a tied one by its second name
            group = of_output.pop(other)
            of_output[name] = group._replace(outputs={name: group.outputs[other]}) if group.convert is None else group
    wanted = [Converted(name, x, of_output[name], real) for name, x in once.items() if name in of_output]
    tied = [Converted(name, x, of_output[name], real) for name, x in twice.items() if name in of_output]
    skipped = {name for name in shapes if conversion.skips(name)}
    if prefix:
        skipped |= shapes.keys() - set(real.values())
    return wanted, tied, skipped
