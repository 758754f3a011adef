"""The files of experts in train_configs are as fast as their neighbours: no step along an option is much faster and
fits. A file of figures, and no run: times are the forecast's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.config import JobConfig, check
from torchtitan_graph.config.job import get, put
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.simulate import JobForecast, by_rates, simulate
from torchtitan_graph.rates import RATES

FILES = Path(__file__).parents[3] / "train_configs"
NAMES = ("deepseek_v3_16b", "deepseek_v3_236b", "deepseek_v3_671b", "gpt_oss_20b", "gpt_oss_120b", "llama4_17bx16e",
         "llama4_17bx128e", "qwen3_30b_a3b", "qwen3_235b_a22b")  # fmt: skip
H100 = RATES["H100"]
HEADROOM = 0.1  # of the memory, that a neighbour must leave free
FASTER = 1.05
SHARE = 1 / 16  # of activations that are kept: what a search tries
WAITS_FOR_EXPERTS = ("ep", "ep_far", "ep_near")


def said(name: str) -> tuple[int, float, float, float]:
    """Return what the head of a file says: its number of GPUs, and the forecast's tokens/s, MFU and GiB."""
    head = " ".join(line.strip("# ") for line in (FILES / f"{name}.toml").read_text().split("[job]")[0].splitlines())
    found = re.search(r"on ([\d,]+) GPUs.*on H100: ([\d,]+) tokens/s a GPU, ([\d.]+) % MFU, ([\d.]+) GiB", head)
    assert found, head
    world, *figures = (float(x.replace(",", "")) for x in found.groups())
    return int(world), *figures  # type: ignore[return-value]


def forecast(config: JobConfig, world: int) -> JobForecast:
    job = build(config, world, H100)
    return simulate(job, by_rates(job, H100), H100)


def steps_from(config: JobConfig, world: int) -> Iterator[dict[str, Any]]:
    """Yield settings, each a step along an option, whether they are legal or not."""

    def degree(axis: str) -> int:
        return int(get(config, f"parallelism.{axis}_parallel_degree"))

    rows = config.training.global_batch_size
    for factor in (2.0, 0.5):
        for axis in ("pipeline", "tensor", "expert"):
            changed = {
                each: degree(each) * (factor if each == axis else 1) for each in ("pipeline", "tensor", "expert")
            }
            data = world / (changed["pipeline"] * changed["tensor"])
            if min(*changed.values(), data) < 1 or rows % data:
                continue
            of = {f"parallelism.{axis}_parallel_degree": int(changed[axis])}
            if degree("pipeline") > 1 and axis != "expert":
                of["training.local_batch_size"] = int(rows // data)
            if axis == "pipeline" and changed[axis] == 1:
                of |= {"parallelism.pipeline_parallel_schedule": "1F1B", "training.local_batch_size": 1}
            yield of
        key = "parallelism.pipeline_parallel_microbatch_size" if degree("pipeline") > 1 else "training.local_batch_size"
        if (size := get(config, key) * factor) >= 1:
            yield {key: int(size)}
    for mode, option in (("none", "op"), ("full", "op"), ("selective", "2"), ("selective", "op")):
        yield {"activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": option}
    if config.activation_checkpoint.mode == "memory_budget":
        share = config.activation_checkpoint.memory_budget
        for other in (max(0.0, share - SHARE), min(1.0, share + SHARE)):
            yield {"activation_checkpoint.memory_budget": other}
    yield {"parallelism.expert_exchange": "direct"}
    yield {"parallelism.expert_exchange": "by_machine"}
    yield {"parallelism.overlap_microbatches": not config.parallelism.overlap_microbatches}


def changed(config: JobConfig, settings: dict[str, Any]) -> bool:
    return any(get(config, key) != value for key, value in settings.items())


def of_file(name: str, world: int) -> JobConfig:
    return configuration(["--job.config_file", str(FILES / f"{name}.toml"), "--model.hf_assets_path", ""], world)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_its_forecast_and_no_neighbour_is_better(name: str) -> None:
    world, tokens, mfu, gib = said(name)
    own = forecast(of_file(name, world), world)
    per_rank = own.tokens_per_second / world
    assert (per_rank, 100 * own.mfu, max(own.needs) / GIB) == pytest.approx((tokens, mfu, gib), rel=0.02)
    assert own.mfu >= 0.2 and own.fits
    waits = sum(own.step.exposed.get(axis, 0.0) for axis in WAITS_FOR_EXPERTS)
    assert waits < 0.1 * own.step.seconds
    better = []
    for settings in steps_from(of_file(name, world), world):
        config = of_file(name, world)
        if not changed(config, settings):
            continue
        for key, value in settings.items():
            put(config, key, value)
        try:
            check(config, world)
            other = forecast(config, world)
        except UserError:
            continue
        fits = max(other.needs) <= H100.memory_gib * GIB * (1 - HEADROOM)
        if fits and other.tokens_per_second > FASTER * own.tokens_per_second:
            better.append((settings, other.tokens_per_second / world))
    assert better == []


def test_every_file_of_experts_says_its_forecast() -> None:
    """Negative control of `said` too: a dense file says none."""
    assert all(said(name)[2] >= 20 for name in NAMES)
    with pytest.raises(AssertionError):
        said("llama3_8b")
    assert {path.stem for path in FILES.glob("*.toml") if "[moe]" in path.read_text()} - {*NAMES} == {
        path.stem for path in FILES.glob("*debug.toml") if "[moe]" in path.read_text()
    }
