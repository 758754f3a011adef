"""Show how a TOML file of torchtitan or an earlier release is read, and write it with today's names."""

import argparse
import copy
import fnmatch
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import JobConfig, check, check_beginning, smallest_world
from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.config.job import get
from torchtitan_graph.config.load import read_file
from torchtitan_graph.config.option import brief
from torchtitan_graph.config.resolve import COMMAND_LINE, Resolution, Setting, resolve
from torchtitan_graph.config.support import CHANGED, FLAVOR_SUFFIXES, IGNORED, REFUSED
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.steps.choices import check_disabled

OTHER, HARMLESS, SAID = "other", "harmless", "said"
TITLES = {
    "kept": "kept, with the same meaning",
    CHANGED: "changed",
    OTHER: "about model.flavor, which is not quite torchtitan's model of that name",
    IGNORED: "ignored, since they change no numbers",
    HARMLESS: "without a counterpart here, at a value that has no effect",
    SAID: "notices of train",
    REFUSED: "refused",
}

_BALANCE = (
    "no bias evens out the experts' loads here; there one did by default. moe.load_balance_loss does it by a loss"
)
# Flavours that differ from torchtitan's last TOML release: a pattern of family and flavour, and the difference.
OTHER_MODELS = (
    ("llama3 debugmodel", "its positions are not stretched here; there they were, as those of 3.1"),
    ("llama4 debugmodel", "its layers are of other sizes here: 256 wide in experts, 512 elsewhere"),
    ("llama4 *", _BALANCE),
    ("qwen3 debugmodel_moe", _BALANCE),
    ("qwen3 *-A*", _BALANCE),
    ("gpt_oss *", _BALANCE),
    ("gpt_oss *", "positions are stretched (YaRN) here, as in the release; there they were not"),
    ("deepseek_v3 debugmodel", "experts are chosen as in V3 here, by sigmoid; there as in V2, by softmax"),
    ("deepseek_v3 16B", _BALANCE),
    ("deepseek_v3 236B", _BALANCE),
)


def translate(name: str) -> tuple[list[Setting], Resolution]:
    """Return the settings of the TOML file `name` and their resolution, refused settings left at their defaults."""
    result = Resolution(JobConfig(), [])
    settings = read_file(name, result)
    resolve(settings, result)
    return settings, result


def rehearse(config: JobConfig) -> tuple[list[str], list[str]]:
    """Return what train would refuse before it starts anything, and its notices, a line each.

    The number of processes is the smallest that the degrees allow. Refusals by this machine alone are notices.
    """
    refused: list[str] = []
    notices: list[str] = []
    config = copy.deepcopy(config)
    world_size = smallest_world(config)
    try:
        notices = check(config, world_size)
    except UserError as error:
        refused += [line.strip() for line in str(error).splitlines()[1:]]
    try:
        check_beginning(config, is_new=True)
    except UserError as error:
        refused += [line.strip() for line in str(error).splitlines()[1:]]
    try:
        load_tokenizer(config.model.hf_assets_path)
    except UserError as error:
        notices.append(f"on this machine, {error}")
        config.model.hf_assets_path = None
    if here := _refusal(config, world_size):
        # The file may be for another machine: memory, GPUs and packages are left out.
        config.comm.mode = "fake_backend"
        config.profiling.enable_memory_snapshot = config.metrics.enable_wandb = False
        config.metrics.enable_mlflow = False
        if anywhere := _refusal(config, world_size):
            refused.append(anywhere)
        else:
            notices.append(f"on this machine, {here}")
    return refused, notices


def _refusal(config: JobConfig, world_size: int) -> str | None:
    try:
        check_disabled(config.compile.disable_passes)
        Blueprint(copy.deepcopy(config), world_size)
    except UserError as error:
        return str(error)
    return None


def other_meanings(config: JobConfig, flavor: str) -> list[str]:
    """Return the differences between a file's model and torchtitan's; `flavor` is the name in the file."""
    family, folder = config.model.name, Path(config.model.hf_assets_path or "")
    if "." in family:
        return []
    if not flavor and (folder / "config.json").is_file():
        return [f"no model.flavor is set: it is what {folder / 'config.json'} says here; there it was debugmodel"]
    name = f"{family} {config.model.flavor or 'debugmodel'}"
    found = [how for pattern, how in OTHER_MODELS if fnmatch.fnmatchcase(name, pattern)]
    if family == "llama4" and not flavor.endswith("_irope"):
        found.append("three layers of four see chunks here, the fourth no positions; there only in _irope flavours")
    if family == "deepseek_v3" and config.training.seq_len <= 4096:
        found.append("positions are stretched (YaRN) at every length here; there only in rows of more than 4096 tokens")
    if not flavor.endswith(tuple(suffix for suffix, _ in FLAVOR_SUFFIXES)):
        found.append("attention stays inside each document of a row here; there only in _flex and _varlen flavours")
    return [f"{name}: {how}" for how in found]


def report(name: str, settings: list[Setting], result: Resolution) -> tuple[str, bool]:
    """Return a report on each line of a file, and whether any is refused."""
    config = result.config
    lines: dict[str, list[str]] = {verdict: [] for verdict in TITLES}
    for finding in result.findings:
        lines[finding.verdict].append(f"{finding.setting.key} = {brief(finding.setting.value)}: {finding.why}")
    judged = {finding.setting.key for finding in result.findings}
    if not lines[REFUSED] or "model.name" not in judged:
        refused, said = rehearse(config)
        lines[REFUSED] += [line.removeprefix(f"{name}: ") for line in refused]
        lines[SAID] += [line.removeprefix(f"{name}: ") for line in said]
        given = {setting.key: setting.value for setting in settings}
        lines[OTHER] = other_meanings(config, str(given.get("model.flavor") or ""))
    for key, value in ((setting.key, setting.value) for setting in settings if setting.key not in judged):
        if key not in config.sources:
            lines[HARMLESS].append(f"{key} = {value!r}")
        elif key == "model.flavor" and lines[OTHER]:
            continue
        elif not any(re.match(rf"{re.escape(key)}(?![\w.])", line) for line in lines[REFUSED]):
            lines["kept"].append(f"{key} = {get(config, key)!r}")
    sections = [
        "\n  ".join([f"{len(lines[verdict])} {title}{':' if lines[verdict] else ''}", *lines[verdict]])
        for verdict, title in TITLES.items()
    ]
    return "\n".join([name, *sections]), bool(lines[REFUSED])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, write the new file if one is asked for, and return 1 if anything is refused, 2 if the file
    can't be read, else 0."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_graph.translate", description=__doc__)
    parser.add_argument("--job.config_file", dest="old", metavar="OLD.toml", required=True, help="the file to read")
    parser.add_argument(
        "--out", metavar="NEW.toml", type=Path, help="write what differs from the defaults to this file"
    )
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-"):
        parser.error(f"{words[0]}: a file is given as --job.config_file {words[0]}")
    arguments = parser.parse_args(words)
    settings, result = translate(arguments.old)
    if unread := next((each for each in result.findings if each.setting.source == COMMAND_LINE), None):
        parser.error(f"{arguments.old}: {unread.why}")
    text, refused = report(arguments.old, settings, result)
    print(text)
    if refused:
        if arguments.out:
            print(f"{arguments.out} is not written, since something is refused", file=sys.stderr)
        return 1
    if arguments.out:
        try:
            with arguments.out.open("x", encoding="utf-8") as file:
                file.write(dump_changes(result.config))
        except FileExistsError:
            parser.error(f"--out {arguments.out}: is there already; name a new file, or delete that one")
        except OSError as error:
            parser.error(f"--out {arguments.out}: can't be written: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
