"""A trained model from a run's folder, a checkpoint or a Hugging Face folder, on one rank or sharded over all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from torchtitan_graph.checkpoint import load_model, newest_below
from torchtitan_graph.config import JobConfig, load, target_of
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.data.turn_ends import ends_of_texts
from torchtitan_graph.delivery import base_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import allocate, check_weights, choose_model, load_weights, new_model
from torchtitan_graph.models.hf.peft import CONFIG as ADAPTER
from torchtitan_graph.models.layers.adapt import check_packed
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initialize_buffers
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan, parallelize
from torchtitan_graph.parallel.storage import Precision, cast_parameters, materialize, plan_storage


class Described(NamedTuple):
    """The description of a checkpoint: a model on meta, how its texts are read, and the folder of its assets, if any.

    base: the folder of the weights that its adapters are for.
    """

    family: ModuleType
    model: Decoder
    reading: RowFormat
    assets: Path | None
    base: str | None = None


class Opened(NamedTuple):
    """A trained model, how its texts are read, and the place of its weights: a checkpoint, or a Hugging Face folder."""

    model: Decoder
    reading: RowFormat
    assets: Path | None
    weights: Path

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.reading.tokenizer is not None, "a model of tokens"
        return self.reading.tokenizer

    def ends(self) -> list[int]:
        """Return the ids of the tokens that end a text; raises UserError like `ends_of_texts`."""
        return ends_of_texts(self.reading, dict.fromkeys([self.assets, self.weights]))


def open_model(
    folder: Path,
    config: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    dims: ParallelDims | None = None,
) -> Opened:
    """Return a trained model; a run's is that of its newest checkpoint.

    Args:
        config: the run's configuration, if it is not to be searched.
        device: None is the CPU.
        dims: a layout of all ranks, over which the parameters are sharded; None: this rank has all. A checkpoint may be
            of any layout.

    Raises:
        UserError: the folder has neither a complete checkpoint nor a Hugging Face model, or the layout doesn't fit it.
    """
    device = device or torch.device("cpu")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        raise UserError(
            f"{folder} holds adapters alone, in the format of the library PEFT: name {_whole_of(folder)}their run's"
            " folder or its checkpoint, or the merged model that checkpoint.last_save_in_hf writes"
        )
    weights = newest_below(folder)
    is_hf = weights == folder and (folder / "config.json").exists()
    family, model, reading, assets, _ = describe_hf(folder) if is_hf else describe(weights, config)
    if dims is not None:
        check_plan(model, plan_of(family, model), dims)
        check_packed(model, plan_of(family, model), dims)
    if is_hf:
        check_weights(model, family, weights)  # before any memory is allocated
    if dims is None:
        allocate(model, dtype)
    else:
        _allocate_shards(model, family, dims.layout(device.type), dtype, device)
    if is_hf:
        load_weights(model, family, weights)
    else:
        load_model(weights, model)
    return Opened(model.to(device) if dims is None else model, reading, assets, weights)


def _whole_of(adapter: Path) -> str:
    """Return the whole models that were saved next to an adapter, for a message."""
    step = adapter.resolve()
    places = (step.with_name(step.name.removesuffix("-adapter") + end) for end in ("-hf", ""))
    return "".join(f"{place}, " for place in places if place.is_dir() and place != step)


def _allocate_shards(
    model: Decoder, family: ModuleType, layout: Layout, dtype: torch.dtype, device: torch.device
) -> None:
    parallelize(model, plan_of(family, model), layout, loss_parallel=False)
    cast_parameters(model, dtype)
    materialize(model, plan_storage(model, layout, Precision(dtype, dtype, dtype)), device)
    initialize_buffers(model)


def describe_hf(folder: Path) -> Described:
    """Return the description of a Hugging Face folder."""
    family, model = new_model(folder)
    return Described(family, model, RowFormat(_tokenizer_of(folder, model)), folder)


def describe(checkpoint: Path, config: Path | None = None) -> Described:
    """Return a checkpoint's description, by the configuration in it, or in one of the three folders above.

    That is a run's config.toml, or the config.json that convert_from_hf.py copies next to its result.
    """
    file = config or _find_config(checkpoint)
    if file.name == "config.json":
        return describe_hf(file.parent)
    job = load(["--job.config_file", str(file)])
    attn = "sdpa" if job.model.attn == "auto" else job.model.attn  # flex would be compiled for one length
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, attn=attn))
    find_files(job, file)
    path = job.model.hf_assets_path
    tokenizer, assets = load_tokenizer(path), find_assets(path) if path else None
    family, model, _ = choose_model(job, assets, tokenizer.vocab_size, target_of(job))
    return Described(family, model, RowFormat.of(job.training, tokenizer), assets, base_of(job))


def find_files(job: JobConfig, near: Path) -> None:
    """Find the tokenizer and the chat template of a run that was started in another folder: perhaps in one above
    `near`."""
    path, template = job.model.hf_assets_path, job.training.chat_template
    if path and not find_assets(path).exists():
        job.model.hf_assets_path = _above(path, near)
    if template and not Path(template).expanduser().exists():
        job.training.chat_template = _above(template, near)


def _above(path: str, near: Path) -> str:
    return str(next(filter(Path.exists, (folder / path for folder in near.resolve().parents)), path))


def _find_config(checkpoint: Path) -> Path:
    folder = checkpoint.resolve()
    for place in [folder, *folder.parents][:4]:
        for file in (place / "config.toml", place / "config.json"):
            if file.is_file():
                return file
    raise UserError(
        f"{checkpoint}: neither it nor the three folders above hold a run's config.toml or a config.json; name it with"
        " --job.config_file"
    )


def _tokenizer_of(folder: Path, model: Decoder) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; without a tokenizer.json, a model trained on bytes has the
    tokenizer of bytes."""
    of_bytes = load_tokenizer(None)
    is_of_bytes = model.config.vocab_size == of_bytes.vocab_size and not (folder / "tokenizer.json").exists()
    return of_bytes if is_of_bytes else load_tokenizer(str(folder))
