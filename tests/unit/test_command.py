"""How commands that print end."""

import signal
import subprocess
import sys

import pytest

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
