"""Text to token ids and back: bytes, or any Hugging Face tokenizer.json."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import tokenizers

import torchtitan_graph
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable


class Tokenizer(Protocol):
    """Turn text into ids below vocab_size and back; `encode` adds no special ids, and never reads any from text.

    bos_id starts a document (None: nothing does), eos_id ends it. `digest` is equal for tokenizers that give the
    same ids.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    digest: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def load_tokenizer(path: str | None) -> Tokenizer:
    """Load the tokenizer of a folder with a tokenizer.json, or of that file; without a path, bytes are the tokens.

    Raises UserError if there is no readable tokenizer, or none of its special tokens ends a document.
    """
    if not path:
        return ByteTokenizer()
    file = find_assets(path)
    with refuse_unreadable(f"model.hf_assets_path = {path!r}"):
        if file.is_dir():
            file = file / "tokenizer.json"
        is_there = file.is_file()
    if not is_there:
        raise UserError(
            f"model.hf_assets_path = {path!r}: there is no tokenizer.json. Name a folder that holds one, or the file"
            " itself; leave the option out to train on bytes."
        )
    return FileTokenizer(file)


def find_assets(path: str) -> Path:
    """Give the place of `model.hf_assets_path`.

    A relative path that is not there is looked for in the package, which ships the tokenizer of its own examples.
    Raises UserError if it can't be looked for.
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
        self.digest = "utf-8 bytes, bos 256, eos 257"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json. Which tokens begin and end a document is read from tokenizer_config.json beside it."""

    def __init__(self, file: Path) -> None:
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file}: not a tokenizer.json that `tokenizers` can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A corpus may contain the text of a special token; there it is text.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id, eos_id = _special_ids(self._tokenizer, file)
        if eos_id is None:
            raise UserError(
                f"{file}: no token ends a document. Name it in {file.parent / 'tokenizer_config.json'}:"
                ' {"eos_token": "..."}, one of the special tokens of tokenizer.json.'
            )
        self.eos_id = eos_id
        self.digest = hashlib.sha256(content + f"{self.bos_id} {self.eos_id}".encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:  # the one setting that a pickled copy loses
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


# Where no tokenizer_config.json says it: the names in use by llama, qwen, deepseek, gpt and ourselves.
_BOS = ("<|bos|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>")
_EOS = ("<|eos|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|endoftext|>")


def _special_ids(tokenizer: tokenizers.Tokenizer, file: Path) -> tuple[int | None, int | None]:
    config_file = file.parent / "tokenizer_config.json"
    config = {}
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_bytes())
        except ValueError as error:
            raise UserError(f"{config_file}: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{config_file} holds no JSON object")
    ids = []
    for key, usual_names in (("bos_token", _BOS), ("eos_token", _EOS)):
        token = config.get(key)
        if isinstance(token, dict):  # older files spell out how the token is matched
            token = token.get("content", "")
        if token is not None and (not isinstance(token, str) or tokenizer.token_to_id(token) is None):
            raise UserError(f"{config_file}: {key} is {token!r}, which is no token of {file}.")
        # A key that is there and null says that there is no such token.
        names = usual_names if key not in config else (token,) if token is not None else ()
        known = (tokenizer.token_to_id(name) for name in names)
        ids.append(next((i for i in known if i is not None), None))
    return ids[0], ids[1]
