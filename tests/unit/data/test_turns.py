"""Each turn is learned as transformers would generate it, in as few contexts as its template allows."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from templates import CHATML, GPT_OSS, QWEN3
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.counts import in_words
from torchtitan_graph.data.document import Contexts
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.messages import LEARNED
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.packing import Cursor, Packing
from torchtitan_graph.data.rendering import with_defaults
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.data.whole_lane import open_lane
from torchtitan_graph.errors import UserError

TRL = importlib.util.find_spec("trl") is not None
_spec = importlib.util.spec_from_file_location("chat_templates", "scripts/chat_templates.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

# The generation prompt opens reasoning, closes it, or leaves it out; earlier turns have none.
THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Behind a template: its generation prompt has an empty block of reasoning on request.
NO_THINKING = (
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}{% endif %}"
)
# The prompt opens reasoning, and no answer is ever rendered with any.
DROPPING = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' + message.content }}
    {%- else %}{{- '<|assistant|>' + message.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{% endif %}"""
# No turn has an end: the next one's first token is it.
ENDLESS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}{{- '<think></think>\\n' }}{% endif %}
    {{- message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
# What closes a conversation follows the end of a turn at once.
CLOSED = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MADE = {"thinking": THINKING, "dropping": DROPPING, "endless": ENDLESS, "closed": CLOSED, "chatml": CHATML,
        "gpt-oss": GPT_OSS, "qwen 3": QWEN3}  # fmt: skip
# The number of contexts of each kind: several turns, system, tools, reasoning, an empty answer, white space, unicode.
CONTEXTS = {
    "thinking": "3132222", "endless": "1111111", "closed": "1111121", "chatml": "1111121", "gpt-oss": "3132222",
    "qwen 3": "3132222",
}  # fmt: skip


def made(folder: Path, template: str, **arguments: object) -> ChatTemplate:
    script.make_tokenizer(folder, template)
    return ChatTemplate(load_tokenizer(str(folder)), date=script.DATE, arguments=arguments)


def runs(template: ChatTemplate, document: object) -> list[str]:
    contexts = document.contexts if isinstance(document, Contexts) else [document]
    decode = template._tokenizer.decode_all
    return [decode(c.ids[start:end].tolist()) for c in contexts for start, end in script.runs_of(c)]


PLAIN = [
    {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Hot."},
    {"role": "user", "content": "Now?"}, {"role": "assistant", "content": "Wait."},
]  # fmt: skip


@pytest.mark.parametrize("name", CONTEXTS)
def test_seven_kinds_of_conversation_are_learned_as_transformers_generates_them(tmp_path, name):
    script.make_tokenizer(tmp_path, MADE[name])
    _, found = script.run_template(tmp_path, {})
    assert "".join(found.values()) == CONTEXTS[name], found


def test_a_turn_in_the_form_of_a_longer_conversation_would_be_found(tmp_path):
    """The negative control of the test above: the whole conversation, with earlier turns as it renders them."""
    template = made(tmp_path, THINKING)
    (*_, last) = template.tokens(PLAIN, None, "assistant", skip=False).contexts
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for is_target in (last.is_target, last.is_target | True):
        with pytest.raises(AssertionError):
            script.compare(last._replace(is_target=is_target), theirs, PLAIN, None, {})


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chats_without_reasoning_under_a_prompt_that_opens_it(tmp_path, arguments):
    template = made(tmp_path, THINKING, **arguments)
    document = template.tokens(PLAIN, None, "assistant", skip=False)
    assert runs(template, document) == ["Hot.<|im_end|>", "Wait.<|im_end|>"]
    for context in document.contexts:
        assert "<think>\n\n</think>\n\n" in template._tokenizer.decode_all(context.ids.tolist())


@pytest.mark.parametrize(
    ("text", "arguments", "what"),
    [
        (THINKING, {}, "opens reasoning by <think>, .* set training.chat_template_kwargs = {enable_thinking = false}"),
        (THINKING.replace("enable_thinking", "thinks"), {}, "chat_template_kwargs = {thinks = false}"),
        (THINKING.split("{%- if enable")[0] + "{%- endif %}", {}, "name a template in training.chat_template"),
        (THINKING, {"enable_thinking": False}, None),
        (QWEN3, {}, "has no block of reasoning, .* name a template in training.chat_template"),
        (QWEN3 + NO_THINKING, {}, "has no block of reasoning, .*{enable_thinking = false}"),
        (QWEN3 + NO_THINKING, {"enable_thinking": False}, None),
    ],
)
def test_answers_after_an_empty_block_that_the_prompt_lacks_are_warned_of(tmp_path, caplog, text, arguments, what):
    template = made(tmp_path, text, **arguments)
    reasoned = {**PLAIN[1], "reasoning_content": "It is old."}
    if not arguments:
        template.tokens([PLAIN[0], reasoned], None, "assistant", skip=False)
        assert not caplog.messages
    for _ in range(2):
        template.tokens(PLAIN, None, "assistant", skip=False)
    assert re.search(what, "".join(caplog.messages)) if what else not caplog.messages
    assert len(caplog.messages) == (what is not None)


def test_reasoning_that_the_prompt_opens_is_learned_behind_its_tag(tmp_path):
    template = made(tmp_path, THINKING)
    said = [*PLAIN[:3], {**PLAIN[3], "reasoning_content": "It is old."}]
    assert runs(template, template.tokens(said, None, "last_assistant", skip=False)) == [
        "It is old.\n</think>\n\nWait.<|im_end|>"
    ]
    with pytest.raises(UserError, match=r"reads enable_thinking\), name a template"):
        made(tmp_path, THINKING, enable_thinking=False).tokens(said, None, "assistant", skip=False)
    exported = made(tmp_path, with_defaults(THINKING, {"enable_thinking": False}))
    with pytest.raises(UserError, match=r"reads enable_thinking; where none is given, .* sets enable_thinking = False"):
        exported.tokens(said, None, "assistant", skip=False)


def test_a_prompt_that_no_answer_begins_with_is_refused_with_a_way_that_works(tmp_path):
    match = r"message 4.*there is '<think>\\n', and 'Wait.</s>' where it is answered\. Name a template"
    with pytest.raises(UserError, match=match):
        made(tmp_path, DROPPING).tokens(PLAIN, None, "assistant", skip=False)
    template = made(tmp_path, DROPPING.replace("<think>\\n", ""))
    assert runs(template, template.tokens(PLAIN, None, "assistant", skip=False)) == ["Hot.</s>", "Wait.</s>"]


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_next_turns_first_token_ends_a_turn(tmp_path, caplog, is_listed):
    template = made(tmp_path, ENDLESS)
    if not is_listed:
        (tmp_path / "generation_config.json").write_text("{}")
        template = ChatTemplate(load_tokenizer(str(tmp_path)))
    document = template.tokens(PLAIN, None, "assistant", skip=False)
    assert runs(template, document) == ["Hot.<|user|>", "Wait." + "<|user|>" * is_listed]
    assert ("List that token's id in eos_token_id" in caplog.text) is not is_listed


@pytest.mark.parametrize(
    "begin, end, learned", [("### ", "\n\n", "the end.\n\n"), ("<|user|>", "", "the end.<|user|>")]
)
def test_an_answer_without_an_end_of_its_own_that_merges_with_its_prompt(tmp_path, begin, end, learned):
    """It is learned as it is tokenised by itself, behind the prompt's own tokens."""
    template = f"{{% for m in messages %}}{begin}{{{{ m.role }}}}: {{{{ m.content }}}}{end}{{% endfor %}}"
    made(tmp_path, f"{template}{{% if add_generation_prompt %}}{begin}assistant: {{% endif %}}")
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["model"]["vocab"]["\u0120t"] = 1 + max(
        *file["model"]["vocab"].values(), *(token["id"] for token in file["added_tokens"])
    )
    file["model"]["merges"].append(["\u0120", "t"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    merging = ChatTemplate(load_tokenizer(str(tmp_path)))
    document = merging.tokens([PLAIN[0], {"role": "assistant", "content": "the end."}], None, "assistant", skip=False)
    assert runs(merging, document) == [learned]
    assert merging._tokenizer.decode_all(document.ids[~document.is_target].tolist()).endswith("assistant: ")


def test_an_eos_token_id_that_is_no_id_is_refused(tmp_path):
    made(tmp_path, ENDLESS)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "x"]}')
    with pytest.raises(UserError, match="generation_config.json: eos_token_id holds 'x', which is no token's id"):
        ChatTemplate(load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_tokens_that_take_the_white_space_around_them(tmp_path, side):
    """As of Phi-3: `<|end|>` with the line break behind it is one token."""
    script.make_tokenizer(tmp_path, CLOSED)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(x, **{side: True}) for x in ("<|end|>", "<|user|>", "<|assistant|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    _, found = script.run_template(tmp_path, {})
    assert all(number in "12" for number in found.values()) and found["several turns"] == "1", found


def test_a_turn_that_is_not_to_be_learned_is_not(tmp_path):
    template = made(tmp_path, CHATML)
    messages = [PLAIN[0], {**PLAIN[1], LEARNED: False}, *PLAIN[2:]]
    assert runs(template, template.tokens(messages, None, "assistant", skip=False)) == ["Wait.<|im_end|>"]
    assert runs(template, template.tokens(PLAIN[:2], None, "last_assistant", skip=False)) == ["Hot.<|im_end|>"]
    assert not template.tokens(messages[:2], None, "last_assistant", skip=False).is_target.any()
    everything = runs(template, template.tokens(messages, None, "all", skip=False))
    assert len(everything) == 2 and everything[0].endswith("assistant\n") and everything[1].startswith("\n<|im_start|>")
    with pytest.raises(UserError, match="message 2, by the assistant, is not to be learned, and training.loss_on"):
        made(tmp_path, THINKING).tokens(messages, None, "all", skip=False)


def test_arguments_that_the_template_does_not_read_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not read 'enable_thinkin'; did you mean enable_thinking"):
        made(tmp_path, THINKING, enable_thinkin=False)
    for name in ("message", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(UserError, match=f"chat_template_kwargs: the chat template does not read '{name}'"):
            made(tmp_path, THINKING, **{name: 1})
    assert made(tmp_path, THINKING, enable_thinking=False).digest != made(tmp_path, THINKING).digest
    day = "{% if day is not defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}{{ messages[0].content }}"
    assert made(tmp_path, day, day="a day").render(PLAIN[:1])[0] == "a dayTea?"


def test_a_template_that_is_not_there_or_writes_no_message_is_refused_by_its_option(tmp_path):
    tokenizer = made(tmp_path, THINKING)._tokenizer
    (file := tmp_path / "mine.jinja").write_text("Hello. {% if add_generation_prompt %}So: {% endif %}")
    with pytest.raises(UserError, match=r"^training.chat_template = '.*mine.jinja': the chat template does not write"):
        RowFormat(tokenizer, chat_template=str(file)).form(["messages"], "here").digest  # noqa: B018
    with pytest.raises(UserError, match=r"mnie.jinja': there is no such file; did you mean .*/mine.jinja\?$"):
        RowFormat(tokenizer, chat_template=str(tmp_path / "mnie.jinja")).template  # noqa: B018
    file.write_text("{{ messages[0].content }}{{ strftime_now('%d') }}")
    RowFormat(tokenizer, chat_template=str(file)).template  # noqa: B018  # a row says that it writes the day


def test_a_row_becomes_several_contexts_by_the_options(tmp_path):
    script.make_tokenizer(tmp_path, THINKING)
    tokenizer, row = load_tokenizer(str(tmp_path)), {"messages": PLAIN}
    assert len(RowFormat(tokenizer).form(row, "here").document(row, "here").contexts) == 2
    with pytest.raises(UserError, match="here: message 2, by the assistant: it is rendered another way.*split_turns"):
        RowFormat(tokenizer, split_turns="never").form(row, "here").document(row, "here")
    for more in (PLAIN[2:3], [PLAIN[2], {**PLAIN[3], "weight": 0}]):  # which are not learned, and follow all the same
        row = {"messages": [*PLAIN[:2], *more]}
        assert not isinstance(RowFormat(tokenizer).form(row, "here").document(row, "here"), Contexts)
        with pytest.raises(UserError, match="here: message 2, by the assistant: it is rendered another way"):
            RowFormat(tokenizer, split_turns="never").form(row, "here").document(row, "here")
    row = {"prompt": PLAIN[:3], "completion": PLAIN[3:]}
    document = RowFormat(tokenizer).form(row, "here").document(row, "here")
    assert tokenizer.decode_all(document.ids[document.is_target].tolist()) == "Wait.<|im_end|>"
    row = {"prompt": PLAIN[:1], "chosen": PLAIN[1:], "rejected": PLAIN[1:2]}
    with pytest.raises(UserError, match="here: an answer has several turns of the assistant.*one context"):
        RowFormat(tokenizer, format="preference").form(row, "here").document(row, "here")


def test_contexts_are_packed_each_by_itself_counted_and_kept_by_shards(tmp_path):
    script.make_tokenizer(tmp_path, THINKING)
    tokenizer, reading = load_tokenizer(str(tmp_path)), RowFormat(load_tokenizer(str(tmp_path)))
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": PLAIN}) + "\n") * 8)
    corpus = open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading)
    documents = [corpus.source[number] for number in range(8)]
    writing = write_shards(
        tmp_path / "shards", lambda start: enumerate(documents[start:], start), is_whole=True,
        source_digest=corpus.source.digest, splits=["all"], tokenizer=tokenizer, tokens_per_shard=300,
    )  # fmt: skip
    assert [*writing][-1][0] == 8
    shards = open_corpus("", str(tmp_path / "shards"), "all", 0, RowFormat(tokenizer)).source
    for number, document in enumerate(documents):
        for ours, theirs in zip(shards[number].contexts, document.contexts, strict=True):
            assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]
    lane = open_lane(corpus, tokenizer, Packing(seq_len=2048, epochs=1), 0, Cursor())
    _, labels, positions, _ = lane.next_row()
    (mine,) = {tuple(map(len, (c.ids for c in d.contexts))) for d in documents}
    begins = (positions[: lane.filled] == 0).nonzero()[0]
    assert sorted(np.diff([*begins, lane.filled])) == sorted(mine * lane.counts.split) and lane.counts.split > 0
    assert (labels >= 0).sum() == lane.counts.split * sum(c.is_target.sum() for c in documents[0].contexts)
    said = in_words(lane.counts)
    number = lane.counts.split
    assert f"conversations split: {number}, into {2 * number} contexts, by training.split_turns" in said


# Published templates that TRL ships, and why some kinds are refused: no rendering of them continues its prompt.
PUBLISHED = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates" if TRL else Path()


@pytest.mark.slow
@pytest.mark.skipif(not TRL, reason="needs TRL, which has published templates")
@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.jinja")) if TRL else [], ids=lambda file: file.stem)
def test_published_templates_are_learned_as_transformers_generates_them(tmp_path, file):
    template = file.read_text()
    script.make_tokenizer(tmp_path, template)
    _, found = script.run_template(tmp_path, {})  # raises where they differ
    refused = [reason for reason in found.values() if not reason.isdigit() and reason != "marked"]
    assert all(
        "the chat template refuses it" in x or "the generation prompt is not how it begins" in x for x in refused
    )
    if "marked" in found.values():
        ours = ChatTemplate(load_tokenizer(str(tmp_path)), date=script.DATE)
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for kind, (messages, tools) in script.conversations().items():
            if found[kind] == "marked":
                marks = theirs.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
                tokens = ours.tokens(messages, tools, "assistant", skip=False)
                assert tokens.ids.tolist() == marks["input_ids"]
                assert tokens.is_target.tolist() == [bool(x) for x in marks["assistant_masks"]]


def test_half_a_surrogate_pair_anywhere_is_replaced(tmp_path):
    template = made(tmp_path, QWEN3)
    said = [PLAIN[0], {**PLAIN[1], "reasoning_content": json.loads('"\\ud83d x"')}]
    assert runs(template, template.tokens(said, None, "assistant", skip=False)) == [
        "<think>\n\ufffd x\n</think>\n\nHot.<|im_end|>"
    ]
