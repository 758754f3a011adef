"""Adapters as files of the library PEFT: `adapter_config.json`, and `adapter_model.safetensors` with each matrix as
`base_model.model.MODULE.lora_A.weight` (r, in) and `lora_B.weight` (out, r), MODULE being Hugging Face's name.

A stack of experts is a module for each, where the base model's files have one tensor for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf.assets import Content
from torchtitan_graph.models.hf.files import Folder, NewFolder, read_json
from torchtitan_graph.models.hf.places import Place, live_tensors, stored_as
from torchtitan_graph.models.hf.read import check_tensors
from torchtitan_graph.models.hf.write import NONE
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.lora import adapters_of
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.parallel.agree import on_rank_0
from torchtitan_graph.parallel.chunk import gather_whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys of adapter_config.json that change nothing of what a loaded adapter computes, or are read by themselves.
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights")
_OF_NO_EFFECT = (
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "auto_mapping", "peft_version", "qalora_group_size", "loftq_config"),
    *("eva_config", "corda_config", "megatron_core", "runtime_config", "ensure_weight_tying", "arrow_config"),
)
# Initial values that leave the base model as it is; others, such as pissa, take the adapter out of its weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_exportable(model: nn.Module, family: ModuleType) -> None:
    """Check that a model's adapters can be written as PEFT's files; warn of those that PEFT leaves out.

    Raises:
        UserError: an adapter's weight is no linear layer of Hugging Face's model, but a part of a tensor.
    """
    adapter_places(model, family)
    # Transformers 5 holds experts in one tensor. PEFT takes each adapter on a name of their layers for a part of it,
    # and finds no place for those of other layers with such a name.
    stored = {name: x.name for name in live_tensors(model) if (x := _stored(model, family, name)) is not None}
    of_experts = {name.rpartition("#")[2] for name in stored.values() if "#" in name}
    of_others = [name for name in adapters_of(model) if "#" not in stored[name]]
    is_lost = [name.removesuffix(".weight") for name in of_others if stored[name].endswith((*of_experts,))]
    if is_lost:
        logger.warning(
            f"{listed(is_lost, 3)}: PEFT with transformers 5 will ignore these adapters, because their layers have the"
            " same names as layers of experts; leave them out of model.lora.targets, or use the merged model"
            " (checkpoint.last_save_in_hf)"
        )


def check_adapter(model: Decoder, family: ModuleType, path: Path) -> None:
    """Check that the adapter in the folder `path` fits a model with adapters, which may be on meta.

    Raises:
        UserError: as `load_adapter`.
    """
    _match(model, family, path)


@torch.no_grad()
def load_adapter(model: Decoder, family: ModuleType, path: Path) -> None:
    """Copy PEFT's adapter in the folder `path` into a materialized model's adapters; all ranks together.

    Raises:
        UserError: the files can't be read, are of another kind of adapter, or of another rank, scale or other layers
            than the model's. Nothing has been copied.
    """
    folder, places = _match(model, family, path)
    for place in places:
        for target, found in place.pieces(folder):
            target.copy_(found)


@torch.no_grad()
def save_adapter(
    model: Decoder,
    family: ModuleType,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    base: str | None = None,
    files: Mapping[str, Content] = NONE,
    replace: bool = False,
) -> None:
    """Write a model's adapters as the folder `path`, atomically; all ranks together.

    Args:
        dtype: of the files; None leaves the parameters'.
        base: the base model's folder or name, for readers.
        files: other files of the folder by name, as the tokenizer's; rank 0 reads them.
        replace: replace an existing folder.

    Raises:
        UserError: `path` is not empty and `replace` is false, or as `check_exportable`.
        OSError or SafetensorError: it can't be written. Raised on all ranks, like the others.
    """
    places = adapter_places(model, family)
    tensors: dict[str, Tensor] = {}
    for place in places:
        whole = gather_whole(place.tensor, dtype or place.tensor.dtype)
        if whole is not None:
            experts = whole.cpu().unbind() if "#" in place.stored.name else [whole.cpu()]
            tensors |= {n: x.clone() for n, x in zip(place.file_names(), experts, strict=True)}

    def write() -> None:
        folder = NewFolder(path, replace)
        folder.write_json(CONFIG, _config(model, family, places, base))
        folder.write_tensors(WEIGHTS, tensors)
        folder.write_files(files)
        folder.commit()

    on_rank_0(write)


def _config(model: Decoder, family: ModuleType, places: list[Place], base: str | None) -> dict[str, Any]:
    options, alpha = model.lora, model.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": options.rslora,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": _target_modules(model, family, places),
    }


def _target_modules(model: nn.Module, family: ModuleType, places: list[Place]) -> list[str]:
    """Return the last parts of the names of the modules with adapters; the whole names where others end alike."""
    adapted = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for p in places for name in p.file_names()}
    leaves = {name.rpartition(".")[2] for name in adapted}
    others = set()
    for name, tensor in live_tensors(model).items():
        stored = _stored(model, family, name)
        if stored is not None and tensor.dim() > 1:
            others |= {each.removesuffix(".weight") for each in Place(name, tensor, stored).file_names()} - adapted
    alike = any(name.rpartition(".")[2] in leaves for name in others)
    return sorted(adapted if alike else leaves)


def _stored(model: nn.Module, family: ModuleType, name: str) -> Stored | None:
    """Return a weight's place in Hugging Face's model; another library's model has its own names."""
    return stored_as(family.HF_KEYS, name) if getattr(model, "conversion", None) is None else Stored(name)


def adapter_places(model: nn.Module, family: ModuleType) -> list[Place]:
    """Return the places of the adapters' matrices in PEFT's file."""
    found = []
    for weight, adapter in adapters_of(model).items():
        stored = _stored(model, family, weight)
        if stored is None:
            raise UserError(f"HF_KEYS of {family.__name__} has no entry for {weight}")
        if stored.transpose or stored.part is not None or not stored.name.endswith(".weight"):
            raise UserError(
                f"{weight} has an adapter, but is a part of {stored.name} in Hugging Face's model, and no linear layer:"
                " PEFT's files have no such adapter; leave it out of model.lora.targets, or export the merged model"
                " (checkpoint.last_save_in_hf)"
            )
        module = _PREFIX + stored.name.removesuffix(".weight")
        for factor in ("A", "B"):
            ours = getattr(adapter, factor)
            found.append(Place(ours, model.get_parameter(ours), Stored(f"{module}.lora_{factor}.weight")))
    return found


def _match(model: Decoder, family: ModuleType, path: Path) -> tuple[Folder, list[Place]]:
    """Open an adapter's folder and check it; return it with the places of this model's adapters."""
    _check_config(read_json(path / CONFIG, "a PEFT adapter"), path / CONFIG, model.lora)
    if not (path / WEIGHTS).is_file() and (path / "adapter_model.bin").is_file():
        raise UserError(f"{path}: adapter_model.bin is a pickle, which can run code: convert it to {WEIGHTS} first")
    folder, places = Folder(path, WEIGHTS), adapter_places(model, family)
    expected: dict[str, tuple[int, ...]] = {}
    for place in places:
        expected |= place.expected(folder)
    check_tensors(expected, [], folder, set())
    return folder, places


def _check_config(raw: Mapping[str, Any], file: Path, options: job.Lora) -> None:
    """Raise a UserError for another kind of adapter, or one that `[model.lora]` differs from."""
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type = {raw.get('peft_type')!r:.100}: only LORA is read here")
    neutral = (None, False, 0, "none", "default")
    known = (*_READ, *_OF_NO_EFFECT)
    left = {key: x for key, x in raw.items() if key not in known and not _is_empty(x) and x not in neutral}
    others = [f"{key} = {x!r:.60}" for key, x in left.items()]
    if others:
        raise UserError(f"{file}: {listed(others, 5)}: not done here, so the adapter would compute something else")
    start = raw.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise UserError(
            f"{file}: init_lora_weights = {start!r:.60}: such an adapter changes the base model's weights; convert it"
            " to a plain one with PEFT's path_initial_model_for_weight_conversion"
        )
    mine = {"r": options.rank, "lora_alpha": options.alpha, "use_rslora": options.rslora}
    theirs = {"r": raw.get("r", 8), "lora_alpha": raw.get("lora_alpha", 8), "use_rslora": raw.get("use_rslora", False)}
    names = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
    if wrong := [key for key in mine if mine[key] != theirs[key]]:
        differences = [f"{key} = {theirs[key]!r:.60}, but model.lora.{names[key]} = {mine[key]!r}" for key in wrong]
        raise UserError(f"{file}: {'; '.join(differences)}; set [model.lora] as the adapter has it")
    if raw.get("lora_dropout"):
        logger.warning(f"{file}: lora_dropout = {raw['lora_dropout']!r:.60}: training goes on without dropout")


def _is_empty(value: object) -> bool:
    return isinstance(value, (list, dict, str)) and not value
