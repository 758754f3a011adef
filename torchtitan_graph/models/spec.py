"""Lookup of a family by name and construction of its model: the contract of a family's module, and its errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from torchtitan_graph.config.resolve import family_names
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.parallel.plan import Plan

# A family is a module with these: the flavours' table, the model class, the tensor-parallel plan, and the map from our
# parameter names to Hugging Face's.
CONTRACT = ("FLAVORS", "Model", "PLAN", "HF_KEYS")

# What it also needs to read and write Hugging Face's files (docs/train/hugging_face.md): the names of transformers'
# classes for it, and its configuration from and to the content of a config.json. HF_PREFIXES, HF_SKIPPED are optional.
HF_CONTRACT = ("HF_ARCHITECTURES", "from_hf_config", "to_hf_config")


def load_family(name: str) -> ModuleType:
    """Return the family's module, imported: `llama3` is `models/llama3.py`, `my_pkg.my_model` the user's own.

    Raises:
        UserError: no such family, or a module that breaks the contract.
    """
    path = name if "." in name else f"torchtitan_graph.models.{name}"
    if "." not in name and name not in family_names():
        legal = f"legal are {', '.join(family_names())}, or the dotted name of your own module"
        raise UserError(f"model.name = {name!r}: {legal}{did_you_mean(name, family_names())}")
    try:
        family = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == "transformers" and "." not in name:
            missing = "it wraps models of the library transformers: pip install 'transformers>=5.23'"
            raise UserError(f"model.name = {name!r}: {missing}") from None
        if error.name is None or not path.startswith(error.name):
            raise UserError(f"model.name = {name!r}: {path} can't be imported: {error}") from error
        missing = f"there is no module {error.name!r} to import; is it on PYTHONPATH?"
        raise UserError(f"model.name = {name!r}: {missing}") from None
    except ImportError as error:
        if name != "transformers":
            raise
        needed = "it needs transformers 5.23 or newer, whose inner names it uses: pip install -U 'transformers>=5.23'"
        raise UserError(f"model.name = {name!r}: {needed}; {error}") from error
    lacking = [attribute for attribute in CONTRACT if not hasattr(family, attribute)]
    if lacking:
        optional = "; HF_KEYS = {} is enough without Hugging Face's files" if "HF_KEYS" in lacking else ""
        raise UserError(
            f"model.name = {name!r}: the module defines no {', '.join(lacking)}; see models/llama3.py{optional}"
        )
    if problem := _problem_of(family):
        raise UserError(f"model.name = {name!r}: {problem}; see models/llama3.py")
    return family


# Fields that every flavour has.
_SIZES = ("dim", "num_layers", "num_heads", "vocab_size", "tied", "norm_eps")


def _problem_of(family: ModuleType) -> str | None:
    """Return what in a family's module breaks the contract, None if nothing does."""
    flavors, model = family.FLAVORS, family.Model
    if not isinstance(flavors, Mapping) or not flavors:
        return f"FLAVORS is {_kind(flavors)}: must be a dict of configurations by name, with at least one"
    for name, config in flavors.items():
        if isinstance(config, type) or not dataclasses.is_dataclass(config) or not _is_frozen(config):
            return f"FLAVORS[{name!r}] is {_kind(config)}: must be an object of a frozen dataclass"
        if lacking := [size for size in _SIZES if not hasattr(config, size)]:
            return f"FLAVORS[{name!r}] has no {', '.join(lacking)}"
    if not (isinstance(model, type) and issubclass(model, Decoder)):
        return f"Model is {_kind(model)}: must be a class derived from torchtitan_graph.models.layers.decoder.Decoder"
    if model.rope is Decoder.rope and model.forward is Decoder.forward:
        return "Model defines no rope(positions_BL)"
    try:
        inspect.signature(model).bind(next(iter(flavors.values())), "sdpa")
    except TypeError as error:
        return f"Model{inspect.signature(model)} must be built by Model(config, attn): {error}"
    if not isinstance(family.PLAN, Mapping):
        return f"PLAN is {_kind(family.PLAN)}: must be a dict of patterns of names, to a role by axis"
    keys = family.HF_KEYS
    if not isinstance(keys, Mapping) or not all(isinstance(x, (str, Stored)) for pair in keys.items() for x in pair):
        return f"HF_KEYS is {_kind(keys)}: must be a dict of our parameters' names, to names in Hugging Face's files"
    return None


def _is_frozen(config: Any) -> bool:
    return type(config).__dataclass_params__.frozen  # type: ignore[no-any-return]


def _kind(x: object) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"


# Sizes of a model that trains within seconds, by the field names of configs. Rows are uneven on purpose.
_TINY = dict(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=130, dense_ffn_dim=70)
_TINY |= dict(moe_ffn_dim=34, num_experts=6, num_dense_layers=1, kv_lora_rank=24, nope_dim=16, rope_dim=8, v_dim=12)
_TINY |= dict(window=7, chunk=8, full_every=3, temperature_span=8)


def tiny_config(config: Any, **changes: Any) -> Any:
    """Return a debug flavour shrunk to a few thousand weights, for checks; other fields, and zeros, stay."""
    names = {field.name for field in dataclasses.fields(config)}
    sizes = {name: size for name, size in _TINY.items() if name in names and getattr(config, name)}
    if getattr(config, "top_k", 0):
        sizes["top_k"] = min(config.top_k, 2)
    return dataclasses.replace(config, **sizes | {k: v for k, v in changes.items() if k in names})


def plan_of(family: ModuleType, model: Decoder) -> Plan:
    """Return the plan of a model: its own, where its family has no plan for all of them."""
    return getattr(model, "PLAN", family.PLAN)  # type: ignore[no-any-return]


def build_model(name: str, flavor: str, attn: str, tokenizer_vocab_size: int) -> Decoder:
    """Return a flavour's model on the meta device; `debugmodel` takes the tokenizer's vocabulary.

    Raises:
        UserError: unknown family or flavour, or a tokenizer with more tokens than the flavour's vocabulary.
    """
    family = load_family(name)
    with torch.device("meta"):
        return family.Model(flavor_config(family, name, flavor, tokenizer_vocab_size), attn)


def flavor_config(family: ModuleType, name: str, flavor: str, tokenizer_vocab_size: int) -> Any:
    """Return a flavour of the family's table; `debugmodel` takes the tokenizer's vocabulary.

    Raises:
        UserError: as `build_model`.
    """
    if flavor not in family.FLAVORS:
        names = getattr(family, "FLAVOR_NAMES", [*family.FLAVORS])  # all, where FLAVORS yields some
        legal = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        raise UserError(f"model.flavor = {flavor!r}: legal for {name} are {legal}{did_you_mean(flavor, names)}")
    config = family.FLAVORS[flavor]
    if flavor.startswith("debugmodel"):
        return dataclasses.replace(config, vocab_size=tokenizer_vocab_size)
    check_vocabulary(f"model.flavor = {flavor!r}", config.vocab_size, tokenizer_vocab_size)
    return config


def check_vocabulary(what: str, vocab_size: int, tokenizer_vocab_size: int) -> None:
    """Raise a UserError if the tokenizer has more tokens than `what`, the model, has rows in its vocabulary."""
    if tokenizer_vocab_size > vocab_size:
        raise UserError(
            f"{what} has {vocab_size} rows in its vocabulary, the tokenizer {tokenizer_vocab_size} tokens: take "
            "the model's own tokenizer (model.hf_assets_path; not set, bytes are the tokens), or a larger vocabulary"
        )
