"""Load Hugging Face's files into a live model in any layout: each rank reads its own shard of each tensor.

At most one expert, or one matrix, of one tensor of the files is in memory at a time; of a packed weight, this rank's
shard of it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf.architecture import config_of, differences, is_of, with_mtp_layers
from torchtitan_graph.models.hf.converted import Converted, converted_places
from torchtitan_graph.models.hf.files import Folder, read_json
from torchtitan_graph.models.hf.places import Place, live_tensors, places, tied_places, unpacked
from torchtitan_graph.models.hf.quantized import DequantizedFolder
from torchtitan_graph.models.layers.lora import packed_weights
from torchtitan_graph.ops.packed import pack
from torchtitan_graph.parallel.chunk import chunk_of

METHODS = ("fp8", "mxfp4")  # config.json's names of the methods that DequantizedFolder reads
AnyPlace = Place | Converted
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
    folder, wanted, tied, skipped = _match(model, family, path, quantized)
    if skipped:
        logger.info(f"{folder.path}: {len(skipped)} tensors are no part of this model, such as {min(skipped)}")
    _check_config(model, family, path)
    packings = packed_weights(model)
    for place in wanted:
        if packing := packings.get(place.ours):
            packed = model.get_parameter(place.ours)
            place = dataclasses.replace(place, tensor=unpacked(packed, packing, chunk_of(packed).local.device))
        for target, found in place.pieces(folder):
            target.copy_(found)
        if packing:
            chunk_of(packed).local.copy_(pack(chunk_of(place.tensor).local, packing))
    for place in tied:
        for target, found in place.pieces(folder):
            if not torch.equal(target.cpu(), found.to(target.dtype)):
                name = place.file_names()[0]
                raise UserError(f"{folder.path}: {name} is not what {place.ours} is tied to in config.json")


def _match(
    model: nn.Module, family: ModuleType, path: Path, quantized: bool
) -> tuple[DequantizedFolder, list[AnyPlace], list[AnyPlace], set[str]]:
    """Open a folder; return it with the model's places in it, those of tied parameters, and the names of tensors that
    are no part of the model."""
    folder = DequantizedFolder(Folder(path))
    _check_quantization(path)
    if folder.quantized() and not quantized:
        raise UserError(
            f"{path} is quantized ({len(folder.quantized())} tensors, such as {min(folder.quantized())}): set "
            "checkpoint.initial_load_in_hf_quantized = true to turn it back into numbers (in Python: quantized=True)"
        )
    wanted: list[AnyPlace]
    tied: list[AnyPlace]
    if getattr(model, "conversion", None) is not None:
        wanted, tied, skippable = converted_places(model, folder)  # type: ignore[assignment]
        there = {place.ours for place in wanted}
        # What no file makes is missing under our name, which files of this library have.
        mine = {name: tuple(x.shape) for name, x in live_tensors(model).items() if name not in there}
        problems = [problem for place in [*wanted, *tied] if (problem := place.problem())]  # type: ignore[union-attr]
    else:
        prefix = _prefix(family, places(family, model), folder)
        wanted = [place.under(prefix) for place in places(family, model)]
        tied = [p for place in tied_places(family, model) if (p := place.under(prefix)).stored.name in folder.names()]
        skippable, mine, problems = _skipped(folder.names(), _skippable(family, model)), {}, []
    for place in [*wanted, *tied]:
        mine |= place.expected(folder)
    return folder, wanted, tied, check_tensors(mine, problems, folder, skippable)


def _prefix(family: ModuleType, wanted: Iterable[Place], folder: DequantizedFolder) -> str:
    """Return the first of the family's prefixes with any tensor of the model."""
    there = folder.names()
    names = [name for place in wanted for name in place.file_names()]
    prefixes: tuple[str, ...] = getattr(family, "HF_PREFIXES", ("",))
    return next((prefix for prefix in prefixes if any(prefix + name in there for name in names)), prefixes[0])


def check_tensors(
    mine: dict[str, tuple[int, ...]], problems: list[str], folder: DequantizedFolder | Folder, skippable: set[str]
) -> set[str]:
    """Check the files against the tensors of all ranks together: those of a pipeline have different parts of the
    model. Return the names of the tensors that are skipped.

    Args:
        mine: the shapes of the files' tensors that this rank needs.
        problems: that are known already.
    """
    by_rank = [(mine, problems)]
    if dist.is_initialized():
        by_rank = by_rank * dist.get_world_size()
        dist.all_gather_object(by_rank, (mine, problems))
    expected = {name: shape for of_rank, _ in by_rank for name, shape in of_rank.items()}
    there = folder.names()
    problems = list(dict.fromkeys(problem for _, of_rank in by_rank for problem in of_rank))
    problems += [f"missing: {name}" for name in expected if name not in there]
    unknown = there - expected.keys()
    problems += [f"unknown: {name}" for name in sorted(unknown - skippable)]
    for name, shape in expected.items():
        if name in there and folder.shape(name) != shape:
            problems.append(f"{name}: shape {list(folder.shape(name))!s:.100}, but here {list(shape)}")
        elif name in there and folder.dtype(name) not in NUMBERS:
            problems.append(f"{name}: {folder.dtype(name)}, quantized in a way that is unknown here")
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        has_config = any((Path(folder.path) / name).is_file() for name in ("config.json", "adapter_config.json"))
        why = "" if has_config else " (it has no config.json; the model is that of model.name and model.flavor)"
        raise UserError(f"{folder.path} is of another model{why}:\n  " + "\n  ".join(problems[:20]) + more)
    return unknown


def _skippable(family: ModuleType, model: nn.Module) -> list[str]:
    """Return the patterns of names that are known to be no part of a model, such as those of a vision tower."""
    num_layers = str(getattr(getattr(model, "config", None), "num_layers", ""))
    return [pattern.replace("{num_layers}", num_layers) for pattern in getattr(family, "HF_SKIPPED", ())]


def _skipped(names: set[str], skippable: list[str]) -> set[str]:
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in skippable)}


def _check_config(model: nn.Module, family: ModuleType, path: Path) -> None:
    """Check the weights' architecture; warn where the same one has, say, other rotary frequencies."""
    file = path / "config.json"
    if not file.exists() or not hasattr(family, "from_hf_config"):
        return
    raw = read_json(file)
    if not is_of(family, raw):
        known = ", ".join(family.HF_ARCHITECTURES)
        raise UserError(f"{file}: architectures = {raw.get('architectures')!r:.200}, but the model here is of {known}")
    code = getattr(model.config, "code", "")
    theirs = with_mtp_layers(config_of(family, raw, file, code), getattr(model.config, "num_mtp_layers", 0))
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
