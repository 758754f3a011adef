"""What nodes know of their origin: phase, module, annotations, stack trace; backward nodes those of their forward."""

import operator

import pytest
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.torch_private.flex import flex_attention_op

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.norm(x))
        return x + torch.tanh(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with fx_traceback.annotate({"layer": i}):
                x = layer(x)
        return x


def by_grad(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def by_backward(model: nn.Module, loss: Tensor) -> list:
    loss.backward()
    return [p.grad for p in model.parameters()]


def trace(differentiate=by_grad, stack_traces: bool = False) -> GraphModule:  # type: ignore[no-untyped-def]
    model = Net()

    def step(x: Tensor) -> list[Tensor]:
        loss = model(x).square().mean()
        return differentiate(model, loss)

    return minimal_fx_tracer(step, module=model, stack_traces=stack_traces)(torch.randn(3, 4)).gm


def calls(gm: GraphModule, target: object) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
def test_a_node_belongs_to_the_phase_that_made_it(differentiate: object) -> None:
    gm = trace(differentiate)
    phases = [meta.phase(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert set(phases) == {"forward", "backward"}
    assert {meta.phase(n) for n in calls(gm, aten.tanh.default)} == {"forward"}
    assert {meta.phase(n) for n in calls(gm, aten.tanh_backward.default)} == {"backward"}


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
def test_forward_and_backward_nodes_carry_the_innermost_module(differentiate: object) -> None:
    gm = trace(differentiate)
    assert [meta.module(n) for n in calls(gm, aten.tanh.default)] == ["layers.0", "layers.1"]
    assert [meta.module(n) for n in calls(gm, aten.tanh_backward.default)] == ["layers.1", "layers.0"]
    modules = {(meta.phase(n), meta.module(n)) for n in calls(gm, aten.mm.default)}
    assert modules == {(phase, f"layers.{i}.linear") for phase in ("forward", "backward") for i in (0, 1)}
    norms = {meta.module(n) for n in gm.graph.nodes if meta.phase(n) == "backward" and "norm" in meta.module(n)}
    assert norms == {"layers.0.norm", "layers.1.norm"}


def test_what_no_module_made_has_the_empty_name() -> None:
    gm = trace()
    (mean,) = calls(gm, aten.mean.default)
    assert meta.module(mean) == ""


def test_backward_nodes_carry_the_annotations_of_their_forward_node() -> None:
    gm = trace()
    for target in (aten.tanh_backward.default, aten.mm.default):
        for node in calls(gm, target):
            assert node.meta["custom"]["layer"] == int(meta.module(node).split(".")[1])
            assert "phase" not in node.meta["custom"]


class Fork(nn.Module):
    """Two modules read one value: the engine sums two gradients that no operator of theirs sums."""

    def __init__(self) -> None:
        super().__init__()
        self.sine, self.cosine = Sine(), Cosine()

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return self.sine(y) * self.cosine(y)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


def test_a_sum_of_gradients_belongs_where_the_second_comes_from() -> None:
    model = Fork()
    step = minimal_fx_tracer(lambda x: torch.autograd.grad(model(x).sum(), x), module=model)
    gm = step(torch.randn(3, requires_grad=True)).gm
    (total,) = calls(gm, aten.add.Tensor)
    assert meta.phase(total) == "backward"
    assert meta.module(total) == meta.module(total.args[1])  # type: ignore[arg-type]
    assert meta.module(total) in ("sine", "cosine")
    (last,) = total.users
    assert meta.module(last) == "", "what follows the sum is not a sum"


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sine, self.mask = Sine(), Mask()

    def forward(self, x: Tensor) -> Tensor:
        return self.sine(x) * self.mask(x)


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).float()


def test_an_operator_without_gradient_takes_no_backward_node_from_the_one_before_it() -> None:
    model = Mixed()
    step = minimal_fx_tracer(lambda x: torch.autograd.grad(model(x).sum(), x), module=model)
    gm = step(torch.randn(3, requires_grad=True)).gm
    (cosine,) = calls(gm, aten.cos.default)
    assert (meta.phase(cosine), meta.module(cosine)) == ("backward", "sine")


def test_stack_traces_lead_to_the_line_and_backward_nodes_have_their_forward_nodes() -> None:
    gm = trace(stack_traces=True)
    for target in (aten.tanh.default, aten.tanh_backward.default):
        for node in calls(gm, target):
            assert "return x + torch.tanh(h)" in node.meta["stack_trace"]
            assert "h = self.linear" not in node.meta["stack_trace"]
    for node in calls(gm, aten.mm.default):
        assert "h = self.linear(self.norm(x))" in node.meta["stack_trace"]


def test_without_stack_traces_there_are_none() -> None:
    gm = trace(stack_traces=False)
    assert not any(node.meta.get("stack_trace") for node in gm.graph.nodes)


# --- flex attention ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        with fx_traceback.annotate({"kernel": "flex"}):
            return flex_attention_op(q, k, v, mask, q.shape[-1] ** -0.5)[0]  # type: ignore[arg-type]


class TwoAttentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        return self.second(self.first(q, k, v, mask), k, v, mask)


def flex_step(q: Tensor, k: Tensor, v: Tensor, mask: object) -> tuple[Tensor, ...]:
    loss = MODEL(q, k, v, mask).square().sum()
    return loss, *torch.autograd.grad(loss, (q, k, v))


MODEL = TwoAttentions()
L = 256


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, L, 8, generator=generator).requires_grad_() for _ in range(3)]


def document_mask(boundary: int, causal: bool = True) -> object:
    documents = (torch.arange(L) >= boundary).long().expand(2, L).contiguous()

    def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents[b, q] == documents[b, kv]

    def backwards(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    return create_block_mask(
        and_masks(backwards, same_document) if causal else same_document, 2, None, L, L, device="cpu"
    )


@pytest.fixture(scope="module")
def flex() -> GraphModule:
    return minimal_fx_tracer(flex_step, module=MODEL, stack_traces=True)(*qkv(), document_mask(100)).gm


def flex_nodes(gm: GraphModule) -> list[Node]:
    flex = torch.ops.higher_order
    return [n for n in gm.graph.nodes if n.target in (flex.flex_attention, flex.flex_attention_backward)]


def test_flex_attention_and_its_subgraphs_carry_their_module(flex: GraphModule) -> None:
    nodes = flex_nodes(flex)
    assert [(meta.phase(n), meta.module(n)) for n in nodes] == [
        ("forward", "first"),
        ("forward", "second"),
        ("backward", "second"),
        ("backward", "first"),
    ]
    seen = 0
    for node in nodes:
        assert node.meta["custom"]["kernel"] == "flex"
        for name in (a.target for a in node.all_input_nodes if a.op == "get_attr"):
            inner_graph = getattr(flex, str(name))
            if not isinstance(inner_graph, GraphModule):
                continue
            for inner in inner_graph.graph.nodes:
                if inner.op == "call_function" and inner.target is not operator.getitem:
                    assert (meta.phase(inner), meta.module(inner)) == (meta.phase(node), meta.module(node))
                    assert inner.meta["custom"]["kernel"] == "flex"
                    assert "flex_attention_op(q, k, v, mask" in inner.meta["stack_trace"]
                    seen += 1
    assert seen


def test_the_documents_of_a_mask_are_inputs_of_the_graph(flex: GraphModule) -> None:
    names = [slot.name for slot in signature_of(flex).inputs if slot.name.startswith("mask")]
    assert "mask.kv_num_blocks" in names
    assert "mask.mask_mod_0" in names
    assert not [n for n in flex.graph.find_nodes(op="get_attr") if isinstance(getattr(flex, n.target), Tensor)]


def test_a_mask_of_other_documents_runs_through_the_same_graph() -> None:
    run = run_traced(minimal_fx_tracer(flex_step, module=MODEL)(*qkv(), document_mask(100)), module=MODEL)
    results = {}
    for boundary in (100, 37, 200):
        found, expected = run(*qkv(), document_mask(boundary)), flex_step(*qkv(), document_mask(boundary))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        results[boundary] = found[0].item()
    assert len(set(results.values())) == 3, "the documents matter"


def test_a_mask_of_another_rule_is_refused() -> None:
    run = run_traced(minimal_fx_tracer(flex_step, module=MODEL)(*qkv(), document_mask(100)), module=MODEL)
    with pytest.raises(UserError, match="structure"):
        run(*qkv(), document_mask(100, causal=False))


# --- repeated regions -------------------------------------------------------------------------------------------------


def test_repeated_regions_share_one_subgraph() -> None:
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    def body(x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(x) * 2,)

    def fn(x: Tensor) -> Tensor:
        for _ in range(3):
            (x,) = invoke_subgraph(body, "region", x)
        return x

    gm = minimal_fx_tracer(fn)(torch.zeros(2)).gm
    regions = calls(gm, torch.ops.higher_order.invoke_subgraph)
    assert len(regions) == 3
    assert len({node.args[0].target for node in regions}) == 1  # type: ignore[union-attr]
