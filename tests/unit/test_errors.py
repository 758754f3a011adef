"""Messages may quote what anybody wrote, and are shown on a terminal."""

import pickle

import pytest

from torchtitan_graph.errors import UserError, without_secrets


def test_a_message_is_shown_as_it_is():
    message = "training.steps = 'é 🙂': must be a number\n\tsuch as 3"
    assert str(UserError(message)) == message
    assert str(pickle.loads(pickle.dumps(UserError(message)))) == message


def test_what_a_terminal_acts_on_is_escaped():
    assert str(UserError("a\x1b[31m b\x00 c\ud800 d\x9b e\r")) == "a\\x1b[31m b\\x00 c\\ud800 d\\x9b e\\r"


def test_long_lines_are_cut_in_their_middle():
    message = str(UserError(f"file: has {'x' * 10_000}, legal is y\nnext"))
    assert message.startswith("file: has xxx") and message.endswith("xxx, legal is y\nnext") and len(message) < 2100


def test_many_lines_are_cut():
    lines = str(UserError("\n".join(map(str, range(1000))))).split("\n")
    assert len(lines) == 200 and lines[-1] == "... and 801 more lines"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x = 'https://me:p@ss@host/a.csv?key=1&b=2', which", "x = 'https://***@host/a.csv?***', which"),
        ("https://token@host/a.csv?k: can't be read", "https://***@host/a.csv?***: can't be read"),
        ("(http://host/a?k=1/b?c) and ftp://me:word@host/a", "(http://host/a?***) and ftp://***@host/a"),
        ("s3://bucket/day=?/*.csv abfs://box@account/a", "s3://bucket/day=?/*.csv abfs://box@account/a"),
        ("me@host at https://host/@you: why?", "me@host at https://host/@you: why?"),
    ],
)
def test_secrets_of_addresses_are_left_out(text, shown):
    assert without_secrets(text) == shown == str(UserError(text))
