"""What lm-evaluation-harness asks becomes requests of ours, and its answers keep their order."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_graph.evaluate.harness import model_class
from torchtitan_graph.evaluate.requests import Request, Score, _batch, _of_row
from torchtitan_graph.generate import Sampling
from torchtitan_graph.generate.generation import Options

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


class Asked:
    """A scorer that continues a prompt with the number of its tokens."""

    longest = 12

    def __init__(self, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer or ByteTokenizer()
        self.reading = RowFormat(self._tokenizer, chat_template=chat_template)
        self.wrote: list[tuple[list[list[int]], Options]] = []

    def tokenizer_of_prompts(self) -> Any:
        return self._tokenizer

    def ends(self) -> frozenset[int]:
        return frozenset([7])

    def write(self, prompts: Sequence[list[int]], options: Options) -> list[str]:
        self.wrote.append(([*prompts], options))
        return [str(len(prompt)) for prompt in prompts]


def model(*arguments: Any) -> Any:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    return model_class()(Asked(*arguments))


def test_texts_are_generated_together_by_their_options_and_come_back_in_order() -> None:
    ours = model()
    greedy = {"until": ["", "x"], "max_gen_toks": 4}
    drawn = {"until": "x", "max_gen_toks": 9, "do_sample": True, "temperature": 0.5, "top_p": None}
    asked = [("0123456789", greedy), ("0123456789", drawn), ("ab", greedy)]
    assert ours.generate_until([SimpleNamespace(args=each) for each in asked]) == ["8", "3", "3"]
    (two, options), (one, of_drawn) = ours._scorer.wrote
    assert [bytes(ids[-7:]) for ids in [two[0], one[0][-2:]]] == [b"3456789", b"89"]
    assert options == Options(Sampling(), 4, frozenset([7]), ("x",))
    assert of_drawn == Options(Sampling(0.5), 9, frozenset([7]), ("x",))


def test_a_token_that_begins_a_document_is_not_written_twice() -> None:
    ours = model(load_tokenizer("tests/assets/tokenizer", special_tokens_in_text=True))
    begin = ours._tokenizer.decode_all([ours.prefix_token_id])
    plain = ours._tokenizer.encode("def")
    assert ours.tok_encode(f"{begin}def") == [ours.prefix_token_id, *plain]
    assert ours.tok_encode("def") == ours._tokenizer.encode("def", add_special_tokens=True)


def test_a_chat_asks_for_an_answer_or_ends_within_it(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    ours = model(load_tokenizer("tests/assets/tokenizer"), str(tmp_path / "chat.jinja"))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ours.apply_chat_template(chat[:1]) == "<user>a<assistant>"
    assert ours.apply_chat_template(chat, add_generation_prompt=False) == "<user>a<assistant>b"


def test_requests_are_documents_of_a_row_and_each_has_its_own_score() -> None:
    requests = [Request([1, 2, 3], 1), Request([4, 5], 1)]
    batch = _batch([requests], 2, 5, ByteTokenizer())
    no, end = IGNORE_INDEX, ByteTokenizer().eos_id
    assert batch.tokens_BL.tolist() == [[1, 2, 4, end, end], [end] * 5]
    assert batch.labels_BL.tolist() == [[no, 3, 5, no, no], [no] * 5]
    assert batch.positions_BL.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    scores_2L = torch.tensor([[-9.0, -1, -2, -9, -9], [0, 1, 0, 0, 0]])
    assert dict(_of_row([0, 1], requests, scores_2L)) == {0: Score(-1, True), 1: Score(-2, False)}
    both = [Request([1, 2, 3], 2)]
    assert dict(_of_row([0], both, scores_2L)) == {0: Score(-10, False)}
