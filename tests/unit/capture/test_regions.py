"""Checkpointed regions, nested compile regions, `local_map`: they return and do what Python allows, in both captures.

A graph has no regions: they are traced in their places. The two captures give the same graph, node for node.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops.wrap import wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_graph.capture.dynamo import CAPTURES
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import InParts
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.torch_private.flex import flex_attention_op

HERE = CAPTURES if torch.__version__ >= "2.13" else {"make_fx": CAPTURES["make_fx"]}
only_dynamo = pytest.mark.skipif(len(HERE) < 2, reason="Dynamo captures steps from torch 2.13 on")
X = torch.arange(9.0).view(3, 3) / 9
SHIFT = torch.full((3,), 0.5)


@dataclasses.dataclass
class Data:  # unknown to pytree
    left: Any
    right: Any


class Own:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class Pair(NamedTuple):
    left: Any
    right: Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.sin(self.one(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net() for _ in range(2))


def net(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


nested = torch.compiler.nested_compile_region(lambda fn, *args: fn(*args))
KINDS: dict[str, Callable[..., Any]] = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "nested": nested,
    "wrap": wrap,
}


def same(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a is b for a, b in pairs)


def check(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor = X) -> list[torch.fx.GraphModule]:
    """Compare loss and gradients with plain autograd's, bit for bit, and the captures' graphs; give the graphs."""

    def step(forward: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        loss = forward(x)
        return loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    graphs = []
    for name, capture in HERE.items():
        traced = capture(InParts(step, forward), model)(x)
        assert same(run_traced(traced, module=model)(x + 1), step(forward, x + 1)), name
        graphs.append(cleanup(traced.gm))
    assert all(described(gm) == described(graphs[0]) for gm in graphs)
    return graphs


def calls(gm: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def twice(y: Tensor) -> Any:
    return y, [y]


def views(y: Tensor) -> Any:
    return y, y[0], y.t()


# What a region makes of the module and its argument, and the loss that is made of that.
RESULTS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "dataclass": (lambda net, x: Data(net(x), x.cos()), lambda r, x: r.left * r.right),
    "own class, nested": (
        lambda net, x: Own([net(x)], {"k": Data(net.one(x), None)}),
        lambda r, x: r.left[0] * r.right["k"].left,
    ),
    "NamedTuple and None": (lambda net, x: Pair(net(x), None), lambda r, x: r.left if r.right is None else x),
    "one tensor twice": (lambda net, x: twice(net(x)), lambda r, x: r[0] * (2 if r[0] is r[1][0] else 3)),
    "its input": (lambda net, x: {"same": x, "y": net(x)}, lambda r, x: r["y"] * (2 if r["same"] is x else 3)),
    "a view of its input": (lambda net, x: (x.t(), x[0], net(x)), lambda r, x: r[0].t() * r[1] * r[2]),
    "views of its own": (lambda net, x: views(net(x)), lambda r, x: r[0] * r[1] * r[2].t()),
    "a parameter": (lambda net, x: (net.one.weight, net(x)), lambda r, x: r[0].sum() * r[1]),
    "numbers": (lambda net, x: (3, 0.5, "word", x.shape, net(x)), lambda r, x: r[4] * r[0] * r[1] * r[3][0]),
    "a module": (lambda net, x: (net.two, net.one(x)), lambda r, x: r[0](r[1])),
    "a function": (lambda net, x: lambda factor: net(x) * factor, lambda r, x: r(2.0)),
    "a tensor of the closure": (lambda net, x: (SHIFT, net(x) * SHIFT), lambda r, x: r[0] * r[1]),
}


# How results are put together is one code for all kinds.
FAST = ("dataclass", "its input")


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        pytest.param(kind, result, marks=[pytest.mark.slow] * (kind != "checkpoint" and result not in FAST))
        for kind in KINDS
        for result in RESULTS
    ],
)
def test_a_region_may_return_anything(kind: str, result: str) -> None:
    model, (region, use) = net(), RESULTS[result]

    def forward(x: Tensor) -> Tensor:
        return use(KINDS[kind](lambda x: region(model, x), x), x).square().sum()

    check(model, forward)


@pytest.mark.parametrize("kind", KINDS)
def test_regions_lie_in_one_another(kind: str) -> None:
    model, region = net(), KINDS[kind]

    def forward(x: Tensor) -> Tensor:
        return region(lambda x: region(lambda y: Data(model.two(y), None), model.one(x).sin()).left.cos(), x).sum()

    check(model, forward)


def of_backward(gm: torch.fx.GraphModule) -> set[Any]:
    """Give the operators of forward whose results backward reads, through views too."""
    forward = [node for node in gm.graph.nodes if node.op == "call_function" and meta.phase(node) == "forward"]
    return {node.target for node in forward if any(meta.phase(user) == "backward" for user in node.users)}


def test_of_a_checkpointed_region_only_the_result_is_kept() -> None:
    model = net()

    def region(x: Tensor) -> Tensor:
        model.one(x).exp()  # nobody needs it
        return model(x)

    for wrapped, is_kept in ((region, True), (functools.partial(KINDS["checkpoint"], region), False)):
        for gm in check(model, lambda x, wrapped=wrapped: wrapped(x).square().sum()):
            assert (torch.ops.aten.sin.default in of_backward(gm)) == is_kept
            assert len(calls(gm, torch.ops.aten.sin.default)) == 2 - is_kept
            assert not calls(gm, torch.ops.aten.exp.default)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_keep_their_modules_and_phases(kind: str) -> None:
    """Of the layers that share a region, and of what backward computes again."""
    model = net(Layers)

    def forward(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = KINDS[kind](lambda layer, x: layer(x), layer, x)
        return x.square().sum()

    for gm in check(model, forward):
        found = sorted((meta.phase(node)[0], meta.module(node)) for node in calls(gm, torch.ops.aten.sin.default))
        layers = [("f", "layers.0"), ("f", "layers.1")]
        assert found == ([("b", "layers.0"), ("b", "layers.1"), *layers] if kind == "checkpoint" else layers)
        products = {(meta.phase(node)[0], meta.module(node)) for node in calls(gm, torch.ops.aten.mm.default)}
        assert products == {("b", f"layers.{i}.{name}") for i in (0, 1) for name in ("one", "two")}


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_selective_checkpoint_keeps_what_it_says() -> None:
    model = net()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().sum()

    for gm in check(model, forward):
        assert len(calls(gm, torch.ops.aten.addmm.default)) == 2 and len(calls(gm, torch.ops.aten.sin.default)) == 2


def test_a_checkpointed_region_may_write_to_a_value_of_its_own() -> None:
    model = net()
    check(model, lambda x: checkpoint(lambda x: model(x).add_(1), x, use_reentrant=False).sum())


@pytest.mark.parametrize("kind", ["checkpoint", "nested"])
def test_a_region_may_append_to_a_list_outside(kind: str) -> None:
    model = net()

    def forward(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        by_name: dict[str, Tensor] = {}

        def region(x: Tensor) -> Tensor:
            y = model.one(x)
            kept.append(y)
            by_name["y"] = y.sin()
            return model.two(y)

        return (KINDS[kind](region, x) * kept[0] * by_name["y"]).sum()

    check(model, forward)


def test_a_nested_region_may_write_to_its_input() -> None:
    model = net()

    def region(z: Tensor) -> Tensor:
        z.add_(1)
        return model(z)

    def forward(x: Tensor) -> Tensor:
        z = x * 2
        return (nested(region, z) * z).sum()

    check(model, forward)


def test_flex_attention_in_a_checkpointed_region() -> None:
    """With a tensor that its score function closes over."""
    model, bias = net(), torch.arange(16.0) / 16
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)

    def region(x: Tensor) -> Data:
        q = model(x).view(1, 1, 16, 3)
        return Data(*flex_attention_op(q, q, q, mask, 0.5, lambda score, b, h, q, kv: score + bias[kv]))

    def forward(x: Tensor) -> Tensor:
        found = checkpoint(region, x, use_reentrant=False)
        return found.left.sum() + found.right.sum()

    check(model, forward, torch.arange(48.0).view(16, 3) / 48)


# --- local_map --------------------------------------------------------------------------------------------------------

R, S = [Replicate()], [Shard(0)]
MAPPED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {  # what it maps, and where its results lie
    "a dict and a list": (lambda x, w: {"a": x @ w, "b": [x @ w.t()]}, (R, R)),
    "None and a number": (lambda x, w: (None, x @ w, 3), (None, S, None)),
    "its inputs and a view": (lambda x, w: (x, x @ w, w, x.t()), (R, R, R, R)),
    "one tensor twice": (lambda x, w: twice(x @ w), (R, R)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_local_map(name: str, one_rank: None) -> None:
    mesh, model, (fn, placements) = init_device_mesh("cpu", (1,)), net(), MAPPED[name]
    for child in (model.one, model.two):
        for key, x in list(child.named_parameters()):
            setattr(child, key, nn.Parameter(distribute_tensor(x.detach(), mesh, R)))
    region = local_map(fn, out_placements=placements, in_placements=(R, R), device_mesh=mesh)

    def forward(x: Tensor) -> Tensor:
        found = pytree.tree_leaves(region(DTensor.from_local(x, mesh, R), model.one.weight))
        return sum(x.to_local().sin().sum() for x in found if isinstance(x, DTensor))  # type: ignore[return-value]

    check(model, forward)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", HERE)
@pytest.mark.parametrize("kind", ["nested", "wrap"])  # autograd refuses it in a checkpointed one
def test_a_region_that_writes_to_an_argument_of_the_step_is_refused(kind: str, capture: str) -> None:
    model = net()

    def region(x: Tensor) -> Tensor:
        return model(x.mul_(2))

    with pytest.raises(UserError, match=r"writes in place to x \(aten.mul_.Tensor, capture/test_regions.py:\d+\)"):
        HERE[capture](lambda x: KINDS[kind](region, x).sum(), model)(X)


@pytest.mark.parametrize("capture", HERE)
def test_a_region_that_draws_numbers_is_refused(capture: str) -> None:
    model = net()

    def region(x: Tensor) -> Tensor:
        return nn.functional.dropout(model(x))

    with pytest.raises(UserError, match=r"draws random numbers \(aten.*, capture/test_regions.py:\d+\)"):
        HERE[capture](lambda x: checkpoint(region, x, use_reentrant=False).sum(), model)(X)


@pytest.mark.parametrize("capture", HERE)
def test_a_reentrant_checkpoint_is_refused(capture: str) -> None:
    model = net()

    def step(forward: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return torch.autograd.grad(forward(x), list(model.parameters()))

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, model.one(x), use_reentrant=True).sum()

    with pytest.raises(UserError, match="torch.utils.checkpoint with use_reentrant=True.*pass use_reentrant=False"):
        HERE[capture](InParts(step, forward), model)(X)


LASTING: list[Tensor] = []


@only_dynamo
@pytest.mark.parametrize("kind", ["checkpoint", "nested"])
def test_a_list_that_outlives_the_step_is_refused_by_name(kind: str) -> None:
    """The tracer does not see it, see docs/extend/capture.md."""
    model = net()

    def region(x: Tensor) -> Tensor:
        LASTING.append(model.one(x))
        return model(x)

    with pytest.raises(UserError, match="the captured function changes LASTING"):
        CAPTURES["dynamo"](lambda x: KINDS[kind](region, x).sum(), model)(X)
