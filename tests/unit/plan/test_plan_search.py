"""The search: its winner is brute force's, what it leaves out could not win, and legal is what the trainer says."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.plan.layers import _periods, depths, keep_layers
from torchtitan_graph.plan.search import Figures, Search, degrees

GIB = 2**30


@pytest.mark.parametrize(
    ("kinds", "every", "first_and_period"),
    [("AAAA", 1, (0, 1)), ("BAAA", 1, (1, 1)), ("ABAB", 1, (0, 2)), ("CBABABA", 1, (1, 2)), ("BAAA", 2, (2, 2)),
     ("AAAB", 1, (3, 1)), ("AABAAB", 1, (0, 3))],
)  # fmt: skip
def test_layers_repeat(kinds: str, every: int, first_and_period: tuple[int, int]) -> None:
    assert _periods(kinds, every) == first_and_period


def family_model(name: str, flavor: str, **changes: Any) -> Any:
    family = load_family(name)
    with torch.device("meta"):
        return family.Model(dataclasses.replace(family.FLAVORS[flavor], **changes), "sdpa")


def test_depths_are_whole_periods_of_a_family_s_layers() -> None:
    # One dense layer, then experts; every third layer of llama4 sees all positions.
    assert depths(family_model("deepseek_v3", "debugmodel", num_layers=8), Recompute()) == (2, 3, 6.0)
    assert depths(family_model("gpt_oss", "debugmodel", num_layers=12), Recompute()) == (2, 4, 5.0)
    assert depths(family_model("llama3", "debugmodel", num_layers=2), Recompute()) is None, "no layer can be left out"
    model = family_model("llama3", "debugmodel")
    keep_layers(model, 2)
    assert model.modules_in_order == ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]


# --- a cluster that is made up: every legal candidate has figures by a formula ---------------------------------------


def job(*words: str) -> JobConfig:
    return load(["--comm.mode", "fake_backend", "--training.global_batch_size", "8", *words])


def made_up(config: JobConfig, layers: int | None) -> Figures:
    """More layers, rows and kept activations need more memory; recomputation, tp and gathers take time."""
    p, n = config.parallelism, layers or 6
    rows = config.training.local_batch_size if p.pipeline_parallel_degree == 1 else p.pipeline_parallel_microbatch_size
    kept = {"none": 4.0, "selective": 2.0, "full": 1.0}[config.activation_checkpoint.mode]
    again = {"none": 1.0, "selective": 1.1, "full": 1.3}[config.activation_checkpoint.mode]
    reshard = ("never", "default", "always").index(p.fsdp_reshard_after_forward)
    tp, shard, ranks = p.tensor_parallel_degree, p.data_parallel_shard_degree, 4 // p.pipeline_parallel_degree
    micro = 8 // (rows * p.data_parallel_replicate_degree * shard)
    arithmetic = n * 8 / 4 * again * (1 + 0.2 / rows)
    sent = {"tp": n * (tp - 1) * 0.4, "fsdp": n * micro * (shard > 1) * (0.05 + 0.05 * reshard)}
    bubble = arithmetic * (p.pipeline_parallel_degree - 1) / micro
    held = n * (16 / (shard * tp * p.pipeline_parallel_degree) + kept * rows / tp + (micro > 1) / ranks)
    parts = {"arithmetic": arithmetic, "bubble": bubble} | {f"exposed {axis}": s for axis, s in sent.items()}
    return Figures(sum(parts.values()), (held + (3 - reshard) * (shard > 1)) * GIB, parts)


def search(memory: float, forecast: Callable[..., Figures] = made_up, **changes: Any) -> Search:
    given: dict[str, Any] = dict(num_near=4, has_experts=False, rows=8, depths=(2, 3, 4.0))
    return Search(job(), 4, memory=memory * GIB, forecast=forecast, **given | changes)


def brute_force(of: Search) -> dict[Hashable, Figures]:
    """Forecast every legal candidate whole."""
    found = {}
    policies = [("none", "op"), ("selective", "op"), ("full", "op")]
    reshards = ("never", "default", "always")
    for each in degrees(4, 4, False, {}):
        data = each["parallelism.data_parallel_replicate_degree"] * each["parallelism.data_parallel_shard_degree"]
        pp, cp = (each[f"parallelism.{axis}_parallel_degree"] for axis in ("pipeline", "context"))
        if cp > 1:
            continue
        schedules = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV") if pp > 1 else (None,)
        for schedule, rows, (mode, option), reshard in itertools.product(schedules, (1, 2, 4, 8), policies, reshards):
            if 8 % (rows * data):
                continue
            own = {"training.local_batch_size": rows, "activation_checkpoint.mode": mode}
            if schedule:
                own |= {"training.local_batch_size": 8 // data, "parallelism.pipeline_parallel_schedule": schedule}
                own |= {"parallelism.pipeline_parallel_microbatch_size": rows}
            own |= {"activation_checkpoint.selective_ac_option": option}
            if each["parallelism.data_parallel_shard_degree"] > 1:
                own |= {"parallelism.fsdp_reshard_after_forward": reshard}
            found[tuple((each | own).items())] = of.forecast(of.configured(each | own), None)
    return found


@pytest.mark.parametrize("memory", [15.0, 30.0, 60.0, 120.0])
def test_the_winner_is_brute_force_s(memory: float) -> None:
    of = search(memory, varied=("tp", "dp_replicate", "pp", "rows", "recompute", "reshard", "schedule"))
    fitting = [f for f in brute_force(of).values() if f.peak <= of.memory]
    if not fitting:
        with pytest.raises(UserError, match="none of .* fits; the least, .*does not fit: needs"):
            of.run()
        return
    found = of.run()
    assert found.best.whole
    assert found.best.figures is not None
    assert found.best.figures.step_s == pytest.approx(min(f.step_s for f in fitting))
    assert all(each.why.startswith(("slower by", "does not fit: needs", "illegal: ")) for each in found.fitting[1:])
