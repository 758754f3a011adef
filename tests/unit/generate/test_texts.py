"""A text grows by whole characters, and ends before a stop string."""

import pytest
from tiny_models import Letters

from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.generate import Text

BYTES = load_tokenizer(None)


def test_characters_of_several_tokens_are_shown_whole() -> None:
    text = Text(BYTES, [], 100)
    shown = [text.push(byte) for byte in "aé🎉".encode()]
    assert shown == ["a", "", "é", "", "", "", "🎉"]
    assert text.push(0xC3) == "" and text.end("length") == "\ufffd"
    assert text.text == "aé🎉\ufffd"


def test_a_text_is_that_of_all_tokens_together() -> None:
    tokenizer = load_tokenizer("tests/assets/tokenizer")
    prompt, words = tokenizer.encode("def main("), tokenizer.encode("self, größe: int) -> 日本\n\n    return  x")
    text = Text(tokenizer, prompt, 100)
    assert "".join(text.push(token) for token in words) + text.end("length") == tokenizer.decode(words)


@pytest.mark.parametrize(
    ("stops", "shown", "ended"),
    [
        (["cd"], ["a", "b", "", ""], "stop"),  # `c` may begin it
        (["cx"], ["a", "b", "", "cd", "e"], "length"),
        (["ab"], ["", ""], "stop"),
        (["abcx"], ["", "", "", "abcd", "e"], "length"),  # longer than the text is when it may begin
        (["x", "bcd"], ["a", "", "", ""], "stop"),
        (["d", "bcd"], ["a", "", "", ""], "stop"),  # both are there: the first place counts
        ([], ["a", "b", "c", "d", "e"], "length"),
    ],
)
def test_it_ends_before_a_stop_string(stops: list[str], shown: list[str], ended: str) -> None:
    text, found = Text(Letters(), [], 5, stops=stops), []
    for token in Letters().encode("abcde"):
        if text.ended is None:
            found.append(text.push(token))
    assert (found, text.ended, text.text) == (shown, ended, "".join(shown))


def test_a_token_that_ends_texts_is_no_part_of_it_and_what_was_held_back_is() -> None:
    text = Text(Letters(), [], 9, ends=[7], stops=["ab"])
    assert text.push(*Letters().encode("a")) == ""
    assert text.push(7) == "a"
    assert (text.text, len(text.tokens), text.ended) == ("a", 1, "eos")
