"""Read and write models as Hugging Face folders: config.json and safetensors files, no other code and no pickles."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf.architecture import choose_model, new_model, own_attention
from torchtitan_graph.models.hf.assets import asset_files, config_keys
from torchtitan_graph.models.hf.peft import check_adapter, check_exportable, load_adapter, save_adapter
from torchtitan_graph.models.hf.read import check_weights, load_weights
from torchtitan_graph.models.hf.write import save_weights
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import allocate

__all__ = [
    "allocate",
    "asset_files",
    "check_adapter",
    "check_exportable",
    "check_weights",
    "choose_model",
    "from_hf",
    "load_adapter",
    "load_weights",
    "new_model",
    "own_attention",
    "save_adapter",
    "save_weights",
    "to_hf",
]


def from_hf(
    path: str | Path, dtype: torch.dtype = torch.float32, *, quantized: bool = False, attn: str = "sdpa"
) -> Decoder:
    """Return a model with the weights in a folder; called with token ids (B, L) it returns logits (B, L, V).

    Args:
        dtype: the parameters' dtype, whatever the files'.
        quantized: dequantize DeepSeek's fp8 and gpt_oss's MXFP4 weights, which takes 2 to 8 times the memory.

    Raises:
        UserError: an unknown architecture, something in config.json that the family can't express, no safetensors
            files, missing, unknown or differently shaped tensors, or quantized ones although `quantized` is false.
    """
    family, model = new_model(Path(path), attn)
    check_weights(model, family, Path(path), quantized=quantized)  # before any memory is allocated
    allocate(model, dtype)
    load_weights(model, family, Path(path), quantized=quantized)
    return model


def to_hf(
    model: nn.Module, path: str | Path, dtype: torch.dtype | None = None, *, assets: str | Path | None = None
) -> None:
    """Write a model as a new folder that transformers loads; `dtype` as for `save_weights`.

    assets: the folder of a tokenizer, which is copied with its templates and generation_config.json.

    Raises:
        UserError: `path` is not empty, or the model is of no family with `HF_KEYS`.
    """
    files = asset_files(Path(assets)) if assets else {}
    config = config_keys(Path(assets)) if assets else {}
    save_weights(model, _module_of(model), Path(path), dtype=dtype, files=files, config=config)


def _module_of(model: nn.Module) -> ModuleType:
    """Return the module of a model's family; the class that FSDP2 puts before the model's is skipped."""
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    found = next((module for module in modules if hasattr(module, "HF_KEYS")), None)
    if found is None:
        raise UserError(f"{type(model).__name__} is of no family: the module that defines it has no HF_KEYS")
    return found
