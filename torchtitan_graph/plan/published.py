"""Speeds that others have published of their own programs, next to which a forecast is shown.

Sources: see scripts/published.py, which forecasts each of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torchtitan_graph.config.job import JobConfig

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
        degrees = [f"{what} {n}" for what, n in (("TP", self.tp), ("CP", self.cp), ("PP", self.pp)) if n > 1]
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


def nearest_published(config: JobConfig, world_size: int, board: str) -> Published | None:
    """Return the published run of the same model on the same kind of device that is most like a job; None without
    one."""
    model, compiled = config.model, config.compile.codegen != "off"
    in_float8 = any("float8" in each for each in model.converters)
    kind = board.partition("_")[0]
    same = [x for x in FIGURES if (x.family, x.model, x.board.partition("_")[0]) == (model.name, model.flavor, kind)]

    def distance(figure: Published) -> tuple[bool, bool, float, float]:
        seq_len = abs(math.log(figure.seq_len / config.training.seq_len))
        ranks = abs(math.log(figure.world / world_size))
        return (FLOAT8 in figure.how) != in_float8, (COMPILED in figure.how) != compiled, seq_len, ranks

    return min(same, key=distance, default=None)
