"""rematerialize: backward computes again what a policy tagged; bitwise."""

import pytest
from torch.fx import GraphModule
from toy import aten, bitwise, blocks, calls, place, run_toy, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.tag_recomputation import tag_recomputation

FULL, BY_OP = Recompute(every=1), Recompute(by_op=True)


def tagged(recompute: Recompute, num_layers: int = 2) -> GraphModule:
    return tag_recomputation(cleanup(trace_toy(toy(num_layers))), blocks(num_layers), recompute)


@pytest.mark.parametrize("recompute", [FULL, BY_OP, Recompute(every=2)])
def test_the_numbers_stay_bit_for_bit(recompute: Recompute) -> None:
    gm = tagged(recompute)
    expected, before = run_toy(gm), len(gm.graph.nodes)
    gm = rematerialize(gm)
    gm.graph.lint()
    assert bitwise(run_toy(gm), expected)
    assert len(gm.graph.nodes) > before


def test_a_copy_of_the_wrong_node_would_be_seen() -> None:
    gm = tagged(FULL)
    expected = run_toy(gm)
    gm = rematerialize(gm)
    copy = next(n for n in calls(gm, aten.silu.default) if meta.phase(n) == "backward")
    copy.target = aten.sigmoid.default
    gm.recompile()
    assert not bitwise(run_toy(gm), expected)


def test_nothing_tagged_nothing_changed() -> None:
    gm = tagged(Recompute())
    before = text(gm)
    assert text(rematerialize(gm)) == before


@pytest.mark.parametrize("recompute", [FULL, BY_OP])
def test_backward_reads_no_tagged_node_of_forward(recompute: Recompute) -> None:
    gm = rematerialize(tagged(recompute))
    for node in gm.graph.nodes:
        if node.op == "call_function" and meta.phase(node) == "backward":
            assert not [n for n in node.all_input_nodes if meta.tag(n) == meta.RECOMPUTE], node.format_node()


@pytest.mark.parametrize("recompute", [FULL, BY_OP])
def test_what_is_saved_is_not_computed_again(recompute: Recompute) -> None:
    gm = tagged(recompute)
    saved = [n for n in gm.graph.nodes if meta.tag(n) == meta.SAVE]
    before = {n: (n.target, n.args) for n in gm.graph.nodes}
    gm = rematerialize(gm)
    made = [n for n in gm.graph.nodes if n not in before]
    assert saved and made
    assert not {(n.target, n.args) for n in made} & {before[n] for n in saved}
    assert all(meta.tag(n) is None and meta.phase(n) == "backward" for n in made)


def test_a_copy_is_made_once_and_only_where_backward_reaches_its_block() -> None:
    gm = tagged(FULL)
    before = set(gm.graph.nodes)
    gm = rematerialize(gm)
    order = place(gm)
    made = [n for n in gm.graph.nodes if n not in before]
    keys = [(n.target, n.args, tuple(n.kwargs.items())) for n in made]
    assert len(set(map(str, keys))) == len(keys)
    blocks = [int(meta.module(n).split(".")[1]) for n in made]
    assert blocks == sorted(blocks, reverse=True), "the last block first"
    first_use = {n: min(order[user] for user in n.users) for n in made}
    of_last = [n for n in made if meta.module(n).startswith("layers.1")]
    of_first = [n for n in made if meta.module(n).startswith("layers.0")]
    assert max(first_use[n] for n in of_last) < min(order[n] for n in of_first), "one block's values at a time"


def test_copies_carry_the_module_of_their_original() -> None:
    gm = rematerialize(tagged(FULL))
    copies = [n for n in calls(gm, aten.silu.default) if meta.phase(n) == "backward"]
    assert [meta.module(n) for n in copies] == ["layers.1", "layers.0"]
