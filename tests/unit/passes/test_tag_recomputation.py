"""tag_recomputation: it writes tags and nothing else."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from toy import GATHER, WAIT, aten, bitwise, blocks, calls, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_budget import tag_budget
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.steps.choices import plan_saved

FULL, EVERY_SECOND, BY_OP, NONE = Recompute(every=1), Recompute(every=2), Recompute(by_op=True), Recompute()


def tagged(recompute: Recompute, num_layers: int = 2) -> GraphModule:
    return tag_recomputation(cleanup(trace_toy(toy(num_layers))), blocks(num_layers), recompute)


def tags(gm: GraphModule, block: int) -> set[str | None]:
    prefix = f"layers.{block}"
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and meta.phase(n) == "forward"]
    return {meta.tag(n) for n in nodes if (meta.module(n) + ".").startswith(prefix + ".")}


def test_the_graph_itself_stays_as_it_is() -> None:
    gm = cleanup(trace_toy(toy()))
    before = text(gm)
    assert text(tag_recomputation(gm, blocks(), FULL)) == before


def test_none_recomputes_nothing() -> None:
    assert meta.RECOMPUTE not in {meta.tag(node) for node in tagged(NONE).graph.nodes}


def test_full_recomputes_each_block_but_its_result() -> None:
    gm = tagged(FULL)
    assert tags(gm, 0) == tags(gm, 1) == {meta.RECOMPUTE, meta.SAVE}
    saved = [n for n in gm.graph.nodes if meta.tag(n) == meta.SAVE]
    assert [meta.module(n) for n in saved] == ["layers.0", "layers.1"]
    assert {n.target for n in saved} == {aten.add.Tensor}


def test_every_second_block_is_recomputed_whole() -> None:
    gm = tagged(EVERY_SECOND, num_layers=4)
    assert [meta.RECOMPUTE in tags(gm, block) for block in range(4)] == [False, True, False, True]


def test_by_operator_every_second_product_is_kept() -> None:
    gm = tagged(BY_OP)
    products = [n for n in calls(gm, aten.mm.default) if meta.phase(n) == "forward" and "layers" in meta.module(n)]
    assert [meta.tag(n) for n in products] == 2 * [meta.SAVE, meta.RECOMPUTE]
    assert {meta.tag(n) for n in calls(gm, aten.silu.default)} == {meta.RECOMPUTE}


@pytest.mark.parametrize("recompute", [FULL, BY_OP])
def test_nothing_outside_the_blocks_and_nothing_of_backward_is_tagged(recompute: Recompute) -> None:
    gm = tagged(recompute)
    for node in gm.graph.nodes:
        if meta.phase(node) == "backward" or not meta.module(node).startswith("layers."):
            assert meta.tag(node) is None


def test_gathered_weights_are_no_activations(layout_of: Callable) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    tag_recomputation(gm, blocks(), FULL)
    gathers = [n for n in calls(gm, GATHER, WAIT) if meta.role(n) == meta.GATHER]
    views = [n for n in calls(gm, aten.t.default) if meta.phase(n) == "forward"]
    assert gathers and views
    assert {meta.tag(n) for n in (*gathers, *views)} == {None}


# --- modules by name --------------------------------------------------------------------------------------------------

MODES = {"none": NONE, "full": FULL, "op": BY_OP, "budget": Recompute(budget=Budget(0.0))}


def named(mode: Recompute, save: str = "", recompute: str = "", num_layers: int = 2) -> Recompute:
    saved, again = plan_saved(save.split(), recompute.split(), toy(num_layers), blocks(num_layers))
    return dataclasses.replace(mode, saved=saved, again=again)


def tag_by_module(gm: GraphModule) -> dict[str, set[str | None]]:
    """Give the tags of each module of the blocks, but for what leaves its block."""
    found: dict[str, set[str | None]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and meta.phase(node) == "forward" and meta.module(node).count(".") > 1:
            found.setdefault(meta.module(node).removeprefix("layers."), set()).add(meta.tag(node))
    return found


def test_all_modules_named_are_mode_full_and_none_of_it_saves_them() -> None:
    assert [meta.tag(n) for n in tagged(named(NONE, recompute="layers.*")).graph.nodes] == [
        meta.tag(n) for n in tagged(FULL).graph.nodes
    ]
    assert meta.RECOMPUTE not in {meta.tag(n) for n in tagged(named(FULL, save="layers.*")).graph.nodes}


def test_the_innermost_module_named_decides() -> None:
    found = tag_by_module(tagged(named(NONE, save="layers.*.up layers.1", recompute="layers.*")))
    assert found["0.norm"] == found["0.down"] == {meta.RECOMPUTE}
    assert found["0.up"] == found["1.norm"] == found["1.up"] == {meta.SAVE}


def test_by_operator_the_products_of_other_modules_keep_their_turn() -> None:
    found, without = tag_by_module(tagged(named(BY_OP, recompute="layers.*.up"))), tag_by_module(tagged(BY_OP))
    assert found["0.up"] == {meta.RECOMPUTE} != without["0.up"]
    assert found["0.down"] == without["0.down"]


def holds_and_gives(recompute: Recompute) -> tuple[int, list]:
    """Give the peak of a step with six layers, and its results."""
    names = blocks(6)
    gm = tag_recomputation(cleanup(trace_toy(toy(6), rows=64)), names, recompute)
    gm = rematerialize(tag_elementwise(tag_budget(gm, names, recompute.budget, ()), names))
    return peak_memory(gm).num_bytes, run_toy(gm, 64)


@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("none", "full"))) for name in MODES]
)
def test_what_is_named_changes_what_is_held_and_no_bit(mode: str) -> None:
    peak, expected = holds_and_gives(MODES[mode])
    saving, found = holds_and_gives(named(MODES[mode], save="layers.*", num_layers=6))
    assert bitwise(found, expected)
    assert saving > peak or mode == "none"  # there the toy keeps all: operators are not worth starting again
    again, found = holds_and_gives(named(MODES[mode], recompute="layers.*.up layers.*.norm", num_layers=6))
    assert bitwise(found, expected)
    assert again < peak if mode in ("none", "op") else again <= saving


@pytest.mark.parametrize(
    ("save", "recompute", "message"),
    [
        ("layer.*.up", "", "activation_checkpoint.save = 'layer.*.up': matches no module of a block; legal are names"),
        ("layers.*.dwon", "", "* for any one part; did you mean layers.*.down?"),
        ("", "layers.0.upp", "activation_checkpoint.recompute = 'layers.0.upp': matches no module of a block"),
        ("", "output", "activation_checkpoint.recompute = 'output': matches no module of a block"),
        ("layers.*", "layers.1", "activation_checkpoint.recompute = 'layers.1': activation_checkpoint.save names"),
    ],
)
def test_what_would_change_nothing_is_refused(save: str, recompute: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        named(NONE, save, recompute)


def test_a_collective_that_is_kept_is_not_waited_for_again() -> None:
    gm = cleanup(trace_toy(toy()))
    made = next(n for n in calls(gm, aten.silu.default) if meta.module(n).startswith("layers.0"))
    with gm.graph.inserting_after(made):
        reduced = call(gm.graph, made, torch.ops._c10d_functional.reduce_scatter_tensor.default, made, "sum", 1, "0")
    with gm.graph.inserting_after(reduced):
        arrived = call(gm.graph, made, WAIT, reduced)
    made.replace_all_uses_with(arrived, delete_user_cb=lambda user: user is not reduced)
    gm = tag_recomputation(gm, blocks(), BY_OP)
    assert (meta.tag(made), meta.tag(reduced), meta.tag(arrived)) == (meta.RECOMPUTE, meta.SAVE, meta.SAVE)
    assert calls(rematerialize(gm), WAIT) == [arrived]
