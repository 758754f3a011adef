"""The script's tokenizer loads, covers every byte, and shortens the text it was trained on."""

import subprocess
import sys

import pytest

from torchtitan_graph.data import load_tokenizer


def train(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torchtitan_graph.train_tokenizer", *options]
    environment = {"PYTHONPATH": ":".join([".", *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_train_on_a_folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text("the cat sat on the mat\n" * 5)
    options = ["--dataset_path", str(tmp_path / "texts"), "--vocab_size", "270", "--out", str(tmp_path / "out")]
    run = train(*options)
    assert run.returncode == 0, run.stderr
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.vocab_size == 270
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert len(tokenizer.encode("the cat sat on the mat")) < 16
    every_byte = "".join(map(chr, range(256))) + "🎉"
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte


@pytest.mark.slow
def test_errors_are_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    run = train("--dataset_path", str(tmp_path / "a.jsonl"), "--out", str(tmp_path))
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()  # without argparse's usage, which would say that the command was wrong
    assert "a.jsonl, line 1: the value of the key 'text' is not text, but a number" in line
