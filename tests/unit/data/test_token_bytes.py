"""The bytes of tokens add up to those of a text, or there are none."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from torchtitan_graph.data.token_bytes import token_bytes
from torchtitan_graph.data.tokenizer import ByteTokenizer, load_tokenizer

TEXT = "na\u00efve \u6771\u4eac \U0001f642\n  <|eos|>"


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_bytes_are_bytes() -> None:
    sizes_V = token_bytes(ByteTokenizer())
    assert sizes_V is not None and sizes_V.tolist() == [1] * 256 + [0, 0]


def test_a_byte_level_bpe_adds_up_whatever_the_cut(tmp_path: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocabulary | {"na": 256}, [("n", "a")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = load_tokenizer(saved(bpe, tmp_path))
    sizes_V, ids = token_bytes(tokenizer), tokenizer.encode(TEXT)
    assert sizes_V is not None
    assert sizes_V[ids].sum() == len(TEXT.encode()) and sizes_V[256] == 2
    assert sizes_V[tokenizer.eos_id] == 0


@pytest.mark.parametrize("change", ["words", "stripped"])
def test_a_tokenizer_that_changes_text_has_none(change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    if change == "words":
        other = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
        other.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        other = Tokenizer(models.BPE(vocabulary, []))
        other.normalizer = normalizers.Strip()
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert token_bytes(load_tokenizer(saved(other, tmp_path))) is None
    assert "no perplexity per byte" in caplog.text
