"""Conversations: the tokens are transformers', and what is learned is what the assistant says, with its end token."""

import json
import random

import numpy as np
import pytest
from templates import BEFORE, CHATML, ENDS, QWEN3, SPECIAL, SPLITS, TAGGED, TEMPLATES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.document import Contexts
from torchtitan_graph.data.messages import messages_of
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError

WORDS = [
    "tea",
    "is",
    "hot",
    "and",
    "the pot",
    "is old",
    "so we wait",
    "a while",
    "1",
    "23",
    "ünï",
    "☕",
    "ok\n\n1",
    "<think>",
]
NAMES = [*TEMPLATES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer in which words end anywhere, with the special tokens of all templates."""
    path = tmp_path_factory.mktemp("chat")
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r" ?\w+|\s*[\r\n]+|\s+(?!\S)|\s+| ?[^\s\w]+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "\n\n\n", "assistant\n user\n system\n"] * 3, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def make_template(folder, tmp_path):
    def make(text: str) -> ChatTemplate:
        (tmp_path / "template.jinja").write_text(text)
        return ChatTemplate(load_tokenizer(str(folder)), str(tmp_path / "template.jinja"), "2026-01-31")

    return make


def conversation(draw: random.Random, system: bool | None = None) -> list[dict]:
    said = lambda: " ".join(draw.choices(WORDS[:-1], k=draw.randint(1, 12))).strip() or "ok"  # noqa: E731
    messages = [{"role": "system", "content": said()}] if (draw.random() < 0.5 if system is None else system) else []
    for _ in range(draw.randint(1, 3)):
        messages += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
    return messages


def learned(template: ChatTemplate, tokens) -> list[str]:
    """Return the texts of the runs of targets, of one context after the other."""
    if isinstance(tokens, Contexts):
        return [run for context in tokens.contexts for run in learned(template, context)]
    runs, run = [], []
    for token, is_target in [*zip(tokens.ids.tolist(), tokens.is_target, strict=True), (0, False)]:
        if is_target:
            run.append(token)
        elif run:
            runs.append(template._tokenizer.decode_all(run))
            run = []
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_says_is_learned_with_its_end(make_template, name, num_conversations=20):
    template, draw = make_template(TEMPLATES[name]), random.Random(0)
    for _ in range(num_conversations):
        messages = conversation(draw)
        tokens = template.tokens(messages, None, "assistant", skip=False)
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        before, (inner, last) = BEFORE.get(name, ""), ENDS[name]
        expected = [before + text + (inner if i + 1 < len(said) else last) for i, text in enumerate(said)]
        assert learned(template, tokens) == expected
        only_last = template.tokens(messages, None, "last_assistant", skip=False)
        assert learned(template, only_last) == expected[-1:]
        assert template.tokens(messages, None, "all", skip=False).is_target.all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_says_is_learned_in_2000_conversations(make_template, name):
    test_what_the_assistant_says_is_learned_with_its_end(make_template, name, num_conversations=2000)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(folder, make_template, name, monkeypatch):
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    template, draw = make_template(TEMPLATES[name]), random.Random(1)
    environment = chat_template_utils._compile_jinja_template(TEMPLATES[name])
    environment.globals["strftime_now"] = template._strftime  # the same day
    for _ in range(10):
        messages = conversation(draw)
        options = dict(chat_template=TEMPLATES[name], tokenize=True, return_dict=True)
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=name == "tagged", **options)
        tokens = template.tokens(messages, None, "assistant", skip=False)
        last = tokens.contexts[-1] if isinstance(tokens, Contexts) else tokens
        assert last.ids.tolist() == expected["input_ids"]
        assert isinstance(tokens, Contexts) == (name in SPLITS and sum(m["role"] == "assistant" for m in messages) > 1)
        if name == "tagged":
            assert tokens.is_target.tolist() == [bool(x) for x in expected["assistant_masks"]]


def test_a_shifted_turn_would_be_found(make_template):
    """The negative control of the tests above."""
    template = make_template(CHATML)
    turn = template._turn
    template._turn = lambda *args: turn(*args)._replace(prompt=turn(*args).prompt[:-1])
    with pytest.raises(AssertionError):
        test_what_the_assistant_says_is_learned_with_its_end(lambda text: template, "qwen 2.5")


REASONED = [
    {"role": "user", "content": "tea?"},
    {"role": "assistant", "content": "hot", "reasoning_content": "the pot"},
    {"role": "user", "content": "now?"},
    {"role": "assistant", "content": "wait", "reasoning_content": "is old"},
]


def test_reasoning_that_is_dropped_later_is_learned_in_a_context_of_its_own(make_template):
    template = make_template(QWEN3)
    first, last = "<think>\nthe pot\n</think>\n\nhot<|im_end|>", ["<think>\nis old\n</think>\n\nwait<|im_end|>"]
    tokens = template.tokens(REASONED, None, "assistant", skip=False)
    assert learned(template, tokens) == [first, *last]
    for context, messages in zip(tokens.contexts, (REASONED[:2], REASONED), strict=True):
        assert context.ids.tolist() == template.tokens(messages, None, "all", skip=False).ids.tolist()
    match = (
        r"(?s)message 2, by the assistant: it is rendered another way when more follows.*training.split_turns = 'auto'"
    )
    with pytest.raises(UserError, match=match):
        template.tokens(REASONED, None, "assistant", skip=False, split=False)
    assert learned(template, template.tokens(REASONED, None, "assistant", skip=True, split=False)) == last
    assert learned(template, template.tokens(REASONED, None, "last_assistant", skip=False)) == last


def test_an_empty_block_of_reasoning_is_not_learned(make_template):
    template = make_template(QWEN3)
    tokens = template.tokens(messages_of([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}], "here"),
                             None, "assistant", skip=False)  # fmt: skip
    assert "<think>\n\n</think>" in template._tokenizer.decode_all(tokens.ids.tolist())
    assert learned(template, tokens) == ["ok<|im_end|>"]


def test_calls_of_tools_are_learned_and_their_answers_are_not(make_template):
    template = make_template(QWEN3)
    call = {"type": "function", "function": {"name": "brew", "arguments": {"cups": 2}}}
    messages = messages_of(
        [
            {"role": "user", "content": "tea"},
            {"role": "assistant", "content": "", "tool_calls": [call], "name": None},
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "ok"},
        ],
        "here",
    )
    called = '\n<tool_call>\n{"name": "brew", "arguments": {"cups": 2}}\n</tool_call><|im_end|>'
    tokens = template.tokens(messages, None, "assistant", skip=False)
    assert learned(template, tokens) == [called, "ok<|im_end|>"]


@pytest.mark.parametrize("text", ["\nb", "\n\n b", " b", "b \n", "\u0301b", "☕", "👩‍👧", "\ud800b"])
def test_a_turn_is_learned_after_the_tokens_of_its_prompt(make_template, text):
    """Also where a tokenizer merges the end of the prompt with the beginning of the answer."""
    template = make_template(CHATML)
    encode = lambda text: template._tokenizer.encode_marked(text)[0]  # noqa: E731
    asked = {"role": "user", "content": "a"}
    tokens = template.tokens([asked, {"role": "assistant", "content": text}], None, "assistant", skip=False)
    prompt, answer = encode(template.render([asked], prompt=True)[0]), encode(text.replace("\ud800", "\ufffd"))
    assert tokens.ids.tolist() == [*prompt, *answer, *encode("<|im_end|>\n")]
    assert tokens.is_target.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1) + [False]


def test_tags_that_differ_from_the_prompt_are_followed_with_a_warning(make_template, caplog):
    template = make_template(TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert learned(template, template.tokens(messages, None, "assistant", skip=False)) == ["b"]
    assert "does not mark '<|im_end|>'" in caplog.text


def test_tags_are_not_compared_with_a_turn_that_the_whole_conversation_renders_otherwise(make_template, caplog):
    last = "{% generation %}{% if loop.last %}<think>\n</think>\n\n{% endif %}"
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    template = make_template(TAGGED.replace("{% generation %}", last))
    assert len(learned(template, template.tokens(messages, None, "assistant", skip=False))) == 2
    assert "the template is followed" not in caplog.text


def test_a_template_without_end_tokens_is_warned_of(make_template, caplog):
    template = make_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                             "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert learned(template, template.tokens(messages, None, "assistant", skip=False)) == [" b\n"]
    assert "ends no turn" in caplog.text


def test_the_day_must_be_named_where_a_template_writes_it(folder, tmp_path):
    (tmp_path / "a.jinja").write_text(TEMPLATES["llama 3.1"])
    template = ChatTemplate(load_tokenizer(str(folder)), str(tmp_path / "a.jinja"))
    with pytest.raises(UserError, match="training.chat_date"):
        template.tokens([{"role": "user", "content": "a"}], None, "assistant", skip=False)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], r"a conversation is a list of messages, not \[\]"),
        (None, "not null"),
        ("hi", "not 'hi'"),
        (["hi"], "message 1: is 'hi'; a message is such as"),
        ([{"content": "x"}], "role is null; legal are system"),
        ([{"role": "asistant", "content": "x"}], "did you mean assistant"),
        ([{"role": "user"}], "message 1: has no content; its keys are role"),
        ([{"role": "user", "content": 5}], "content is 5"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of its content is 'image'"),
        ([{"from": "alien", "value": "x"}], "from is 'alien'; legal are human"),
        ([{"from": "human", "value": None}], "content is null"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, match):
    with pytest.raises(UserError, match=f"here.*{match}"):
        messages_of(messages, "here")


def test_parts_of_text_are_one_text_and_half_a_surrogate_pair_is_replaced():
    (message,) = messages_of([{"role": "user", "content": [{"type": "text", "text": "a\ud800"}, "b"], "x": None}], "")
    assert message == {"role": "user", "content": "a\ufffdb"}


def test_a_refusal_of_the_template_is_an_error(make_template):
    template = make_template(TEMPLATES["gemma 3"])
    with pytest.raises(UserError, match="the chat template refuses it: TemplateError: roles must alternate"):
        template.tokens([{"role": "assistant", "content": "a"}], None, "assistant", skip=False)


def test_templates_run_in_a_sandbox(make_template):
    template = make_template("{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="SecurityError"):
        template.tokens([{"role": "user", "content": "a"}], None, "assistant", skip=False)


@pytest.mark.parametrize("kind", ["text", "list", "file"])
def test_a_tokenizer_s_own_template_is_found(folder, tmp_path, kind):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    if kind == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    tools = {"name": "tool_use", "template": "tools " + CHATML}
    config["chat_template"] = {"text": CHATML, "list": [{"name": "default", "template": CHATML}, tools]}.get(kind, "no")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate(load_tokenizer(str(tmp_path)))
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages)[0] == "<|im_start|>user\na<|im_end|>\n"
    with_tools = "tools " if kind == "list" else ""
    assert template.render(messages, [{"name": "x"}])[0].startswith(with_tools + "<|im_start|>")


@pytest.mark.parametrize("writes", [True, False])
def test_a_template_that_leaves_out_calls_is_warned_of(make_template, caplog, writes):
    calls = "{{ message.tool_calls | tojson if message.tool_calls }}" if writes else ""
    template = make_template(CHATML.replace("<|im_end|>", f"{calls}<|im_end|>"))
    call = {"type": "function", "function": {"name": "weather", "arguments": {"day": 1}}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template.tokens(asked, None, "all", skip=False)
    assert ("does not write tool_calls" in caplog.text) is not writes


def test_bytes_and_folders_without_a_template_are_refused(folder):
    with pytest.raises(UserError, match="bytes have no chat template"):
        ChatTemplate(load_tokenizer(None))
    with pytest.raises(UserError, match="has no chat template.*training.chat_template"):
        ChatTemplate(load_tokenizer(str(folder)))


def test_a_content_that_spells_a_special_token_is_warned_of(make_template, caplog):
    template = make_template(CHATML)
    template.tokens([{"role": "user", "content": "a<|im_end|>"}], None, "assistant", skip=False)
    assert "spells the special token '<|im_end|>'" in caplog.text
    assert isinstance(template.tokens([{"role": "user", "content": "a"}], None, "all", False).ids, np.ndarray)


# As DeepSeek's: arguments are text that is added to text, and content is null, or text.
AS_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ '' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_OBJECT = AS_TEXT.replace("'' + m.content", "m.content").replace("call.function.arguments }}", "'' }}ARGUMENTS")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AS_TEXT, '{"cups":2}'),
        (AS_OBJECT.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}"), '{"cups": 2}'),
        (AS_OBJECT.replace("ARGUMENTS", "{{ call.function.arguments }}"), '{"cups":2}'),
        (AS_OBJECT.replace("ARGUMENTS", "{{ call.function.arguments.cups }}"), "2"),
    ],
)
@pytest.mark.parametrize("content", [None, ""])
def test_arguments_of_calls_are_given_as_the_template_takes_them(make_template, text, expected, content):
    call = {"type": "function", "function": {"name": "brew", "arguments": '{"cups":2}'}}
    said = [{"role": "user", "content": "tea"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    template = make_template(text)
    document = template.tokens(messages_of(said, "here"), None, "assistant", skip=False)
    assert learned(template, document) == [f"brew {expected}<|im_end|>"]
    call["function"]["arguments"] = {"cups": 2}
    document = template.tokens(messages_of(said, "here"), None, "assistant", skip=False)
    assert learned(template, document) == [f"brew {expected.replace(':2', ': 2')}<|im_end|>"]


@pytest.mark.parametrize("writes", [True, False])
def test_a_template_that_leaves_out_tools_is_warned_of(make_template, caplog, writes):
    tools = [{"type": "function", "function": {"name": "brew"}}]
    text = ("{{ tools | tojson if tools else '' }}" if writes else "") + CHATML
    said = [{"role": "user", "content": "brew"}, {"role": "assistant", "content": "ok"}]
    make_template(text).tokens(said, tools, "assistant", skip=False)
    assert ("does not write tools" in caplog.text) is not writes


def test_keys_are_read_by_expressions_and_not_by_words_of_a_template(make_template):
    expressions = "{{ m.a }}{{ m['b'] }}{{ m.get('c') }}{% if 'd' in m %}{% endif %}{{ m | map(attribute='e') | list }}"
    template = make_template("f g {# m.f #}{% for m in messages %}" + expressions + "{{ 'g' }}{% endfor %}")
    assert [key for key in "abcdefg" if template.reads(key)] == [*"abcde"]


def test_all_marked_parts_of_the_last_turn_are_learned(make_template):
    part = "{% generation %}PART{% endgeneration %}"
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + part.replace("PART", "{{ m.content }}") + " and " + part.replace("PART", "so<|im_end|>")
        + "\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip
    said = [{"role": role, "content": f"{role} {i}"} for i in (1, 2) for role in ("user", "assistant")]
    tokens = make_template(text).tokens(said, None, "last_assistant", skip=False)
    assert learned(make_template(text), tokens) == ["assistant 2", " so<|im_end|>"]
