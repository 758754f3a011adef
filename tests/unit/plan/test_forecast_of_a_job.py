"""Forecasts against closed forms, and against what a dry run says."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan_graph.analysis.cost import estimate
from torchtitan_graph.analysis.liveness import GATHERED_INPUTS, lifetimes
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import load
from torchtitan_graph.device import Target
from torchtitan_graph.forecast import OPTIMIZER, STEP
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.schedule import plan_pipeline
from torchtitan_graph.plan import outlook
from torchtitan_graph.plan import ranks as building
from torchtitan_graph.plan.__main__ import main
from torchtitan_graph.plan.ranks import BuiltJob, build, configuration
from torchtitan_graph.plan.report import as_data, lines
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES, Rates
from torchtitan_graph.torch_private.distributed import init_fake_process_group
from torchtitan_graph.torch_private.pipelines import PipelineAction

H100 = RATES["H100"]
DEBUG = ["--training.seq_len", "64", "--training.local_batch_size", "4", "--compile.optimizer_in_graph", "false"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "3", "--training.global_batch_size", "4"]
LAYOUTS = {
    "one": (1, ["--training.global_batch_size", "8"]),
    "FSDP-2 TP-2": (4, ["--parallelism.tensor_parallel_degree", "2"]),
    "PP-3": (3, PIPELINE),
}


def job(world_size: int, words: list[str]) -> BuiltJob:
    return build(configuration([*DEBUG, *words], world_size), world_size, H100)


@pytest.fixture(scope="module")
def jobs() -> Callable[[str], BuiltJob]:
    made: dict[str, BuiltJob] = {}

    def get(name: str) -> BuiltJob:
        if name not in made:
            made[name] = job(*LAYOUTS[name])
        return made[name]

    return get


@pytest.mark.parametrize(
    "name",
    ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FSDP-2 TP-2", "PP-3"))],
)
def test_memory_is_what_a_dry_run_says(name: str, jobs: Callable[[str], BuiltJob]) -> None:
    world_size, words = LAYOUTS[name]
    plan = simulate(found := jobs(name), by_rates(found, H100), H100)
    for place, rank in enumerate(found.ranks):
        assert sum(rank.forecast.at_peak.values()) == rank.forecast.held[STEP]
        assert plan.needs[place] == rank.forecast.in_all + int(H100.reserved_gib * 2**30)
    blueprint = Blueprint(load([*DEBUG, *words, "--comm.mode", "fake_backend"]), world_size, Target.of(H100))
    init_fake_process_group(world_size, plan.rank.rank)
    try:
        said = blueprint.dry_run()
    finally:
        torch.distributed.destroy_process_group()
    told = plan.rank.forecast
    assert told.lines()[: len(told.held) + 2] == said[: len(told.held) + 2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_step_are_the_step(name: str, jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs(name)
    step = simulate(found, by_rates(found, H100), H100).step
    parts = [step.host, step.bubble, step.sums, step.optimizer]
    assert sum([*step.computed.values(), *step.exposed.values(), *parts]) == pytest.approx(step.seconds)
    assert all(step.exposed[axis] <= step.sent[axis] + step.bubble for axis in step.exposed)


def test_inputs_that_are_gathered_and_kept_are_told_apart(jobs: Callable[[str], BuiltJob]) -> None:
    """Of every second block, which is not computed again, its attention's and its feed-forward's, and the output's: 4
    rows of 64 tokens in bf16."""
    of_tp = jobs("FSDP-2 TP-2").ranks[0]
    (gm,), model = of_tp.modules, Blueprint(load([]), 1).model
    kept = [each for each in lifetimes(gm) if each.purpose == GATHERED_INPUTS]
    assert [each.num_bytes for each in kept] == (len(model.layers) + 1) * [4 * 64 * model.config.dim * 2]
    assert 0 < of_tp.forecast.at_peak[GATHERED_INPUTS] <= sum(each.num_bytes for each in kept)


OF_EXPERTS = "--model.name qwen3 --model.flavor debugmodel_moe --training.global_batch_size 16"
SLOW = H100._replace(near=H100.near / 100)


def chosen(caplog: pytest.LogCaptureFixture, rates: Rates, ep: int) -> tuple[bool, dict[str, float]]:
    """Return whether `auto` takes pairs, and the memory that it says of each choice; of the taken one it is what the
    forecast then says."""
    words = f"{OF_EXPERTS} --parallelism.expert_parallel_degree {ep} --parallelism.overlap_microbatches=auto"
    caplog.clear()
    with caplog.at_level("INFO", "torchtitan_graph"):
        (rank,) = build(configuration([*DEBUG, *words.split()], ep), ep, rates).ranks
    found = isinstance(rank.graphs.train, StageGraph) and rank.graphs.train.in_pairs
    told = [text.split() for text in caplog.messages if text.startswith("auto: overlap_microbatches")]
    needs = {words[2].removesuffix(":"): float(words[3]) for words in told}
    taken = needs[str(found).lower()]
    assert taken == pytest.approx(rank.forecast.in_all / 2**30 + rates.reserved_gib, rel=0.01)
    return found, needs


@pytest.mark.slow
def test_auto_takes_pairs_where_they_are_faster_and_what_needs_least_where_nothing_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where links are slow pairs hide the exchange."""
    found, needs = chosen(caplog, SLOW, 2)
    assert found and len(needs) == 2
    found, _ = chosen(caplog, SLOW._replace(memory_gib=min(needs.values()) * 0.99 / 0.9), 2)
    assert found == (needs["true"] < needs["false"])


@pytest.mark.slow
def test_auto_takes_what_fits_and_one_by_one_where_there_is_nothing_to_hide(caplog: pytest.LogCaptureFixture) -> None:
    _, needs = chosen(caplog, SLOW, 2)
    found, _ = chosen(caplog, SLOW._replace(memory_gib=sum(needs.values()) / 2 / 0.9), 2)
    assert found == (needs["true"] < needs["false"])
    found, _ = chosen(caplog, SLOW, 1)
    assert not found, "one rank waits for nothing"


def test_no_part_of_a_step_is_left_out(jobs: Callable[[str], BuiltJob]) -> None:
    """However long the rest takes: of a step of a thousand times as many microbatches the optimizer is a row, too."""
    found = jobs("one")
    plan = simulate(found, by_rates(found, H100), H100)
    step = dataclasses.replace(plan.step, seconds=1000 * plan.step.seconds)
    rows = [line for line in lines(dataclasses.replace(plan, step=step)) if " ms " in line]
    assert any(row.startswith("  clipping and optimizer ") for row in rows)


def test_notes_say_what_is_not_known_and_what_to_change(jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs("FSDP-2 TP-2")
    plan = simulate(found, by_rates(found, H100), H100)

    def noted(**changes: float) -> str:
        waits = {"exposed": {}, "host": 0.0, "bubble": 0.0} | changes
        return "\n".join(lines(dataclasses.replace(plan, step=dataclasses.replace(plan.step, **waits))))  # type: ignore

    quiet, seconds = noted(), plan.step.seconds
    assert "no time was measured: kernels reach the shares of H100's peaks" in quiet and quiet.count("note:") == 1
    assert "34% of the step waits, most of it for tp (30%): try a lower parallelism.tensor_parallel_degree" in noted(
        exposed={"tp": 0.3 * seconds, "fsdp": 0.04 * seconds}  # type: ignore[arg-type]
    )
    waiting = noted(exposed={"efsdp/ep": 0.4 * seconds})  # type: ignore[arg-type]
    assert "for efsdp/ep (40%): try parallelism.fsdp_once_a_step, if a step has several microbatches" in waiting
    assert "for the host (50%): try a larger training.local_batch_size, or compile.cuda_graphs" in noted(
        host=seconds / 2
    )
    assert "for other stages (50%): try more microbatches" in noted(bubble=seconds / 2)
    for what in ("from the host", "to the host"):
        assert f"for {what} (40%): try fewer blocks in activation_checkpoint.offload" in noted(
            exposed={what: 0.4 * seconds}  # type: ignore[arg-type]
        )
    tight = H100._replace(memory_gib=max(plan.needs) / 2**30 / 0.96)
    text = "\n".join(lines(dataclasses.replace(plan, rates=tight)))
    assert "note: 4.0% of the memory are spare" in text and "fits" in text
    text = "\n".join(lines(dataclasses.replace(plan, rates=RATES["CPU"])))
    assert "no time was measured" not in text  # operators were replayed on it


def test_a_step_is_its_microbatches_and_the_optimizer(jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs("one")
    costs = by_rates(found, H100)(found.ranks[0])
    plan = simulate(found, by_rates(found, H100), H100)
    once = estimate(found.ranks[0].graphs.train.gm, costs).seconds  # type: ignore[union-attr]
    trained = found.ranks[0].forecast.held["parameters"]
    assert plan.step.optimizer == pytest.approx(10 * trained / (H100.memory * H100.memory_share))
    added = 3 * trained / (H100.memory * H100.memory_share)
    assert plan.step.seconds == pytest.approx(2 * once + added + plan.step.optimizer)
    assert plan.tokens_per_second == pytest.approx(8 * 64 / plan.step.seconds)
    half = simulate(found, by_rates(found, H100), H100._replace(half=H100.half / 2))
    assert half.mfu == pytest.approx(2 * plan.mfu)  # negative control: by the peak, whatever the step takes


def test_a_cuda_graph_has_no_launches(jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs("one")
    config = dataclasses.replace(found.config, compile=dataclasses.replace(found.config.compile, cuda_graphs=True))
    replayed = found._replace(config=config)
    assert simulate(found, by_rates(found, H100), H100).step.host > 0
    assert simulate(replayed, by_rates(replayed, H100), H100).step.host == pytest.approx(0.0, abs=1e-9)


def test_a_pipeline_waits_as_its_schedule_does(jobs: Callable[[str], BuiltJob]) -> None:
    """With messages that take no time, as the action lists; a slow network adds to it, and is told as such."""
    found = jobs("PP-3")
    fast, slow = (
        H100._replace(near=speed, far=speed, near_hop=hop, far_hop=hop) for speed, hop in ((1e30, 0), (1e5, 0))
    )
    plans = [simulate(found, by_rates(found, rates), rates) for rates in (fast, slow)]
    quick, late = (plan.step for plan in plans)
    assert quick.exposed["pp"] == pytest.approx(0, abs=1e-9) and quick.bubble > 0
    passed = found.ranks[0].graphs.train[0].passed.nbytes  # type: ignore[index]
    message = passed / 1e5 / slow.network_share
    # The first gradients are cast from bf16 to the sums, those of three microbatches more are added as they are read.
    trained = found.ranks[plans[0].fullest].forecast.held["parameters"]
    assert quick.sums == pytest.approx((1.5 + 3 * 2.5) * trained / (H100.memory * H100.memory_share))
    num_messages = 8 if plans[1].fullest == 1 else 4  # of four microbatches, to and fro in the middle
    assert late.sent["pp"] == pytest.approx(num_messages * message)
    assert late.exposed["pp"] >= 2 * 2 * message - quick.seconds  # of the first microbatch, there and back


def test_sums_of_gradients_are_there_while_they_are_reduced() -> None:
    """Of one microbatch on two ranks of a stage: weights in bf16 and sums in fp32 are whole, and no sum was before."""
    words = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "1"]
    told = job(4, words).ranks[0].forecast
    assert told.where.startswith("the reduction of stage 0, ")
    assert told.held[STEP] == sum(told.at_peak.values()) > 3 * told.held["parameters"]


def test_messages_are_waited_for() -> None:
    """Two stages, one microbatch: F, there, F B, back, B."""
    found = load(["--parallelism.pipeline_parallel_degree", "2"])
    modules = ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "output"]
    schedule = plan_pipeline(found.parallelism, modules, 1)

    def seconds(action: PipelineAction) -> float:
        return {"F": 1.0, "B": 2.0}[action.kind]

    assert schedule.ends(seconds) == [6.0, 4.0]
    assert schedule.ends(seconds, lambda action: 10.0) == [26.0, 14.0]
    # What the second rank does first, for 3 seconds, it does while it waits for the first one's forward.
    assert schedule.ends(seconds, before=lambda action: 3.0 if action[:2] == ("F", 1) else 0.0) == [8.0, 6.0]
    several = plan_pipeline(found.parallelism, modules, 4)
    # The last rank asks for a microbatch when the forward of the one before is done: F, four times there and F, B.
    assert several.ends(seconds, lambda action: 10.0 if action.kind == "SEND_F" else 0.0)[1] == 1 + 4 * (10 + 1) + 2


@pytest.mark.slow
def test_stages_that_are_alike_are_built_once_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model.name", "deepseek_v3", "--parallelism.pipeline_parallel_degree", "4"]
    words += ["--parallelism.expert_parallel_degree", "2", "--training.global_batch_size", "4"]
    words += ["--training.local_batch_size", "2"]
    shared = job(8, words)
    fast = H100._replace(launch=0.0)  # so small a model waits for the host alone
    monkeypatch.setattr(building, "_kind", lambda place, model, options: place)
    alone = job(8, words)
    assert len({id(each) for rank in shared.ranks for each in rank.graphs.train.values()}) < 4  # type: ignore[union-attr]
    for one, other in zip(shared.ranks, alone.ranks, strict=True):
        assert (one.rank, one.forecast) == (other.rank, other.forecast)
        assert one.graphs.storages.keys() == other.graphs.storages.keys(), "each rank saves parameters of its own"
        assert {*other.names.items()} == {(name, name) for name in one.names.values()}
    plans = [simulate(each, by_rates(each, fast), fast) for each in (shared, alone)]
    assert plans[0].step == plans[1].step and plans[0].needs == plans[1].needs

    # A checkpoint has the parameters of all stages; and a layer's uneven experts slow down the stage that has them.
    (tmp_path / "loads.json").write_text(json.dumps({f"layers.{i}": [1 + 9 * (i == 3), *[1] * 7] for i in range(1, 6)}))
    parser = argparse.ArgumentParser()
    outlook.add_arguments(parser)
    options = parser.parse_args(["--expert_load", str(tmp_path / "loads.json"), "--storage_gb_per_s", "1"])
    ahead = [outlook.look_ahead(options, plan, by_rates(plan.job, fast)) for plan in plans]
    assert ahead[0] == ahead[1]
    uneven, saved = ahead[0].uneven, ahead[0].saving
    assert uneven is not None and uneven.step_s > uneven.even_s
    model = Blueprint(load(["--model.name", "deepseek_v3"]), 1).model
    assert saved is not None and saved.num_bytes == sum(p.numel() for p in model.parameters()) * 4 * 3


@pytest.mark.parametrize(("name", "axes"), [("FSDP-2 TP-2", {"fsdp", "tp"}), ("PP-3", {"pp"})])
def test_the_report_says_what_the_data_say(name: str, axes: set[str], jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs(name)
    plan = simulate(found, by_rates(found, H100), H100)
    groups = dataclasses.replace(found.options, num_replicas=2, num_microbatches=6)  # 3 each
    plan = dataclasses.replace(plan, job=found._replace(options=groups))
    text, data = "\n".join(lines(plan)), json.loads(json.dumps(as_data(plan)))
    assert f"{data['tokens_per_second']:.0f} in all" in text and "fits" in text
    assert data["step"] == dataclasses.asdict(plan.step) and data["rates"]["name"] == "H100"
    assert {each["axis"] for each in data["received"]} == axes == {*data["step"]["sent"]}
    assert data["tokens_per_second_of_a_rank"] == plan.tokens_per_second / (2 * found.dims.num_ranks)
    for each in data["received"]:
        assert f"{each['bytes'] / 2**30:10.3f} GiB in {each['number']}\n" in text
    small = H100._replace(memory_gib=1.0)
    text = "\n".join(lines(simulate(found, by_rates(found, small), small)))
    assert "DOES NOT FIT" in text and "are spare" not in text


REPLICAS = ["--world", "16", "--device", "h100", "--storage_gb_per_s", "1", "--node_mtbf_hours", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "2", "--device", "h10"], "did you mean h100"),
        (["--world", "0", "--device", "h100"], "--world 0"),
        (["--world", str(2**31), "--device", "h100"], "must be the number of ranks"),
        (["--world", "2", "--device", "h100", "--comm.fake_rank", "1"], "a forecast is of all ranks"),
        (["--world", "2", "--device", "h100", "--comm.fake_device", "A100"], "here --device says it"),
        (["--world", "3", "--device", "h100", "--parallelism.tensor_parallel_degree", "2"], "tensor_parallel_degree"),
        (["--world", "2", "--device", "h100", "--training.stepz", "2"], "did you mean"),
        (["--world", "2", "--device", "h100", "--json", "no_such_folder/x.json"], "there is no folder"),
        (["--world", "2", "--device", "h100", "--compile.mode", "eager"], "a dry run reads what a step needs"),
        (["--world", "1", "--device", "cpu", "--compile.cuda_graphs"], "needs a GPU, and this process computes on cpu"),
        (["--world", "2", "--device", "h100", "--json", "."], "--json .: is a folder"),
        (["--world", "2", "--device", "h100", "--search", "--out", "tests"], "--out tests: is a folder"),
        (["--world", "2", "--device", "h100", "--out", "best.toml"], "add --search"),
        ([*REPLICAS, "--replicas", "3"], "--replicas 3: must divide 16 ranks"),
        ([*REPLICAS, "--replicas", "2", "--search"], "name what it varies, without dp_replicate"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_device_does_not_do_is_not_forecast() -> None:
    """A CPU moves nothing to the host's memory, and the memory of parameters that it does not move is its own."""
    words = ["--training.enable_cpu_offload", "--activation_checkpoint.offload", "layers.*"]
    on_cpu, on_gpu = (build(configuration([*DEBUG, *words], 1), 1, RATES[name]).ranks[0] for name in ("CPU", "H100"))
    assert not on_cpu.forecast.on_host and on_cpu.forecast.held["parameters"] == on_gpu.forecast.on_host["parameters"]


def test_what_is_not_known_of_an_optimizer_is_said(jobs: Callable[[str], BuiltJob]) -> None:
    found = jobs("one")
    (rank,) = found.ranks
    held = {name: size for name, size in rank.forecast.held.items() if name != OPTIMIZER}
    told = dataclasses.replace(rank.forecast, held=held, optimizer="my.Own")
    plan = simulate(found._replace(ranks=[rank._replace(forecast=told)]), by_rates(found, H100), H100)
    assert "fits, and what my.Own keeps" in "\n".join(lines(plan))
    assert as_data(plan)["memory"]["not_counted"] == "what my.Own keeps"
    assert "what Inductor's code" in dataclasses.replace(told, is_whole=True).unknown


def test_loads_of_other_experts_are_refused_before_any_graph_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loads.json").write_text("[1, 2]")
    words = ["--world", "2", "--device", "h100", "--expert_load", str(tmp_path / "loads.json"), "--search"]
    assert main([*words, "--model.name", "deepseek_v3"]) == 2
    error = capsys.readouterr().err
    assert "2 loads of layers.1, which has 8 experts" in error and "passes" not in error
    assert main(words) == 2 and "this model has no experts; leave it out" in capsys.readouterr().err


def test_a_forecast_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world", "2", "--device", "h100", "--json", str(tmp_path / "plan.json"), *DEBUG]) == 0
    assert "tokens/s a rank" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 2
