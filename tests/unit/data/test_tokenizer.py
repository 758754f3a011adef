"""Text goes to ids and back; special tokens are found, and never read from text."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_graph.data import load_tokenizer
from torchtitan_graph.errors import UserError

SMALL = Path("tests/assets/tokenizer")
TEXT = "def f(x):\n        return x**2  # naïve 🎉 'don\\'t' 12345\r\n\tend"
KINDS = [None, str(SMALL), str(SMALL / "tokenizer.json")]


@pytest.mark.parametrize("path", KINDS)
def test_text_there_and_back(path):
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == TEXT
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize("path", KINDS[:2])
def test_any_text_there_and_back(path):
    tokenizer = load_tokenizer(path)

    @given(st.text(st.characters(codec="utf-8")))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_the_small_tokenizer():
    tokenizer = load_tokenizer(str(SMALL))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 0, 1)
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) * 0.7
    assert sum(file.stat().st_size for file in SMALL.iterdir()) < 200_000


@pytest.mark.parametrize("path", KINDS[:2])
def test_special_tokens_in_text_are_text(path):
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a <|eos|> b <|bos|>")
    assert tokenizer.eos_id not in ids and tokenizer.bos_id not in ids


def test_digests_tell_tokenizers_apart(tmp_path):
    shutil.copytree(SMALL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "<|eos|>"}')
    without_bos = load_tokenizer(str(tmp_path))
    assert without_bos.bos_id is None
    digests = [load_tokenizer(path).digest for path in KINDS] + [without_bos.digest]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("config", [None, {}, {"eos_token": {"content": "<|eos|>"}}, {"bos_token": "<|bos|>"}])
def test_special_tokens_are_found(tmp_path, config):
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<end>"}, "eos_token is '<end>', which is no token"),
        ({"eos_token": None}, "no token ends a document"),
        ({"eos_token": 3}, "eos_token is 3, which is no token"),
        ({"eos_token": {"special": True}}, "eos_token is '', which is no token"),
        (["<|eos|>"], "holds no JSON object"),
    ],
)
def test_special_tokens_that_are_not_there(tmp_path, config, message):
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="model.hf_assets_path = .*there is no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json: not JSON"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", KINDS[:2])
def test_a_tokenizer_goes_to_worker_processes(path):
    tokenizer = load_tokenizer(path)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(TEXT + "<|eos|>") == tokenizer.encode(TEXT + "<|eos|>")
