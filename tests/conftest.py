import os
from collections.abc import Iterator

import pytest
import torch

from torchtitan_graph.log import logger


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tier too: the full matrix of layouts")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders in two processes, by file. Named files run in this process: two more take longer to start."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    is_whole = all(os.path.isdir(word) for word in config.args)
    if is_whole and option.numprocesses is None and not option.usepdb and not option.collectonly:
        option.numprocesses, option.dist = 2, "loadfile"


def pytest_configure() -> None:
    torch.set_num_threads(1)


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
