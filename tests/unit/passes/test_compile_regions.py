"""compile_regions: what is tagged is compiled, and nothing else changes."""

import contextlib
import dataclasses
import operator
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from toy import GATHER, WAIT, Toy, batch, bitwise, blocks, calls, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.capture.step import trace_eval_step, trace_train_step
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.compiler import PassPlan, passes
from torchtitan_graph.config import job
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import edit, meta
from torchtitan_graph.graph.blocks import loss_of
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models import llama3
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.ops.operator import _DECLARED, operator_of
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, buckets, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import FLEX, WHOLE, compile_regions, tag_regions
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.steps.choices import FUSIONS, plan_regions
from torchtitan_graph.torch_private import inductor
from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.tracing import boxed

FORWARD, BACKWARD = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on a CPU needs g++")

# Inductor adds in another order: a few roundings of fp32 show in a whole tensor. A lost term would be a hundredth.
TOLERANCE = 1e-6

Compiled = list[GraphModule]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Let regions run as they are: bit for bit, and at once. Gives those that Inductor would have compiled."""
    found: Compiled = []

    def keep(gm: GraphModule, inputs: list[Tensor], options: object) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
        found.append(gm)
        strides = [x.stride() for x in inputs]

        def run(given: list[Tensor]) -> tuple[Tensor, ...]:
            assert [x.stride() for x in given] == strides, "Inductor's code would refuse them"
            return gm(*given)

        return run

    monkeypatch.setattr("torchtitan_graph.passes.compile_regions.compile_by_inductor", keep)
    return found


def llama(trace: Callable = trace_train_step, seq_len: int = 24) -> tuple[GraphModule, list[Tensor]]:
    """Trace and clean a llama3 of two layers with flex attention; give inputs for it."""
    with torch.device("meta"):
        model = llama3.Model(llama3.Config(32, 2, 2, 1, 40, 50), "flex")
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(50, (2, 1, seq_len), generator=generator)
    positions = torch.arange(seq_len).expand(1, seq_len).contiguous()
    inputs = Batch(tokens, labels, positions, (positions > 9).long())
    rest = (inputs, model.masks(inputs.documents_BL, inputs.positions_BL), torch.tensor(seq_len))
    gm = cleanup(trace(model, cross_entropy, *rest, device="cpu").gm)
    return gm, [
        *(torch.randn(p.shape, generator=generator) * 0.2 for p in model.parameters()),
        *(leaf for leaf in pytree.tree_leaves(rest) if isinstance(leaf, Tensor)),
    ]


def run(gm: GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return gm(*inputs)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def tagged(gm: GraphModule) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if region := meta.region(node):
            found.setdefault(region, []).append(node)
    return found


def as_if_on_a_gpu(gm: GraphModule) -> None:
    for node in calls(gm, FORWARD, BACKWARD):
        node.args[0].meta["val"] = node.args[0].meta["val"].to("meta")


def test_a_region_takes_its_inputs_as_they_are_used_and_gives_each_result_once(uncompiled: Compiled) -> None:
    """Under the names of its operators."""
    compile_regions(cleanup(trace_toy(toy())), {"layers.*": {}})
    assert uncompiled
    for part in uncompiled:
        read = [x for node in part.graph.nodes for x in node.all_input_nodes if x.op == "placeholder"]
        assert list(dict.fromkeys(read)) == part.graph.find_nodes(op="placeholder")
        results = part.graph.output_node().args[0]
        assert len(set(results)) == len(results)  # type: ignore[arg-type]
        called = [node for node in part.graph.nodes if node.op == "call_function"]
        assert all(node.name.startswith(node.target.__name__.partition(".")[0]) for node in called)


# --- policy ---------------------------------------------------------------------------------------------------------


def test_a_flex_region_is_the_operator_its_subgraphs_and_its_parts() -> None:
    gm, _ = llama()
    as_if_on_a_gpu(gm)
    tag_regions(gm, [FLEX])
    regions = tagged(gm)
    operators = calls(gm, FORWARD, BACKWARD)
    assert len(operators) == 4 and set(regions) == {f"flex {node.name}" for node in operators}
    for node in operators:
        subgraphs = {n for n in node.all_input_nodes if n.op == "get_attr"}
        assert len(subgraphs) == (2 if node.target is FORWARD else 3)
        assert set(regions[f"flex {node.name}"]) == {node, *subgraphs, *node.users}
        assert {user.target for user in node.users} == {operator.getitem}


def test_on_a_cpu_the_training_step_keeps_its_flex_attention(caplog: pytest.LogCaptureFixture) -> None:
    gm, inputs = llama()
    before, expected = text(gm), run(gm, inputs)
    with caplog.at_level("INFO", "torchtitan_graph"):
        gm = compile_regions(gm, {FLEX: {}})
    assert text(gm) == before and bitwise(run(gm, inputs), expected)
    assert [r.message for r in caplog.records if "4 flex attention operators stay uncompiled" in r.message]


def test_a_module_is_a_region_in_forward_and_one_in_backward() -> None:
    gm = cleanup(trace_toy(toy()))
    tag_regions(gm, ["layers.*"])
    regions = tagged(gm)
    assert set(regions) == {f"layers.{i} {phase}" for i in (0, 1) for phase in ("forward", "backward")}
    for name, nodes in regions.items():
        assert {f"{'.'.join(meta.module(n).split('.')[:2])} {meta.phase(n)}" for n in nodes} == {name}
    silu = torch.ops.aten.silu.default
    assert set(calls(gm, silu)) <= set(regions["layers.0 forward"] + regions["layers.1 forward"])


def tanh_of(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (torch.tanh(x @ weight),)


def test_a_call_of_a_subgraph_is_in_no_region() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        (y,) = invoke_subgraph(tanh_of, "once", x, weight)
        return torch.autograd.grad((y * 2).sum(), weight)[0]

    gm = minimal_fx_tracer(step)(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).gm
    tag_regions(gm, [WHOLE])
    called = calls(gm, torch.ops.higher_order.invoke_subgraph)
    assert len(called) == 2 and not any(map(meta.region, called)) and any(map(meta.region, gm.graph.nodes))


@needs_compiler
@pytest.mark.slow
def test_inductor_is_still_wrong_about_subgraphs_on_a_cpu() -> None:
    """Why the test above: when this fails, torch has mended it, and a call of a subgraph may be compiled."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    region = torch.compiler.nested_compile_region(lambda x, weight, bias: torch.tanh(F.linear(x, weight, bias)))

    def loss(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(x, layer.weight, layer.bias)
        return x.square().sum()

    x = torch.randn(4, 8)
    expected, *found = (
        torch.autograd.grad(fn(x), list(layers.parameters()))
        for fn in (loss, torch.compile(loss, backend="aot_eager"), torch.compile(loss))
    )
    exact, compiled = (distance(list(each), list(expected)) for each in found)
    assert exact == 0 and compiled > 0.1


def test_the_loss_is_what_lies_between_the_last_modules_forward_and_its_backward() -> None:
    gm, _ = llama()
    nodes = loss_of(gm)
    assert {meta.phase(n) for n in nodes} == {"forward", "backward"} and not any(map(meta.module, nodes))
    assert torch.ops.aten.cos.default not in {n.target for n in nodes}, "the rope tables come before the modules"


def test_the_first_pattern_that_matches_counts() -> None:
    gm = cleanup(trace_toy(toy()))
    tag_regions(gm, ["layers.*.up", "layers.1"])
    assert {"layers.0.up forward", "layers.1.up forward", "layers.1 forward"} <= set(tagged(gm))
    assert "layers.0 forward" not in tagged(gm)


@pytest.mark.parametrize(
    "family",
    ["llama3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama4", "qwen3", "deepseek_v3", "gpt_oss"))],
)
def test_a_fusion_is_all_that_its_modules_compute_and_nothing_else(
    family: str, layout_of: Callable[..., Layout]
) -> None:
    cell = Cell(ParallelDims(), family=family)
    model = build_model(cell)
    kinds = tuple(FUSIONS.values())
    fused = {name for name, module in model.named_modules() if isinstance(module, kinds)}
    assert len(fused) > 2 * len(model.blocks)
    patterns = list(plan_regions(job.Compile(fusions=["rms_norm", "swiglu", "rope"]), model, torch.device("cpu")))
    gm = build_graphs(Assembly(model, load_family(family), layout_of(), cell.options("graph"))).train.gm
    tag_regions(gm, patterns)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and not edit.is_view(n)]
    assert {meta.module(n) for n in nodes if meta.region(n)} == fused
    assert not [n for n in nodes if meta.module(n) in fused and not meta.region(n)]


# --- mechanism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patterns", [["layers.*"], ["layers.*.up"], ["layers.*", "output"]])
def test_the_rest_of_the_graph_stays_as_it_is(patterns: list[str], uncompiled: Compiled) -> None:
    gm = cleanup(trace_toy(toy()))
    expected = run_toy(gm)
    tag_regions(gm, patterns)
    rest = [n.name for n in gm.graph.nodes if meta.region(n) is None]
    gm = compile_regions(gm, dict.fromkeys(patterns, {}))
    gm.graph.lint()
    settled = calls(gm, torch.ops.aten.contiguous.default)
    assert [n.name for n in gm.graph.nodes if meta.region(n) is None and n not in settled] == rest
    assert uncompiled and bitwise(run_toy(gm), expected)


def test_a_batch_may_have_other_strides_than_were_traced(uncompiled: Compiled) -> None:
    gm = cleanup(trace_toy(toy()))
    expected = run_toy(gm)
    gm = compile_regions(gm, {WHOLE: {}})
    tokens = gm.graph.find_nodes(op="placeholder")[-4]
    assert tokens.meta["val"].dtype == torch.int64
    with gm.graph.inserting_after(tokens):
        wide = gm.graph.call_function(torch.cat, ([tokens, tokens], 1))
    with gm.graph.inserting_after(wide):
        part = gm.graph.call_function(torch.narrow, (wide, 1, 0, 3))
    tokens.replace_all_uses_with(part, delete_user_cb=lambda user: user is not wide)
    gm.recompile()
    assert uncompiled and bitwise(run_toy(gm), expected)


def test_an_output_of_the_wrong_place_would_be_seen(uncompiled: Compiled) -> None:
    gm = cleanup(trace_toy(toy()))
    expected = run_toy(gm)
    gm = compile_regions(gm, {"layers.*.up": {}})
    of_region = [n for n in gm.graph.nodes if meta.region(n) == "layers.0.up backward"]
    region = next(n for n in of_region if {user.target for user in n.users} == {operator.getitem})
    first, second = list(region.users)[:2]
    first.args, second.args = second.args, first.args
    gm.recompile()
    with pytest.raises((RuntimeError, AssertionError)):
        assert bitwise(run_toy(gm), expected)


def test_equal_regions_are_compiled_once(uncompiled: Compiled) -> None:
    compile_regions(cleanup(trace_toy(toy(num_layers=5))), {"layers.*.up": {}})
    assert len(uncompiled) == 2, "one forward, one backward"


def test_flex_attention_brings_its_subgraphs_along(uncompiled: Compiled) -> None:
    gm, inputs = llama()
    expected = run(gm, inputs)
    as_if_on_a_gpu(gm)
    gm = compile_regions(gm, {"layers.*": {}, FLEX: {}})
    gm.graph.lint()
    assert not calls(gm, FORWARD, BACKWARD) and not gm.graph.find_nodes(op="get_attr")
    flex = [part for part in uncompiled if calls(part, FORWARD, BACKWARD)]
    assert [len(calls(part, FORWARD, BACKWARD)) for part in flex] == [1, 1]
    assert bitwise(run(gm, inputs), expected)


def test_flex_attention_takes_its_kernels_when_it_is_compiled(
    uncompiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that eager takes, but where Inductor is to look for blocks itself."""

    def options(q_BNLH: Tensor, own_blocks: bool = True) -> dict[str, Any]:
        return {"BACKEND": "TRITON"} | ({"fwd_BLOCK_M": 32} if own_blocks else {})

    monkeypatch.setattr("torchtitan_graph.passes.compile_regions.flex_kernel_options", options)
    for searches in (False, True):
        uncompiled.clear()
        gm, _ = llama()
        as_if_on_a_gpu(gm)
        compile_regions(gm, {FLEX: {"max_autotune": searches}})
        found = [
            next(x for x in node.args if isinstance(x, dict))
            for part in uncompiled
            for node in calls(part, FORWARD, BACKWARD)
        ]
        assert len(found) == 2 and all(x["BACKEND"] == "TRITON" and x["OUTPUT_LOGSUMEXP"] for x in found)
        assert all(("fwd_BLOCK_M" in x) != searches for x in found)


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(every=1)])
def test_it_follows_all_other_passes(
    recompute: Recompute, uncompiled: Compiled, layout_of: Callable[..., Layout]
) -> None:
    model = toy()
    gm = trace_toy(model, torch.bfloat16)
    storages = plan_storage(model, layout_of(dp_shard=4), Precision(compute=torch.bfloat16))
    plan = PassPlan(storages, blocks(), buckets(model, blocks()), recompute, regions={"layers.*": {}})
    for each in passes(plan):
        gm = each.run(gm)
        gm.graph.lint()
    assert calls(gm, GATHER) and not any(calls(part, GATHER) for part in uncompiled)
    assert not calls(gm, torch.ops.aten.silu.default) and any(calls(p, torch.ops.aten.silu.default) for p in uncompiled)


@pytest.mark.parametrize("box", ["emptied", "kept"])
def test_what_dies_inside_a_region_is_freed_there(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def compile(gm: GraphModule, inputs: list[Tensor], options: object) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
        def run(inputs: list[Tensor]) -> tuple[Tensor, ...]:
            (x,) = inputs
            if box == "emptied":
                inputs.clear()
            y, died = x + 1, weakref.ref(x)
            del x
            seen.append(died() is None)
            return (y,)

        return run

    monkeypatch.setattr("torchtitan_graph.passes.compile_regions.compile_by_inductor", compile)
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3)
    y = edit.call(graph, x, torch.ops.aten.sin.default, x)
    z = edit.call(graph, x, torch.ops.aten.add.Tensor, y, 1)
    meta.write(z, module="layers.0")
    graph.output((z,))
    gm = compile_regions(GraphModule(torch.nn.Module(), graph), {"layers.*": {}})
    (found,) = boxed(gm)([torch.zeros(3)])
    assert torch.equal(found, torch.ones(3)) and seen == [box == "emptied"]


@pytest.mark.parametrize("region", ["layers.*", WHOLE])
def test_what_lives_inside_a_region_counts(region: str, uncompiled: Compiled) -> None:
    """As if its operators ran one by one; and a result that is another's view is the same memory."""
    gm = rematerialize(tag_recomputation(cleanup(trace_toy(toy())), blocks(), Recompute(every=1)))
    before = peak_memory(gm).num_bytes
    assert peak_memory(compile_regions(gm, {region: {}})).num_bytes == before and uncompiled


def test_where_nothing_runs_regions_are_cut_out_and_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """As in a dry run: what they hold, and compute, is the same."""
    gm = cleanup(trace_toy(toy()))
    expected, before = run_toy(gm), peak_memory(gm).num_bytes
    with caplog.at_level("INFO", "torchtitan_graph"):
        gm = compile_regions(gm, {"layers.*": {}}, compiles=False)
    assert caplog.messages == ["compile_regions: 4 regions, 2 of them different, not compiled"]
    assert len(tagged(gm)) == 4 and peak_memory(gm).num_bytes == before and bitwise(run_toy(gm), expected)


def test_whole_is_cut_at_waits(uncompiled: Compiled, layout_of: Callable[..., Layout]) -> None:
    model = toy()
    gm = trace_toy(model)
    storages = plan_storage(model, layout_of(dp_shard=4), Precision())
    for each in passes(PassPlan(storages, blocks(), buckets(model, blocks()), regions={WHOLE: {}})):
        gm = each.run(gm)
        gm.graph.lint()
    aten = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten"]
    by_index = calls(gm, torch.ops.aten.embedding_dense_backward.default)  # stays too
    assert all(meta.role(n) or edit.is_view(n) or n in by_index for n in aten)
    assert len([n for n in gm.graph.nodes if meta.region(n) and n.target is not operator.getitem]) > 6
    order = [n for n in gm.graph.nodes if n.target is WAIT or meta.region(n)]
    forward = [n.target is WAIT for n in order if meta.phase(n) == "forward"]
    assert forward.count(True) > 2 and sorted(forward, reverse=True) != forward, "not all weights come first"


def test_a_region_that_can_not_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise TypeError("no such kernel")

    monkeypatch.setattr("torchtitan_graph.passes.compile_regions.compile_by_inductor", fail)
    with pytest.raises(RuntimeError, match='region layers.0 forward: no such kernel\n.*codegen = "off"') as raised:
        compile_regions(cleanup(trace_toy(toy())), {"layers.*": {}})
    assert isinstance(raised.value.__cause__, TypeError)


def test_the_log_says_what_is_compiled(uncompiled: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torchtitan_graph"):
        compile_regions(cleanup(trace_toy(toy(num_layers=3))), {"layers.*": {}})
    assert [text.split(",")[0] for text in caplog.messages] == [
        "compiling region 1 of 2: layers.0 forward and 2 like it",
        "compiling region 2 of 2: layers.2 backward and 2 like it",
        "compile_regions: 6 regions",
    ]


# --- Inductor -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
def test_a_compiled_region_gives_the_same_numbers() -> None:
    gm = cleanup(trace_toy(toy()))
    expected = run_toy(gm)
    gm = compile_regions(gm, {"layers.*": {}})
    assert not calls(gm, torch.ops.aten.silu.default)
    assert distance(run_toy(gm), expected) < TOLERANCE


def by_index(weight: torch.Tensor, index: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Sums whose order matters: gradients by an embedding's index, by an index, and by what Inductor makes one of."""
    rows = torch.nn.functional.embedding(index, weight) + weight[index]
    windows = weight.flatten().unfold(0, 9, 2)
    return torch.autograd.grad((rows * factor).sin().sum() + windows.cos().sum(), weight)[0]


def test_sums_by_index_are_in_no_region(uncompiled: Compiled) -> None:
    inputs = torch.randn(8, 4, requires_grad=True), torch.arange(8) % 3, torch.randn(8, 1)
    gm = compile_regions(minimal_fx_tracer(by_index)(*inputs).gm, {WHOLE: {}})
    assert calls(gm, torch.ops.aten.embedding_dense_backward.default) and calls(gm, torch.ops.aten.index_put.default)
    assert not calls(gm, torch.ops.aten.sin.default)


@needs_compiler
@pytest.mark.slow
def test_compiled_regions_give_the_same_bits_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that add to the same rows; and without what keeps their order, to show that it would be seen."""
    inputs = torch.randn(64, 128, requires_grad=True), torch.randint(4, (65_536,)), torch.randn(65_536, 1)

    def differ() -> bool:
        gm = compile_regions(minimal_fx_tracer(by_index)(*inputs).gm, {WHOLE: {}})
        first, *others = [gm(*(x.detach() for x in inputs))[0] for _ in range(20)]
        return not all(torch.equal(first, each) for each in others)

    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)  # as the trainer on a CPU
    try:
        assert not differ()
        for op in (torch.ops.aten.embedding_dense_backward.default, torch.ops.aten.index_put.default):
            monkeypatch.setitem(_DECLARED, id(op), (op, dataclasses.replace(operator_of(op), compiles=True)))
        monkeypatch.setattr(inductor, "_same_bits_each_run", contextlib.nullcontext)
        torch.use_deterministic_algorithms(False)
        assert differ()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)


@pytest.mark.slow
@needs_compiler
def test_a_norm_compiled_in_bf16_gives_the_same_bits_in_forward() -> None:
    with torch.device("meta"):
        model = Toy().to(torch.bfloat16)
    gm = cleanup(trace_eval_step(model, cross_entropy, batch(), None, torch.tensor(6.0), device="cpu").gm)
    inputs = [torch.randn(p.shape).bfloat16() for p in model.parameters()] + [*batch(2), torch.tensor(6.0)]
    expected = run(gm, inputs)
    gm = compile_regions(gm, {"layers.*.norm": {}})
    assert not calls(gm, torch.ops.aten.rsqrt.default)
    assert bitwise(run(gm, inputs), expected)


@pytest.mark.slow
@needs_compiler
def test_on_a_cpu_the_evaluation_step_compiles_its_flex_attention() -> None:
    gm, inputs = llama(trace_eval_step, seq_len=128)
    expected = run(gm, inputs)
    gm = compile_regions(gm, {FLEX: {}})
    assert not calls(gm, FORWARD)
    assert distance(run(gm, inputs), expected) < TOLERANCE
    documents = inputs[-2]
    assert documents.shape == (1, 128), "what the mask's rule closes over"
    inputs[-2] = torch.zeros_like(documents)
    assert distance(run(gm, inputs), expected) > 100 * TOLERANCE, "another mask is seen"


def test_on_a_cpu_a_sequence_that_ends_inside_a_block_is_left_as_it_is() -> None:
    gm, _ = llama(trace_eval_step, seq_len=24)
    assert calls(compile_regions(gm, {FLEX: {}}), FORWARD), "compiled, torch 2.13 gives other numbers"


# --- options --------------------------------------------------------------------------------------------------------


def plan(device: str = "cpu", **options: object) -> dict:
    return dict(plan_regions(job.Compile(**options), toy(), torch.device(device)))


def test_nothing_is_compiled_unless_asked_for_but_flex_attention_on_a_gpu() -> None:
    assert plan() == {} and plan("cuda") == {FLEX: {}}
    assert plan(codegen="blocks") == {"layers.*": {}}
    assert plan(codegen="whole") == {WHOLE: {}}
    assert plan("cuda", codegen="whole") == {WHOLE: {}, FLEX: {}}


def test_fusions_are_compiled_beside_what_codegen_says() -> None:
    assert plan(fusions=["rms_norm"]) == {"layers.*.norm": {}}
    assert plan(fusions=["rms_norm"], codegen="blocks", regions=["output"]).keys() == {"output", "layers.*.norm"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": ["layers.*.attention"]}, "compile.regions = 'layers.*.attention': matches no module"),
        ({"fusions": ["rmsnorm"]}, "legal are rms_norm, swiglu, rope; did you mean rms_norm?"),
        ({"fusions": ["swiglu"]}, "compile.fusions = 'swiglu': the model has no module SwiGLU"),
    ],
)
def test_what_can_not_be_compiled_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*").replace("?", r"\?")):
        plan(codegen="blocks", **options)


def test_of_a_pipeline_nothing_is_compiled_that_runs_once_a_step(
    uncompiled: Compiled, layout_of: Callable[..., Layout]
) -> None:
    """What is reduced was summed in the dtype of the reduction, which the graph's casts, compiled, would misread."""
    # On one rank a cast stands alone, by no collective.
    cell = Cell(
        ParallelDims(pp=2), precision=Precision(torch.float32, torch.bfloat16, torch.float32), num_microbatches=2
    )
    options = dataclasses.replace(cell.options("graph"), regions={"layers.*": {}})
    graphs = build_graphs(Assembly(build_model(cell), llama3, layout_of(pp=2), options))
    (stage,) = graphs.train.values()
    compiled = {
        name: any(meta.region(node) for node in part.gm.graph.nodes) for name, part in stage.parts.by_name.items()
    }
    assert compiled == {"gather": False, "forward": True, "backward": True, "reduce": False}
