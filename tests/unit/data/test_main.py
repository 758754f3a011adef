"""`python -m torchtitan_graph.data` shows rows as the model sees them, and counts."""

import json
import multiprocessing
import os
import re
import signal
import time
from threading import Thread

import pytest
from templates import CHATML

from torchtitan_graph.config.load import load
from torchtitan_graph.data import bench
from torchtitan_graph.data.__main__ import main

SAYS = {"role": "user", "content": "a"}


@pytest.fixture
def words(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(60)]
    rows += [{"prompt": "", "completion": "x" * 99} for _ in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job.toml").write_text(f'[training]\ndataset_path = "{tmp_path}/sums.jsonl"\nseq_len = 32\n')
    return [str(tmp_path / "job.toml")]


def test_rows_are_shown_with_what_is_learned_between_brackets(words, capsys):
    assert main([*words, "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    document = shown.splitlines()[1]
    number = int(document.removeprefix("<bos>").partition("+")[0])
    assert document == f"<bos>{number}+1=[[{number + 1}<eos>]]"
    assert (
        "one epoch: " in shown
        and "(on one rank: set training.global_batch_size)" in shown
        and "conversations cut at training.seq_len: " in shown
    )
    assert "row 2" not in shown


def test_rows_are_written_as_a_page(words, tmp_path):
    assert main([*words, "--html", str(tmp_path / "rows.html"), "--most", "2"]) == 0
    page = (tmp_path / "rows.html").read_text()
    assert "<mark>" in page and "&lt;eos&gt;</mark>" in page and "there are more" in page


def test_options_of_training_count_and_a_typo_is_refused(words, capsys):
    assert main([*words, "--training.too_long", "drop"]) == 0
    assert "dropped, as longer than it: " in capsys.readouterr().out
    assert main([*words, "--training.too_lang", "drop"]) == 2


@pytest.mark.parametrize("epochs", ["0", "1"])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a prompt of more than 32 bytes:  ", "completion": "x"}, "begins after training.seq_len tokens"),
        ({"messages": [SAYS, {"role": "assistant", "content": "b", "weight": 0}]}, "nothing in them is learned .* we"),
        ({"messages": [SAYS, {"role": "assistant", "content": "b", "masked": True}]}, "nothing in them is learned"),
        ({"messages": [SAYS]}, "nothing in them is learned .*no turn of the assistant"),
    ],
)
def test_a_corpus_with_nothing_to_learn_is_refused_for_its_reason(words, tmp_path, capsys, row, why, epochs):
    (tmp_path / "sums.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    others = ["--model.hf_assets_path", "tests/assets/tokenizer", "--training.chat_template", str(tmp_path / "a.jinja")]
    (tmp_path / "a.jinja").write_text(CHATML)
    assert main([*words, "--training.epochs", epochs, *(others if "messages" in row else [])]) == 2
    said = capsys.readouterr().err
    assert re.search(f"no document has anything to learn: conversations left out, as .*{why}.*: 38", said)
    assert ("seq_len" in said) == ("prompt" in row)


def test_reversed_columns_are_refused(words, capsys):
    assert main([*words, "--training.columns", "{question = 'prompt', answer = 'completion'}"]) == 2
    said = capsys.readouterr().err
    assert "question = 'prompt' is reversed" in said and "{prompt = 'question'}" in said


def test_a_mixture_is_shown_and_has_no_end(words, tmp_path, capsys):
    (tmp_path / "more.txt").write_text("a line of text\n" * 2000)
    (tmp_path / "job.toml").write_text(
        "[training]\nseq_len = 32\n"
        + "".join(f'[[training.sources]]\ndataset_path = "{tmp_path}/{x}"\n' for x in ("sums.jsonl", "more.txt"))
    )
    assert main([*words, "--rows", "1", "--most", "40"]) == 0
    shown = capsys.readouterr().out
    assert "rows: 40; there are more, see --most" in shown and "--- row 1, document 1: " in shown


@pytest.mark.slow
def test_a_node_s_ranks_are_measured_together(words, capfd):
    assert main([*words, "--bench", "0.2", "--ranks", "2", "--training.local_batch_size", "2"]) == 0
    first, then, alone = capfd.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"opened after [\d.]+ s, first batch after [\d.]+ s", first)
    assert re.match(r"then 2 ranks read in [\d.]+ s: [\d,]+ documents/s, [\d,]+ rows/s, [\d,]+ tokens/s, ", then)
    assert re.fullmatch(r"the files alone, read one after another: [\d,]+ MB/s(, enough for [\d,]+ tokens/s)?", alone)
    assert main([*words, "--bench", "0.2", "--ranks", "2", "--training.dataset_path", "nowhere.jsonl"]) == 2
    assert "there is no such file or folder" in capfd.readouterr().err


def test_the_files_alone_are_those_that_training_reads(words, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "lines.jsonl").write_text('{"text": "x"}\n')
    os.mkfifo(tmp_path / "corpus" / "other.bin")  # an error, were it read
    os.mkfifo(tmp_path / "unused.jsonl")
    entries = (("corpus", 1), ("unused.jsonl", 0))
    sources = (f'[[training.sources]]\ndataset_path = "{tmp_path}/{name}"\nweight = {x}\n' for name, x in entries)
    (tmp_path / "job.toml").write_text("".join(sources))
    assert bench._files_alone(load(["--job.config_file", *words]), {}, 1.0) > 0


def test_a_rank_of_a_measurement_that_is_killed_is_named(words, capsys):
    others = set(multiprocessing.active_children())  # of earlier tests

    def kill() -> None:
        while len(ranks := set(multiprocessing.active_children()) - others) < 2:
            time.sleep(0.01)
        os.kill(max(ranks, key=lambda rank: rank.name).pid, signal.SIGKILL)

    Thread(target=kill, daemon=True).start()
    assert main([*words, "--bench", "--ranks", "2"]) == 2
    assert "the process of rank 1 died, killed by SIGKILL: if this machine was out of memory" in capsys.readouterr().err
    assert set(multiprocessing.active_children()) <= others


def test_a_measurement_of_no_time_is_refused(words, capsys):
    assert main([*words, "--bench", "0"]) == 2
    assert "--bench needs seconds above 0" in capsys.readouterr().err
