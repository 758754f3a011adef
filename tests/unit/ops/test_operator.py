"""What an operator's declaration says is what all that runs, prices and rewrites a graph reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from library_of_a_user import declared
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.cost import OTHER, PRODUCT, works_of
from torchtitan_graph.analysis.flops import matmul_flops
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.ops import operator
from torchtitan_graph.ops.operator import OTHER_COLLECTIVE, declare, operator_of
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import WHOLE, tag_regions
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.runtime.pieces import cut_into_pieces

BLOCKS = ("layers.0", "layers.1")
own = torch.ops.a_users


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return own.counted(own.unsaid(own.tagged(declared(x, self.first))), self.second)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def graph() -> GraphModule:
    model = Model()
    step = lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters()))  # noqa: E731
    return cleanup(minimal_fx_tracer(step, model)(torch.ones(2, 4)).gm)


def node_of(gm: GraphModule, name: str) -> Node:
    return gm.graph.find_nodes(op="call_function", target=getattr(own, name).default)[0]


def test_products_are_priced_by_the_declaration_or_by_torch_s_formula_and_elementwise_work_is_not() -> None:
    gm = graph()
    work = {name: works_of(node_of(gm, name))[0] for name in ("declared", "counted", "tagged", "unsaid")}
    product = 2 * 2 * 4 * 4
    assert {name: (each.kind, each.operations) for name, each in work.items()} == {
        "declared": (PRODUCT, product),
        "counted": (PRODUCT, product),
        "tagged": (OTHER, 0),  # torch knows a formula, but it is elementwise
        "unsaid": (OTHER, 0),
    }
    assert matmul_flops(node_of(gm, "declared")) == product


def test_a_costly_operator_is_saved_and_an_elementwise_one_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = tag_recomputation(graph(), BLOCKS, Recompute(by_op=True))
    assert meta.tag(node_of(gm, "declared")) == meta.SAVE
    assert meta.tag(node_of(gm, "counted")) == meta.SAVE  # the block's output
    assert meta.tag(node_of(gm, "tagged")) == meta.tag(node_of(gm, "unsaid")) == meta.RECOMPUTE
    monkeypatch.setattr(keeping, "START", 0)
    gm = tag_elementwise(graph(), BLOCKS)
    assert meta.tag(node_of(gm, "tagged")) == meta.RECOMPUTE
    assert meta.tag(node_of(gm, "unsaid")) is None  # nobody said that it is cheap


def test_a_region_leaves_out_what_it_may_not_contain() -> None:
    gm = graph()
    tag_regions(gm, [WHOLE])
    regions = {name: meta.region(node_of(gm, name)) for name in ("declared", "counted", "tagged", "unsaid")}
    assert regions == {"declared": None, "counted": WHOLE, "tagged": WHOLE, "unsaid": WHOLE}


def test_a_recording_contains_what_is_declared_alone() -> None:
    is_recorded = {
        node.name: piece.is_recorded for piece in cut_into_pieces(graph()) for node in piece.gives if piece.gives
    }
    assert is_recorded["declared"] and not is_recorded["counted"]


def test_a_declaration_changes_what_is_read_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without its declaration the operator is like any other."""
    monkeypatch.delitem(operator._DECLARED, id(declared))
    gm = graph()
    assert works_of(node_of(gm, "declared"))[0].kind == OTHER
    tag_regions(gm, [WHOLE])
    assert meta.region(node_of(gm, "declared")) == WHOLE
    declare(torch.ops.a_users.declared, flops=lambda *args, out_val: 7)  # of all its overloads
    assert matmul_flops(node_of(gm, "declared")) == 7
    assert operator_of(declared).compiles


def test_a_declaration_that_says_nothing_legal_is_refused_and_not_kept() -> None:
    before = operator_of(declared)
    for facts, message in (
        ({"recompute": "seldom"}, "recompute = 'seldom': must be any, alternate, costly or never"),
        ({"elementwise": True, "flops": lambda *args, out_val: 7}, "flops: those of elementwise operators"),
    ):
        with pytest.raises(UserError, match=message):
            declare(declared, **facts)
        assert operator_of(declared) is before
    with pytest.raises(UserError, match="setup needs backward"):
        operator.operator(lambda x: x, setup=lambda *args: None)


def test_an_operator_that_names_a_group_sends() -> None:
    assert operator_of(torch.ops._c10d_functional.broadcast.default).collective is OTHER_COLLECTIVE
    assert operator_of(torch.ops.aten.mm.default).collective is None


# --- no other file names an operator ----------------------------------------------------------------------------------

PACKAGE = Path(operator.__file__).parents[1]
OWN = {str(op).split(".")[1] for op, _ in operator._DECLARED.values() if str(op).startswith("torchtitan_graph.")}
# Models, layers and losses compute with operators; everything else asks for their declarations. These passes insert
# copies, so they name them.
COMPUTE = ("ops/", "models/", "quantize/", "loss.py", "check/kernels.py")
COMPUTE += ("parallel/dispatch.py", "parallel/by_machine.py")
INSERT = ("bucket_collectives", "offload_activations", "overlap_copies", "rest_on_host")
EXCEPTIONS = tuple(f"passes/{name}.py" for name in INSERT)


def operators_named_in(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.torchtitan_graph":
            yield "torch.ops.torchtitan_graph"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan_graph.ops"):
            yield from (alias.name for alias in node.names if alias.name in OWN)
        elif isinstance(node, ast.Compare) and ".target" in ast.unparse(node):
            yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and x.value in OWN)


def test_only_what_computes_with_operators_names_them() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = {name: names for name, path in files.items() if (names := {*operators_named_in(path.read_text())})}
    assert {name for name in found if not name.startswith(COMPUTE)} == set(EXCEPTIONS)


@pytest.mark.parametrize(
    "code",
    [
        "_X = torch.ops.torchtitan_graph.exchange.default",
        "from torchtitan_graph.ops.exchange import exchange, turned_order",
        "sends = 'exchange' in str(node.target)",
    ],
)
def test_a_name_is_seen(code: str) -> None:
    assert list(operators_named_in(code))
