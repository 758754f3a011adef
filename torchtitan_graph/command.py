"""Commands that print or write results: a UserError is one line, and a closed pipe or Ctrl-C ends them quietly."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_graph.config.addresses import is_address
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.small_files import write_text
from torchtitan_graph.transient import in_words, is_transient


class _Parser(argparse.ArgumentParser):
    """A parser that names the option a mistyped one means, and takes no address for a Path."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.register("type", Path, _as_argument)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = self.parse_known_args(args, namespace)
        if others:
            word = others[0].partition("=")[0]
            own = [name for name in self._option_string_actions if name.startswith("--")]
            is_option = word.startswith("--")
            self.error(f"{word} is not an option{did_you_mean(word, own)}" if is_option else f"{word}: unexpected")
        return found


def parse_path(given: str) -> Path:
    """Return a path; raise UserError for an address, which Path would take for a folder named "s3:"."""
    if is_address(given):
        raise UserError(f"{given}: is an address, and this must be a path of this machine: copy it here first")
    return Path(given)


def _as_argument(given: str) -> Path:
    try:
        return parse_path(given)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser(doc: str | None, **others: Any) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a module's docstring, as it stands there."""
    return _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **others)


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorate a command's function of its arguments, by default those of the process: logging is set up, and a
    UserError is logged and returns exit code 2; an error of storage that is away is logged and returns 6."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        init_logging()
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except Exception as error:
            if is_transient(error):
                logger.error(f"storage is unavailable; start this again once it is back: {in_words(error)}")
                return 6  # as of a run
            if not isinstance(error, UserError):
                raise
            logger.error(str(error))
            return 2

    return run


def check_result(option: str, path: Path) -> None:
    """Check that a result file can be written, before the work that fills it; raise a UserError naming the option."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; name a file in one that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: can't be written; name a file in a folder that you may write to")


def write_result(option: str, path: Path, content: str) -> None:
    """Write a command's result file like `write_text`; one that is not a regular file, such as /dev/stdout, in place.

    Raises a UserError with the option and the reason if it can't be written; nothing of it is left.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(content, encoding="utf-8")
        else:
            write_text(path, content)
    except OSError as error:
        raise UserError(f"{option} {path}: can't be written: {error.strerror or error}") from error


def run_command(main: Callable[[], int]) -> NoReturn:
    """Exit with the result of `main`. A closed pipe, as after `| head`, and Ctrl-C end it as they end other programs:
    without a traceback, with the shell's exit code for SIGPIPE and SIGINT."""
    try:
        try:
            code = main()
        finally:  # also after --help, which exits
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        code = 128 + signal.SIGPIPE
    sys.exit(code)
