"""The search: its winner is brute force's, what it leaves out could not win, and legal is what the trainer says."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import JobConfig, check, load
from torchtitan_graph.config.job import get
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.plan import find
from torchtitan_graph.plan.depth import _periods, depths, keep_layers
from torchtitan_graph.plan.ranks import build
from torchtitan_graph.plan.search import VARIED, Figures, Search, degrees
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import StepOptions

GIB = 2**30


@pytest.mark.parametrize(
    ("kinds", "first_and_period"),
    [("AAAA", (0, 1)), ("BAAA", (1, 1)), ("ABAB", (0, 2)), ("CBABABA", (1, 2)), ("AAAB", (3, 1)), ("AABAAB", (0, 3))],
)
def test_layers_repeat(kinds: str, first_and_period: tuple[int, int]) -> None:
    assert _periods(kinds) == first_and_period


def family_model(name: str, flavor: str, **changes: Any) -> Any:
    family = load_family(name)
    with torch.device("meta"):
        return family.Model(dataclasses.replace(family.FLAVORS[flavor], **changes), "sdpa")


def test_depths_are_whole_periods_of_a_family_s_layers() -> None:
    plain = StepOptions(Target.here(), (1, 64))
    second = dataclasses.replace(plain, recompute=Recompute(every=2))
    # One dense layer, then experts; every second layer of gpt_oss sees all positions, or is computed again.
    assert depths(family_model("deepseek_v3", "debugmodel", num_layers=8), plain) == (2, 3, 6.0)
    assert depths(family_model("gpt_oss", "debugmodel", num_layers=12), plain) == (2, 4, 5.0)
    assert depths(family_model("llama3", "debugmodel", num_layers=12), second) == (2, 4, 5.0)
    assert depths(family_model("llama3", "debugmodel", num_layers=2), plain) is None, "no layer can be left out"
    # What options say of single layers: the last one's activations stay where they are; code for the first alone.
    eight = family_model("llama3", "debugmodel", num_layers=8)
    offload = tuple(f"layers.{i}" for i in range(7))
    assert depths(eight, dataclasses.replace(plain, offload=offload)) is None
    assert depths(eight, dataclasses.replace(plain, regions={"layers.0.feed_forward": {}})) == (2, 3, 6.0)
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
    mode, share = config.activation_checkpoint.mode, config.activation_checkpoint.memory_budget
    kept = {"none": 4.0, "selective": 2.0, "full": 1.0}.get(mode, 0.9 + 3.1 * share)
    again = {"none": 1.0, "selective": 1.1, "full": 1.3}.get(mode, 1.4 - 0.4 * share)
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
    given: dict[str, Any] = dict(num_near=4, num_experts=0, rows=8, depths=(2, 3, 4.0))
    return Search(job(), 4, memory=memory * GIB, forecast=forecast, **given | changes)


def test_rows_of_a_step_are_dealt_to_all_replica_groups() -> None:
    """8 rows for two groups of four ranks: a microbatch has at most so many that each group has one."""
    config, seen = job("--fault_tolerance.enable"), set()
    of = Search(config, 4, memory=1e3 * GIB, forecast=made_up, num_near=4, num_experts=0, rows=8, depths=(2, 3, 4.0))
    of.run()
    for each in of.found:
        if each.figures is not None:
            settings = of.configured(each.settings)
            p, rows = settings.parallelism, settings.training.local_batch_size
            seen.add((p.pipeline_parallel_degree, rows))
            assert 8 % (2 * rows * p.data_parallel_replicate_degree * p.data_parallel_shard_degree) == 0
    assert (1, 4) in seen and (4, 4) in seen, "tp 4, or four stages, with all rows of a group at once"


@functools.cache
def brute_force() -> dict[Hashable, Figures]:
    """Forecast every legal candidate whole."""
    found: dict[Hashable, Figures] = {}
    of = search(1.0)
    policies = [("none", "op"), ("selective", "op"), ("full", "op")]
    reshards = ("never", "default", "always")
    for each in degrees(4, 4, 0, {}):
        data = each["parallelism.data_parallel_replicate_degree"] * each["parallelism.data_parallel_shard_degree"]
        pp, cp = (each[f"parallelism.{axis}_parallel_degree"] for axis in ("pipeline", "context"))
        if cp > 1:
            continue
        schedules = ("1F1B",) if pp > 1 else (None,)
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
    of = search(memory, varied=("tp", "dp_replicate", "pp", "rows", "recompute", "reshard"))
    fitting = [f for f in brute_force().values() if f.peak <= of.memory]
    if not fitting:
        with pytest.raises(UserError, match="none of .* fits; the least, .*does not fit: needs"):
            of.run()
        return
    found = of.run()
    assert found.best.whole
    assert found.best.figures is not None
    by_policy = min(f.step_s for f in fitting)
    assert found.best.figures.step_s <= by_policy * (1 + 1e-6)
    kept = [each for each in found.fitting if each.settings["activation_checkpoint.mode"] != "memory_budget"]
    assert kept[0].step_s == pytest.approx(by_policy)
    assert all(each.why.startswith(("slower by", "does not fit: needs", "illegal: ")) for each in found.fitting[1:])


def test_in_place_of_a_leading_one_that_does_not_fit_after_all_its_next_way_is_tried() -> None:
    """Few layers tell too little of all of "none"; the next, "selective", was not built while that seemed to fit."""

    def too_little(config: JobConfig, layers: int | None) -> Figures:
        found = made_up(config, layers)
        hidden = layers is not None and config.activation_checkpoint.mode == "none"
        return dataclasses.replace(found, peak=0.4 * found.peak) if hidden else found

    of, exact = (search(40.0, each, varied=("recompute", "rows")) for each in (too_little, made_up))
    found, wanted = of.run(), exact.run()
    assert str(found.best) == str(wanted.best) and "none" not in str(found.best)


def test_the_peak_moves_to_where_layers_keep_more() -> None:
    few, more = (Figures(1.0, 20 + n, {}, {"loss": 20.0 + n, "forward": 4.0 * n}) for n in (2, 3))
    assert few.at(more, 38.0).peak == 4.0 * 40, "not 20 + 40"


def test_depths_are_deepened_until_the_line_holds() -> None:
    def bent(config: JobConfig, layers: int | None) -> Figures:
        """The first depth is on another line than all others."""
        found = made_up(config, layers)
        return dataclasses.replace(found, step_s=found.step_s + 100.0 * (layers != 2))

    def curved(config: JobConfig, layers: int | None) -> Figures:
        return dataclasses.replace(made_up(config, layers), step_s=2.0 ** (layers or 12))

    of = search(1e6, bent, varied=("recompute", "rows"), depths=(2, 3, 10.0))
    for settings in (each.settings for each in of.run().fitting):
        told = of._extrapolated(of.configured(settings))
        assert told is not None and told.step_s == pytest.approx(100 + made_up(of.configured(settings), 12).step_s)
    of = search(1e6, curved, varied=("rows",), depths=(2, 3, 10.0))
    assert all(each.whole for each in of.run().fitting), "where no line holds all layers are built"


def with_experts(config: JobConfig, layers: int | None) -> Figures:
    """Experts on more ranks need less memory, and wait for their exchange: not in pairs, and less by machine."""
    found, p = made_up(config, layers), config.parallelism
    num_near, waits = 2, 0.0
    if (ep := p.expert_parallel_degree) > 1:
        slow = 10.0 if ep > num_near else 2.0
        waits = slow * (0.4 if p.expert_exchange == "by_machine" else 1.0) * (0.0 if p.overlap_microbatches else 1.0)
    parts = {**found.parts, "exposed ep communication": waits}
    peak = found.peak * (1.1 if p.overlap_microbatches else 1.0) / ep
    return Figures(sum(parts.values()), peak, parts)


def test_experts_over_machines_exchange_by_machine_and_in_pairs() -> None:
    of_twelve = degrees(8, 2, 12, {"parallelism.tensor_parallel_degree": 1})
    sharded = [each for each in of_twelve if each["parallelism.data_parallel_shard_degree"] == 8]
    assert [each["parallelism.expert_parallel_degree"] for each in sharded] == [1, 2, 4]
    given: dict[str, Any] = dict(num_near=2, num_experts=8, forecast=with_experts, depths=None, rows=8)
    # Only the experts of four ranks fit, which are two machines: alone they would wait.
    of = Search(job(), 4, memory=12.0 * GIB, varied=("ep", "rows", "pairs", "exchange"), **given)
    best = of.run().best.settings
    assert best["parallelism.expert_parallel_degree"] == 4 and best["parallelism.overlap_microbatches"]
    assert best["parallelism.expert_exchange"] == "by_machine"
    best = Search(job(), 4, memory=12.0 * GIB, varied=("ep", "rows"), **given).run().best.settings
    assert best["parallelism.expert_exchange"] == "direct" and not best["parallelism.overlap_microbatches"], (
        "not varied"
    )


def test_pipelines_are_tried_in_pairs() -> None:
    def in_pairs(config: JobConfig, layers: int | None) -> Figures:
        found, p = made_up(config, layers), config.parallelism
        waits = 0.0 if p.overlap_microbatches else 5.0
        return Figures(found.step_s + waits, found.peak, {**found.parts, "messages between stages": waits})

    varied = ("pp", "schedule", "pairs")
    of = search(120.0, in_pairs, varied=varied)
    of.fixed["parallelism.pipeline_parallel_degree"] = 2
    best = of.run().best.settings
    assert best["parallelism.overlap_microbatches"]
    assert best["parallelism.pipeline_parallel_schedule"] == "DualPipeV"
    of = search(120.0, in_pairs, varied=("pp", "pairs"))
    of.fixed["parallelism.pipeline_parallel_degree"] = 2
    assert not of.run().best.settings["parallelism.overlap_microbatches"], "1F1B is kept, which has none"


def test_ctrl_c_gives_the_best_so_far() -> None:
    heard: list[str] = []

    def until_the_third(config: JobConfig, layers: int | None) -> Figures:
        calls.append(layers)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return made_up(config, layers)

    calls: list[int | None] = []
    of = search(120.0, until_the_third, varied=("tp", "rows"), progress=heard.append)
    found = of.run()
    assert of.is_stopped and 0 < of.num_built < of.num_at_most and found.best.whole
    assert any(line.startswith("stopped:") for line in heard)
    assert f"1 of at most {of.num_at_most}: " in heard[0] and "; best so far " in heard[1]
    assert find.lines(of, found)[0].startswith(f"stopped early, of at most {of.num_at_most}: {of.num_built} candidates")

    def at_once(config: JobConfig, layers: int | None) -> Figures:
        raise KeyboardInterrupt

    with pytest.raises(UserError, match="stopped before the first candidate was built"):
        search(120.0, at_once).run()


def test_degrees_do_not_straddle_machines() -> None:
    for each in degrees(24, 8, 24, {}):
        tp, ep = (each[f"parallelism.{axis}_parallel_degree"] for axis in ("tensor", "expert"))
        assert 8 % tp == 0 and (8 % ep == 0 or ep % 8 == 0)
    tp_of_six = {each["parallelism.tensor_parallel_degree"] for each in degrees(6, 8, 0, {})}
    assert tp_of_six == {1, 2, 3, 6}, "in one machine all are legal"


def test_a_lever_that_is_slower_leaves_room_for_the_next() -> None:
    def once(config: JobConfig, layers: int | None) -> Figures:
        found, p = made_up(config, layers), config.parallelism
        waits = {"none": 10.0, "all": 11.0, "experts": 8.0}[p.fsdp_once_a_step]
        parts = {"exposed fsdp communication": waits}
        return Figures(found.step_s + waits, found.peak, found.parts | parts)

    found = Search(job("--parallelism.expert_parallel_degree", "2"), 4, num_near=4, num_experts=8, rows=8,
                   memory=1e6 * GIB, forecast=once, depths=None, varied=("rows", "once")).run()  # fmt: skip
    assert found.best.settings["parallelism.fsdp_once_a_step"] == "experts"
    assert "once experts" in str(found.best)


def test_nothing_is_built_twice_and_pairs_are_shown() -> None:
    built: list[str] = []

    def noted(config: JobConfig, layers: int | None) -> Figures:
        p = config.parallelism
        built.append(f"{p.pipeline_parallel_schedule} {p.overlap_microbatches} {p.fsdp_reshard_after_forward} "
                     f"{config.training.local_batch_size} {p.pipeline_parallel_microbatch_size}")  # fmt: skip
        found = made_up(config, layers)
        waits = {"bubble": 0.0 if p.overlap_microbatches else 9.0}
        return Figures(found.step_s + waits["bubble"], found.peak, found.parts | waits)

    of = Search(job("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4"), 4, num_near=4,
                num_experts=0, rows=8, memory=1e6 * GIB, forecast=noted, depths=None,
                varied=("schedule", "pairs", "reshard"))  # fmt: skip
    found = of.run()
    assert len(built) == len({*built}) and "pairs true" in str(found.best)


def test_ctrl_c_in_a_whole_build_leaves_it_to_be_built() -> None:
    whole: list[bool] = []

    def interrupted(config: JobConfig, layers: int | None) -> Figures:
        if layers is None:
            whole.append(True)
            if len(whole) == 1:
                raise KeyboardInterrupt
        return dataclasses.replace(made_up(config, layers), step_s=7.0 if layers is None else 1.0 * layers)

    found = search(1e6, interrupted, varied=("rows",)).run()
    assert found.best.figures is not None and found.best.figures.step_s == 7.0, "not the extrapolated 6"


def test_pairs_that_do_not_fit_are_tried_with_more_recomputation() -> None:
    def with_pairs(config: JobConfig, layers: int | None) -> Figures:
        in_pairs, mode = config.parallelism.overlap_microbatches, config.activation_checkpoint.mode
        by_mode = {"none": (95.0, 10.0), "selective": (60.0, 11.0), "full": (20.0, 20.0), "memory_budget": (20.0, 12.0)}
        peak, step_s = by_mode[mode]
        waits = {"exposed ep communication": 0.5 if in_pairs else 6.0}
        return Figures(step_s + sum(waits.values()), peak * (1.1 if in_pairs else 1.0) * GIB, waits)

    of = Search(job("--training.local_batch_size", "1"), 4, num_near=4, num_experts=0, rows=8, memory=100.0 * GIB,
                forecast=with_pairs, depths=None, varied=("recompute", "pairs"))  # fmt: skip
    best = of.run().best.settings
    assert best["parallelism.overlap_microbatches"] and best["activation_checkpoint.mode"] == "selective"


def test_as_much_is_recomputed_as_the_memory_needs() -> None:
    """With two rows mode none needs 74 GiB, which is too much; what full leaves free is used."""
    of = search(66.0, varied=("rows", "recompute"), depths=None)
    best = of.run().best
    assert best.settings["activation_checkpoint.mode"] == "memory_budget" and best.figures is not None
    assert 0.9 * of.memory < best.figures.peak <= of.memory
    assert str(best).endswith(f"recompute memory_budget {best.settings['activation_checkpoint.memory_budget']:g}")
    assert "memory_budget" not in str(search(66.0, varied=("rows",), depths=None).run().best), "not varied"
    assert "memory_budget" not in str(search(1e6, varied=("rows", "recompute")).run().best), "nothing to gain"


def test_schedules_take_one_place_among_those_tried_in_pairs() -> None:
    """Fewer rows wait most, but not in pairs."""

    def waits_by_rows(config: JobConfig, layers: int | None) -> Figures:
        p = config.parallelism
        rows = p.pipeline_parallel_microbatch_size
        bubble = 0.0 if p.overlap_microbatches else 20.0 / rows
        return Figures(10.0 + 0.1 * (8 - rows) * -1 + bubble, GIB, {"bubble": bubble})

    words = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "16"]
    of = Search(job(*words), 4, num_near=4, num_experts=0, rows=32, memory=1e6 * GIB, forecast=waits_by_rows,
                depths=None, varied=("schedule", "rows", "pairs"))  # fmt: skip
    best = of.run().best.settings
    assert best["parallelism.overlap_microbatches"] and best["parallelism.pipeline_parallel_microbatch_size"] == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_in_place_of_one_that_does_not_fit_whole_comes_the_fastest_of_its_siblings(is_refused: bool) -> None:
    times = {"none": 5.0, "selective": 6.0, "full": 9.0, "memory_budget": 7.0}
    later = {"never": 0.0, "default": 3.0, "always": 4.0}

    def whole_is_more(config: JobConfig, layers: int | None) -> Figures:
        mode, reshard = config.activation_checkpoint.mode, config.parallelism.fsdp_reshard_after_forward
        peak = {"none": 100.0, "selective": 40.0, "full": 10.0, "memory_budget": 40.0}[mode] - 20.0 * (
            reshard != "never"
        )
        if layers is not None:
            return Figures((times[mode] + later[reshard]) * layers / 10, peak / 10 * GIB, {})
        if is_refused and peak > 90.0:
            raise UserError("whole: can't be built")
        return Figures(times[mode] + later[reshard], peak * GIB, {})

    of = Search(job("--training.local_batch_size", "2"), 4, num_near=4, num_experts=0, rows=8, memory=85.0 * GIB,
                forecast=whole_is_more, depths=(2, 3, 8.0), varied=("recompute", "reshard"))  # fmt: skip
    best = of.run().best.settings
    assert (
        best["activation_checkpoint.mode"] == "selective" and best["parallelism.fsdp_reshard_after_forward"] == "never"
    )


def test_a_pipeline_is_legal_whatever_is_shared_without_one() -> None:
    words = ["--parallelism.fsdp_once_a_step", "all", "--training.local_batch_size", "1"]
    of = Search(job(*words), 4, num_near=4, num_experts=0, rows=8, memory=1e6 * GIB, forecast=made_up, depths=None,
                varied=("pp",))  # fmt: skip
    assert any(each.settings["parallelism.pipeline_parallel_degree"] > 1 for each in of.run().fitting)


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_few_layers_tell_all_and_the_best_is_the_best_of_all_built_whole() -> None:
    words = ["--comm.mode", "fake_backend", "--training.seq_len", "64", "--training.global_batch_size", "2"]
    words += ["--training.local_batch_size", "1", "--parallelism.tensor_parallel_degree", "2"]
    config, rates = load([*words, "--activation_checkpoint.mode", "full"]), RATES["H100"]
    of, found = find.search(config, 2, rates, None, ("rows",))
    best, other = found.fitting  # two rows at a time, or one
    assert best.whole and other.whole and best.figures is not None and other.figures is not None
    few, more, x = of.depths or (0, 0, 0.0)
    told = of.forecast(of.configured(other.settings), few).at(of.forecast(of.configured(other.settings), more), x)
    built = build(of.configured(other.settings), 2, rates)
    whole = find.figures(simulate(built, by_rates(built, rates), rates))
    assert told.step_s == pytest.approx(whole.step_s, rel=1e-9) and whole.step_s > best.figures.step_s
    assert told.parts == pytest.approx(whole.parts, rel=1e-6)
    # Deeper models may hold most elsewhere: the lines through few layers are close.
    assert told.peak == pytest.approx(whole.peak, rel=0.01)
    text = "\n".join(find.lines(of, found))
    assert "2 candidates built; 2 fit. Best:" in text and "slower by" in text


def test_the_best_is_a_file_that_loads_and_trains_as_it_is(tmp_path: Path) -> None:
    of = search(120.0, varied=("tp", "rows"))
    found = of.run()
    path = tmp_path / "best.toml"
    path.write_text(text := find.best_toml(of, found.best))
    assert text.startswith(f"# Found by python -m torchtitan_graph.plan --search for 4 ranks: {found.best}.\n")
    config = load(["--job.config_file", str(path)])
    assert config.comm.mode == "default"
    assert {key: get(config, key) for key in found.best.settings} == dict(found.best.settings)
    assert config.training.global_batch_size == 8
    assert check(config, 4) is not None


def test_what_the_trainer_refuses_is_told_in_its_words() -> None:
    def refuses(config: JobConfig, layers: int | None) -> Figures:
        Blueprint(config, 4)
        return made_up(config, layers)

    found = search(120.0, refuses, varied=("tp", "pp", "schedule")).run()
    assert all("rows" in str(each) for each in found.fitting), "also a single one"
    illegal = {str(each): each.why for each in found.others if each.why.startswith("illegal")}
    assert any("tok_embeddings.weight; choose a degree that does" in why for why in illegal.values()), illegal


def test_a_schedule_of_one_s_own_is_not_varied() -> None:
    of = search(120.0)
    of.config.parallelism.pipeline_parallel_schedule_csv = "my.csv"
    kept = Search(of.config, 4, num_near=4, num_experts=0, rows=8, memory=GIB, forecast=made_up, depths=None)
    assert "parallelism.pipeline_parallel_schedule" in kept.fixed and not of.fixed


def test_what_can_t_be_varied_is_refused() -> None:
    with pytest.raises(UserError, match="--search tp,batch: batch is none of dp_replicate, tp, cp"):
        find.check_varied("tp,batch")
    with pytest.raises(UserError, match="row is none of .*; did you mean rows?"):
        find.check_varied("row")
    assert find.check_varied("") == VARIED
    assert find.check_varied("tp,rows") == ("tp", "rows")
