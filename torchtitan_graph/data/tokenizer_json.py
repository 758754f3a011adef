"""Read an untrusted tokenizer.json, and the tokens that tokenizer_config.json next to it adds."""

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import tokenizers
from tokenizers import processors

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import check_values, read_json, read_small

MOST_GROWTH = 4096  # unicode forms, a SentencePiece map, markers of spaces and bytes as characters reach 2,200 together
MOST_IDS = 2**24
_MOST_NAMED = 8
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_PROBE = "Ab 12, é 🎉\n"


class AddedToken(TypedDict, total=False):
    """A token in tokenizer_config.json, and how text is searched for it."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerConfig(TypedDict, total=False):
    """The keys that are read from tokenizer_config.json; others are ignored."""

    bos_token: Any
    eos_token: Any
    unk_token: Any
    sep_token: Any
    pad_token: Any
    cls_token: Any
    mask_token: Any
    additional_special_tokens: Any
    extra_special_tokens: Any
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: Any


def read_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    """Return the tokenizer of a tokenizer.json, and the file's content.

    Raises UserError if it is not one, can make text more than MOST_GROWTH times longer, or has ids beyond MOST_IDS.
    """
    with refuse_unreadable(str(file)):
        content = read_small(file)
    check_values(content, file)
    with blame(f"{file}: not a tokenizer.json that `tokenizers` can read"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise UserError(
            f"{file}: model.dropout = {dropout} gives other ids each time; a run needs the same: set it to null"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Packing adds the tokens around a document; the file's own template is not used.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for parts in ([tokenizer.normalizer, tokenizer.pre_tokenizer], [tokenizer.decoder]):
        with blame(f"{file}: not a tokenizer.json that is understood here"):
            growth = math.prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None)
        if growth > MOST_GROWTH:
            raise UserError(f"{file}: can make a text {growth:,.0f} times longer; up to {MOST_GROWTH:,} times is legal")
    last_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= last_id < MOST_IDS:
        raise UserError(f"{file}: its last id is {last_id:,}; 0 to {MOST_IDS - 1:,} are legal")
    with blame(f"{file}: can't tokenise a text such as {_PROBE!r}"):
        tokenizer.encode(_PROBE, add_special_tokens=False)
    return tokenizer, content


def read_tokenizer_config(file: Path) -> TokenizerConfig:
    """Return tokenizer_config.json; empty if there is none."""
    with refuse_unreadable(str(file)):
        try:
            return read_json(file, TokenizerConfig)
        except FileNotFoundError:
            return {}


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer's folder by name: `default`, and perhaps `tool_use` and others.

    They are in chat_template.jinja and additional_chat_templates/*.jinja, or else in tokenizer_config.json, where they
    are one text, or a list of names and texts. Raises UserError for anything else.
    """
    found: dict[str, str] = {}
    file = folder / "tokenizer_config.json"
    listed = read_tokenizer_config(file).get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list) and all(isinstance(each, dict) for each in listed):
        found = {each.get("name"): each.get("template") for each in listed}
    elif listed is not None:
        raise UserError(f"{file}: chat_template is neither a text nor a list of named ones")
    if not all(isinstance(part, str) for pair in found.items() for part in pair):
        raise UserError(f"{file}: chat_template: each entry of the list must have a name and a template, both texts")
    with refuse_unreadable(str(folder)):
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        for name, path in [("default", folder / "chat_template.jinja"), *((path.stem, path) for path in more)]:
            if path.is_file():
                found[name] = read_small(path).decode(errors="replace")
    return found


def read_ends(folder: Path) -> list[int]:
    """Return the ids of the tokens that end what a model says, by `eos_token_id` of a folder's generation_config.json.

    Raises UserError if it is neither an id nor a list of ids.
    """
    file = folder / "generation_config.json"
    with refuse_unreadable(str(file)):
        if not file.is_file():
            return []
        listed = read_json(file, dict[str, Any]).get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if wrong := [x for x in ids if type(x) is not int]:
        raise UserError(f"{file}: eos_token_id holds {wrong[0]!r:.80}, which is no token's id")
    return ids


def named_tokens(config: TokenizerConfig) -> dict[str, str]:
    """Return the texts of the special tokens that tokenizer_config.json names, by their keys: templates write them."""
    named = {key: _named(config.get(key))[0] for key in NAMED}
    return {key: text for key, text in named.items() if text}


def add_listed_tokens(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig, file: Path) -> list[str]:
    """Add the tokens in `added_tokens_decoder`, and those named as special, as transformers does.

    Listed ids determine the order; the id of a new token is the next free one, as in transformers. An existing token
    gets the listed flags. One that is only named, as pad_token, must exist. Returns the changes: a token's text, and
    its flags where they are not those of special tokens. Raises UserError if a listed id is that of another token.
    """
    listed = config.get("added_tokens_decoder", {})
    if wrong := [number for number in listed if not (number.isascii() and number.isdigit() and len(number) < 10)]:
        raise UserError(f"{file}: added_tokens_decoder lists {wrong[0]!r:.80}, which is not an id")
    before = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named = [_named(config.get(key)) for key in NAMED]
    special = {text for text, _ in named}
    new: dict[str, int] = {}  # with the listed ids
    tokens: dict[str, tokenizers.AddedToken] = {}
    for number, token in sorted(listed.items(), key=lambda item: int(item[0])):
        text = token.get("content", "")
        if not text:
            continue
        if text not in new and tokenizer.token_to_id(text) is None:
            if (other := tokenizer.id_to_token(int(number))) is not None:
                raise UserError(
                    f"{file}: added_tokens_decoder lists {text!r} with the id {number}, which is that of {other!r} in"
                    " tokenizer.json. Take the line out, or name an id that is free"
                )
            new[text] = int(number)
        tokens[text] = tokenizers.AddedToken(text, **{key: value for key, value in token.items() if key != "content"})
        if text in special:
            tokens[text].special = True
    for text, flags in [*named, *map(_named, _further(config))]:
        if not text or text in before or text in tokens:
            continue
        if tokenizer.token_to_id(text) is None:
            logger.info(
                f"{file}: names {text!r:.80}, which is in no list of tokens: it gets no id, as nothing needs it"
            )
        else:
            tokens[text] = tokenizers.AddedToken(text, **flags, special=True)
    changed = {text: token for text, token in tokens.items() if repr(token) != repr(before.get(text))}
    tokenizer.add_tokens([*changed.values()])  # at once: each call takes time proportional to the number of tokens
    _log_moved(tokenizer, new, file)
    return [text + "".join(f"\0{flag}" for flag in _unusual(token)) for text, token in changed.items()]


def _named(token: Any) -> tuple[str, dict[str, bool]]:
    """Return a special token's text, or "", and its flags; older files describe how the token is matched."""
    if not isinstance(token, dict):
        return token if isinstance(token, str) else "", {}
    flags = {flag: token[flag] for flag in _FLAGS if isinstance(token.get(flag), bool)}
    return _named(token.get("content"))[0], flags


def _further(config: TokenizerConfig) -> list[Any]:
    found = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [*found.values()] if isinstance(found, dict) else found if isinstance(found, list) else []


def _unusual(token: tokenizers.AddedToken) -> list[str]:
    return [flag for flag in _FLAGS if getattr(token, flag)] + ([] if token.special else ["text"])


def _log_moved(tokenizer: tokenizers.Tokenizer, new: dict[str, int], file: Path) -> None:
    moved = [text for text, number in new.items() if tokenizer.token_to_id(text) != number]
    for text in moved[:_MOST_NAMED]:
        logger.info(f"{file}: {text!r} gets the id {tokenizer.token_to_id(text)}, the next that is free")
    if len(moved) > _MOST_NAMED:
        logger.info(f"{file}: and {len(moved) - _MOST_NAMED:,} more get the ids that follow")


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Convert errors of the library `tokenizers`, Rust's panics among them, into a UserError about `what`."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from error


def _growth(part: dict[str, Any]) -> float:
    """Return the most that a normaliser, pre-tokenizer or decoder can lengthen a text, as a factor of bytes."""
    kind = part["type"]
    if kind == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("pretokenizers") or part.get("decoders", [])))
    if kind == "Replace":
        pattern, content = part["pattern"], len(part["content"].encode())
        if "String" in pattern and pattern["String"]:
            return max(1, content / len(pattern["String"].encode()))
        return 1 + content  # an expression may match between characters
    if kind == "Prepend":  # before each piece between two added tokens
        return 1 + len(part["prepend"].encode())
    if kind == "Precompiled":  # a trie and, after it, the replacements of its entries
        replacements = base64.b64decode(part["precompiled_charsmap"])
        return max(1, *map(len, replacements[4 + int.from_bytes(replacements[:4], "little") :].split(b"\0")))
    return _GROWTH.get(kind, 1)


_GROWTH = {"NFKC": 11, "NFKD": 11, "NFC": 3, "NFD": 3, "BertNormalizer": 6, "Lowercase": 1.5}
_GROWTH |= {"ByteLevel": 4, "Metaspace": 4}
