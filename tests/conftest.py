import dataclasses
import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from ends import watch_over
from s3 import Store, found_by, serve_s3
from torchtitan_graph.log import logger


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tier too: the full matrix of layouts")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders in two processes. Named files run in this process: two more take longer to start."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    is_whole = all(os.path.isdir(word) for word in config.args)
    if is_whole and option.numprocesses is None and not option.usepdb and not option.collectonly:
        option.numprocesses, option.dist = 2, "loadfile"


class ByFixtures(LoadFileScheduling):
    """Run a file in one process; and so a folder whose files share ranks and traces, or the run they compare with."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in ("tests/numerics/", "tests/e2e/") if nodeid.startswith(folder)), None) or (
            super()._split_scope(nodeid)
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFixtures:
    return ByFixtures(config, log)


def pytest_configure() -> None:
    torch.set_num_threads(1)
    watch_over()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a readable id for what pytest would number, such as a cell or a dictionary of options."""
    if isinstance(val, bytes):  # they may be random or hold a time, and each process must get the same id
        return f"{len(val)} bytes"
    if isinstance(val, (Mapping, list, tuple, str)) or dataclasses.is_dataclass(val) and not isinstance(val, type):
        return _readable(val)[:50]
    return None


def _readable(value: object, depth: int = 0) -> str:
    if depth > 4:
        return "..."
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        changed = {field.name: x for field, x in fields if x is not field.default}
        return _readable(changed, depth) or type(value).__name__
    if isinstance(value, Mapping):
        return "-".join(f"{_readable(name, depth + 1)}={_readable(x, depth + 1)}" for name, x in value.items())
    if isinstance(value, (list, tuple)):
        return "-".join(_readable(x, depth + 1) for x in value)
    if value is None or isinstance(value, (str, int, float, torch.dtype)):
        return str(value).encode("unicode_escape").decode()
    return getattr(value, "__name__", type(value).__name__)


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Store]:
    with serve_s3() as store:
        yield store


@pytest.fixture
def store(_s3_server: Store) -> Iterator[Store]:
    """An S3 server with one empty bucket, which fsspec in this process finds."""
    _s3_server.reset()
    with found_by(_s3_server.env()):
        yield _s3_server


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    """Take away the handler that a program's `main` set up in a test: its stream is closed when the test ends."""
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not config.getoption("--slow") and "slow" not in config.getoption("-m"):
        reasons["slow"] = "slow tier: run it with --slow, or alone with -m slow"
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
