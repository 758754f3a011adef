"""The options as text: what --help prints, and the page docs/02_options.md."""

import textwrap
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from torchtitan_graph.config.job import OPTIONS, JobConfig
from torchtitan_graph.config.option import Option, nearest, options, show
from torchtitan_graph.config.support import FLAVOR_SUFFIXES, OLD_FLAVORS, RENAMED, UNSUPPORTED, UNSUPPORTED_VALUES
from torchtitan_graph.errors import UserError

SYNTAX = """\
Options are set in a TOML file and on the command line, which wins over the file; the file wins over the defaults.

    --job.config_file FILE       the TOML file; a bare name is also looked up among the packaged files
    --table.key value            or --table.key=value
    --table.flag                 turns a true-or-false option on, --table.no-flag turns it off
    --table.list first,second    a list
    --table.tables TABLES        a table, or an array of tables, as in TOML: '[{key = value}, {key = value}]'
    --help [TABLE]               explains all options, or those of one table; --help TABLE.KEY one option
    --version                    prints the version

An empty value unsets an option that need not be set."""


def tables() -> dict[str, list[Option]]:
    """Return the options of each table, in the order of declaration."""
    found: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        found.setdefault(option.key.rpartition(".")[0], []).append(option)
    return found


def describe_table(name: str) -> str:
    """Return the one line that says what a table is about."""
    kind: Any = JobConfig
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    return describe(kind)


def describe(table: type) -> str:
    """Return the one line that says what the dataclass of a table is about."""
    assert is_dataclass(table) and table.__doc__, table
    return table.__doc__.strip()


def option_help(table: str | None) -> str:
    """Return the text of --help: all options, or those of one table and the tables in it, or one option.

    Raises:
        UserError: there is no such table.
    """
    if table in OPTIONS:
        return _help_block(f"[{table.rpartition('.')[0]}]", [OPTIONS[table]], "--" + table.rpartition(".")[0])
    every = tables()
    chosen = [name for name in every if table is None or name == table or name.startswith(f"{table}.")]
    if not chosen:
        near = nearest(table or "", [*every, *OPTIONS])
        raise UserError(f"--help {table}: there is no such table" + (f"; did you mean {near}?" if near else ""))
    blocks = [SYNTAX] if table is None else []
    for name in chosen:
        blocks.append(_help_block(f"[{name}]  {describe_table(name)}", every[name], "--" + name))
        blocks += [
            _help_block(f"[[{option.key}]]  {describe(option.row)}", options(option.row).values(), option.key)
            for option in every[name]
            if option.row is not None
        ]
    return "\n\n".join(blocks)


def _help_block(title: str, members: Iterable[Option], prefix: str) -> str:
    lines = [title]
    for option in members:
        name = option.key.rpartition(".")[2]
        lines.append(f"  {prefix}.{name}  ({option.legal()}; default: {show(option.default)})")
        lines += textwrap.wrap(option.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def options_page() -> str:
    """Return docs/02_options.md."""
    lines = [
        "# 2. Options",
        "",
        "Written by `python -m torchtitan_graph.config > docs/02_options.md`; edit `torchtitan_graph/config/` instead.",
        "",
        SYNTAX,
        "",
        "Everything is checked before a process group starts. An error lists all problems at once: where, which",
        "option, what is legal, and the nearest name.",
        "",
        "`python -m torchtitan_graph.translate OLD.toml` says what becomes of a file of torchtitan or of an earlier",
        "release, and what train would refuse; `--out NEW.toml` writes it anew. Every run writes its resolved",
        "configuration to its `dump_folder`; that file can be loaded as it is, and says where each value came from.",
    ]
    for name, members in tables().items():
        lines += _page_section(f"[{name}]", describe_table(name), members)
        for option in members:
            if option.row is not None:
                lines += _page_section(f"[[{option.key}]]", describe(option.row), options(option.row).values())
    lines += [
        "",
        "## Old names",
        "",
        "These are read as the new ones, with a notice.",
        "",
        "| old | new |",
        "|---|---|",
    ]
    lines += [f"| {old} | {new} |" for old, new in RENAMED.items() if new in OPTIONS]
    lines += [
        f"| model.flavor = {old} ({family}) | model.flavor = {new} |" for (family, old), new in OLD_FLAVORS.items()
    ]
    lines += [
        f"| model.flavor = NAME{suffix} | model.flavor = NAME, model.attn = {attn} |"
        for suffix, attn in FLAVOR_SUFFIXES
    ]
    lines += ["| dataset = c4_test | dataset = stdlib |"]
    lines += [
        "",
        "## Names of torchtitan that mean nothing here",
        "",
        "They are no options. A file that sets one to another value than its default there is refused, or, where that",
        "changes no numbers, trained with a notice. Whatever a file says is read in this way; nothing is dropped in",
        "silence.",
        "",
        "| name | | why, or what to do instead |",
        "|---|---|---|",
    ]
    names = UNSUPPORTED | {old: UNSUPPORTED[new] for old, new in RENAMED.items() if new in UNSUPPORTED}
    lines += [f"| {key} | {name.verdict} | {name.instead} |" for key, name in names.items()]
    lines += [f"| {key} = {value} | refused | {instead} |" for (key, value), instead in UNSUPPORTED_VALUES.items()]
    return "\n".join(lines) + "\n"


def _page_section(title: str, about: str, members: Iterable[Option]) -> list[str]:
    lines = ["", f"## {title}", "", about, "", "| key | default | legal | meaning |", "|---|---|---|---|"]
    for option in members:
        cells = (option.key.rpartition(".")[2], show(option.default), option.legal(), option.help)
        lines.append("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |")
    return lines
