"""A user's pass runs at its place on every graph of a run; what can't run is refused."""

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import own_passes
import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from pool import run_on
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.check.matrix import NUM_ROWS, SEQ_LEN, Cell, build_model
from torchtitan_graph.compiler import Extra, Inspection, PassPlan, passes, run_passes
from torchtitan_graph.config import check, dump_toml, job, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.steps.choices import plan_extra
from torchtitan_graph.torch_private.distributed import init_fake_process_group

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "extend" / "pass.md").read_text()


def plan(*entries: dict, **options: object) -> list[Extra]:
    return plan_extra(job.Compile(extra_passes=[job.ExtraPass(**entry) for entry in entries], **options))


def entry(name: str, after: str = "rematerialize") -> dict:
    return {"pass_": f"own_passes.{name}", "after": after}


def order(extra: list[Extra]) -> list[str]:
    return [each.name for each in passes(PassPlan({}, (), ()), extra)]


def test_a_pass_follows_the_one_that_is_named() -> None:
    ours = order([])
    place = ours.index("rematerialize") + 1
    names = ["own_passes.count", "own_passes.keep"]
    both = plan(entry("count"), entry("keep"), entry("keep", after="compile_regions"))
    assert order(both) == [*ours[:place], *names, *ours[place:], "own_passes.keep"]
    assert [each.own.cut for each in both] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.mine", "entry 1: pass = 'nowhere.mine': nowhere can't be imported"),
        ("own_passes.kep", "entry 1: pass = 'own_passes.kep': own_passes has no kep; did you mean keep?"),
        ("own_passes.NUMBER", "can't be called with a graph alone: 3 is not a callable object; name a function"),
        ("own_passes.takes_two", "can't be called with a graph alone: missing a required argument: 'level'"),
    ],
)
def test_what_is_no_pass_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan({"pass_": name, "after": "cleanup"})


def test_a_place_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="entry 2: after = 'rematerialise': legal are .*; did you mean rematerialize"):
        plan(entry("keep"), entry("keep", after="rematerialise"))
    with pytest.raises(UserError, match="after = 'merge_equal': compile.disable_passes leaves it out; legal are"):
        plan(entry("keep", after="merge_equal"), disable_passes=["merge_equal"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gives_nothing", "gives NoneType, not a graph"),
        ("forgets_signature", "gives GraphModule, not a graph with its meta['signature']"),
        ("uses_before", "gives a graph that can't run: "),
        ("drops_output", "gives a graph with other inputs or outputs than its meta['signature'] says"),
        ("adds_without_shape", "gives a graph with a node, neg_default, whose value's shape is not in its meta['val']"),
    ],
)
def test_a_pass_that_gives_no_graph_is_refused(name: str, problem: str) -> None:
    gm = minimal_fx_tracer(lambda x: x.sin().cos())(torch.ones(2)).gm
    (extra,) = plan(entry(name))
    with pytest.raises(UserError) as caught:
        run_passes(gm, [extra.own], (), CPU, Inspection())
    message = str(caught.value)
    assert message.startswith(f"compile.extra_passes, entry 1: pass = 'own_passes.{name}': {problem}")
    assert "of the training step" in message


def outcome_without_recompiling(is_ours: bool) -> Exception | None:
    gm = minimal_fx_tracer(lambda x: x.sin())(torch.ones(2)).gm
    (extra,) = plan(entry("cosine_without_recompiling"))
    own = extra.own._replace(option="") if is_ours else extra.own
    try:
        run_passes(gm, [own], (), CPU, Inspection(verify_on=Numbers([torch.ones(2)])))
    except (RuntimeError, UserError) as error:
        return error
    return None


def test_a_pass_that_forgets_to_recompile_is_verified_on_what_will_run() -> None:
    """That a user's pass breaks its promise is theirs to mend, and needs no traceback; of ours it is a fault."""
    promise = "pass own_passes.cosine_without_recompiling promises the same numbers bit for bit"
    (ours,) = run_on(1, outcome_without_recompiling, True)
    assert isinstance(ours, RuntimeError) and str(ours).startswith(promise)
    (theirs,) = run_on(1, outcome_without_recompiling, False)
    where = "compile.extra_passes, entry 1: pass = 'own_passes.cosine_without_recompiling': "
    assert isinstance(theirs, UserError) and str(theirs).startswith(where + promise)
    assert "Correct it: python -m torchtitan_graph.check_pass own_passes.cosine_without_recompiling" in str(theirs)


@pytest.fixture
def nothing_is_sent() -> Iterator[None]:
    own_passes.SEEN.clear()
    yield
    dist.destroy_process_group()


def build(cell: Cell, *entries: dict) -> None:
    init_fake_process_group(cell.dims.num_ranks, 0)
    options = dataclasses.replace(cell.options("graph"), extra=plan(*entries), eval_rows=(NUM_ROWS, SEQ_LEN))
    build_graphs(Assembly(build_model(cell), load_family(cell.family), cell.dims.layout("cpu"), options))


def kinds() -> list[set[str]]:
    """Give the kinds of outputs of each graph that the pass was given."""
    return [{slot.kind for slot in signature.outputs} for signature in own_passes.SEEN]


def test_it_runs_on_training_and_evaluation(nothing_is_sent: None) -> None:
    build(Cell(ParallelDims(dp_shard=2)), entry("count"))
    assert sorted(kinds(), key=len) == [{"loss"}, {"loss", "grad"}]


def test_of_a_stage_it_runs_on_the_whole_or_on_the_parts(nothing_is_sent: None) -> None:
    cell = Cell(ParallelDims(pp=2), num_microbatches=4, pipeline=(("pipeline_parallel_schedule", "1F1B"),))
    build(cell, entry("count", after="bucket_collectives"))
    num_graphs = len(own_passes.SEEN)
    assert num_graphs == 2  # the stage, and its evaluation
    dist.destroy_process_group()
    own_passes.SEEN.clear()
    build(cell, entry("count", after="compile_regions"))
    assert len(own_passes.SEEN) == 3  # forward, backward, and evaluation


def test_the_example_is_what_the_docs_show_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    example = REPOSITORY / "examples" / "own_pass"
    assert (example / "passes.py").read_text().partition("\n\n")[2] in PAGE
    (toml,) = (block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "extra_passes" in block)
    assert toml in (example / "train.toml").read_text()
    config = load(["--job.config_file", str(example / "train.toml")])
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load(["--job.config_file", str(tmp_path / "again.toml")]).compile == config.compile
    (extra,) = plan_extra(config.compile)
    gm: GraphModule = minimal_fx_tracer(lambda x: (x * 2).sin())(torch.ones(2)).gm
    gm = run_passes(gm, [extra.own], (), CPU, Inspection())
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert importlib.import_module("own_pass.passes").double_by_adding is extra.own.run


def test_eager_mode_runs_no_pass_and_imports_none() -> None:
    words = ["--compile.extra_passes", '[{pass="nowhere.mine", after="cleanup"}]', "--training.seq_len", "16"]
    config = load([*words, "--compile.mode", "eager"])
    (notice,) = check(config, 1)
    assert "compile.mode = eager has no graph, and runs no passes" in notice
    assert Blueprint(config, 1).options.extra == []
    with pytest.raises(UserError, match="nowhere can't be imported"):
        Blueprint(load(words), 1)
