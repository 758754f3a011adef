"""Text that spells out special tokens is told before training, and can be tokenised as such ahead of time."""

import argparse
import json

import pytest

from torchtitan_graph import pretokenize
from torchtitan_graph.config.job import DataSource
from torchtitan_graph.data import build_dataloader, load_tokenizer
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus, open_mixture
from torchtitan_graph.data.special_tokens import warn_of_special_tokens

SMALL = "tests/assets/tokenizer"
CHAT = ["<|bos|>a question<|eos|><|bos|>an answer<|eos|>", "plain <|b os|> text", "<|eos|>"]


@pytest.fixture
def chat(tmp_path):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CHAT))
    return tmp_path / "chat.jsonl"


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def load(path, tokenizer, split="all"):
    return build_dataloader(
        dataset="", dataset_path=str(path), split=split, tokenizer=tokenizer, seed=0, seq_len=8,
        local_batch_size=1, dp_rank=0, dp_degree=1,
    )  # fmt: skip


def test_special_tokens_in_text_are_told_with_what_to_do(chat, warnings):
    load(chat, load_tokenizer(SMALL))
    (line,) = warnings()
    assert line.startswith(f"{chat}: 2 of the 3 documents looked at spell out special tokens")
    assert "('<|eos|>' in 2, '<|bos|>' in 1)" in line
    assert "python -m torchtitan_graph.pretokenize --special_tokens" in line


def test_each_corpus_of_a_mixture_is_looked_at(chat, warnings, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"text": "plain"}\n' * 40)
    sources = [DataSource(dataset_path=str(path)) for path in (tmp_path / "plain.jsonl", chat)]
    open_mixture(sources, "train", 0, RowFormat(load_tokenizer(SMALL)))
    (line,) = warnings()
    assert line.startswith("training.sources, entry 2: ")


@pytest.mark.parametrize(("tokenizer", "split"), [(None, "all"), (SMALL, "validation")])
def test_what_is_not_told(chat, warnings, tokenizer, split):
    """Bytes have no special tokens in text, and what training holds out is like what it was told of."""
    load(chat, load_tokenizer(tokenizer), split)
    assert not warnings()


def test_few_documents_are_looked_at(texts_source, warnings):
    class Counted(texts_source):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    for texts, most in ((["<|eos|>"] * 300, 256), (["<|eos|>" + "x" * 2**20] * 5, 4)):
        Counted.read = 0
        warn_of_special_tokens(ShuffledCorpus(Counted(texts), "all", 0), load_tokenizer(SMALL), "here")
        assert Counted.read == most
    assert "here: 256 of the 256 documents" in warnings()[0]


def test_documents_of_all_lanes_are_looked_at(texts_source, warnings):
    class Lanes(ShuffledCorpus):
        def documents(self, lane, epoch, start):
            for index, _ in super().documents(lane, epoch, start):
                yield index, "<|eos|>" if lane == 1 else "plain"

    corpus = Lanes(texts_source(["x"] * 600), "all", 0)
    warn_of_special_tokens(corpus, load_tokenizer(SMALL), "here")
    assert f"here: {256 // corpus.num_lanes} of the 256 documents" in warnings()[0]


def test_shards_may_hold_special_tokens_of_text(chat, tmp_path, warnings):
    options = dict(
        dataset="", dataset_path=str(chat), hf_assets_path=SMALL, split="train", format=None, columns={},
        loss_on="assistant", unclear_turns="refuse", chat_template=None, chat_date=None, on_bad_row="refuse",
        split_turns="auto", chat_template_kwargs={}, num_documents=None, num_workers=0, tokens_per_shard=100,
        cache_folder=None, cache_gb=1.0,
    )  # fmt: skip
    for name, special_tokens in (("text", False), ("tokens", True)):
        pretokenize.pretokenize(argparse.Namespace(**options, out=tmp_path / name, special_tokens=special_tokens))
    assert len(warnings()) == 1
    tokenizer = load_tokenizer(SMALL)
    as_text, as_tokens = (
        open_corpus("", str(tmp_path / name), "all", 0, RowFormat(tokenizer)).source for name in ("text", "tokens")
    )
    question, answer = tokenizer.encode("a question"), tokenizer.encode("an answer")
    assert as_text[0].tolist() == tokenizer.encode(CHAT[0])
    assert as_tokens[0].tolist() == [0, *question, 1, 0, *answer, 1]
    assert as_text.digest != as_tokens.digest  # a run can't go over from one to the other
