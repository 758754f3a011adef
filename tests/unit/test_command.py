"""How commands that print end, and what they say of words that they do not know."""

import errno
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchtitan_graph.command import command, make_parser
from torchtitan_graph.errors import UserError

MANY = "print('x\\n' * 10**6) or 0"


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (MANY, 128 + signal.SIGPIPE),
        ("signal.raise_signal(signal.SIGINT)", 128 + signal.SIGINT),
        (f"sys.exit({MANY})", 128 + signal.SIGPIPE),
        ("7", 7),
    ],
)
def test_a_reader_that_has_gone_and_ctrl_c_end_it_without_a_traceback(main: str, code: int) -> None:
    program = f"import signal, sys; from torchtitan_graph.command import run_command; run_command(lambda: {main})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == code


def test_help_ends_without_a_traceback_too() -> None:
    program = "from torchtitan_graph.config.load import _show; _show('x\\n' * 10**6)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(errno.EIO, "Input/output error"), 6), (UserError("--x: must be 1"), 2)]
)
def test_an_error_that_is_no_fault_is_one_line(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def main(argv: Sequence[str]) -> int:
        raise error

    assert main([]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert str(error) in line and ("storage is unavailable" in line) == (code == 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temprature", "1"], "--temprature is not an option; did you mean --temperature?"),
        (["--x=1"], "--x is not an option\n"),
        (["a", "b"], "b: unexpected"),
        (["--out=s3://bucket/a"], "argument --out: s3://bucket/a: is an address, and this must be a path of this mach"),
    ],
)
def test_a_word_that_no_parser_knows_is_answered(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = make_parser(None)
    parser.add_argument("--temperature")
    parser.add_argument("--out", type=Path)
    parser.add_argument("one", nargs="?")
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert message in capsys.readouterr().err
