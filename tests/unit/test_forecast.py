"""What a dry run says of a rank, against sums by hand and between layouts."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.analysis import keeping
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.check.matrix import BF16, NUM_ROWS, SEQ_LEN, Cell, build_model, build_reference
from torchtitan_graph.config import job, load
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import (
    GRADIENTS,
    INPUTS,
    OFFLOADED,
    OPTIMIZER,
    STEP,
    Forecast,
    check_fits,
    forecast,
)
from torchtitan_graph.log import logger
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import FSDP, PP, TP, ParallelDims
from torchtitan_graph.parallel.recompute import POLICIES, Budget, Recompute
from torchtitan_graph.parallel.storage import Reshard
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.steps.budget import AVERAGE, EARLIER, PARAMETERS
from torchtitan_graph.torch_private.distributed import init_fake_process_group


@pytest.fixture(autouse=True)
def nothing_is_sent() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def of(
    cell: Cell,
    rank: int = 0,
    optimizer: str = "AdamW",
    frozen: str = "nothing",
    eval_rows: tuple[int, int] | None = None,
) -> Forecast:
    """Forecast a rank of a cell, one of its modules frozen."""
    if dist.is_initialized():
        dist.destroy_process_group()
    init_fake_process_group(cell.dims.num_ranks, rank)
    layout, model = cell.dims.layout("cpu"), build_model(cell)
    for name, parameter in model.named_parameters():
        if name.startswith(frozen):
            parameter.requires_grad_(False)
    options = dataclasses.replace(cell.options("graph"), eval_rows=eval_rows)
    assembly = Assembly(model, load_family(cell.family), layout, options, reference=build_reference(cell))
    return forecast(assembly, build_graphs(assembly), job.Optimizer(name=optimizer))


ONE_LAYER = (("num_layers", 1),)
TWO_LAYERS = (("num_layers", 2),)


def test_a_reference_is_counted_among_the_parameters_and_nowhere_else() -> None:
    dims = ParallelDims(dp_shard=2)
    few = {"vocab_size": 512, "ffn_dim": 128, "changes": ONE_LAYER}
    cell = Cell(dims, own_step="torchtitan_graph.goals.dpo", reference=(("dim", 32), *ONE_LAYER), **few)
    own, frozen = build_model(cell), build_reference(cell)
    assert frozen is not None and not any(p.requires_grad for p in frozen.model.parameters())
    sizes = [sum(p.numel() for p in model.parameters()) * 4 // 2 for model in (own, frozen.model)]
    found = of(cell)
    assert found.held[PARAMETERS] == sum(sizes) and found.held[OPTIMIZER] == 2 * sizes[0]
    assert found.operations > of(dataclasses.replace(cell, own_step=None, reference=None)).operations


@pytest.mark.slow
def test_a_model_that_runs_twice_does_not_hold_all_its_weights() -> None:
    sizes = (("num_layers", 4), ("dim", 1024))
    step = {"own_step": "torchtitan_graph.goals.dpo", "lora": (("rank", 2),)}
    cell = Cell(ParallelDims(dp_shard=2), ffn_dim=4096, changes=sizes, **step)
    kept = of(dataclasses.replace(cell, disabled=("gather_each_call",)))
    of_a_block = sum(p.numel() for p in build_model(cell).layers[0].parameters()) * 4
    assert kept.held[STEP] - of(cell).held[STEP] > of_a_block


def test_shards_and_moments_are_counted_and_what_is_unknown_is_said() -> None:
    cell = Cell(ParallelDims(dp_shard=4), vocab_size=512, ffn_dim=128, changes=ONE_LAYER)
    whole = sum(p.numel() for p in build_model(cell).parameters()) * 4
    found = of(cell)
    assert found.held["parameters"] == whole // 4
    assert found.held[OPTIMIZER] == 2 * whole // 4
    assert found.sent[FSDP, "reduce_scatter_tensor"].num_bytes == 3 * whole // 4
    own = of(cell, optimizer="my.Own")
    assert OPTIMIZER not in own.held and "and what my.Own keeps" in "\n".join(own.lines())
    assert of(dataclasses.replace(cell, num_microbatches=2)).held["gradients of earlier microbatches"] == whole // 4


@pytest.mark.parametrize(
    "dims", [pytest.param(ParallelDims(), marks=pytest.mark.slow), ParallelDims(pp=2)], ids=["one", "PP-2"]
)
def test_evaluation_counts_where_it_holds_more(dims: ParallelDims) -> None:
    """Of its rows the logits: in fp32, as many as there are tokens and words."""
    cell = Cell(dims, vocab_size=512, num_microbatches=2, changes=(("num_layers", dims.pp),))
    few, many = (of(cell, dims.pp - 1, eval_rows=(rows, SEQ_LEN)) for rows in (1, 64))
    assert not few.where.startswith("evaluation")
    assert many.where.startswith("evaluation, forward") and many.held[STEP] >= 64 * SEQ_LEN * 512 * 4
    assert sum(many.at_peak.values()) == many.held[STEP] and EARLIER not in many.held
    assert (many.held[PARAMETERS], many.held[OPTIMIZER]) == (few.held[PARAMETERS], few.held[OPTIMIZER])


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_what_is_frozen_has_no_moments_and_no_gradients(on_host: bool) -> None:
    cell = Cell(vocab_size=512, num_microbatches=2, cpu_offload=on_host, changes=ONE_LAYER)
    whole, found = of(cell), of(cell, frozen="layers")
    sizes = {name: p.numel() * 4 for name, p in build_model(cell).named_parameters()}
    trained = sum(size for name, size in sizes.items() if not name.startswith("layers"))
    rest, of_whole = (each.on_host if on_host else each.held for each in (found, whole))
    assert rest[PARAMETERS] == of_whole[PARAMETERS] == sum(sizes.values())
    assert rest[OPTIMIZER] == 2 * trained < of_whole[OPTIMIZER]
    assert rest["gradients of earlier microbatches"] == trained
    assert not on_host or rest[GRADIENTS] == trained


def test_what_is_frozen_is_neither_reduced_nor_gathered_for_nothing() -> None:
    cell = Cell(ParallelDims(dp_shard=2), vocab_size=512, ffn_dim=128, freeze=("tok_embeddings", "layers.[01].*"))
    whole, found = of(dataclasses.replace(cell, freeze=())), of(cell)
    sizes = {name: p.numel() * 4 // 2 for name, p in build_model(cell).named_parameters()}  # half is another rank's
    last = sum(size for name, size in sizes.items() if name.startswith("layers.2."))
    trained = last + sizes["norm.weight"] + sizes["output.weight"]
    assert found.sent[FSDP, "reduce_scatter_tensor"].num_bytes == trained
    assert found.sent[FSDP, "all_gather_into_tensor"].num_bytes == sum(sizes.values()) + last
    assert whole.sent[FSDP, "all_gather_into_tensor"].num_bytes == sum(sizes.values()) + 3 * last
    assert found.operations < 0.7 * whole.operations and found.held[STEP] < 0.7 * whole.held[STEP]


def test_every_axis_takes_its_part() -> None:
    few = {"vocab_size": 512, "ffn_dim": 128, "changes": ONE_LAYER}
    alone, split = of(Cell(**few)), of(Cell(ParallelDims(tp=2), **few))
    assert split.operations == pytest.approx(alone.operations / 2)
    assert {axis for axis, _ in split.sent} == {TP}
    assert split.held[STEP] < alone.held[STEP]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_what_ranks_of_context_parallel_compute_alike_counts_once(family: str) -> None:
    """Latent attention expands the whole row's latent on every rank."""
    cells = (Cell(ParallelDims(cp=cp), family=family, vocab_size=512, changes=TWO_LAYERS) for cp in (1, 2))
    alone, split = map(of, cells)
    assert split.operations == pytest.approx(alone.operations / 2)


@pytest.mark.slow
def test_a_stage_holds_what_its_schedule_keeps() -> None:
    pipeline = ParallelDims(pp=2)
    cell = Cell(pipeline, num_microbatches=4, vocab_size=512, changes=(("num_layers", 4),))
    all_at_once = dataclasses.replace(cell, pipeline=(("pipeline_parallel_schedule", "GPipe"),))
    one_by_one = dataclasses.replace(cell, pipeline=(("pipeline_parallel_schedule", "1F1B"),))
    found = of(one_by_one)
    assert of(all_at_once).held[STEP] > found.held[STEP]
    assert "stage 1" in of(one_by_one, rank=1).where
    fewer = dataclasses.replace(one_by_one, num_microbatches=2)
    assert of(fewer).sent_once[PP, "message"].number == 2
    both_ways = dataclasses.replace(cell, pipeline=(("pipeline_parallel_schedule", "DualPipeV"),))
    assert "stage" in of(both_ways).where  # its list has whole backwards and halves
    assert found.sent_once == {(PP, "message"): (4, 4 * 2 * 32 * 64 * 4)}  # rows, length, width, bytes
    assert "received over pp in a step: message" in "\n".join(found.lines())


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(dp_shard=2), pytest.param(ParallelDims(pp=2), marks=pytest.mark.slow)],
    ids=["FSDP-2", "PP-2"],
)
def test_what_is_offloaded_is_held_by_the_host(dims: ParallelDims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALLEST", 0)
    gpipe = (("pipeline_parallel_schedule", "GPipe"),)
    stay = Cell(dims, num_microbatches=4, changes=(("num_layers", 4 * dims.pp),), pipeline=gpipe)
    before, after = (of(dataclasses.replace(stay, offload=names)) for names in ((), ("layers.0", "layers.1")))
    assert not before.on_host and after.on_host[OFFLOADED] > 0
    assert "host" not in "\n".join(before.lines()) and "GiB, in the host's memory" in "\n".join(after.lines())
    if dims.pp > 1:
        fewer = of(dataclasses.replace(stay, num_microbatches=2, offload=("layers.0", "layers.1")))
        # Most is held in backward of the second microbatch, when it and two others keep values; it lets go of its own.
        assert 2 / 4 <= (before.held[STEP] - after.held[STEP]) / after.on_host[OFFLOADED] <= 3 / 4
        assert fewer.on_host[OFFLOADED] == after.on_host[OFFLOADED]
    else:
        assert 0 < before.held[STEP] - after.held[STEP] <= after.on_host[OFFLOADED]


@pytest.mark.parametrize(
    "dims", [pytest.param(ParallelDims(dp_shard=2), marks=pytest.mark.slow), ParallelDims(pp=2)], ids=["FSDP-2", "PP-2"]
)
def test_what_rests_on_the_host_is_not_held_by_the_device(dims: ParallelDims) -> None:
    stay = Cell(
        dims,
        num_microbatches=2,
        vocab_size=512,
        changes=(("num_layers", dims.pp),),
        pipeline=(("pipeline_parallel_schedule", "GPipe"),),
    )
    before, after = of(stay), of(dataclasses.replace(stay, cpu_offload=True))
    assert after.held.keys() <= {STEP, INPUTS} and after.in_all < before.in_all
    rest = {name: size for name, size in before.held.items() if name not in (STEP, INPUTS)}
    assert after.on_host == rest | {GRADIENTS: before.held[PARAMETERS]}
    assert "in the host's memory" in "\n".join(after.lines()) and "what AdamW" not in "\n".join(after.lines())


def test_a_pipeline_gathers_once_and_sums_gradients_in_the_dtype_of_their_reduction() -> None:
    dims = ParallelDims(pp=2, dp_shard=2)
    cell = Cell(dims, BF16, num_microbatches=4, vocab_size=512, ffn_dim=128, changes=TWO_LAYERS)
    found, rows = of(cell), NUM_ROWS // 8 * SEQ_LEN
    shard = found.held["parameters"]  # fp32; gathered in bf16, reduced in fp32
    assert found.sent_once[FSDP, "all_gather_into_tensor"].num_bytes == shard // 2
    assert found.sent_once[FSDP, "reduce_scatter_tensor"].num_bytes == shard
    assert found.sent_once[PP, "message"].num_bytes == 4 * rows * build_model(cell).config.dim * 2
    assert "received over fsdp in a step" in "\n".join(found.lines())
    halves = dataclasses.replace(cell, precision=dataclasses.replace(BF16, reduce=torch.bfloat16))
    assert found.held[STEP] - of(halves).held[STEP] == shard  # of whole gradients, two parts


def test_what_stages_gather_and_reduce_once_is_of_the_step() -> None:
    once = Cell(ParallelDims(pp=2, dp_shard=2), num_microbatches=4, vocab_size=512, changes=TWO_LAYERS)
    again = dataclasses.replace(once, reshard=Reshard(blocks=True, root=True))
    gathered, reduced = (FSDP, "all_gather_into_tensor"), (FSDP, "reduce_scatter_tensor")
    kept, freed = of(once), of(again)
    assert {gathered, reduced} <= kept.sent_once.keys() and not kept.sent
    assert gathered in freed.sent and gathered not in freed.sent_once and reduced in freed.sent_once


@pytest.mark.parametrize(
    ("axis", "optimizer", "said"),
    [
        pytest.param("tensor", "--optimizer.implementation foreach", "optimizer step: passes", marks=pytest.mark.slow),
        pytest.param("pipeline", "", "optimizer step: passes", marks=pytest.mark.slow),
        pytest.param(
            *("tensor", "--optimizer.name torch.optim.SGD", "optimizer step: not traced in a dry run"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_optimizers_step_is_traced_too_where_it_is_a_graph(
    axis: str, optimizer: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    options = ["--compile.optimizer_in_graph", f"--parallelism.{axis}_parallel_degree", "2", "--training.seq_len", "64"]
    options += optimizer.split()
    blueprint = Blueprint(load(["--comm.mode", "fake_backend", *options]), 4)
    init_fake_process_group(4)
    with caplog.at_level(logging.INFO):
        blueprint.dry_run()
    assert said in caplog.text
    assert all(p.is_meta for p in blueprint.model.parameters()), "nothing is allocated"


@pytest.mark.parametrize(("gib", "said"), [(1e-3, "a rank needs .* the least, activation_checkpoint"), (1.0, "")])
def test_what_can_not_fit_is_refused(gib: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = of(Cell(vocab_size=512, changes=ONE_LAYER))
    monkeypatch.setattr(devices, "memory_total_gib", lambda: gib)
    asked: list[Recompute] = []

    def with_policy(recompute: Recompute) -> Forecast:
        asked.append(recompute)
        return told

    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        check_fits(told, with_policy)
    assert asked == ([policy.recompute for policy in POLICIES] if said else []), "all are tried where it does not fit"


_LAYERS = Cell(vocab_size=512, changes=(("num_layers", 6),))
BUDGETED = {
    "one rank": _LAYERS,
    "FSDP-2": dataclasses.replace(_LAYERS, dims=ParallelDims(dp_shard=2)),
} | {
    schedule: dataclasses.replace(
        _LAYERS,
        dims=ParallelDims(pp=2),
        num_microbatches=4,
        pipeline=(("pipeline_parallel_schedule", schedule),),
    )
    for schedule in ("GPipe", "ZBVZeroBubble")
}


@pytest.mark.parametrize(
    "name", ["one rank", *(pytest.param(name, marks=pytest.mark.slow) for name in BUDGETED if name != "one rank")]
)
def test_gib_of_a_rank_are_met_or_refused_with_the_least(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What passes after the policy add is made up for: the bucket of a block waits for its last gradient. A pipeline's
    rank counts what its schedule holds of all of its stages. Of all tries, one table of passes is shown."""
    cell = BUDGETED[name]
    most, least = (built(cell, Recompute(budget=Budget(part)), None) for part in (1.0, 0.0))
    allowed = (most + least) / 2
    caplog.clear()
    with caplog.at_level("INFO", "torchtitan_graph"):
        assert least < built(cell, Recompute(budget=Budget()), allowed / GIB) <= allowed < most
    titles = [text.splitlines()[0] for text in caplog.messages]
    assert titles.count("stage 0: passes" if cell.dims.pp > 1 else "training step: passes") == 1
    assert built(cell, Recompute(budget=Budget()), most / GIB) == most, "nothing is computed again in vain"
    with pytest.raises(UserError, match="memory_budget_gib = 1e-06: the least that this rank can hold is 0.0"):
        built(cell, Recompute(budget=Budget()), 1e-6)


def built(cell: Cell, recompute: Recompute, gib: float | None) -> int:
    """Give what a rank holds in all within a budget."""
    if dist.is_initialized():
        dist.destroy_process_group()
    init_fake_process_group(cell.dims.num_ranks)
    layout, model = cell.dims.layout("cpu"), build_model(cell)
    options = dataclasses.replace(cell.options("graph"), recompute=recompute, budget_gib=gib)
    assembly = Assembly(model, load_family(cell.family), layout, options)
    return forecast(assembly, build_graphs(assembly), job.Optimizer()).in_all


@pytest.mark.slow
def test_a_forecast_of_another_policy_keeps_its_modules_and_the_jobs_own() -> None:
    init_fake_process_group(1)
    options = ["--job.config_file", "llama3_debug.toml", "--comm.mode", "fake_backend"]

    def peaks(*words: str) -> list[int]:
        blueprint = Blueprint(load([*options, *words]), 1)
        saved = Recompute(every=1, saved=frozenset(blueprint.model.blocks))
        return [blueprint.forecast_with(how).in_all for how in (Recompute(every=1), saved, Recompute())]

    whole, saved, none = peaks()
    assert whole < none < saved  # what is cheap is computed again by default, except in modules that are named
    assert peaks("--activation_checkpoint.save", "layers.*") == [saved] * 3


def test_what_the_optimizer_keeps_is_counted_as_it_is_kept() -> None:
    cell = Cell(vocab_size=512, ffn_dim=128, changes=ONE_LAYER)
    sizes = {name: p.numel() for name, p in build_model(cell).named_parameters()}
    matrices = {name for name in sizes if name.startswith("layers.") and "norm" not in name}
    of_muon, whole = sum(sizes[name] for name in matrices), sum(sizes.values())
    init_fake_process_group(1)
    assembly = Assembly(build_model(cell), load_family(cell.family), cell.dims.layout("cpu"), cell.options("graph"))
    graphs = build_graphs(assembly)

    def held(**options: Any) -> dict[str, int]:
        return forecast(assembly, graphs, job.Optimizer(**options)).held

    assert held(name="Muon")[OPTIMIZER] == 4 * (of_muon + 2 * (whole - of_muon))
    assert held(name="Muon", state_dtype="bfloat16")[OPTIMIZER] == 2 * (of_muon + 2 * (whole - of_muon))
    assert held(state_dtype="bfloat16")[OPTIMIZER] == 2 * 2 * whole
    assert held(ema_decay=0.9)[AVERAGE] == 4 * whole and AVERAGE not in held()
