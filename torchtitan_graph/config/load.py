"""Loading of the command line and the TOML file into one checked JobConfig, or one error that lists every problem."""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torchtitan_graph
from torchtitan_graph.config.job import OPTIONS, JobConfig
from torchtitan_graph.config.manual import option_help
from torchtitan_graph.config.option import brief
from torchtitan_graph.config.resolve import (
    COMMAND_LINE,
    NAMES,
    Resolution,
    Setting,
    is_flag,
    notices,
    problem_list,
    resolve,
)
from torchtitan_graph.config.support import REFUSED, RENAMED
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import nearest
from torchtitan_graph.patience import retry_io
from torchtitan_graph.small_files import BadFile, read_toml
from torchtitan_graph.transient import is_transient

# The options added to a job's for a command that builds its graphs and runs none; verification would run them.
DRY = ("--comm.mode", "fake_backend", "--debug.no-verify_passes")


def _show(text: str) -> NoReturn:
    """Print a text and exit; quietly too where its reader has ended, as after `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    raise SystemExit(0)


def load(argv: Sequence[str]) -> JobConfig:
    """Return the configuration of a run: command line over TOML file over defaults.

    `argv` holds the arguments after the program's name. `--help`, also `--help TABLE ...`, prints the options and
    exits, `--version` the version.

    Raises:
        UserError: anything is wrong; the message lists all of it, a line each: where, which option, what is legal.
    """
    if isinstance(argv, str) or not isinstance(argv, Sequence) or not all(isinstance(word, str) for word in argv):
        words = "['--job.config_file', 'my.toml', '--training.steps', '10']"
        raise UserError(f"load: argv = {brief(argv)}: must be the words of a command line, as in load({words})")
    for index, word in enumerate(argv):
        if word in ("--help", "-h"):
            tables = list(itertools.takewhile(lambda name: not name.startswith("-"), argv[index + 1 :]))
            _show("\n\n".join(map(option_help, tables)) if tables else option_help(None))
        if word == "--version":
            _show(f"torchtitan_graph {torchtitan_graph.__version__}")
    result = Resolution(JobConfig(), [])
    arguments = read_arguments(argv, result)
    files = [setting.value for setting in arguments if setting.key == "job.config_file" and setting.value]
    settings = [*(read_file(files[-1], result) if files else []), *arguments]
    resolve(settings, result)
    refused = [str(finding) for finding in result.findings if finding.verdict == REFUSED]
    if refused:
        raise UserError(problem_list(refused))
    result.config.notices = notices(result.findings)
    return result.config


def read_beside(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line of a tool that also takes training options; return its own options and the other words.

    A name that is none of either, and most like one of the command's own, ends the process as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    own = [name.removeprefix("--") for name in parser._option_string_actions if name.startswith("--")]
    for name in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        if name not in own and name not in NAMES and (near := nearest(name, [*own, *NAMES])) in own:
            parser.error(f"--{name} is not an option; did you mean --{near}?")
    return parser.parse_known_args(words)


def add_option(parser: argparse.ArgumentParser, key: str) -> None:
    """Add a job's option to a tool's parser, under its name without the table."""
    option = OPTIONS[key]

    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser.add_argument(f"--{key.rpartition('.')[2]}", type=parse, default=option.default, help=f"as {key}")


def read_arguments(argv: Sequence[str], result: Resolution) -> list[Setting]:
    """Return the settings in `--table.key value`, `--table.key=value`, `--table.flag` and `--table.no-flag`."""
    settings = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            result.refuse(Setting(COMMAND_LINE, word, None), _unexpected(word))
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        table, _, leaf = key.rpartition(".")
        positive = f"{table}.{leaf.removeprefix('no_')}"
        value: str | None = text if equals else None
        if key not in NAMES and leaf.startswith("no_") and positive in NAMES:
            if value is None and is_flag(positive):
                settings.append(Setting(COMMAND_LINE, positive, "false"))
            else:
                why = "only true-or-false options have a --table.no-flag, without value"
                result.refuse(Setting(COMMAND_LINE, positive, value), why)
            continue
        option = OPTIONS.get(RENAMED.get(key, key))
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif value is None and key in NAMES and is_flag(key):
            value = "true"
        if value is None and option is not None:
            result.refuse(Setting(COMMAND_LINE, key, None), f"needs a value: {option.legal()}")
        else:
            settings.append(Setting(COMMAND_LINE, key, value))
    return settings


def _unexpected(word: str) -> str:
    if word.endswith(".toml"):
        return f"unexpected; a file is given as --job.config_file {word}"
    if word.partition("=")[0] in OPTIONS:
        return f"unexpected; did you mean --{word}?"
    return "unexpected; options are given as --table.key value, a list as first,second"


def read_file(name: str, result: Resolution) -> list[Setting]:
    """Return the settings of a TOML file, one per key. A run's folder stands for the `config.toml` in it, and a bare
    name that is not a file here for a packaged file."""
    path, package = Path(name), Path(torchtitan_graph.__file__).parent
    folders = [package / "train_configs", package.parent / "train_configs"] if path.name == name else []
    try:
        if path.is_dir():
            runs = sorted(str(file.parent) for file in path.glob("*/config.toml"))
            if not (path / "config.toml").is_file():
                near_by = f"; these are runs: {', '.join(runs[:5])}" if runs else ""
                why = f"is not a run's folder, for it has no config.toml{near_by}"
                result.refuse(Setting(COMMAND_LINE, "job.config_file", name), why)
                return []
            path = path / "config.toml"
            name = str(path)
        path = next((file for file in (path, *(folder / name for folder in folders)) if file.is_file()), path)
        tree = retry_io(lambda: read_toml(path))
    except OSError as error:
        if is_transient(error):
            raise
        others = [file.stem for folder in (path.parent, *folders) for file in folder.glob("*.toml")]
        near = nearest(path.stem, others) if path.name not in [f"{other}.toml" for other in others] else None
        why = f"can't be read: {error.strerror or error}" + (f"; did you mean {near}.toml?" if near else "")
        result.refuse(Setting(COMMAND_LINE, "job.config_file", name), why)
        return []
    except BadFile as error:
        why = str(error).removeprefix(f"{path}: ")
        result.refuse(Setting(COMMAND_LINE, "job.config_file", name), why)
        return []
    return _flatten(tree, "", str(path))


def _flatten(tree: dict[str, Any], prefix: str, source: str) -> list[Setting]:
    settings = []
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and any(known.startswith(key + ".") for known in NAMES):
            settings += _flatten(value, key + ".", source)
        else:
            settings.append(Setting(source, key, value))
    return settings
