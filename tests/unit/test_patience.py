"""Transient I/O errors are retried; a missing file is an error at once."""

import errno
import pickle
import socket
from pathlib import Path

import pytest

from torchtitan_graph import patience
from torchtitan_graph.checkpoint.folder import find_problem
from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.parallel.agree import RanksFailed
from torchtitan_graph.patience import refuse_unwritable, retry_io
from torchtitan_graph.transient import is_transient

STALE = OSError(errno.ESTALE, "Stale file handle", "/shared/file")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time pass at once."""
    now: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", now.append)
    monkeypatch.setattr(patience.time, "monotonic", lambda: sum(now))
    return now


def fails(times: float, error: Exception) -> object:
    left = iter(range(int(times)))

    def function(*_: object, **__: object) -> str:
        if next(left, None) is None:
            return "read"
        raise type(error)(*error.args)

    return function


def test_it_is_waited_for(slept: list[float]) -> None:
    assert retry_io(fails(3, STALE)) == "read"
    assert slept == [1, 2, 4]


def test_but_not_for_ever(slept: list[float]) -> None:
    with pytest.raises(OSError, match="Stale"):
        retry_io(fails(10_000, STALE))
    assert sum(slept) == patience.WAIT_S and max(slept) == patience.EVERY_S


def test_a_host_of_no_name_is_waited_for_only_once_it_was_reached(slept: list[float]) -> None:
    with pytest.raises(socket.gaierror) as raised:
        retry_io(fails(1, socket.gaierror(socket.EAI_NONAME, "Name or service not known")), is_new=True)
    assert not slept and not is_transient(raised.value)
    assert retry_io(fails(1, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))) == "read"
    assert retry_io(fails(1, socket.gaierror(socket.EAI_AGAIN, "Temporary failure")), is_new=True) == "read"


def test_time_that_passed_before_the_first_failure_does_not_count(slept: list[float]) -> None:
    failing = fails(1, STALE)

    def slow() -> object:
        patience.time.sleep(2 * patience.WAIT_S)
        return failing()

    assert retry_io(slow) == "read"


def test_it_is_waited_for_once_where_one_calls_the_other(slept: list[float]) -> None:
    def inner() -> object:
        try:
            return retry_io(fails(10_000, STALE))
        except OSError as error:
            raise RuntimeError("a library's own") from error

    with pytest.raises(RuntimeError):
        retry_io(inner)
    assert sum(slept) == patience.WAIT_S


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "x"), UserError("a typing error")])
def test_what_is_not_there_is_told_at_once(error: Exception, slept: list[float]) -> None:
    with pytest.raises(type(error)):
        retry_io(fails(1, error))
    assert not slept and not is_transient(error)


def test_it_is_known_in_the_words_of_others() -> None:
    assert is_transient(UserError(f"can't be read: {STALE}"))
    failed = pickle.loads(pickle.dumps(RanksFailed("rank 3: ServerDisconnectedError", transient=True)))
    assert is_transient(failed) and not is_transient(RanksFailed(f"rank 3: {STALE}; rank 4: UserError: no such option"))


def test_no_configuration_and_no_checkpoint_is_given_up_for_it(
    slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that is wrong is never tried again; a checkpoint that is damaged is passed over."""
    (tmp_path / "mine.toml").touch()
    monkeypatch.setattr("torchtitan_graph.small_files.os.open", fails(10_000, STALE))
    for read in (lambda: load(["--job.config_file", str(tmp_path / "mine.toml")]), lambda: find_problem(tmp_path)):
        with pytest.raises(OSError, match="Stale"):
            read()


def test_what_is_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("tb", "link"):
        said = rf"folder can't be written: .*{name} is there, and is not a folder: move it"
        with pytest.raises(UserError, match=said), refuse_unwritable("folder", tmp_path / name):
            (tmp_path / name).mkdir(exist_ok=True)
