"""The small files of a model's folder that go with its weights, whatever these are: tokenizer, template, licence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_graph.models.hf.files import read_json

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_OF_MODEL = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
_CONFIG_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")

Content = bytes | Path  # a file's, or the file that is copied


def tokenizer_files(folder: Path) -> dict[str, Content]:
    """Return those files of a folder that are its tokenizer, by their names in it; the chat templates among them."""
    names = [*_TOKENIZER, TEMPLATE, *(f"{MORE_TEMPLATES}/{x.name}" for x in (folder / MORE_TEMPLATES).glob("*.jinja"))]
    return {name: folder / name for name in sorted(names) if (folder / name).is_file()}


def asset_files(folder: Path) -> dict[str, Content]:
    """Return the files of a folder that go with its model, by their names in it: the tokenizer, generation's defaults,
    the licence."""
    of_model: Mapping[str, Content] = {name: folder / name for name in _OF_MODEL if (folder / name).is_file()}
    return {**tokenizer_files(folder), **of_model}


def config_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder's config.json that are not the architecture: tokens, and the longest text."""
    if not (folder / "config.json").is_file():
        return {}
    theirs = read_json(folder / "config.json")
    return {key: theirs[key] for key in _CONFIG_KEYS if key in theirs}
