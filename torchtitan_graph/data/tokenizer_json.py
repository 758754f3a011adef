"""A tokenizer.json that anybody may have written, and the tokens that tokenizer_config.json beside it adds."""

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
_PROBE = "Ab 12, é 🎉\n"


class AddedToken(TypedDict, total=False):
    """A token that tokenizer_config.json lists, and how text is searched for it."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerConfig(TypedDict, total=False):
    """What is read of tokenizer_config.json; its other keys are left out."""

    bos_token: Any
    eos_token: Any
    added_tokens_decoder: dict[str, AddedToken]


def read_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    """Read a tokenizer.json; return it with the file's content.

    Raises:
        UserError: it is not one, it can make text more than MOST_GROWTH times longer, or has ids beyond MOST_IDS.
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
    # What surrounds a document is packing's to add, and what a file's own template repeats is nobody's.
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
    """Read tokenizer_config.json; none is an empty one."""
    with refuse_unreadable(str(file)):
        try:
            return read_json(file, TokenizerConfig)
        except FileNotFoundError:
            return {}


def add_listed_tokens(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig, file: Path) -> list[str]:
    """Add what `added_tokens_decoder` lists and the tokenizer lacks, as transformers does; return what was added.

    Listed ids give the order; a token's id is the next that is free. (transformers counts them in the same way.)

    Raises:
        UserError: a listed id is that of another token.
    """
    listed = config.get("added_tokens_decoder", {})
    if wrong := [number for number in listed if not (number.isascii() and number.isdigit() and len(number) < 10)]:
        raise UserError(f"{file}: added_tokens_decoder lists {wrong[0]!r:.80}, which is no id")
    added: dict[str, int] = {}  # with the listed ids
    tokens = []
    for number, token in sorted(listed.items(), key=lambda item: int(item[0])):
        text = token.get("content", "")
        if not text or text in added or tokenizer.token_to_id(text) is not None:
            continue
        if (other := tokenizer.id_to_token(int(number))) is not None:
            raise UserError(
                f"{file}: added_tokens_decoder lists {text!r} with the id {number}, which is that of {other!r} in"
                " tokenizer.json. Take the line out, or name an id that is free"
            )
        flags = {key: value for key, value in token.items() if key != "content"}
        tokens.append(tokenizers.AddedToken(text, **flags))
        added[text] = int(number)
    tokenizer.add_tokens(tokens)  # at once: each call takes time by the number of tokens that there are
    moved = [text for text, number in added.items() if tokenizer.token_to_id(text) != number]
    for text in moved[:_MOST_NAMED]:
        logger.info(f"{file}: {text!r} gets the id {tokenizer.token_to_id(text)}, the next that is free")
    if len(moved) > _MOST_NAMED:
        logger.info(f"{file}: and {len(moved) - _MOST_NAMED:,} more get the ids that follow")
    return list(added)


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Raise what the library raises, bare Exceptions and panics of its own language, as a UserError about `what`."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from error


def _growth(part: dict[str, Any]) -> float:
    """Return how many times longer, in bytes, a text can be behind a normaliser, pre-tokenizer or decoder."""
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
    if kind == "Precompiled":  # a trie and, behind it, what its entries are replaced by
        replacements = base64.b64decode(part["precompiled_charsmap"])
        return max(1, *map(len, replacements[4 + int.from_bytes(replacements[:4], "little") :].split(b"\0")))
    return _GROWTH.get(kind, 1)


_GROWTH = {
    "NFKC": 11,
    "NFKD": 11,
    "NFC": 3,
    "NFD": 3,
    "BertNormalizer": 6,
    "Lowercase": 1.5,
    "ByteLevel": 4,
    "Metaspace": 4,
}
