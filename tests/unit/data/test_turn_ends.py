"""The tokens that end a text: what a template writes after an answer and after calls, and what is listed."""

import json
from pathlib import Path

import pytest
from templates import CHATML, SPECIAL, TEMPLATES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_graph.data.turn_ends import ends_of_texts
from torchtitan_graph.errors import UserError

pytest.importorskip("transformers")
MORE = ["<|call|>", "<|eom_id|>", "<|observation|>", "<calls>", "</calls>"]
ENDS = {
    "llama 3.1": ["<|eot_id|>"], "qwen 2.5": ["<|im_end|>"], "qwen 3": ["<|im_end|>"], "gemma 3": ["<end_of_turn>"],
    "mistral": [], "deepseek v3": ["<｜end▁of▁sentence｜>"], "gpt-oss": ["<|return|>"], "phi": ["<|end|>"],
    "tagged": ["<|im_end|>"],
}  # fmt: skip
LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}BODY{% endfor %}"
CALLS = "{% for call in m.tool_calls or [] %}CALL{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ends")
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL + MORE])
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in ("</tool_call>", "<|plain|>", "  ")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def ends(folder: Path, template: str | None, *listed: Path) -> list[str]:
    """Return the tokens that end a text, without the document's."""
    file = None
    if template is not None:
        (folder / "a.jinja").write_text(template)
        file = str(folder / "a.jinja")
    tokenizer = load_tokenizer(str(folder))
    found = ends_of_texts(RowFormat(tokenizer, chat_template=file), listed)
    assert found[-1] == tokenizer.eos_id
    return [tokenizer.decode_all([end]) for end in found[:-1]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_ends_where_its_template_ends_it(folder: Path, name: str) -> None:
    assert ends(folder, TEMPLATES[name]) == ENDS[name]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The next turn's first token, for an answer and for calls, between which there is no special one.
        (
            LOOP.replace("{{ m.role }}", "{{ 'observation' if m.role == 'tool' else m.role }}").replace("BODY", CALLS)
            .replace("CALL", "\n<tool>{{ call.function.arguments.city }}</tool_call>"),
            ["<|user|>", "<|observation|>"],
        ),  # fmt: skip
        # A token after white space; one that is not special; none; a template that refuses everything.
        (CHATML.replace("<|im_start|>", "").replace("<|im_end|>", " \n<|end|>"), ["<|end|>"]),
        (CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "<|plain|>"), ["<|plain|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}  \n{% endfor %}", []),
        ("{{ raise_exception('never') }}", []),
        # Calls end otherwise than answers, after several special tokens of their own; arguments are a text.
        (
            LOOP.replace("BODY", CALLS + "{% if m.tool_calls %}</calls><|call|>{% else %}<|end|>{% endif %}\n")
            .replace("CALL", "<calls>{{ '' + call.function.arguments }}</calls>"),
            ["<|end|>", "<|call|>"],
        ),  # fmt: skip
    ],
)  # fmt: skip
def test_ends_of_other_kinds(folder: Path, template: str, expected: list[str]) -> None:
    assert ends(folder, template) == expected


def test_listed_ends_come_first_and_each_once(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode_marked("<|return|><|im_end|></s>")[0]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": ids}))
    reading = RowFormat(tokenizer, chat_template=str(folder / "a.jinja"))
    (folder / "a.jinja").write_text(CHATML)
    assert ends_of_texts(reading, [None, tmp_path]) == ids
    file.write_text(json.dumps({"eos_token_id": ids[0]}))
    assert ends_of_texts(reading, [tmp_path]) == [ids[0], ids[1], tokenizer.eos_id]
    file.write_text('{"eos_token_id": [1, "two"]}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id holds 'two', which is no token's id"):
        ends_of_texts(reading, [tmp_path])


def test_without_a_template_a_document_s_end_is_the_only_one(folder: Path, tmp_path: Path) -> None:
    assert ends(folder, None) == []
    assert ends_of_texts(RowFormat(ByteTokenizer()), [tmp_path]) == [257]


def test_a_template_that_is_gone_is_warned_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(str(folder))
    reading = RowFormat(tokenizer, chat_template=str(tmp_path / "gone.jinja"))
    assert ends_of_texts(reading) == [tokenizer.eos_id]
    assert "gone.jinja" in caplog.text and "Texts end as by the tokenizer's own files" in caplog.text
