"""mixed_precision: parameters rest in one dtype and are computed in another; casts stand on the cheap side."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule
from toy import GATHER, REDUCE_SCATTER, aten, calls, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import input_nodes, output_nodes
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.mixed_precision import mixed_precision
from torchtitan_graph.passes.shard_params import shard_params

BF16, FP32 = torch.bfloat16, torch.float32
NAME = "layers.1.up.weight"


def lowered(layout_of: Callable, precision: Precision, **degrees: int) -> GraphModule:
    model = toy()
    gm = cleanup(trace_toy(model, precision.compute))
    storages = plan_storage(model, layout_of(**degrees), precision)
    gm = mixed_precision(shard_params(gm, storages), storages)
    gm.graph.lint()
    return gm


def test_a_parameter_is_cast_before_it_is_gathered(layout_of: Callable) -> None:
    gm = lowered(layout_of, Precision(FP32, BF16, FP32), dp_shard=2)
    placeholder = input_nodes(gm, "param")[NAME]
    (cast,) = placeholder.users
    (start,) = cast.users
    assert placeholder.meta["val"].dtype == FP32
    assert (cast.target, cast.meta["val"].dtype, cast.meta["val"].shape) == (
        aten._to_copy.default,
        BF16,
        placeholder.meta["val"].shape,
    )
    assert (start.target, start.meta["val"].dtype) == (GATHER, BF16)
    assert (meta.role(cast), meta.param(cast)) == (meta.GATHER, NAME)


def test_a_gradient_is_cast_before_it_is_reduced(layout_of: Callable) -> None:
    gm = lowered(layout_of, Precision(FP32, BF16, FP32), dp_shard=2)
    wait = output_nodes(gm, "grad")[NAME]
    start = wait.args[0]
    pad = start.args[0]  # type: ignore[union-attr]
    cast = pad.args[0]  # type: ignore[union-attr]
    assert start.target is REDUCE_SCATTER  # type: ignore[union-attr]
    assert [n.meta["val"].dtype for n in (wait, start, pad, cast, cast.args[0])] == [FP32, FP32, FP32, FP32, BF16]  # type: ignore[union-attr]
    assert meta.role(cast) == meta.REDUCE  # type: ignore[arg-type]


def test_a_gradient_may_be_reduced_in_the_dtype_it_is_computed_in(layout_of: Callable) -> None:
    gm = lowered(layout_of, Precision(FP32, BF16, BF16), dp_shard=2)
    cast = output_nodes(gm, "grad")[NAME]
    assert (cast.target, cast.meta["val"].dtype, cast.args[0].meta["val"].dtype) == (aten._to_copy.default, FP32, BF16)  # type: ignore[union-attr]
    assert all(node.meta["val"].dtype == BF16 for node in calls(gm, REDUCE_SCATTER))


def test_one_rank_has_the_casts_alone(layout_of: Callable) -> None:
    gm = lowered(layout_of, Precision(FP32, BF16, FP32), dp_shard=1)
    (cast,) = input_nodes(gm, "param")[NAME].users
    assert (cast.target, cast.meta["val"].dtype) == (aten._to_copy.default, BF16)
    assert all(node.meta["val"].dtype == FP32 for node in output_nodes(gm, "grad").values())


def test_one_precision_changes_nothing(layout_of: Callable) -> None:
    model = toy()
    storages = plan_storage(model, layout_of(dp_shard=2), Precision())
    gm = shard_params(cleanup(trace_toy(model)), storages)
    before = text(gm)
    assert text(mixed_precision(gm, storages)) == before


def test_no_arithmetic_between_the_casts_changes(layout_of: Callable) -> None:
    model = toy()
    storages = plan_storage(model, layout_of(dp_shard=2), Precision(FP32, BF16, FP32))
    gm = shard_params(cleanup(trace_toy(model, BF16)), storages)
    before = [n.target for n in gm.graph.nodes if meta.role(n) is None]
    assert [n.target for n in mixed_precision(gm, storages).graph.nodes if meta.role(n) is None] == before
