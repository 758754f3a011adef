"""The small files of an export: the base's, with the template that was trained and what ends a text."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.delivery import base_of, deliver
from torchtitan_graph.errors import UserError

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}NAME{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '' if think else 'no ' }}{{ style }}{% endif %}"
)
BOS, EOS = 0, 1


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder without weights, whose template is in tokenizer_config.json and in a file that goes first."""
    folder = tmp_path / "base"
    (folder / "additional_chat_templates").mkdir(parents=True)
    files: dict[str, Any] = {
        "tokenizer.json": (TOKENIZER / "tokenizer.json").read_text(),
        "tokenizer_config.json": {"bos_token": "<|bos|>", "chat_template": "old", "model_max_length": 77},
        "chat_template.jinja": TURNS.replace("NAME", "{{ bos_token }}"),
        "additional_chat_templates/tool_use.jinja": "with tools",
        "additional_chat_templates/rag.jinja": "with documents",
        "config.json": {"model_type": "llama", "eos_token_id": 5, "max_position_embeddings": 99, "hidden_size": 3},
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 3, "top_k": 9, "eos_token_id": 7},
        "LICENSE": "as you like",
        "added_tokens.json": {},
        "model.safetensors": "weights",
        "README.md": "what the base is",
    }
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write(base: Path | None, out: Path, path: Path | None = None, **reading: Any) -> dict[str, Any]:
    """Return config.json's keys; write the files of a delivery into the folder `out`."""
    found = deliver(RowFormat(load_tokenizer(str(path or base) if path or base else None), **reading), path or base)
    for name, content in found.files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return found.config


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_an_export_has_what_the_base_has_and_what_ends_a_text(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert write(base, out) == {"bos_token_id": BOS, "eos_token_id": 5, "max_position_embeddings": 99}
    names = {str(x.relative_to(base)) for x in base.rglob("*") if x.is_file()}
    here = {str(x.relative_to(out)) for x in out.rglob("*") if x.is_file()}
    assert names - here == {"config.json", "model.safetensors", "README.md"} and not here - names
    assert (out / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"
    # Listed ones first, then what a turn ends with, then what a document ends with.
    assert read(out / "generation_config.json") == {"bos_token_id": 3, "top_k": 9, "eos_token_id": [7, BOS, EOS]}
    # Some readers take the template here before that of the file; the end of a document was found by its usual name.
    expected = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    assert read(out / "tokenizer_config.json") == {**expected, "model_max_length": 77}
    assert write(out, tmp_path / "again")["eos_token_id"] == EOS, "config.json is not among these files"
    for name in here:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes(), "an export is exported as it is"


def test_the_template_that_was_trained_goes_with_it_and_its_arguments(base: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out, file = tmp_path / "out", tmp_path / "a.jinja"
    file.write_text("\n" + TURNS.replace("NAME", "{{ eos_token }}"))
    arguments = {"think": True, "style": "a \"\\n\" and 'é 🎉'"}
    write(base, out, chat_template=str(file), chat_template_kwargs=arguments)
    # What was trained wrote conversations with tools, too; templates of other names are the base's.
    assert [x.name for x in (out / "additional_chat_templates").iterdir()] == ["rag.jinja"]
    assert read(out / "generation_config.json")["eos_token_id"] == [7, EOS]
    asked = [{"role": "user", "content": "a"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tool = {"type": "function", "function": {"name": "f", "description": "A.", "parameters": {"type": "object"}}}
    reading = RowFormat(load_tokenizer(str(base)), chat_template=str(file), chat_template_kwargs=arguments)
    ours, _ = reading.template.render(asked, [tool], prompt=True)
    theirs = tokenizer.apply_chat_template(asked, tools=[tool], add_generation_prompt=True, tokenize=False)
    assert ours == theirs == f"\n<user>a<assistant>{arguments['style']}"
    other = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False, think=False, style="!")
    assert other == "\n<user>a<assistant>no !"
    # A run that begins with the export, and gives one argument another value: one line for each.
    first = (out / "chat_template.jinja").read_text()
    write(out, tmp_path / "second", chat_template_kwargs={"think": False})
    second = (tmp_path / "second" / "chat_template.jinja").read_text()
    assert second == first.replace("set think = True", "set think = False") != first


def test_a_tokenizer_alone_describes_no_model_and_bytes_have_ends(base: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").rename(base / "mine.json")
    (base / "chat_template.jinja").unlink()
    config = write(None, tmp_path / "out", base / "mine.json")
    assert config == {"bos_token_id": BOS, "eos_token_id": EOS}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "old"
    assert read(tmp_path / "out" / "generation_config.json") == {"bos_token_id": BOS, "eos_token_id": [EOS]}
    assert not (tmp_path / "out" / "LICENSE").exists()
    assert write(None, tmp_path / "bytes") == {"bos_token_id": 256, "eos_token_id": 257}
    assert read(tmp_path / "bytes" / "generation_config.json") == {"bos_token_id": 256, "eos_token_id": [257]}


def test_what_can_t_be_taken_along_is_refused(base: Path, tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "default", "template": ""}, {"name": "../x", "template": ""}]}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(UserError, match=r"'../x' can't be the name of a chat template"):
        write(base, tmp_path / "out")
    (base / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config.json"):
        write(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.hf_assets_path", "base", "--checkpoint.initial_load_in_hf"], "base"),
        (["--model.hf_assets_path", "base", "--model.random_base"], None),
        (
            [
                *("--model.hf_assets_path", "base", "--checkpoint.initial_load_in_hf"),
                *("--checkpoint.initial_load_path", "weights"),
            ],
            "weights",
        ),
        (["--model.hf_assets_path", "base", "--checkpoint.initial_load_path", "run/step-3"], None),
        ([], None),
    ],
)
def test_adapters_name_the_folder_of_the_weights_that_they_are_for(
    words: list[str], expected: str | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert base_of(load(words)) == (None if expected is None else str(tmp_path / expected))
