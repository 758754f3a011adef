"""Run chat templates on seven kinds of conversation, compare what is learned with transformers, and write a page:

python scripts/chat_templates.py --templates DIR --out docs/train/chat_templates.md

DIR has a file NAME.jinja for each family. The tokenizer is made here: bytes, and the special tokens that the template
spells.
"""

import argparse
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from torchtitan_graph.command import make_parser
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.document import Contexts, Tokens
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.data.turns import EMPTY_REASONING
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger

DATE = "2026-01-31"
# Tokens that are special in the tokenizers of released models.
_SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_/]+\|>|<SPECIAL_\d+>|\[e~\[|\]~!?b[\[\]]|<seed:[eb]os>|<｜[^｜<>]+｜>|\[\|[a-z]+\|\]|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>|</?s>|<\|?[a-z_]+\|?>"
)
_TEXT = re.compile(r"</?(?:think|tool_call|tool_response|tools|function|parameter|arg_key|arg_value|answer)\b")
_PIECES = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Tokens that generation_config.json of a family lists, where the template ends no turn by itself.
_LISTED = ("<|user|>", "<|observation|>", "<|assistant_end|>", "<seed:eos>")
_TOOL = {
    "type": "function",
    "function": {
        "name": "brew",
        "description": "Makes tea.",
        "parameters": {"type": "object", "properties": {"cups": {"type": "integer", "description": "How many."}}},
    },
}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "brew", "arguments": {"cups": 2}}}


def conversations() -> dict[str, tuple[list[dict[str, Any]], list[Any] | None]]:
    """Return a conversation of each kind, and the tools that it may call."""
    user = lambda text: {"role": "user", "content": text}  # noqa: E731
    says = lambda text, **more: {"role": "assistant", "content": text, **more}  # noqa: E731
    called = {"role": "tool", "name": "brew", "tool_call_id": "call00001", "content": "done"}
    return {
        "several turns": ([user("Tea?"), says("Hot."), user("Now?"), says("Wait."), user("So?"), says("Now.")], None),
        "system": ([{"role": "system", "content": "Be brief."}, user("Tea?"), says("Hot.")], None),
        "tools": (
            [user("Tea?"), says("", tool_calls=[_CALL]), called, says("Here."), user("More?"), says("No.")],
            [_TOOL],
        ),
        "reasoning": (
            [
                user("Tea?"),
                says("Hot.", reasoning_content="The pot is new."),
                user("Now?"),
                says("Wait.", reasoning_content="It is old."),
            ],
            None,
        ),
        "empty answer": ([user("Tea?"), says(""), user("Now?"), says("Wait.")], None),
        "white space": ([user("Tea? "), says("\n\n  Hot. \n"), user(" Now?"), says(" Wait.")], None),
        "unicode": ([user("Té? ☕"), says("\u0301é 👩‍👧 ünï"), user("今?"), says("等")], None),
    }


def make_tokenizer(folder: Path, template: str) -> None:
    """Write a tokenizer of bytes with a template's special tokens."""
    from torchtitan_graph.transformers_private import render_chat

    spelt, named = [template], {"bos_token": "<s>", "eos_token": "</s>"}
    for messages, tools in conversations().values():
        with contextlib.suppress(Exception):  # a kind of conversation that the template refuses
            spelt.append(render_chat(template, messages, tools, False, named, lambda form: DATE)[0])
    special = [token for text in spelt for token in _SPECIAL.findall(text) if not _TEXT.match(token)]
    special = [*dict.fromkeys(["<s>", "</s>", *_LISTED, *special])]
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={**vocabulary, "ĊĊ": 256}, merges=[("Ċ", "Ċ")]))
    pieces = pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": special[2:]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    ends = [tokenizer.token_to_id(token) for token in _LISTED]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def runs_of(context: Tokens) -> Iterator[tuple[int, int]]:
    """Yield the places of the runs of targets, the end excluded."""
    edges = [False, *context.is_target.tolist(), False]
    begins = [i for i in range(len(edges) - 1) if edges[i + 1] and not edges[i]]
    yield from zip(begins, (i for i in range(len(edges) - 1) if edges[i] and not edges[i + 1]), strict=True)


def compare(
    document: Tokens | Contexts, theirs: Any, messages: list[dict[str, Any]], tools: Any, arguments: Any
) -> int:
    """Check that each turn of the assistant is learned once, after the tokens that transformers' tokenizer gives of its
    prompt, as it renders the conversation up to and with it. Return the number of contexts.

    Raises AssertionError if a turn is not.
    """
    contexts = document.contexts if isinstance(document, Contexts) else (document,)
    learned = [(context, *run) for context in contexts for run in runs_of(context)]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(learned) == len(turns), f"{len(learned)} turns are learned, of {len(turns)}"
    special = set(theirs.all_special_ids)

    def rendered(until: int, prompt: bool) -> str:
        found: str = theirs.apply_chat_template(
            messages[:until], tools=tools, add_generation_prompt=prompt, tokenize=False, **arguments
        )
        return found

    def encoded(text: str) -> list[int]:
        ids: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
        return ids

    for number in turns:
        prompt, text = rendered(number, True), rendered(number + 1, False)
        opened = re.search(r"\s*<(seed:)?think>\s*\Z", prompt)
        empty = EMPTY_REASONING.match(text, opened.start() if opened else len(prompt))
        if empty and text.startswith(prompt[: empty.start()]):
            prompt = text[: max(len(prompt) * text.startswith(prompt), empty.end())]
        assert text.startswith(prompt), "the prompt is not how the turn begins"
        given, whole = encoded(prompt), encoded(text)
        answer = whole[len(given) :] if whole[: len(given)] == given else encoded(text[len(prompt) :])
        found = [(c, start, end) for c, start, end in learned if c.ids[:start].tolist() == given]
        assert len(found) == 1, "the model is given other tokens"
        context, start, end = found[0]
        said = context.ids[start:end].tolist()
        if said[:-1] == answer and said[-1] in special:  # ended by the first token of the next turn
            continue
        assert said == answer[: len(said)], "the model learns other tokens"
        assert not theirs.decode(answer[len(said) :], skip_special_tokens=True).strip(), "the answer is not whole"
    return len(contexts)


def run_template(folder: Path, arguments: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what is learned of an answer, and for each kind of conversation its number of contexts or why it is
    refused.

    Raises AssertionError if a turn is learned otherwise than transformers would generate it.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    tokenizer = load_tokenizer(str(folder))
    template = ChatTemplate(tokenizer, date=DATE, arguments=arguments)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    compiled = chat_template_utils._compile_jinja_template(theirs.chat_template)
    found, sample = {}, ""
    for kind, (messages, tools) in conversations().items():
        try:
            document = template.tokens(messages, tools, "assistant", skip=False)
        except UserError as error:
            found[kind] = str(error)
            continue
        compiled.globals["strftime_now"] = template._strftime  # the same day
        if "{% generation" in theirs.chat_template or "{%- generation" in theirs.chat_template:
            found[kind] = "marked"
        else:
            found[kind] = str(compare(document, theirs, messages, tools, arguments))
        if kind == "several turns":
            first = document.contexts[0] if isinstance(document, Contexts) else document
            start, end = next(runs_of(first))
            sample = tokenizer.decode_all(first.ids[start:end].tolist())
    return sample, found


def rows(templates: Path) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Yield a row for each template, and for each way of its reasoning: family, arguments, a sample, and the result of
    each kind."""
    from torchtitan_graph.transformers_private import chat_arguments

    for file in sorted(templates.glob("*.jinja"), key=lambda file: file.stem.lower()):
        text = file.read_text()
        read = chat_arguments(text)
        ways: list[dict[str, Any]] = [{}]
        ways += [{name: False} for name in ("enable_thinking", "thinking") if name in read]
        ways += [{name: True} for name in ("enable_thinking", "thinking") if name in read]
        with tempfile.TemporaryDirectory() as folder:
            make_tokenizer(Path(folder), text)
            for arguments in ways:
                said = ", ".join(f"{name} = {str(value).lower()}" for name, value in arguments.items())
                logger.info(f"{file.stem} {said}")
                yield file.stem, said, *run_template(Path(folder), arguments)


def reason_of(message: str) -> str:
    """Return why a conversation is refused, without what is of this conversation only, and without advice."""
    reason = re.sub(r"^message \d+, by the assistant: ", "", message)
    reason = re.sub(r"\. (Choose|Give|Name) .*", "", reason)
    found = re.match(r"the generation prompt is not how it begins: after .* there is (.*), and .* where", reason)
    if not found:
        return reason
    has = re.sub(r"^'(Be brief).*", r"'\1 ...'", found[1])
    return f"the generation prompt has {has} where the template renders the answer without it"


def page(templates: Path) -> str:
    """Return the page about a folder of templates."""
    kinds = [*conversations()]
    lines: list[str] = []
    reasons: dict[str, int] = {}
    plain: dict[str, str] = {}  # of each family without arguments
    for family, arguments, sample, found in rows(templates):
        cells = []
        for result in map(found.__getitem__, kinds):
            is_fine = result.isdigit() or result == "marked"
            number = 0 if is_fine else reasons.setdefault(reason_of(result), len(reasons) + 1)
            cells.append(result if is_fine else f"[no ({number})](#why-refused)")
        shown = f"`{json.dumps(sample, ensure_ascii=False)[1:-1]}`".replace("|", "\\|") if sample else ""
        results = f"{shown} | {' | '.join(cells)} |"
        if plain.setdefault(family, results) != results or not arguments:
            lines.append(f"| {family} | {f'`{arguments}`' if arguments else ''} | {results}")
    head = f"| template | argument | learned of `Hot.` | {' | '.join(kinds)} |\n|{'---|' * (3 + len(kinds))}"
    why = "\n".join(f"{number}. {reason.replace('|', chr(92) + '|')}" for reason, number in reasons.items())
    return _PAGE.format(head=head, rows="\n".join(lines), why=why, number=len(plain))


_PAGE = """\
# Chat templates

Look here for what is learned under the template of your model. `scripts/chat_templates.py` made this page: it ran
{number} published templates on seven kinds of conversation, and compared each turn with transformers' rendering of the
conversation up to it: the same tokens are given, and the same are learned.

A number says into how many contexts the conversation is split, see
[What is learned](conversations.md#what-is-learned): "several turns" and "tools" have three turns of the assistant,
"system" one, the others two. A link says why a conversation is refused. "marked": the template marks what is learned by
`{{% generation %}}`. An argument is one of `training.chat_template_kwargs`, and has a row where it changes something.

To run it on templates of your own: `python scripts/chat_templates.py --templates DIR --out page.md`, with a file
NAME.jinja for each.

## What to choose

- Chats without reasoning, for a model that reasons by choice (Qwen3, Qwen3.5, Nemotron 3, GLM-4.5):
  `training.chat_template_kwargs = {{enable_thinking = false}}`, and the same argument when you serve the model.
- Chats with reasoning: the template as it is. Where it drops earlier reasoning, each turn gets its own context.
- A generation prompt that opens reasoning, by a template that renders answers without it (DeepSeek R1 distillations,
  MiniMax M2 on plain chats): copy the template into a file, take the opening tag off its generation prompt, and name
  the file in `training.chat_template`. The export carries it.
- A template that ends no turn by a token of its own (GLM-4.5, Apertus): the next turn's first token is learned as the
  end, also of the last turn if `eos_token_id` in the model's `generation_config.json` lists it.

## Results

{head}
{rows}

## Why refused

{why}
"""


def main() -> None:
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--templates", type=Path, required=True, help="folder with a file NAME.jinja for each family")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    options.out.write_text(page(options.templates))


if __name__ == "__main__":
    init_logging()
    main()
