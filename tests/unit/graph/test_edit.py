"""New nodes get their values' shapes and dtypes, found once for all that are alike."""

import pytest
import torch

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, copy_graph, copy_node, value

aten = torch.ops.aten


def test_what_was_found_for_one_node_is_given_to_the_next_that_is_alike() -> None:
    gm = minimal_fx_tracer(lambda x, y: x + y)(torch.ones(4, 2), torch.ones(4, 2)).gm
    x, y = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        of_x, of_y = (call(gm.graph, x, aten.sum.dim_IntList, each, [0]) for each in (x, y))
    assert value(of_x) is value(of_y)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((aten.sum.dim_IntList, [0]), (aten.sum.dim_IntList, [1])),
        ((aten.mul.Scalar, 2), (aten.mul.Scalar, 2.0)),  # of integers: 2 == 2.0, and the results' dtypes differ
        ((aten.transpose.int, 0, 1), (aten.permute.default, [0, 1])),
    ],
)
def test_another_operator_or_constant_is_another_value(first: tuple, second: tuple) -> None:
    gm = minimal_fx_tracer(lambda x: x + 1)(torch.ones(4, 2, dtype=torch.int64)).gm
    (x,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        nodes = [call(gm.graph, x, target, x, *constants) for target, *constants in (first, second, first)]
    layouts = [(value(n).shape, value(n).stride(), value(n).dtype) for n in nodes]
    assert layouts[0] == layouts[2] != layouts[1]


def test_another_layout_of_an_input_is_another_value() -> None:
    gm = minimal_fx_tracer(lambda x: (x + 1, x.t() + 1))(torch.ones(3, 3)).gm
    straight, turned = (n for n in gm.graph.nodes if n.target is aten.add.Tensor)
    with gm.graph.inserting_before(gm.graph.output_node()):
        strides = [value(call(gm.graph, n, aten.neg.default, n)).stride() for n in (straight, turned)]
    assert strides == [(3, 1), (1, 3)]


def test_another_dtype_of_an_input_is_another_value() -> None:
    gm = minimal_fx_tracer(lambda x: (x + 1, x.double()))(torch.ones(3)).gm
    with gm.graph.inserting_before(gm.graph.output_node()):
        results = [call(gm.graph, n, aten.neg.default, n) for n in gm.graph.output_node().all_input_nodes]
    assert [value(n).dtype for n in results] == [torch.float32, torch.float64]


def test_a_new_node_has_the_phase_and_the_module_of_its_source() -> None:
    gm = minimal_fx_tracer(lambda x: x + 1)(torch.ones(2)).gm
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    for phase in ("forward", "backward"):
        meta.write(node, phase=phase, module="layers.0")
        with gm.graph.inserting_after(node):
            new = call(gm.graph, node, aten.neg.default, node)
        assert (meta.phase(new), meta.module(new)) == (phase, "layers.0")


def test_a_copy_has_annotations_of_its_own() -> None:
    """A user's pass writes on one of them, and FX's own copies would show it too."""
    gm = minimal_fx_tracer(lambda x: x + 1)(torch.ones(2)).gm
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    node.meta["custom"] = {"phase": "forward"}
    (whole,) = copy_graph(gm).graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with gm.graph.inserting_after(node):
        copies = [copy_node(gm.graph, node, lambda n: n), call(gm.graph, node, aten.neg.default, node), whole]
    for each in copies:
        each.meta["custom"]["mine"] = 1
    assert node.meta["custom"] == {"phase": "forward"}
