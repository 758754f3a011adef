"""The command: what it reads and prints, and refuses in one line."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_graph.checkpoint import save_model
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.generate import Options, generate
from torchtitan_graph.generate import chat as chat_module
from torchtitan_graph.generate.__main__ import main
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, to_hf
from torchtitan_graph.open_model import open_model

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"
SHORT = ["--max_new_tokens", "6"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published: config.json, weights, tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    torch.manual_seed(0)
    to_hf(llama3.Model(llama3.Config(32, 1, 2, 2, 64, vocab_size=2048, rope_scaling=None)), folder, assets=TOKENIZER)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture) -> Any:
    def call(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture) -> Any:
    def call(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return call


def test_prompts_of_a_file_are_continued_as_each_alone(folder: Path, run: Any, tmp_path: Path) -> None:
    prompts = ["def main(", "x\ny", "import os, sys and more"]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    draw = ["--json", "--temperature", "1", "--top_k", "40", "--num_samples", "2", "--seed", "5", *SHORT]
    found = [json.loads(line) for line in run(folder, "--prompts", tmp_path / "p.jsonl", *draw).splitlines()]
    assert [(x["prompt"], x["sample"]) for x in found] == [(text, n) for text in prompts for n in (0, 1)]
    alone = run(folder, "--prompts", tmp_path / "p.jsonl", *draw, "--batch_size", "1").splitlines()
    assert found == [json.loads(line) for line in alone]
    assert found[0]["text"] != found[1]["text"] and found[0]["ended"] == "length" and len(found[0]["tokens"]) == 6


def test_lines_of_standard_input_are_prompts(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def main(\n\nimport os\n"))
    together = run(folder, "--prompts", "-", *SHORT)
    assert together == run(folder, "def main(", *SHORT) + "\n" + run(folder, "import os", *SHORT) + "\n"


def test_a_text_ends_at_a_stop_string_or_a_token_of_generation_config(folder: Path, run: Any, tmp_path: Path) -> None:
    whole = json.loads(run(folder, "def main(", "--json", *SHORT))
    stop = whole["text"][4:7]
    cut = json.loads(run(folder, "def main(", "--json", "--stop", stop, *SHORT))
    assert cut["ended"] == "stop" and cut["text"] == whole["text"].partition(stop)[0]
    shutil.copytree(folder, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, whole["tokens"][2]]}))
    ended = json.loads(run(tmp_path / "hf", "def main(", "--json", *SHORT))
    assert ended["ended"] == "eos" and ended["tokens"] == whole["tokens"][:2]
    assert json.loads(run(tmp_path / "hf", "def main(", "--json", "--ignore_eos", *SHORT)) == whole


def test_the_configuration_is_found_wherever_the_checkpoint_lies(
    folder: Path, run: Any, refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    words = ["def main(", *SHORT]
    expected = run(folder, *words)
    # A run that was started in tmp_path with a relative hf_assets_path; the configuration above its checkpoints.
    shutil.copytree(folder, tmp_path / "assets")
    outputs = tmp_path / "outputs" / "run"
    save_model(outputs / "checkpoint", from_hf(folder))
    step = outputs / "checkpoint" / "step-0"
    toml = 'model = {name = "llama3", hf_assets_path = "assets"}\n'
    (outputs / "config.toml").write_text(toml)
    # Of a checkpoint, of a folder of checkpoints, and of a run, the newest; of several runs none.
    assert run(step, *words) == run(outputs / "checkpoint", *words) == run(outputs, *words) == expected
    shutil.copytree(outputs, outputs.with_name("other"))
    line = refusal(outputs.parent, *words)
    assert f"{outputs.parent} is not a checkpoint; did you mean one of" in line and f"{step}" in line
    shutil.rmtree(outputs.with_name("other"))
    # Moved away, with the configuration in it; and without any.
    moved = tmp_path / "far" / "away" / "from" / "all" / "runs"
    shutil.copytree(step, moved)
    assert run(moved, *words, "--job.config_file", outputs / "config.toml") == expected
    assert "neither it nor the three folders above hold a run's config.toml" in refusal(moved, *words)
    (moved / "config.toml").write_text(toml)
    assert run(moved, *words) == expected  # tmp_path is above it, too


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["ADAPTER", "a"], "ADAPTER holds adapters alone, in the format of the library PEFT: name their run's folder"),
        (["step-3-adapter", "--chat"], "/step-3-hf, their run's folder or its checkpoint"),
        ([".", "--max_new_tokens", "0"], "--max_new_tokens 0: must be at least 1"),
        ([".", "--temperature", "nan"], "--temperature nan: must be at least 0"),
        ([".", "--top_p", "0"], "--top_p 0.0: must be above 0 and at most 1"),
        ([".", "--top_k", "5"], "--temperature 0 takes the likeliest token"),
        ([".", "--num_samples", "2"], "--temperature 0 takes the likeliest token"),
        ([".", "a", "--prompts", "b"], "--prompts and a prompt: give one of them"),
        ([".", "--stop", ""], "--stop '': must be a text"),
        ([".", "--tensor_parallel_degree", "2"], "does not divide 1 processes"),
        ([".", "a", "--chat"], "--chat reads what is said from the terminal: leave out prompt"),
        ([".", "--system", "a"], "--system: is the system prompt of --chat"),
        (["HF", "--prompts", "nowhere"], "--prompts nowhere: can't be read"),
        (["HF", "--prompts", "EMPTY"], "holds no prompt"),
        (["HF", "--prompts", "WRONG.jsonl"], "line 1: the key `prompt` must hold a text"),
        (["HF", "--chat"], "has no chat template"),
    ],
)
def test_a_mistake_is_refused_in_one_line(
    words: list[str], part: str, folder: Path, refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("\n")
    Path("step-3-hf").mkdir()
    for name in ("ADAPTER", "step-3-adapter"):
        Path(name).mkdir()
        Path(name, "adapter_config.json").write_text("{}")
    Path("WRONG.jsonl").write_text('{"text": "a"}\n')
    assert part in refusal(*[str(folder) if word == "HF" else word for word in words])


# --- chat ---


@pytest.fixture
def chatting(folder: Path, tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


def test_a_chat_answers_what_the_rendered_conversation_is_continued_with(
    chatting: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = from_hf(chatting), load_tokenizer(str(chatting))

    def continued(text: str) -> str:
        tokens, _ = tokenizer.encode_marked("<|bos|>" + text)
        (*_, last) = generate(model, tokenizer, [tokens], Options(max_new_tokens=6, stops=("\n",)), torch.device("cpu"))
        return last[0][0].text

    lines = ["hello", "again", "/reset", "hello", "/system be kind", "hello", "/what"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    answers = run(chatting, "--chat", "--stop", "\n", *SHORT).split("\n")
    first = continued("<user>hello<assistant>")
    assert answers[0] == answers[2] == first
    assert answers[1] == continued(f"<user>hello<assistant>{first.strip()}<|eos|><user>again<assistant>")
    assert answers[3] == continued("<system>be kind<user>hello<assistant>") != first
    assert answers[4].startswith("/what: no command; /reset starts again")


def test_an_answer_can_be_stopped_and_one_that_fails_is_forgotten(
    chatting: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spoilt(model: Any, tokenizer: Any, prompts: Any, options: Any, device: Any) -> Any:
        seen.append((tokenizer.decode_all(prompts[0]), options.ends))
        if len(seen) == 1:
            raise UserError("too long")
        yield [(None, "so ")]
        if len(seen) == 2:
            raise KeyboardInterrupt
        yield [(None, "far")]

    monkeypatch.setattr(chat_module, "generate", spoilt)
    monkeypatch.setattr("sys.stdin", io.StringIO("zero\none\ntwo\n"))
    assert run(chatting, "--chat") == "too long; /reset starts again\nso \nso far\n"
    assert seen[2][0] == "<|bos|><user>one<assistant>so<|eos|><user>two<assistant>"


def test_an_answer_ends_at_the_token_that_the_template_writes_after_one(chatting: Path) -> None:
    (chatting / "chat_template.jinja").write_text(TEMPLATE.replace("{{ eos_token }}", "{{ bos_token }}"))
    (chatting / "generation_config.json").write_text('{"eos_token_id": 7}')
    opened = open_model(chatting)
    assert opened.ends() == [7, opened.tokenizer.bos_id, opened.tokenizer.eos_id]
