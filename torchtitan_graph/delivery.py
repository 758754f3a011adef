"""What goes with the weights that a run leaves, so that other libraries chat with them as this one does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_graph.config.job import JobConfig
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.rendering import with_defaults
from torchtitan_graph.data.tokenizer import FileTokenizer, find_assets
from torchtitan_graph.data.tokenizer_json import read_templates
from torchtitan_graph.data.turn_ends import ends_of_texts
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf.assets import (
    MORE_TEMPLATES,
    TEMPLATE,
    Content,
    asset_files,
    config_keys,
    tokenizer_files,
)
from torchtitan_graph.small_files import read_json

GENERATION, _TOKENIZER, _TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"


class Delivery(NamedTuple):
    """The small files of an export by their names, its config.json's keys that are not the architecture, and what is
    said about them in the log."""

    files: dict[str, Content]
    config: dict[str, Any]
    summary: str


def deliver(reading: RowFormat, assets: Path | None) -> Delivery:
    """Return what goes with a model that was trained on texts that were read in a way.

    The tokenizer's files are those of its folder, and generation's defaults those of `assets`. The chat template is the
    one that was trained with, and generation_config.json lists all tokens that end a text in `eos_token_id`.

    Args:
        reading: how texts were read; without a tokenizer, files are those of `assets`.
        assets: the folder of the base model, or its tokenizer.json alone; None where bytes are the tokens.

    Raises:
        UserError: one of the files can't be read.
    """
    tokenizer = reading.tokenizer
    folder = assets if assets is not None and assets.is_dir() else None  # a tokenizer.json alone describes no model
    config = {} if folder is None else config_keys(folder)
    files = {} if folder is None else asset_files(folder)
    if tokenizer is None:
        return Delivery(files, config, "no tokenizer")
    if isinstance(tokenizer, FileTokenizer):
        files |= tokenizer_files(tokenizer.folder)
        files[_TOKENIZER] = tokenizer.file
        files |= _templates(reading, files)
        files[_TOKENIZER_CONFIG] = _tokenizer_config(tokenizer, reading.has_template)
    ends = ends_of_texts(reading, [folder])
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    files[GENERATION] = _json({**_generation(folder, special["bos_token_id"]), "eos_token_id": ends})
    which = reading.chat_template or ("the tokenizer's chat template" if TEMPLATE in files else "no chat template")
    stops = ", ".join(f"{tokenizer.decode_all([end])!r} ({end})" for end in ends)
    return Delivery(files, {**special, **config}, f"{which}; texts end at {stops}")


def base_of(job: JobConfig) -> str | None:
    """Return the folder of the weights that a run's adapters are for; None if they are random, or in no format that
    PEFT reads."""
    if not job.checkpoint.initial_load_in_hf:
        return None
    if (path := job.checkpoint.initial_load_path) is not None:
        return str(Path(path).absolute())
    assets = job.model.hf_assets_path
    return None if assets is None else str(find_assets(assets).absolute())


def _templates(reading: RowFormat, files: dict[str, Content]) -> dict[str, Content]:
    """Return the chat templates as files, with the arguments of training; take others out of `files`."""
    if not reading.has_template:
        return {}
    for name in [name for name in files if name == TEMPLATE or name.startswith(MORE_TEMPLATES)]:
        del files[name]
    assert isinstance(reading.tokenizer, FileTokenizer), "others have no template"
    texts = read_templates(reading.tokenizer.folder)
    if reading.chat_template is not None:
        texts.pop("tool_use", None)  # what was trained with rendered conversations with tools, too
    given = reading.chat_template_kwargs
    texts |= {name: with_defaults(text, given) for name, text in reading.template.templates.items()}
    if wrong := [name for name in texts if not re.fullmatch(r"[\w.-]+", name)]:
        raise UserError(f"{reading.tokenizer.folder}: {wrong[0]!r:.80} can't be the name of a chat template: no file")
    return {
        TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja": x.encode() for name, x in texts.items()
    }


def _tokenizer_config(tokenizer: FileTokenizer, has_files: bool) -> Content:
    """Return tokenizer_config.json with the tokens that begin and end a document, and the class that reads
    tokenizer.json as it is; without a chat template where it has files of its own, which some readers read second."""
    file = tokenizer.folder / _TOKENIZER_CONFIG
    theirs = read_json(file, dict[str, Any]) if file.is_file() else {}
    found = {key: x for key, x in theirs.items() if key != "chat_template" or not has_files}
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for key, number in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if number is not None and key not in found:
            found[key] = tokenizer.text_of(number)
    return file if found == theirs else _json(found)


def _generation(folder: Path | None, bos: int | None) -> dict[str, Any]:
    """Return the entries of the base model's generation_config.json, or those of a model without one."""
    file = (folder or Path()) / GENERATION
    theirs = read_json(file, dict[str, Any]) if folder is not None and file.is_file() else {}
    # With _from_model_config, transformers takes config.json's entries instead.
    found = {key: x for key, x in theirs.items() if key != "_from_model_config"}
    return found if bos is None else {"bos_token_id": bos, **found}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
