"""The comparison as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan_graph.compare.runs import Run
from torchtitan_graph.config.dump import in_toml
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.config.option import brief

NOT_COMPARED = ("job.config_file", "job.dump_folder", "job.allow_changed")
# Metrics of the machine: they differ between any two runs.
OF_THE_MACHINE = {
    *("tokens_per_second", "step_time_s", "data_loading_s", "mfu", "memory_gib"),
    *("documents_per_second", "read_mb_per_second"),
    *("slowest_rank", "slowest_busy_s", "slowest_data_s", "median_busy_s"),
}
WIDTH = 60  # of a curve, in characters
BARS = "▁▂▃▄▅▆▇█"


def report(runs: Sequence[Run]) -> str:
    """Return all parts of the comparison; the first run is what the others are compared with."""
    parts = [_states(runs), _configurations(runs), _curves(runs), _last_common(runs)]
    return "\n\n".join([*parts, "\n".join(bits(runs[0], run) for run in runs[1:])])


def shown(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics to be shown: those of which a run has a number."""
    found = {key for run in runs for record in run.steps.values() for key, x in record.items() if _is_number(x)}
    validation = sorted(key for key in found if key.startswith("validation"))
    wanted = ["loss", *validation, "grad_norm", "lr", "tokens_per_second", "memory_gib"]
    return [key for key in wanted if key in found]


def bits(run: Run, other: Run) -> str:
    """Return a line on the first step of two runs whose metrics differ in a bit.

    A run writes each float with all its digits, so equal numbers are equal bits, but for the zero's sign: their texts
    are compared.
    """
    common = [step for step in run.steps if step in other.steps]
    who = f"{run.name} and {other.name}"
    if not common:
        return f"bits: {who} have logged no common step"
    for before, step in zip([None, *common], common, strict=False):
        one, two = run.steps[step], other.steps[step]
        keys = [key for key in one if key in two and key not in OF_THE_MACHINE]
        if different := [key for key in keys if repr(one[key]) != repr(two[key])]:
            since = "the first that both logged" if before is None else f"equal up to step {before}"
            values = ", ".join(f"{key} {brief(one[key])} and {brief(two[key])}" for key in different)
            return f"bits: {who} differ first at step {step} ({since}): {values}"
    return f"bits: {who} are equal in all {len(common)} steps that both logged, up to step {common[-1]}"


def _states(runs: Sequence[Run]) -> str:
    rows = [[run.name, run.state, f"{max(run.steps)} steps" if run.steps else "no step logged"] for run in runs]
    return _table(["run", "state", "logged"], rows)


def _configurations(runs: Sequence[Run]) -> str:
    known = [run for run in runs if run.config is not None]
    rows = []
    for key in OPTIONS:
        values = [in_toml(get(run.config, key)) for run in known if run.config is not None]
        if key not in NOT_COMPARED and len(set(values)) > 1:
            rows.append([key, *values])
    if len(known) < 2:
        return "configuration: not compared"
    return _table(["configuration", *(run.name for run in known)], rows) if rows else "configuration: no difference"


def _curves(runs: Sequence[Run]) -> str:
    """Return the loss of each run as a line of bars, all on the same scale."""
    curves = {run.name: run.curve("loss") for run in runs}
    values = [x for curve in curves.values() for x in curve.values() if math.isfinite(x)]
    if not values:
        return "loss: no step logged"
    last, low, high = max(step for curve in curves.values() for step in curve), min(values), max(values)
    rows = []
    for name, curve in curves.items():
        line = [" "] * WIDTH
        for step, x in curve.items():
            if math.isfinite(x):
                share = (x - low) / (high - low) if high > low else 0.0
                line[min(WIDTH - 1, step * WIDTH // (last + 1))] = BARS[round(share * (len(BARS) - 1))]
        rows.append([name, "".join(line).rstrip()])
    return _table(["loss", f"steps 1 to {last}, {low:.4g} to {high:.4g}"], rows)


def _last_common(runs: Sequence[Run]) -> str:
    """Return each metric at the last step that all runs have it of, and its differences from the first run's."""
    rows = []
    for key in shown(runs):
        curves = [run.curve(key) for run in runs]
        common = [step for step in curves[0] if all(step in curve for curve in curves)]
        if common:
            values = [curve[common[-1]] for curve in curves]
            cells = [_short(values[0]), *(f"{_short(x)} ({x - values[0]:+.3g})" for x in values[1:])]
            rows.append([key, str(common[-1]), *cells])
    if not rows:
        return "there is no step that all runs logged"
    return _table(["last common step", "step", *(run.name for run in runs)], rows)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*lines, fillvalue="")]
    cells = [[x.ljust(width) for x, width in zip(line, widths, strict=False)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)
