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
from typing import Any, NamedTuple

from torch.fx import Node

from torchtitan_graph.analysis.cost import OTHER, PRODUCT, Costs, Work
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import make_parser
from torchtitan_graph.config.job import JobConfig
from torchtitan_graph.device import GIB, Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.plan.ranks import BuiltJob, build, configuration
from torchtitan_graph.plan.simulate import JobForecast, by_rates, simulate
from torchtitan_graph.rates import RATES, Rates

# Bytes of casting the operands of a product to float8, relative to those that the product itself reads and writes in
# bf16: each operand is read once for its largest magnitude, and read and written once more; but several products share
# one.
QUANTISING = 0.5

FULL, OP, COMPILED, FLOAT8, ASYNC = "full", "op", "compiled", "float8", "async TP"


class Published(NamedTuple):
    """A published figure: tokens/s of each device, and GiB if known; `fitted`, if constants were fitted to it. With
    `own` options the forecast is of this program's way to do it, not of the published one."""

    board: str
    model: str
    world: int
    rows: int
    seq_len: int
    how: tuple[str, ...]
    tokens: float
    gib: float | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    schedule: str = "1F1B"
    microbatches: int = 1
    fitted: bool = False
    family: str = "llama3"
    own: str = ""

    @property
    def words(self) -> list[str]:
        """The job's options, without float8, see `Float8`."""
        data = self.world // (self.tp * self.cp * self.pp)
        rows = self.rows // self.microbatches
        options = {
            "model.name": self.family,
            "model.flavor": self.model,
            "model.attn": "flex",
            "model.elementwise": "torch",
            "model.hf_assets_path": "",
            "training.seq_len": self.seq_len,
            "training.local_batch_size": self.rows,
            "training.global_batch_size": self.rows * data,
            "training.mixed_precision_param": "bfloat16",
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.pipeline_parallel_degree": self.pp,
            "activation_checkpoint.mode": "full" if FULL in self.how else "selective",
            "activation_checkpoint.selective_ac_option": "op" if OP in self.how else "2",
            "compile.codegen": "blocks" if COMPILED in self.how else "off",
            "parallelism.enable_async_tensor_parallel": str(ASYNC in self.how).lower(),
        }
        if self.pp > 1:
            options["parallelism.pipeline_parallel_schedule"] = self.schedule
            options["parallelism.pipeline_parallel_microbatch_size"] = rows
        if self.own:
            del options["model.elementwise"]
        words = [word for key, value in options.items() for word in (f"--{key}", str(value)) if value != ""]
        return [*words, *self.own.split()]

    @property
    def name(self) -> str:
        degrees = [f"{axis} {n}" for axis, n in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if n > 1]
        schedule = [self.schedule] if self.pp > 1 else []
        family = "" if self.family == "llama3" else f"{self.family} "
        job = [f"{family}{self.model} {self.world} {self.board}", f"{self.rows} x {self.seq_len}"]
        return ", ".join([*job, *degrees, *schedule, *self.how])


_PAIRS = (
    "--parallelism.overlap_microbatches --parallelism.expert_exchange by_machine --parallelism.expert_parallel_degree"
)
_ROUNDED = "--parallelism.exchange_sums by_machine --moe.early_scores"
_IN_FLOAT8 = (
    "--model.converters float8,quantize.grouped_mm.float8 --quantize.grouped_mm.float8.fqns experts"
    " --quantize.linear.float8.filter_fqns output --quantize.linear.float8.recipe_name rowwise_with_gw_hp"
    " --quantize.grouped_mm.float8.recipe_name rowwise_with_gw_hp --parallelism.exchange_dtype float8"
)
_KEPT = "--activation_checkpoint.mode memory_budget --activation_checkpoint.memory_budget"
_PIPE: dict[str, Any] = {"schedule": "DualPipeV"}
_BOARD, _LONG = "H100_500W", ((32768, 1), (65536, 2), (131072, 4), (262144, 8))
_ALL = (FULL, COMPILED, FLOAT8)
FIGURES = (
    Published(_BOARD, "8B", 8, 2, 8192, (OP,), 5762, 82.4, fitted=True),
    Published(_BOARD, "8B", 8, 2, 8192, (OP, COMPILED), 6667, 77.0, fitted=True),
    Published(_BOARD, "8B", 8, 2, 8192, (OP, COMPILED, FLOAT8), 8532, 76.8, fitted=True),
    Published(_BOARD, "8B", 128, 2, 8192, (OP,), 5605, 67.0),
    Published(_BOARD, "8B", 128, 2, 8192, (OP, COMPILED), 6514, 62.0),
    Published(_BOARD, "8B", 128, 2, 8192, (OP, COMPILED, FLOAT8), 8380, 61.8),
    *(
        Published(_BOARD, "8B", 8, 1, seq_len, _ALL, tokens, gib, cp=cp, fitted=cp == 1)
        for (seq_len, cp), tokens, gib in zip(_LONG, (3890, 2540, 1071, 548), (83.9, 84.2, 84.0, 84.5), strict=True)
    ),
    Published(_BOARD, "70B", 256, 16, 8192, _ALL, 829, 71.9, tp=8),
    Published(_BOARD, "70B", 256, 16, 8192, (*_ALL, ASYNC), 876, 67.6, tp=8),
    Published(_BOARD, "405B", 512, 32, 8192, (*_ALL, ASYNC), 100, 82.5, tp=8, pp=8, microbatches=8),
    Published(_BOARD, "405B", 512, 32, 8192, (*_ALL, ASYNC), 128, 72.7, tp=8, pp=8, microbatches=8,
              schedule="Interleaved1F1B"),
    *(
        Published(_BOARD, "405B", 512, 8, seq_len, (*_ALL, ASYNC), tokens, gib, tp=8, pp=8, cp=cp, microbatches=8)
        for (seq_len, cp), tokens, gib in zip(_LONG, (76, 47, 31, 16), (75.3, 75.9, 77.1, 84.9), strict=True)
    ),
    Published("A100", "8B", 64, 1, 8192, (), 2904),
    Published("A100", "8B", 64, 1, 8192, (OP,), 2973),
    Published("A100", "70B", 64, 1, 8192, (FULL,), 331),
    Published("H200", "8B", 32, 2, 8192, (OP, COMPILED, FLOAT8), 10938, 47.96),
    Published("H200", "8B", 64, 2, 8192, (OP, COMPILED, FLOAT8), 10753, 46.97),
    # Experts, in float8 where it is said.
    Published("H800", "671B", 2048, 120, 4096, (), 1543, pp=16, microbatches=120, family="deepseek_v3",
              own=f"{_PAIRS} 16 {_ROUNDED} {_IN_FLOAT8} {_KEPT} 0.42", **_PIPE),
    Published("H800", "671B", 2048, 120, 4096, (), 1543, pp=16, microbatches=120, family="deepseek_v3",
              own=f"{_PAIRS} 16 {_KEPT} 0.5", **_PIPE),
    Published("H100", "671B", 1024, 128, 4096, (), 865, pp=16, microbatches=128, family="deepseek_v3",
              own=f"{_PAIRS} 16 {_KEPT} 0.5", **_PIPE),
    Published("H100", "30B-A3B", 8, 64, 4096, (FULL,), 12040, family="qwen3",
              own=f"--training.local_batch_size 4 {_PAIRS} 8"),
    Published("H100", "235B-A22B", 256, 64, 4096, (), 1575, pp=16, microbatches=64, family="qwen3",
              own=f"{_PAIRS} 8 {_KEPT} 0.5", **_PIPE),
    Published("H100", "120b", 64, 64, 4096, (), 7626, pp=4, microbatches=32, family="gpt_oss",
              own=f"{_PAIRS} 8 {_KEPT} 0.4375", **_PIPE),
)  # fmt: skip


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
