"""What is refused of validation's sets, and of what the best validation decides."""

import pytest

from torchtitan_graph.config import check, load
from torchtitan_graph.errors import UserError

SETS = ["--validation.enable", "--validation.sets", "[{name = 'wiki', dataset_path = 'a'}, {name = 'code'}]"]


@pytest.mark.parametrize(
    "options, expected",
    [
        ([*SETS, "--validation.dataset", "c4"], "validation.dataset = 'c4': is not used with validation.sets"),
        (["--validation.enable", "--validation.sets", "[{name = 'a'}, {name = 'a'}]"], "several entries are called a"),
        (["--validation.sets", "[{dataset = 'c4'}]"], "entry 1: name is missing"),
        (["--validation.sets", "[{name = 'a b'}]"], "entry 1: name = 'a b' must be 1 to 100 ASCII letters"),
        (
            [*SETS, "--validation.best_metric", "validation_loss/wikki"],
            "legal are validation_loss/wiki, validation_loss/code; did you mean validation_loss/wiki?",
        ),
        (["--validation.enable", "--validation.best_metric", "loss"], "is not a metric of validation; legal are"),
        (["--validation.patience", "2"], "validation.patience = 2: nothing is validated; set validation.enable = true"),
        ([*SETS, "--validation.format", "chat"], "validation.format = 'chat': is not used with validation.sets"),
        (["--validation.format", "chat"], "validation.format = 'chat': without a corpus of its own validation reads"),
        (
            ["--validation.dataset_path", "a", "--validation.columns", "{text = 'a', prompt = 'b'}"],
            "text, prompt are of different formats",
        ),
        (["--validation.sets", "[{name = 'a', format = 'chat'}]"], "entry 1: format, columns: without a corpus of its"),
        (
            ["--validation.sets", "[{name = 'a', dataset_path = 'a', columns = {promt = 'b'}}]"],
            "entry 1: columns: promt is nothing that is read; did you mean prompt?",
        ),
        (["--validation.sets", "[{name = 'a', format = 'chats'}]"], "did you mean chat?"),
        (["--checkpoint.keep_best"], "checkpoint.keep_best = true: nothing is validated"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        check(load(options), 1)
    assert expected in str(error.value)


def test_what_has_no_effect_is_said() -> None:
    notices = "\n".join(check(load([*SETS[1:], "--validation.best_metric", "validation_loss/code"]), 1))
    assert "validation.sets = " in notices and "nothing is validated while validation.enable is false" in notices
    assert "decides nothing while validation.patience is 0 and checkpoint.keep_best is false" in notices
    keeping = ["--validation.enable", "--checkpoint.keep_best"]
    assert "checkpoint.keep_best = true: nothing is saved" in "\n".join(check(load(keeping), 1))
