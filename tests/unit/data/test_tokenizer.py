"""Text goes to ids and back; special tokens are found, and never read from text."""

import base64
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_graph.data import load_tokenizer
from torchtitan_graph.data.tokenizer_json import add_listed_tokens
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
        ({"eos_token": "<end>"}, "eos_token is '<end>', which is not a token"),
        ({"eos_token": None}, "no token ends a document"),
        ({"eos_token": 3}, "eos_token is 3, which is not a token"),
        ({"eos_token": {"special": True}}, "eos_token is '', which is not a token"),
        (["<|eos|>"], "tokenizer_config.json: has invalid content: Expected `object`"),
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
    with pytest.raises(UserError, match="there is no such folder. Models of the hub are not downloaded"):
        load_tokenizer("meta-llama/Llama-3.2-1B")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"there is no such folder; did you mean .*model\? Models of the hub"):
        load_tokenizer(str(tmp_path / "modl"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json: is not JSON"):
        load_tokenizer(str(tmp_path))


# tokenizer_config.json beside it

SPECIAL = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


def beside(folder: Path, **config) -> str:
    shutil.copy(SMALL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "listed",
    [
        {"128000": "<|begin|>", "128001": "<|end|>"},  # ids that are not the next ones
        {"2048": "<|begin|>", "2049": "<|end|>"},
        {"2049": "<|begin|>", "2048": "<|end|>"},
        {"10": "<|end|>", "9": "<|begin|>"},
        {"0": "<|bos|>", "1": "<|eos|>", "2050": "<|pad|>", "2048": "<|end|>", "2049": "<|begin|>"},
    ],
)
def test_listed_tokens_are_added_as_transformers_adds_them(tmp_path, listed):
    transformers = pytest.importorskip("transformers")
    path = beside(
        tmp_path,
        added_tokens_decoder={number: {"content": text, **SPECIAL} for number, text in listed.items()},
        bos_token="<|begin|>",
        eos_token="<|end|>",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    if "9" in listed:  # ids of other tokens
        with pytest.raises(
            UserError, match=r"lists '<\|begin\|>' with the id 9, which is that of .*name an id that is"
        ):
            load_tokenizer(path)
        return
    ours, theirs = load_tokenizer(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert "<|end|>" in ours.special_tokens and ours.eos_id not in ours.encode("a <|end|>")
    assert pickle.loads(pickle.dumps(ours)).decode([ours.bos_id, *ours.encode(TEXT), ours.eos_id]) == TEXT
    assert ours.digest != load_tokenizer(str(SMALL)).digest


def test_many_listed_tokens_are_added_at_once():
    calls = []
    add = tokenizers.Tokenizer.add_tokens

    class Counted:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def add_tokens(self, tokens):
            calls.append(len(tokens))
            return add(self.inner, tokens)

    tokenizer = tokenizers.Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    listed = {str(3000 + 2 * i): {"content": f"<|{i // 2}|>", **SPECIAL} for i in range(20_000)}  # each twice
    added = add_listed_tokens(Counted(tokenizer), {"added_tokens_decoder": listed}, SMALL)
    assert calls == [10_000] and added == [f"<|{i}|>" for i in range(10_000)]
    assert [tokenizer.token_to_id(text) for text in added] == list(range(2048, 12_048))


def test_listed_tokens_that_are_there_change_nothing(tmp_path):
    listed = {"0": {"content": "<|bos|>", **SPECIAL}, "1": {"content": "<|eos|>", **SPECIAL}}
    path = beside(tmp_path, added_tokens_decoder=listed, eos_token="<|eos|>")
    assert load_tokenizer(path).digest == load_tokenizer(str(SMALL)).digest


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"1908": {"content": "the", "lstrip": True, "normalized": False}}},  # a word
        {"added_tokens_decoder": {"1908": {"content": "the", "special": True}}},
        {"added_tokens_decoder": {"0": {"content": "<|bos|>", "rstrip": True, "special": False}}},  # a special token
        {"added_tokens_decoder": {"0": {"content": "<|bos|>", **SPECIAL, "single_word": True}}},
        {"added_tokens_decoder": {str(i): {"content": "x!", "lstrip": i > 3000} for i in (3000, 3001)}},  # twice
        {"pad_token": "the", "added_tokens_decoder": {"1908": {"content": "the", "special": False}}},
        {"pad_token": "the", "additional_special_tokens": ["and"]},
        {"mask_token": {"__type": "AddedToken", "content": "the", "lstrip": True, "normalized": False}},
    ],
    ids=str,
)
@pytest.mark.parametrize("from_text", [True, False])
def test_tokens_that_are_there_are_registered_as_transformers_does(tmp_path, config, from_text):
    transformers = pytest.importorskip("transformers")
    path = beside(tmp_path, eos_token="<|eos|>", tokenizer_class="PreTrainedTokenizerFast", **config)
    ours, theirs = load_tokenizer(path, from_text), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    assert ours.vocab_size == len(theirs)
    for text in (" the other, breathe the air and", "a <|bos|> b <|bos|>x", "a x! x!b  x!", TEXT):
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=not from_text)
        assert ours.encode(text) == expected
    special = [token.content for token in theirs.added_tokens_decoder.values() if token.special]
    assert sorted(ours.special_tokens) == sorted(special)
    assert ours.digest != load_tokenizer(str(SMALL)).digest


def test_a_special_token_that_is_in_no_list_gets_no_id(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    with caplog.at_level("INFO", "torchtitan_graph"):
        tokenizer = load_tokenizer(beside(tmp_path, pad_token="<pad>", extra_special_tokens={"image_token": "<image>"}))
    assert tokenizer.vocab_size == 2048 and tokenizer.digest == load_tokenizer(str(SMALL)).digest
    assert "'<pad>', which is in no list" in caplog.text and "'<image>'" in caplog.text


def test_listed_flags_make_another_tokenizer(tmp_path):
    digests = set()
    for flags in (SPECIAL, {**SPECIAL, "lstrip": True}, {**SPECIAL, "special": False}):
        path = beside(tmp_path, added_tokens_decoder={"2048": {"content": "<x>", **flags}})
        digests.add(load_tokenizer(path).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([], "added_tokens_decoder: Expected `object`, got `array`"),
        ({"1": "<x>"}, r"added_tokens_decoder\[...\]: Expected `object`, got `str`"),
        ({"x" * 999: {"content": "<x>"}}, "lists 'x{70,}, which is not an id"),
        ({"9" * 5000: {"content": "<x>"}}, "lists '9{70,}, which is not an id"),
        ({"3000": {"content": "<x>", "special": 1}}, "special: Expected `bool`, got `int`"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(tmp_path, listed, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(beside(tmp_path, added_tokens_decoder=listed))


# Files of somebody else


def forged(**parts) -> bytes:
    eos = {"id": 2, "content": "<eos>", **SPECIAL}
    vocab = {"a": 0, "?": 1, "<eos>": 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [eos],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    }
    return json.dumps({**tokenizer, **parts}).encode()


def several(kind: str, part: dict, times: int) -> dict:
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[kind]
    return {kind: {"type": "Sequence", key: [part] * times}}


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LONG_MAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * 5000 + b"\0").decode()
FORGED = {
    "doubles": (forged(**several("normalizer", DOUBLE, 60)), "can make a text .* times longer"),
    "nested": (forged(**several("normalizer", several("normalizer", DOUBLE, 8)["normalizer"], 8)), "can make a text"),
    "bytes": (forged(**several("normalizer", {"type": "ByteLevel"}, 60)), "can make a text .* times longer"),
    "bytes again": (forged(**several("pre_tokenizer", BYTES, 60)), "can make a text .* times longer"),
    "decoder": (forged(**several("decoder", DOUBLE, 60)), "can make a text .* times longer"),
    "between": (forged(normalizer=replace({"Regex": ""}, "a" * 5000)), "can make a text .* times longer"),
    "forms": (forged(**several("normalizer", {"type": "NFKC"}, 60)), "can make a text .* times longer"),
    "map": (forged(normalizer={"type": "Precompiled", "precompiled_charsmap": LONG_MAP}), "can make a text .* times"),
    "backtracks": (forged(normalizer=replace({"Regex": "(a+)+$"}, "")), None),
    "panics": (forged(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}), "can't tokenise a text"),
    "panics too": (forged(pre_tokenizer={"type": "FixedLength", "length": 0}), "can't tokenise a text"),
    "an id": (forged(added_tokens=[{"id": 2**32 - 1, "content": "<eos>", **SPECIAL}],
                     model={"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}), None),
    "a large id": (forged(model={"type": "WordLevel", "vocab": {"?": 2**32 - 1}, "unk_token": "?"}), "last id is 4,29"),
    "random": (forged(model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}), "gives other ids"),
    "deep": (b'{"normalizer": ' + b"[" * 10**6, "not a tokenizer.json that `tokenizers` can read: recursion limit"),
    "many": (b"[" + b"[]," * 5_000_000, "holds more than 4,000,000 values"),
    "bytes that are no text": (b"\xff" * 99, "not a tokenizer.json"),
    "empty": (b"", "not a tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_tokenizers_are_refused(tmp_path, name):
    content, message = FORGED[name]
    (tmp_path / "tokenizer.json").write_bytes(content)
    if message is None:
        load_tokenizer(str(tmp_path))
        return
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_text_that_a_tokenizer_fails_on_is_told(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(FORGED["backtracks"][0])
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="can't tokenise a text that begins 'aaaa.*retry-limit"):
        tokenizer.encode("a" * 60 + "b")


def test_a_template_of_the_file_repeats_nothing(tmp_path):
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9, "pair": []}
    (tmp_path / "tokenizer.json").write_bytes(forged(post_processor={**template, "special_tokens": {}}))
    assert load_tokenizer(str(tmp_path)).encode("a") == [0]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_small_regular_file_is_refused_at_once(tmp_path, name):
    shutil.copytree(SMALL, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=f"{name}: is not a regular file, but a FIFO"):
        load_tokenizer(str(tmp_path))
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(UserError, match=f"{name}: has 1,099,511,627,776 bytes, more than"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", KINDS[:2])
def test_a_tokenizer_goes_to_worker_processes(path):
    tokenizer = load_tokenizer(path)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(TEXT + "<|eos|>") == tokenizer.encode(TEXT + "<|eos|>")
