"""The model to train: a flavour of a family's table, or the configuration in a Hugging Face folder's config.json."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf.files import read_json
from torchtitan_graph.models.layers.adapt import adapt
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.spec import HF_CONTRACT, check_vocabulary, family_names, flavor_config, load_family

WRAPPER = "transformers"  # the family of models that have none of their own here
ANY = "*"  # among a family's HF_ARCHITECTURES
TOKENIZER_ONLY = "to take only the tokenizer from there, name the file tokenizer.json itself"


class ChosenModel(NamedTuple):
    """A model on meta, its family, and the table `model` of its configuration, resolved: nothing in it is "auto"."""

    family: ModuleType
    model: Decoder
    options: job.Model


def choose_model(job_config: JobConfig, assets: Path | None, tokenizer_vocab_size: int, target: Target) -> ChosenModel:
    """Return the model of a configuration, for the device that its graphs are for.

    With a config.json in the folder `assets` (`model.hf_assets_path`), that is the architecture if `model.flavor` is
    not set, and must agree with the flavour if it is. Weights are not read.

    Raises:
        UserError: as `load_family` and `build_model`; a family that can't be saved as asked; or config.json contradicts
            `model.name` or `model.flavor`, or is of an unknown family or form.
    """
    options = dataclasses.replace(job_config.model, attn=choose_attention(job_config, target))
    flavor = options.flavor
    file = (assets or Path()) / "config.json"
    raw = read_json(file) if assets is not None and os.path.exists(file) else None
    if raw is not None and flavor is None and "model.name" not in job_config.sources:
        options.name = WRAPPER if options.trust_remote_code else family_of(raw, file)[0]
        if options.name == WRAPPER:
            logger.info(
                f"{file}: {raw.get('architectures')!r:.100} is no family of this package: transformers' own model"
            )
    if options.trust_remote_code and (raw is None or options.name != WRAPPER):
        raise UserError(
            f"model.trust_remote_code = true: with model.name = {WRAPPER!r} and a folder with a config.json in"
            " model.hf_assets_path, whose Python code then is run; leave it out"
        )
    options.elementwise = choose_elementwise(job_config, target, options.name)
    code = str(assets) if options.trust_remote_code else ""
    family = load_family(options.name)
    lacking = [attribute for attribute in HF_CONTRACT if not hasattr(family, attribute)]
    if job_config.checkpoint.last_save_in_hf and lacking:
        raise UserError(
            f"checkpoint.last_save_in_hf = true: {family.__name__} defines no {', '.join(lacking)}: see llama3.py"
        )
    if raw is None or not hasattr(family, "from_hf_config"):
        options.flavor = flavor or "debugmodel"
        config = flavor_config(family, options.name, options.flavor, tokenizer_vocab_size)
    else:
        _check_family(family, options.name, raw, file)
        config = config_of(family, raw, file, code)
        if code:
            logger.warning(f"model.trust_remote_code = true: the Python code in {code} runs in this process")
        check_vocabulary(str(file), config.vocab_size, tokenizer_vocab_size)
        if flavor is not None:
            wanted = flavor_config(family, options.name, flavor, tokenizer_vocab_size)
            _check_flavor(options.name, flavor, wanted, config, file)
    source = f"model.flavor = {options.flavor!r}" if raw is None else str(file)
    config = with_mtp_layers(config, options.num_mtp_layers, options.name)
    model = _on_meta(family, config, options.attn, source)
    if job_config.model.attn == "auto" and options.attn == "varlen":
        options.attn, why = own_attention(model)
        model.attn = options.attn
        logger.info(f"model.attn = auto: {model.attn}, {why}")
    adapt(model, family, options)
    for note in model.notes:
        logger.info(note)
    return ChosenModel(family, model, options)


def choose_attention(job_config: JobConfig, target: Target) -> str:
    """Return `model.attn`; where that is "auto", "varlen" on a CPU, "sdpa" or "flex" on a GPU.

    Rows are packed from documents, so every mask is more than causal. On a CPU, attention within segments computes no
    masked pair; `own_attention` replaces it for a model that it can't compute. Of the GPU's kernels only flex
    attention's, compiled, skip masked pairs, need no mask of rows x rows, and take grouped keys and values without
    copies. They need one length of rows. Uncompiled, it holds every score.
    """
    chosen, training = job_config.model.attn, job_config.training
    if chosen != "auto":
        return chosen
    if not target.is_gpu:
        return "varlen"
    if training.dynamic_seq_len:
        chosen, why = "sdpa", "for block masks have one length, and training.dynamic_seq_len is true"
    elif "compile_regions" in job_config.compile.disable_passes:
        chosen, why = "sdpa", "for compile_regions, which compiles flex, is among compile.disable_passes"
    else:
        chosen, why = "flex", "on a GPU"
    logger.info(f"model.attn = auto: {chosen}, {why}")
    return chosen


def own_attention(model: Decoder) -> tuple[str, str]:
    """Return what "auto" is for a model on a CPU, and why: "varlen", or another that can compute its attention."""
    if why := model.not_in_segments():
        return "flex" if model.changes_scores else "sdpa", f"for {why}"
    return "varlen", "on a CPU"


def choose_elementwise(job_config: JobConfig, target: Target, name: str) -> str:
    """Return `model.elementwise`; where that is "auto", "fused", "rope" or "torch".

    Raises:
        UserError: it is "fused" or "rope", and the family `name` computes with transformers' own modules.
    """
    chosen = job_config.model.elementwise
    if chosen in ("fused", "rope") and name == WRAPPER:
        raise UserError(
            f"model.elementwise = {chosen!r}: model.name = {WRAPPER!r} computes with transformers' own modules; leave"
            " it at auto"
        )
    if chosen != "auto":
        return chosen
    if name == WRAPPER:
        chosen, why = "torch", "for transformers' own modules"
    elif not target.is_gpu and job_config.compile.codegen != "off":
        chosen, why = "torch", "for Inductor compiles it"
    elif not target.is_gpu:
        chosen, why = "rope", "on a CPU"
    elif {"rope", "swiglu"} <= set(job_config.compile.fusions):
        chosen, why = "torch", "for compile.fusions has both"
    else:
        chosen, why = "fused", "on a GPU"
    logger.info(f"model.elementwise = auto: {chosen}, {why}")
    return chosen


def with_mtp_layers(config: Any, number: int, name: str = "") -> Any:
    """Return the configuration with `number` multi-token-prediction layers.

    Raises:
        UserError: the family `name` has none.
    """
    if not hasattr(config, "num_mtp_layers"):
        if number:
            raise UserError(f"model.num_mtp_layers = {number}: {name} predicts one token; only deepseek_v3 can do more")
        return config
    return dataclasses.replace(config, num_mtp_layers=number)


def new_model(path: Path, attn: str = "sdpa") -> tuple[ModuleType, Decoder]:
    """Return the model of the config.json in `path`, on meta, after its family.

    Raises:
        UserError: as `family_of` and `config_of`, or there is no config.json.
    """
    file = path / "config.json"
    raw = read_json(file)
    _, family = family_of(raw, file)
    return family, _on_meta(family, config_of(family, raw, file), attn, str(file))


def _on_meta(family: ModuleType, config: Any, attn: str, source: str) -> Decoder:
    try:
        with torch.device("meta"):
            return family.Model(config, attn)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except RuntimeError as error:
        if "overflow" not in str(error):  # of the bytes of a tensor
            raise
        raise UserError(f"{source}: a tensor would have more numbers than memory can hold: {error}") from error


def family_of(raw: dict[str, Any], file: Path) -> tuple[str, ModuleType]:
    """Return the family of a config.json, with its name, by `architectures`: of others, the one that wraps
    transformers' models.

    Raises:
        UserError: none of this package's own, and transformers is not there.
    """
    own = {name: load_family(name) for name in family_names() if name != WRAPPER}
    for name, family in own.items():
        if is_of(family, raw):
            return name, family
    try:
        return WRAPPER, load_family(WRAPPER)
    except UserError as error:
        architectures = sorted(name for family in own.values() for name in family.HF_ARCHITECTURES)
        raise UserError(
            f"{file}: architectures = {raw.get('architectures')!r:.200} is none of this package's own, "
            f"{', '.join(architectures)}, and others need transformers: {error}"
        ) from error


def config_of(family: ModuleType, raw: dict[str, Any], file: Path, code: str = "") -> Any:
    """Return the family's configuration from a config.json; `code` is the folder whose own Python code defines it.

    Raises:
        UserError: the family can't express it.
    """
    try:
        return family.from_hf_config(raw, code) if code else family.from_hf_config(raw)
    except UserError as error:
        other = "" if ANY in family.HF_ARCHITECTURES else f"; model.name = {WRAPPER!r} takes transformers' own model"
        raise UserError(f"{file}: {error}{other}") from error


def is_of(family: ModuleType, raw: dict[str, Any]) -> bool:
    """Return whether a config.json is of a family."""
    architectures = raw.get("architectures")
    return (
        ANY in family.HF_ARCHITECTURES
        or isinstance(architectures, list)
        and any(name in family.HF_ARCHITECTURES for name in architectures)
    )


def _check_family(family: ModuleType, name: str, raw: dict[str, Any], file: Path) -> None:
    if not is_of(family, raw):
        raise UserError(
            f"model.name = {name!r}: {file} in model.hf_assets_path is of "
            f"{raw.get('architectures')!r:.200}, not of {', '.join(family.HF_ARCHITECTURES)}: set the model.name of "
            f"that family, or leave out model.name and model.flavor; {TOKENIZER_ONLY}"
        )


def _check_flavor(name: str, flavor: str, wanted: Any, config: Any, file: Path) -> None:
    if found := differences(wanted, config):
        raise UserError(
            f"model.flavor = {flavor!r} of {name} contradicts {file} in model.hf_assets_path: {'; '.join(found)}. "
            f"Leave model.flavor out to train what config.json says; {TOKENIZER_ONLY}"
        )


def differences(config: Any, other: Any) -> list[str]:
    """Return the differences between two configurations of a family, as text."""
    ours, theirs = (x.as_dict() if hasattr(x, "as_dict") else dataclasses.asdict(x) for x in (config, other))
    names = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    return [f"{key} is {ours.get(key)!r} here, {theirs.get(key)!r} there" for key in names]
