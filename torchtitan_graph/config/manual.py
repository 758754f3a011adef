"""The options as text, for --help and the pages docs/reference/options."""

import re
import textwrap
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from torchtitan_graph.config.job import OPTIONS, JobConfig
from torchtitan_graph.config.option import Option, options, show
from torchtitan_graph.config.support import FLAVOR_SUFFIXES, OLD_FLAVORS, RENAMED, UNSUPPORTED, UNSUPPORTED_VALUES
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean

SYNTAX = """\
Options are set in a TOML file and on the command line. The command line overrides the file; the file overrides the
defaults.

    --job.config_file FILE       the TOML file; a bare name is also looked up among the packaged files
    --table.key value            or --table.key=value
    --table.flag                 turns a true-or-false option on, --table.no-flag turns it off
    --table.list first,second    a list
    --table.lists 'a,b;c'        a list of lists, or as in TOML: '[["a", "b"], ["c"]]'
    --table.tables TABLES        a table, or an array of tables, as in TOML: '[{key = value}, {key = value}]'
    --help                       shows the common options and the tables
    --help TABLE                 explains the options of one table or several, as --help training; --help TABLE.KEY one
    --version                    prints the version

An empty value unsets an option that may be unset."""

# What --help shows, and each table's help shows first.
COMMON = (
    "job.config_file",
    "job.dump_folder",
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "optimizer.lr",
    "lr_scheduler.warmup_steps",
    "training.dataset",
    "training.dataset_path",
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.mixed_precision_param",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.expert_parallel_degree",
    "activation_checkpoint.mode",
    "compile.mode",
    "compile.codegen",
    "checkpoint.enable",
    "checkpoint.interval",
    "validation.enable",
    "metrics.log_freq",
    "metrics.enable_tensorboard",
    "debug.seed",
)


def tables() -> dict[str, list[Option]]:
    """Return the options of each table in the order of declaration, the common ones first."""
    found: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        found.setdefault(option.key.rpartition(".")[0], []).append(option)
    return {name: sorted(members, key=lambda option: option.key not in COMMON) for name, members in found.items()}


def describe_table(name: str) -> str:
    """Return the one-line description of a table."""
    kind: Any = JobConfig
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    return describe(kind)


def describe(table: type) -> str:
    """Return the one-line description of a table's dataclass."""
    assert is_dataclass(table) and table.__doc__, table
    return table.__doc__.strip()


def option_help(table: str | None) -> str:
    """Return the text of --help: the common options, those of one table and the tables in it, or one option.

    Raises:
        UserError: there is no such table.
    """
    if table in OPTIONS:
        return _help_block(f"[{table.rpartition('.')[0]}]", [OPTIONS[table]], "--" + table.rpartition(".")[0])
    every = tables()
    if table is None:
        common = [(f"--{key} ({show(OPTIONS[key].default)})", OPTIONS[key].help) for key in COMMON]
        shown = [(f"--help {name}", describe_table(name)) for name in every]
        return "\n".join([SYNTAX, "", "Common options, with defaults:", "", *_columns(common), "", *_columns(shown)])
    chosen = [name for name in every if name == table or name.startswith(f"{table}.")]
    if not chosen:
        raise UserError(f"--help {table}: there is no such table{did_you_mean(table, [*every, *OPTIONS])}")
    blocks = []
    for name in chosen:
        blocks.append(_help_block(f"[{name}]  {describe_table(name)}", every[name], "--" + name))
        blocks += [
            _help_block(f"[[{option.key}]]  {describe(option.row)}", options(option.row).values(), option.key)
            for option in every[name]
            if option.row is not None
        ]
    return "\n\n".join(blocks)


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return names with the first clauses of their texts, a line each."""
    return [f"  {name:46} " + re.split(r"[.;:](?: |$)", text)[0] for name, text in rows]


def _help_block(title: str, members: Iterable[Option], prefix: str) -> str:
    lines = [title]
    for option in members:
        name = option.key.rpartition(".")[2]
        lines.append(f"  {prefix}.{name}  ({option.legal()}; default: {show(option.default)})")
        lines += textwrap.wrap(option.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def options_pages() -> dict[str, str]:
    """Return the pages of docs/reference/options by file name: an index, one for each table, and the old names."""
    sections: dict[str, list[str]] = {}
    for name, members in tables().items():
        lines = sections.setdefault(name.split(".")[0], [])
        lines += _page_section(f"[{name}]", describe_table(name), members)
        for option in members:
            if option.row is not None:
                lines += _page_section(f"[[{option.key}]]", describe(option.row), options(option.row).values())
    index = [
        "# Options",
        "",
        "Look up an option here: its default, its legal values and its meaning. These pages are generated by",
        "`python -m torchtitan_graph.config docs/reference/options`; edit `config/` instead.",
        "",
        SYNTAX,
        "",
        "All options are checked before a process group starts. An error lists every problem at once, with its place,",
        "the option, what is legal, and the nearest name.",
        "",
        "`python -m torchtitan_graph.translate --job.config_file OLD.toml` shows how a TOML file of torchtitan or of",
        "an earlier release is read, and what train would refuse; `--out NEW.toml` writes it with today's names. Every",
        "run writes its resolved configuration to `config.toml` in its `dump_folder`. That file can be loaded again,",
        "and says where each value came from.",
        "",
        "## The tables",
        "",
        "| table | |",
        "|---|---|",
        *(f"| [{name}]({name}.md) | {describe_table(name)} |" for name in sections),
        "| [old names](old_names.md) | Keys of torchtitan and of earlier releases: renamed, refused or ignored. |",
    ]
    pages = {f"{name}.md": [f"# {name}", *lines] for name, lines in sections.items()}
    every = {"README.md": index, **pages, "old_names.md": _old_names()}
    return {name: "\n".join(lines) + "\n" for name, lines in every.items()}


def _old_names() -> list[str]:
    lines = ["# Old names", "", "These are read as the new names, with a notice.", "", "| old | new |", "|---|---|"]
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
        "## Keys of torchtitan and of earlier releases that are no options",
        "",
        "If a file sets one of them to a value other than its default there, it is refused, or, where that changes no",
        "numbers, ignored or changed with a notice. Nothing in a file is dropped silently.",
        "",
        "| name | | why, or what to do instead |",
        "|---|---|---|",
    ]
    names = UNSUPPORTED | {old: UNSUPPORTED[new] for old, new in RENAMED.items() if new in UNSUPPORTED}
    lines += [f"| {key} | {name.verdict} | {name.instead} |" for key, name in names.items()]
    lines += [f"| {key} = {value} | refused | {instead} |" for (key, value), instead in UNSUPPORTED_VALUES.items()]
    return lines


def _page_section(title: str, about: str, members: Iterable[Option]) -> list[str]:
    lines = ["", f"## {title}", "", about, "", "| key | default | legal | meaning |", "|---|---|---|---|"]
    for option in members:
        cells = (option.key.rpartition(".")[2], show(option.default), option.legal(), option.help)
        lines.append("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |")
    return lines
