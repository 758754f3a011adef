"""The code in the pages about graphs runs."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Transformer

from torchtitan_graph.capture import call_hierarchy, minimal_fx_tracer
from torchtitan_graph.check.outcome import outcome_on_random
from torchtitan_graph.compiler import Pass, find_problem
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.meta import KEYS
from torchtitan_graph.parallel.verify import same_bits

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


TRACES, *_, TAKES_SIZES = blocks("extend/tracing.md")  # tests/unit/formats/test_tracing_page.py runs all of them
TELLS_PLACES, KEEPS_META, *_ = blocks("reference/graph.md")


def test_the_first_block_of_tracing_traces_and_runs() -> None:
    names: dict = {}
    exec(TRACES, names)
    assert names["loss"].shape == ()
    assert [g.shape for g in names["gradients"]] == [(8, 4), (8,), (4, 8), (4,)] * 2


def test_its_last_block_takes_other_sizes() -> None:
    names: dict = {}
    exec(TRACES + TAKES_SIZES, names)
    with pytest.raises(UserError, match=r"x.shape\[0\] is 65: the trace holds for 2 to 64"):
        names["run"](torch.zeros(65, 4))


def test_the_first_block_of_the_graph_tells_where_nodes_were_made(capsys: pytest.CaptureFixture[str]) -> None:
    first = TRACES.replace("minimal_fx_tracer(step,", "minimal_fx_tracer(step, call_hierarchy=True,")
    assert first != TRACES
    exec(first + TELLS_PLACES, {})
    assert " backward " in capsys.readouterr().out


def test_its_second_block_keeps_what_nodes_carry() -> None:
    names: dict = {}
    exec(TRACES.replace("minimal_fx_tracer(step,", "minimal_fx_tracer(step, call_hierarchy=True,") + KEEPS_META, names)
    gm, again, forgets = names["traced"].gm, names["again"], Transformer(names["traced"].gm).transform()
    carried = [[[*map(n.meta.get, (*KEYS, "call_hierarchy"))] for n in each.graph.nodes] for each in (gm, again)]
    assert carried[0][:-1] == carried[1][:-1]  # the output has none
    assert find_problem(again) is None
    assert find_problem(forgets) and not any(map(call_hierarchy, forgets.graph.nodes))  # as the page says


def passes_in(page: str) -> dict[str, Callable[[GraphModule], GraphModule]]:
    found: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for name in re.findall(r"^def (\w+)\(gm: GraphModule\) -> GraphModule:", block, re.MULTILINE):
            names: dict = {}
            exec(block, names)
            found[name] = names[name]
    return found


def times(x: Tensor, factor: float) -> Tensor:
    return torch.ops.aten.mul.Scalar(x, factor)


def step(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad((leaf * 2).pow(3).sum(), leaf)[0]


FLOATS, WHOLE = torch.randn(3, 4), torch.arange(12).view(3, 4)
GRAPHS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "product": (lambda x: times(x, 2.0).sin(), FLOATS),
    "operator": (lambda x: (x * 1).sin() + x * 2, FLOATS),
    "half": (lambda x: times(x, 2), FLOATS.bfloat16()),
    "whole numbers": (lambda x: (times(x, 2.0), times(x, 2), x * 1.0, x * 1), WHOLE),
    "result": (lambda x: (times(x, 2.0), x * 1, times(x, 1)), FLOATS),
    "expanded": (lambda x: (times(x[:1].expand(3, 4), 2.0).view(-1), (x[:1].expand(3, 4) * 1).view(-1)), FLOATS),
    "transposed": (lambda x: (times(x.t(), 2.0), x.t() * 1), FLOATS),
    "written to": (lambda x: ((x * 1).add_(1) + x, times(x, 2.0).add_(1) + x), FLOATS),
    "special": (lambda x: times(torch.stack([x / 0, -x / 0, 0 * x, 0 * (x / 0), 3e38 * x]), 2.0), FLOATS),
    "backward": (step, FLOATS),
    "no dimension": (lambda x: times(x.sum(), 2.0) * 1, FLOATS),
}


def faults_of(own: Callable[[GraphModule], GraphModule], graph: str) -> list[str]:
    """Say what a pass breaks: it can't run, other numbers, dtypes or strides, or a result that is an argument."""
    fn, x = GRAPHS[graph]
    gm = minimal_fx_tracer(fn)(x).gm
    if failure := outcome_on_random(Pass("own", own), gm):
        return [failure.said]
    after = own(copy.deepcopy(gm))
    given, also = x.clone(), x.clone()
    found = []
    for old, new in zip(gm(given), after(also), strict=True):
        if (old.dtype, old.stride()) != (new.dtype, new.stride()) or not same_bits(old, new):
            found.append(f"{new.dtype} {new.stride()} for {old.dtype} {old.stride()}, or other bits")
        if new.untyped_storage().data_ptr() == also.untyped_storage().data_ptr() and (
            old.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        ):
            found.append("a result is the caller's argument")
    return found


DOCUMENTED = {name: each for page in sorted(DOCS.rglob("*.md")) for name, each in passes_in(page.read_text()).items()}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_pass_of_the_docs_keeps_every_bit(name: str, graph: str) -> None:
    assert faults_of(DOCUMENTED[name], graph) == []


def test_the_pass_of_this_page_does_what_it_says() -> None:
    assert "double_by_adding" in DOCUMENTED
    gm = DOCUMENTED["double_by_adding"](minimal_fx_tracer(lambda x: (x * 2).sin() + 2.0 * x)(FLOATS).gm)
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(torch.ops.aten.add.Tensor) == 3 and torch.ops.aten.mul.Tensor not in targets


def drop_unit_products(gm: GraphModule) -> GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        if node.args[1] == 1:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


@pytest.mark.parametrize("graph", ["whole numbers", "result", "expanded", "written to"])
def test_a_pass_that_is_not_exact_is_found(graph: str) -> None:
    """Negative control: what the page warns of."""
    assert faults_of(drop_unit_products, graph)
