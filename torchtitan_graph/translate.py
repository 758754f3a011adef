"""Say what becomes of a TOML file of an earlier release, and write it anew."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.config.job import JobConfig, get
from torchtitan_graph.config.load import read_toml
from torchtitan_graph.config.resolve import CHANGED, Resolution, resolve
from torchtitan_graph.config.support import IGNORED, REFUSED, RENAMED

TITLES = {
    "kept": "kept, with the same meaning",
    CHANGED: "changed",
    IGNORED: "ignored, since they change no numbers",
    REFUSED: "refused",
}


def translate(name: str) -> Resolution:
    """Return what the TOML file called `name` resolves to, refused settings left at their defaults."""
    result = Resolution(JobConfig(), [])
    resolve(read_toml(name, result), result)
    return result


def report(name: str, result: Resolution) -> str:
    """Return a list of what is kept, changed, ignored and refused of a file."""
    judged = {RENAMED.get(finding.setting.key, finding.setting.key) for finding in result.findings}
    lines: dict[str, list[str]] = {verdict: [] for verdict in TITLES}
    lines["kept"] = [f"{key} = {get(result.config, key)!r}" for key in result.config.sources if key not in judged]
    for finding in result.findings:
        lines[finding.verdict].append(f"{finding.setting.key} = {finding.setting.value!r}: {finding.why}")
    sections = [
        "\n  ".join([f"{len(lines[verdict])} {title}{':' if lines[verdict] else ''}", *lines[verdict]])
        for verdict, title in TITLES.items()
    ]
    return "\n".join([name, *sections])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, write the new file where one is asked for, and return 1 if anything is refused, else 0."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_graph.translate", description=__doc__)
    parser.add_argument("old", metavar="OLD.toml", help="file of an earlier release")
    parser.add_argument(
        "--out", metavar="NEW.toml", type=Path, help="write what differs from the defaults to this file"
    )
    arguments = parser.parse_args(argv)
    result = translate(arguments.old)
    print(report(arguments.old, result))
    if any(finding.verdict == REFUSED for finding in result.findings):
        if arguments.out:
            print(f"{arguments.out} is not written, since something is refused", file=sys.stderr)
        return 1
    if arguments.out:
        ignored = [finding.setting.key for finding in result.findings if finding.verdict == IGNORED]
        leave_out = {RENAMED.get(key, key) for key in ignored}
        arguments.out.write_text(dump_changes(result.config, leave_out=leave_out), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
