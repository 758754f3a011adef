"""Resolution of settings into a configuration and findings: every value that a user sets is checked here."""

import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torchtitan_graph
from torchtitan_graph.config.job import OPTIONS, JobConfig, get, put
from torchtitan_graph.config.option import brief, show
from torchtitan_graph.config.support import (
    ANSWERS,
    CHANGED,
    FLAVOR_SUFFIXES,
    IGNORED,
    NAMES_ELSEWHERE,
    OLD_FLAVORS,
    REFUSED,
    REMOVED_PASSES,
    RENAMED,
    TABLES_ELSEWHERE,
    UNSUPPORTED,
    UNSUPPORTED_VALUES,
)
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import GENERIC, did_you_mean, nearest

MOST_TOLD = 30  # problems in one message
COMMAND_LINE = "command line"
TABLES = dict.fromkeys(key.rpartition(".")[0] for key in OPTIONS)
NAMES = dict.fromkeys([*OPTIONS, *RENAMED, *UNSUPPORTED])  # of two names equally near the first is named


class Setting(NamedTuple):
    """A key that was set, its source, and its value: a TOML value, or text of the command line."""

    source: str
    key: str
    value: Any


class Finding(NamedTuple):
    """The verdict on a setting: refused, ignored or changed, and why."""

    verdict: str
    setting: Setting
    why: str

    def __str__(self) -> str:
        source, key, value = self.setting
        value = f" = {brief(value)}" if value is not None else ""
        verdict = f"{self.verdict}: " if self.verdict != REFUSED else ""
        return f"{source}: {one_line(key)}{value}: {verdict}{one_line(self.why)}"


@dataclass
class Resolution:
    """A configuration and the findings on its settings."""

    config: JobConfig
    findings: list[Finding]

    def refuse(self, setting: Setting, why: str) -> None:
        self.findings.append(Finding(REFUSED, setting, why))


def one_line(text: str) -> str:
    """Return any text, such as a name in a file, without line breaks, and cut where it is long."""
    text = text if len(text) <= 1000 else text[:1000] + "..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def problem_list(problems: Sequence[str]) -> str:
    """Return one message for all problems; of very many, the first."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    more = [f"and {len(problems) - MOST_TOLD} more"] * (len(problems) > MOST_TOLD)
    return "\n  ".join([f"{count} in the configuration:", *problems[:MOST_TOLD], *more])


def _now_called(key: str) -> str:
    return f"is now called {key}"


def notices(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, and one line for all keys of a source that are only called otherwise now."""
    renamed: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.why == _now_called(RENAMED.get(finding.setting.key, "")):
            renamed.setdefault(finding.setting.source, []).append(finding)
    found = []
    for finding in findings:
        group = renamed.get(finding.setting.source, [])
        if len(group) < 2 or finding not in group:
            found.append(str(finding))
        elif finding is group[0]:
            source = finding.setting.source
            pairs = ", ".join(f"{each.setting.key} is {RENAMED[each.setting.key]}" for each in group)
            how = f"; python -m torchtitan_graph.translate --job.config_file {source} --out NEW.toml writes them"
            found.append(
                f"{source}: changed: {len(group)} keys have new names: {pairs}{how if source != COMMAND_LINE else ''}"
            )
    return found


def resolve(settings: Sequence[Setting], result: Resolution) -> None:
    """Check every setting and store it in the configuration; a later setting of a key overrides an earlier one."""
    given = {(setting.source, setting.key) for setting in settings}
    effective: dict[str, Setting] = {}
    for setting in settings:
        new_key = RENAMED.get(setting.key)
        if new_key and (setting.source, new_key) in given:
            result.refuse(setting, f"is the old name of {new_key}, which is set as well; keep one of them")
        elif new_key in OPTIONS:
            result.findings.append(Finding(CHANGED, setting, _now_called(new_key)))
        key = new_key or setting.key
        if key in UNSUPPORTED or _is_unsupported_value(key, setting.value):
            effective[key] = setting
        elif key not in OPTIONS:
            result.refuse(setting, _unknown(key))
        elif key == "job.config_file" and setting.source != COMMAND_LINE:
            result.refuse(setting, "a file can't name another one; give --job.config_file on the command line")
        elif _store(setting, key, result):
            effective[key] = setting
    for key, setting in effective.items():
        if key in UNSUPPORTED:
            name = UNSUPPORTED[key]
            if name.verdict != CHANGED and not name.is_harmless(setting.value):  # see the functions below
                result.findings.append(Finding(name.verdict, setting, name.instead))
        elif _is_unsupported_value(key, setting.value):
            result.refuse(setting, UNSUPPORTED_VALUES[key, setting.value])
    _resolve_aliases(effective, result)
    _resolve_bad_rows(effective, result)
    _resolve_speed(effective, result)
    _resolve_references(effective, result)


def family_names() -> list[str]:
    """Return the names of this package's model families: every module in `models/` but `spec`."""
    found = pkgutil.iter_modules([str(Path(torchtitan_graph.__file__).parent / "models")])
    return sorted(module.name for module in found if not module.ispkg and module.name != "spec")


def is_flag(key: str) -> bool:
    """Return whether the option of a known name is a boolean."""
    key = RENAMED.get(key, key)
    return OPTIONS[key].kind is bool if key in OPTIONS else UNSUPPORTED[key].is_flag


def _is_unsupported_value(key: str, value: Any) -> bool:
    return isinstance(value, str) and (key, value) in UNSUPPORTED_VALUES


def _store(setting: Setting, key: str, result: Resolution) -> bool:
    """Check one value and store it in the configuration; return whether it is legal. All values pass here."""
    option = OPTIONS[key]
    is_list_as_text = option.kind == list[str] and isinstance(setting.value, str)
    is_text = setting.source == COMMAND_LINE or is_list_as_text  # files of torchtitan have these too
    try:
        value = option.parse(setting.value) if is_text else option.accept(setting.value)
    except UserError as error:
        result.refuse(setting, str(error))
        return False
    if is_list_as_text and setting.source != COMMAND_LINE:
        result.findings.append(Finding(CHANGED, setting, f"is read as the list {brief(value)}"))
    put(result.config, key, value)
    result.config.sources[key] = setting.source
    return True


def _unknown(key: str) -> str:
    if key in TABLES:
        return f"is a table; write [{key}] and its keys below"
    table, _, name = key.removeprefix("no_").rpartition(".")
    if key.startswith("no_") and (flag := f"{table}.{name}") in OPTIONS and is_flag(flag):
        return f"is not an option; did you mean --{table}.no-{name}?"
    if known := NAMES_ELSEWHERE.get(key) or (NAMES_ELSEWHERE.get(name) if name not in GENERIC else None):
        of_table = f"{table}.{known.rpartition('.')[2]}"
        return f"is not an option; see {of_table if of_table in OPTIONS else known}"
    if answer := ANSWERS.get(name):
        return f"is not an option: {answer}"
    if (ours := f"{TABLES_ELSEWHERE.get(table, table)}.{name}") in OPTIONS:
        return f"is not an option; did you mean {ours}?"
    near = nearest(key, [*NAMES, *TABLES] if "." not in key else NAMES)
    near = RENAMED.get(near or "", near)
    if near in OPTIONS or near in TABLES:  # never a name that would be refused, ignored or renamed in turn
        return f"is not an option; did you mean {near}?"
    return "is not an option; --help lists all options"


def _resolve_aliases(effective: dict[str, Setting], result: Resolution) -> None:
    """Replace values that had another meaning, or another name, in earlier releases."""
    config = result.config
    if removed := [name for name in config.compile.disable_passes if name in REMOVED_PASSES]:
        config.compile.disable_passes = [name for name in config.compile.disable_passes if name not in removed]
        why = f"{', '.join(removed)}: the loss's operator saves this memory itself"
        result.findings.append(Finding(IGNORED, effective["compile.disable_passes"], why))
    for key in ("training.dataset", "validation.dataset"):
        if get(config, key) == "c4_test":
            put(config, key, "stdlib")
            why = "is now stdlib, the running Python's own sources, since nothing is downloaded"
            result.findings.append(Finding(CHANGED, effective[key], why))
    name = config.model.name
    if "." in name:  # a module of the user's: its flavours have their own names
        if not all(part.isidentifier() for part in name.split(".")):
            result.refuse(effective["model.name"], "is not the dotted name of a module, such as my_pkg.my_model")
        return
    families = family_names()
    if name not in families:
        why = f"must be one of {', '.join(families)}, or the dotted name of a module of your own"
        result.refuse(effective["model.name"], why + did_you_mean(name, families))
        return
    given = config.model.flavor or ""
    suffix, attn = next((pair for pair in FLAVOR_SUFFIXES if given.endswith(pair[0])), ("", config.model.attn))
    flavor = given.removesuffix(suffix)
    flavor = OLD_FLAVORS.get((name, flavor), flavor)
    if flavor == given:
        return
    config.model.flavor = flavor
    if "model.attn" not in effective:
        config.model.attn = attn
    why = f"is now flavor = {flavor!r}" + (f" with model.attn = {config.model.attn!r}" if suffix else "")
    result.findings.append(Finding(CHANGED, effective["model.flavor"], why))


def _resolve_bad_rows(effective: dict[str, Setting], result: Resolution) -> None:
    """Read training.skip_not_utf8, of earlier releases."""
    setting, name = effective.get("training.skip_not_utf8"), UNSUPPORTED["training.skip_not_utf8"]
    if setting is None or name.is_harmless(setting.value):
        return
    if setting.value is not True and brief(setting.value).lower() != "'true'":
        result.refuse(setting, "must be true or false; training.on_bad_row is its new name")
    elif "training.on_bad_row" in effective:
        result.findings.append(Finding(IGNORED, setting, "training.on_bad_row is set as well"))
    else:
        put(result.config, "training.on_bad_row", "skip")
        result.config.sources["training.on_bad_row"] = setting.source
        result.findings.append(Finding(CHANGED, setting, name.instead))


def _resolve_speed(effective: dict[str, Setting], result: Resolution) -> None:
    """Read compile.enable, torchtitan's word for code by Inductor, and turn off speed-ups of its files that are not
    built with converters; the numbers are the same."""
    config, left_out = result.config, "; the same numbers up to rounding, in more time"
    setting = effective.get("compile.enable")
    if setting is not None and not UNSUPPORTED["compile.enable"].is_harmless(setting.value):
        if setting.value is not True and brief(setting.value).lower() != "'true'":
            result.refuse(setting, "must be true or false; compile.codegen is its new name")
        elif "compile.codegen" in effective:
            result.findings.append(Finding(IGNORED, setting, "compile.codegen is set as well"))
        elif config.model.converters:
            why = f"is left out, for code by Inductor is not built with model.converters{left_out}"
            result.findings.append(Finding(CHANGED, setting, why))
        else:
            put(config, "compile.codegen", "blocks")
            config.sources["compile.codegen"] = setting.source
            result.findings.append(Finding(CHANGED, setting, "is read as compile.codegen = blocks"))
    key = "parallelism.enable_async_tensor_parallel"
    if config.model.converters and get(config, key):
        put(config, key, False)
        why = f"is left out, for cutting products into parts is not built with model.converters{left_out}"
        result.findings.append(Finding(CHANGED, effective[key], why))


def _resolve_references(effective: dict[str, Setting], result: Resolution) -> None:
    """Replace `{table.key}` in dump_folder by that option's value. The result has no braces: it can be read again."""

    def value_of(match: re.Match[str]) -> str:
        key = match[1]
        if key not in OPTIONS:
            problems.append(f"{{{key}}} {_unknown(key)}")
            return ""
        value = get(result.config, key)
        if value in (None, "", []):
            problems.append(f"{{{key}}} has no value; set {key} as well")
        elif "{" in show(value) or "}" in show(value):
            problems.append(f"{{{key}}} is {show(value)!r}, which has braces itself")
        return show(value)

    problems: list[str] = []
    given = result.config.job.dump_folder
    folder = re.sub(r"\{([^{}]*)\}", value_of, given)
    if not problems and ("{" in folder or "}" in folder):
        problems.append("has a brace without its other half; {table.key} stands for the value of that option")
    if problems:
        result.refuse(effective["job.dump_folder"], "; ".join(problems))
    else:
        result.config.job.dump_folder = folder
