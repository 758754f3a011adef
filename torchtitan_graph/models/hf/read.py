"""Load Hugging Face's files into a live model in any layout: each rank reads its own shard of each tensor.

At most one expert, or one matrix, of one tensor of the files is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf.architecture import config_of, differences, is_of, with_mtp_layers
from torchtitan_graph.models.hf.files import Folder, Ranges, read_json
from torchtitan_graph.models.hf.places import Place, places, tied_places
from torchtitan_graph.models.hf.quantized import DequantizedFolder
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.parallel.chunk import chunk_of

METHODS = ("fp8", "mxfp4")  # config.json's names of the methods that DequantizedFolder reads
NUMBERS = ("F64", "F32", "F16", "BF16")  # dtypes of files that need no scales


def check_weights(model: nn.Module, family: ModuleType, path: Path, *, quantized: bool = False) -> None:
    """Check that the weights in the folder `path` fit a model, which may be on meta: before any memory is allocated.

    Raises:
        UserError: as `load_weights`.
    """
    _match(model, family, path, quantized)


@torch.no_grad()
def load_weights(model: nn.Module, family: ModuleType, path: Path, *, quantized: bool = False) -> None:
    """Copy the weights in the folder `path` into a materialized model, converting them to its dtypes.

    Raises:
        UserError: the files can't be read, are quantized although `quantized` is false, or are of another model: then
            the message lists every missing, unknown and differently shaped tensor. Nothing has been copied.
    """
    folder, prefix, wanted, tied = _match(model, family, path, quantized)
    _tell_skipped(prefix, [*wanted, *tied], folder, _skippable(family, model))
    _check_config(model, family, path)
    for place in wanted:
        _copy(place, prefix, folder)
    for place in tied:
        _check_tied(place, prefix, folder)


def _match(
    model: nn.Module, family: ModuleType, path: Path, quantized: bool
) -> tuple[DequantizedFolder, str, list[Place], list[Place]]:
    """Open a folder; return it with the prefix of its names, the model's places in it, and those of tied parameters."""
    folder = DequantizedFolder(Folder(path))
    _check_quantization(path)
    if folder.quantized() and not quantized:
        raise UserError(
            f"{path} is quantized ({len(folder.quantized())} tensors, such as {min(folder.quantized())}): set "
            "checkpoint.initial_load_in_hf_quantized = true to turn it back into numbers (in Python: quantized=True)"
        )
    wanted, tied = places(family, model), tied_places(family, model)
    prefix = _prefix(family, wanted, folder)
    tied = [place for place in tied if prefix + place.stored.name in folder.names()]
    _check(prefix, [*wanted, *tied], folder, _skippable(family, model))
    return folder, prefix, wanted, tied


def _prefix(family: ModuleType, wanted: Iterable[Place], folder: DequantizedFolder) -> str:
    """Return the first of the family's prefixes with any tensor of the model."""
    there = folder.names()
    names = [name for place in wanted for name in place.file_names()]
    prefixes: tuple[str, ...] = getattr(family, "HF_PREFIXES", ("",))
    return next((prefix for prefix in prefixes if any(prefix + name in there for name in names)), prefixes[0])


def _check(prefix: str, wanted: list[Place], folder: DequantizedFolder, skippable: list[str]) -> None:
    """Check the files against the tensors of all ranks together: those of a pipeline have different parts of the
    model."""
    mine = {
        prefix + name: place.stored.file_shape(tuple(place.tensor.shape))
        for place in wanted
        for name in place.file_names()
    }
    by_rank = [mine]
    if dist.is_initialized():
        by_rank = by_rank * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
    expected = {name: shape for of_rank in by_rank for name, shape in of_rank.items()}
    there = folder.names()
    problems = [f"missing: {name}" for name in expected if name not in there]
    unknown = there - expected.keys()
    problems += [f"unknown: {name}" for name in sorted(unknown - _skipped(unknown, skippable))]
    for name, shape in expected.items():
        if name in there and folder.shape(name) != shape:
            problems.append(f"{name}: shape {list(folder.shape(name))!s:.100}, but here {list(shape)}")
        elif name in there and folder.dtype(name) not in NUMBERS:
            problems.append(f"{name}: {folder.dtype(name)}, quantized in a way that is unknown here")
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise UserError(f"{folder.path} is of another model:\n  " + "\n  ".join(problems[:20]) + more)


def _skippable(family: ModuleType, model: nn.Module) -> list[str]:
    """Return the patterns of names that are known to be no part of a model, such as those of a vision tower."""
    num_layers = str(getattr(getattr(model, "config", None), "num_layers", ""))
    return [pattern.replace("{num_layers}", num_layers) for pattern in getattr(family, "HF_SKIPPED", ())]


def _skipped(unknown: set[str], skippable: list[str]) -> set[str]:
    return {name for name in unknown if any(fnmatch.fnmatchcase(name, pattern) for pattern in skippable)}


def _tell_skipped(prefix: str, wanted: list[Place], folder: DequantizedFolder, skippable: list[str]) -> None:
    names = {prefix + name for place in wanted for name in place.file_names()}
    if skipped := _skipped(folder.names() - names, skippable):
        logger.info(f"{folder.path}: {len(skipped)} tensors are no part of this model, such as {min(skipped)}")


def _check_config(model: nn.Module, family: ModuleType, path: Path) -> None:
    """Check the weights' architecture; warn where the same one has, say, other rotary frequencies."""
    file = path / "config.json"
    if not file.exists() or not hasattr(family, "from_hf_config"):
        return
    raw = read_json(file)
    if not is_of(family, raw):
        known = ", ".join(family.HF_ARCHITECTURES)
        raise UserError(f"{file}: architectures = {raw.get('architectures')!r:.200}, but the model here is of {known}")
    theirs = with_mtp_layers(config_of(family, raw, file), getattr(model.config, "num_mtp_layers", 0))
    if found := differences(model.config, theirs):
        logger.warning(f"the weights of {path} were trained as another model: {'; '.join(found)}")


def _check_quantization(path: Path) -> None:
    """Check that config.json names a supported quantization, whatever the tensors look like."""
    file = path / "config.json"
    raw = read_json(file) if file.exists() else {}
    for key in ("quantization_config", "compression_config"):
        found = raw.get(key)
        method = found.get("quant_method") if isinstance(found, dict) else found
        if found and method not in METHODS:
            raise UserError(
                f"{file}: {key} has the quant_method {method!r:.100}, which is not read here; {', '.join(METHODS)} are."
                f" Convert the weights to plain numbers; where they are that already, take {key} out"
            )


def _copy(place: Place, prefix: str, folder: DequantizedFolder) -> None:
    for target, whole, stored, ranges in _pieces(place):
        target.copy_(_read(folder, prefix, stored, whole, ranges))


def _check_tied(place: Place, prefix: str, folder: DequantizedFolder) -> None:
    """Check that a tied parameter's second tensor, where a file has one, is equal."""
    for target, whole, stored, ranges in _pieces(place):
        if not torch.equal(target.cpu(), _read(folder, prefix, stored, whole, ranges).to(target.dtype)):
            raise UserError(f"{folder.path}: {prefix}{stored.name} is not what {place.ours} is tied to in config.json")


def _pieces(place: Place) -> Iterable[tuple[Tensor, tuple[int, ...], Stored, Ranges]]:
    """Yield the pieces of this rank's shard that are read at once: an expert, or the whole shard where there are none.

    A piece is the live storage, the shape of the whole tensor that it is a slice of, its stored form, and the slice.
    """
    local, offsets, shape = chunk_of(place.tensor)
    if local.numel() == 0:
        return
    ranges = [(begin, begin + size) for begin, size in zip(offsets, local.shape, strict=True)]
    if "#" in place.stored.name:
        for i, target in enumerate(local):
            one = dataclasses.replace(place.stored, name=place.stored.name.replace("#", str(offsets[0] + i)))
            yield target, shape[1:], one, ranges[1:]
    elif local.dim() == 3:
        for i in range(local.shape[0]):
            expert = offsets[0] + i
            yield local[i : i + 1], shape, place.stored, [(expert, expert + 1), *ranges[1:]]
    else:
        yield local, shape, place.stored, ranges


def _read(folder: DequantizedFolder, prefix: str, stored: Stored, shape: tuple[int, ...], ranges: Ranges) -> Tensor:
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
    found = folder.read(prefix + stored.name, box)
    found = found[..., first::step] if step > 1 else found
    return found.transpose(-1, -2) if stored.transpose else found
