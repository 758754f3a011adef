"""Forecast runs whose speed others have published, and compare: python scripts/published.py [--only 8B] [--json FILE]

The figures are torchtitan's: of December 2024 on H100 with HBM2e at 500 W (its benchmarks/llama3_h100_202412), of 2024
on A100 (an earlier docs/performance.md), of June 2025 on H200 (benchmarks/llama3_8b_h200_2025-06). They are of its own
program, in eager mode or through torch.compile, not of this one's graph. docs/reference/forecasts.md
says what was fitted to them, and where the forecast misses.

Mixtures of experts are DeepSeek's own (2.664 million hours of H800 for 14.8T tokens, its technical report), NVIDIA
NeMo Automodel's and Megatron-Bridge's (docs/performance-summary.md of each). Their layouts are their programs'; the
forecast is of this one's, with the options that it has for them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.fx import Node

from torchtitan_graph.analysis.cost import OTHER, PRODUCT, Costs, Work
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import make_parser
from torchtitan_graph.config.job import JobConfig
from torchtitan_graph.device import GIB, Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.plan.published import FIGURES, FLOAT8, Published
from torchtitan_graph.plan.ranks import BuiltJob, build, configuration
from torchtitan_graph.plan.simulate import JobForecast, by_rates, simulate
from torchtitan_graph.rates import RATES, Rates

# Bytes of casting the operands of a product to float8, relative to those that the product itself reads and writes in
# bf16: each operand is read once for its largest magnitude, and read and written once more; but several products share
# one.
QUANTISING = 0.5


@dataclasses.dataclass(frozen=True)
class Float8(Costs):
    """Costs of the same graph with its layers' products in float8: this program does not compile such a graph."""

    def works(self, node: Node) -> Sequence[Work]:
        works = super().works(node)
        if not meta.module(node).startswith("layers."):
            return works
        return [each for work in works for each in (_in_float8(work) if work.kind == PRODUCT else (work,))]


def _in_float8(work: Work) -> tuple[Work, Work]:
    moved = work.num_bytes / 2
    casts = QUANTISING * work.num_bytes
    return work._replace(width=1, num_bytes=moved, least=moved), Work(OTHER, 0.0, casts, casts, 2)


def as_published(config: JobConfig, world_size: int, target: Target) -> Blueprint:
    """Return a blueprint whose norms are several operators, as they were in the torch of those runs."""
    return Blueprint(config, world_size, dataclasses.replace(target, fused_norms=False))


def forecast(figure: Published, job: BuiltJob, rates: Rates) -> JobForecast:
    """Return the forecast of a figure on a board."""
    prices = by_rates(job, rates)
    if FLOAT8 in figure.how:
        return simulate(job, lambda rank: Float8(rates, rank.links, rank.visible), rates)
    return simulate(job, prices, rates)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as data too")
    options = parser.parse_args()
    init_logging()
    logger.setLevel(logging.WARNING)
    rows, jobs = [], {}
    for figure in (each for each in FIGURES if options.only in each.name):
        rates, key = RATES[figure.board], (figure.board, *figure.words)
        if key not in jobs:
            jobs.clear()
            try:
                how = Blueprint if figure.own else as_published
                jobs[key] = build(configuration(figure.words, figure.world), figure.world, rates, how)
            except UserError as error:
                print(f"{figure.name}: {error}", file=sys.stderr)
                continue
        plan = forecast(figure, jobs[key], rates)
        found = plan.tokens_per_second / figure.world
        sold = forecast(figure, jobs[key], RATES["H100"]).tokens_per_second / figure.world
        row = {"name": figure.name, "published": figure.tokens, "forecast": found, "error": found / figure.tokens - 1,
               "GiB": max(plan.needs) / GIB, "published_GiB": figure.gib, "fitted": figure.fitted,
               "on_H100_as_sold": sold, "step": dataclasses.asdict(plan.step)}  # fmt: skip
        rows.append(row)
        print(
            f"{figure.name:75} {figure.tokens:6.0f} {found:8.0f} {row['error']:+7.1%}  {row['GiB']:5.1f} GiB"
            f" ({figure.gib or '?'}), on H100 {sold:6.0f} {sold / figure.tokens - 1:+.0%}{', fitted' * figure.fitted}",
            flush=True,
        )
    for is_fitted, name in ((True, "fitted"), (False, "others")):
        if chosen := [row for row in rows if row["fitted"] == is_fitted]:
            errors = [abs(row["error"]) for row in chosen]
            print(f"{name}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
