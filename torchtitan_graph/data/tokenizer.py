"""Text to token ids and back: by bytes, or by any Hugging Face tokenizer.json."""

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import tokenizers

import torchtitan_graph
from torchtitan_graph.data.tokenizer_json import (
    add_listed_tokens,
    blame,
    named_tokens,
    read_tokenizer,
    read_tokenizer_config,
)
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import near_path, refuse_unreadable


class Tokenizer(Protocol):
    """Converts text into ids below vocab_size and back; `encode` reads no special ids from text, and adds none unless
    it is told to add those that surround a text.

    bos_id starts a document (None: nothing does), eos_id ends it. One of `special_tokens` inside a text is text.
    `decode` leaves special tokens out, `decode_all` spells them.
    `digest` is equal for tokenizers with the same ids.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    special_tokens: tuple[str, ...]
    digest: str

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def decode_all(self, ids: list[int]) -> str: ...


def load_tokenizer(path: str | None, special_tokens_in_text: bool = False) -> Tokenizer:
    """Return the tokenizer of a folder with a tokenizer.json, or of that file; without a path, bytes are the tokens.

    special_tokens_in_text: read special tokens in text as tokens; else they are text.

    Raises UserError if there is no readable tokenizer, or none of its special tokens ends a document.
    """
    if not path:
        return ByteTokenizer()
    file = find_assets(path)
    with refuse_unreadable(f"model.hf_assets_path = {path!r}"):
        if file.is_dir():
            file = file / "tokenizer.json"
        is_there = file.exists()
    if not is_there and Path(path).suffix != ".json" and not find_assets(path).exists():
        near = near_path(Path(path))
        near = near if near.endswith("?") else "."  # a name of the hub has parts that are nowhere
        raise UserError(
            f"model.hf_assets_path = {path!r}: there is no such folder{near} Models of the hub are not downloaded: do"
            " that first (hf download OWNER/NAME --local-dir DIR), and name the folder"
        )
    if not is_there:
        raise UserError(
            f"model.hf_assets_path = {path!r}: there is no tokenizer.json. Name a folder that holds one, or the file"
            " itself; leave the option out to train on bytes."
        )
    return FileTokenizer(file, special_tokens_in_text)


def find_assets(path: str) -> Path:
    """Return the path of `model.hf_assets_path`.

    A relative path that does not exist is searched in the package, which contains the tokenizer of its own examples.
    Raises UserError if the path is invalid.
    """
    package = Path(torchtitan_graph.__file__).parent
    places = (folder / path for folder in (Path(), package, package.parent))
    with refuse_unreadable(f"model.hf_assets_path = {path!r}"):
        return next((place for place in places if place.exists()), Path(path))


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and two special ids."""

    def __init__(self) -> None:
        self.vocab_size = 258
        self.bos_id: int | None = 256
        self.eos_id = 257
        self.special_tokens: tuple[str, ...] = ()
        self.digest = "utf-8 bytes, bos 256, eos 257"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def decode_all(self, ids: list[int]) -> str:
        return "".join({256: "<bos>", 257: "<eos>"}.get(i) or bytes([i]).decode(errors="replace") for i in ids)


class FileTokenizer:
    """A tokenizer.json. The tokens that begin and end a document are named in tokenizer_config.json next to it."""

    def __init__(self, file: Path, special_tokens_in_text: bool) -> None:
        self.file, self._special_tokens_in_text = file, special_tokens_in_text
        self.folder = file.parent
        self._tokenizer, content = read_tokenizer(file)
        config_file = file.parent / "tokenizer_config.json"
        config = read_tokenizer_config(config_file)
        added = add_listed_tokens(self._tokenizer, config, config_file)
        self._tokenizer.encode_special_tokens = not special_tokens_in_text  # that is, as text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id, eos_id = _special_ids(self._tokenizer, config, file)
        if eos_id is None:
            raise UserError(
                f"{file}: no token ends a document. Name it in {config_file}:"
                ' {"eos_token": "..."}, one of the special tokens of tokenizer.json.'
            )
        self.eos_id = eos_id
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in tokens if token.special)
        self.special_ids = [number for number, token in self.added_tokens().items() if token.special]
        self.named_tokens = named_tokens(config)
        named = f"{self.bos_id} {self.eos_id}" + "".join(f" {token!r}" for token in added)
        self.digest = hashlib.sha256(content + named.encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:  # the one setting that a pickled copy loses
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = not self._special_tokens_in_text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; with `add_special_tokens` also those that tokenizer.json says surround it."""
        with blame(f"{self.file}: can't tokenise a text that begins {text[:40]!r}"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text in which special tokens are tokens, and the characters of each, the end excluded."""
        with blame(f"{self.file}: can't tokenise a text that begins {text[:40]!r}"):
            self._tokenizer.encode_special_tokens = False
            try:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
            finally:
                self._tokenizer.encode_special_tokens = not self._special_tokens_in_text
        return encoding.ids, encoding.offsets

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """The expression that splits a text at special tokens, and keeps them."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def decode(self, ids: list[int]) -> str:
        with blame(f"{self.file}: can't make a text of {len(ids):,} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of ids with special tokens spelt out."""
        with blame(f"{self.file}: can't make a text of {len(ids):,} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of the tokens that text is made of, without added ones."""
        return self._tokenizer.get_vocab(with_added_tokens=False)

    def text_of(self, number: int) -> str | None:
        """Return the token with an id as the vocabulary spells it, None if no token has it."""
        return self._tokenizer.id_to_token(number)

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Return the added tokens by id, the special ones among them."""
        return self._tokenizer.get_added_tokens_decoder()


# Defaults without tokenizer_config.json: the names used by llama, qwen, deepseek, gpt and ourselves.
_BOS = ("<|bos|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>")
_EOS = ("<|eos|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|endoftext|>")


def _special_ids(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, object], file: Path
) -> tuple[int | None, int | None]:
    ids = []
    for key, usual_names in (("bos_token", _BOS), ("eos_token", _EOS)):
        token = config.get(key)
        if isinstance(token, dict):  # older files describe how the token is matched
            token = token.get("content", "")
        if token is not None and (not isinstance(token, str) or tokenizer.token_to_id(token) is None):
            raise UserError(
                f"{file.parent / 'tokenizer_config.json'}: {key} is {token!r:.80}, which is not a token of {file}. Name"
                " one that is, null for none, or list it in added_tokens_decoder"
            )
        # A key with null means that there is no such token.
        names = usual_names if key not in config else (token,) if token is not None else ()
        known = (tokenizer.token_to_id(name) for name in names)
        ids.append(next((i for i in known if i is not None), None))
    return ids[0], ids[1]
