"""`torchtitan_graph.check_pass` passes a right pass, and shows what is wrong with another on a small graph."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.check.matrix import BF16, Cell
from torchtitan_graph.check.outcome import NUMBERS, compare, first_difference, same_bits
from torchtitan_graph.check.passes import Wanted, check_changed, check_graphs, check_numbers
from torchtitan_graph.check.runner import Check, Failed, report
from torchtitan_graph.check.shrink import shrink
from torchtitan_graph.check_pass import main
from torchtitan_graph.compiler import Pass
from torchtitan_graph.config.job import ExtraPass
from torchtitan_graph.formats.replay import read
from torchtitan_graph.parallel.layout import ParallelDims

ONE = Cell(num_steps=1, changes=(("num_layers", 1),))
FSDP2 = Cell(ParallelDims(dp_shard=2), BF16, num_steps=1, changes=(("num_layers", 1),))


@pytest.fixture
def want(tmp_path: Path) -> Callable[..., Wanted]:
    """Give what is checked of a pass of own_passes."""

    def make(name: str, exact: bool = True) -> Wanted:
        entry = ExtraPass(f"own_passes.{name}", after="bucket_collectives", exact=exact)
        return Wanted(entry, [("llama3", "debugmodel")], ["sdpa"], False, False, tmp_path)

    return make


def found(check: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(Failed) as failed:
        check(*arguments)
    return str(failed.value)


def small_graph(said: str) -> tuple[Path, list[str]]:
    """Give the file that a failure names, and the operators of its graph."""
    path = Path(re.search(r"a small graph on which it shows: (.*)", said)[1])  # type: ignore[index]
    nodes = read(path).graph.nodes
    return path, [str(node.target) for node in nodes if node.op == "call_function"]


def test_a_right_pass_passes_and_what_it_changes_is_told(want: Callable) -> None:
    changed: list[bool] = []
    told = check_graphs(FSDP2, want("double_silu"), changed)  # its graphs are sound
    assert re.fullmatch(r"nodes \d+ -> \d+(, peak .* MiB)?", told)
    assert check_graphs(FSDP2, want("keep"), changed) == ""
    assert changed == [True, False]
    assert check_numbers(ONE, want("keep")) == ""


def test_a_pass_that_changes_nothing_anywhere_fails() -> None:
    assert "it changes no graph" in found(check_changed, [False, False])
    check_changed([False, True])


@pytest.mark.slow
def test_other_numbers_are_shown_on_one_node(want: Callable) -> None:
    said = found(check_numbers, ONE, want("double_silu"))
    assert "other numbers: step 1: loss" in said
    path, operators = small_graph(said)
    assert operators == ["aten.silu.default"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stdout.startswith("own_passes.double_silu: other numbers")
    assert "# +    add_tensor = aten.add.Tensor(silu" in path.read_text()


@pytest.mark.slow
def test_what_rounds_is_wrong_only_where_the_pass_promises_bits(want: Callable) -> None:
    assert "other numbers" in found(check_numbers, ONE, want("round_silu"))
    assert re.match(r"off by at most \d.*e-0[67] of", check_numbers(ONE, want("round_silu", exact=False)))
    assert "other numbers" in found(check_numbers, ONE, want("double_silu", exact=False))


def test_an_error_in_the_pass_is_shown_on_a_small_graph(want: Callable) -> None:
    said = found(check_graphs, FSDP2, want("trip_over_silu"), [])
    assert "IndexError: there is a silu (" in said and "own_passes.py:" in said
    assert small_graph(said)[1] == ["aten.silu.default"]


def test_a_shape_that_a_pass_gets_wrong_is_found(want: Callable) -> None:
    said = found(check_graphs, ONE, want("forget_a_shape"), [])
    assert "not what its meta['val'] says: t" in said
    assert small_graph(said)[1] == ["aten.t.default"]


@pytest.mark.slow
def test_another_order_on_another_rank_is_shown_on_two_collectives(want: Callable) -> None:
    said = found(check_graphs, FSDP2, want("swap_gathers_on_odd_ranks"), [])
    assert "rank 1 sends in another order: number 1 on rank 0 is _c10d_functional.all_gather" in said
    _, operators = small_graph(said)
    assert operators.count("_c10d_functional.all_gather_into_tensor.default") == 2


def test_outputs_may_be_off_by_rounding_only_if_the_pass_says_so() -> None:
    gm, x = minimal_fx_tracer(lambda x: x * 2)(torch.ones(8)).gm, torch.rand(8) + 1
    exact, rounding = (Pass("own", lambda gm: gm, exact=is_exact) for is_exact in (True, False))
    rounded = x * (1 + 2**-22)
    assert compare(exact, gm, [x], [x]) is compare(rounding, gm, [x], [rounded]) is None
    for own, found in ((exact, rounded), (rounding, x * 1.1)):
        failure = compare(own, gm, [x], [found])
        assert failure is not None and failure.kind == NUMBERS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["own_passes.kep"], "error: name = 'own_passes.kep': own_passes has no kep"),
        (["own_passes.keep", "--after", "bucket_colectives"], "error: --after = 'bucket_colectives': legal are"),
        (["own_passes.keep", "--after", "bucket_colectives"], "did you mean bucket_collectives?"),
        (["own_passes.keep", "--families", "lama3"], "did you mean llama3?"),
        (["own_passes.keep", "--attn", "fast"], "--attn fast: legal are"),
    ],
)
def test_a_name_that_there_is_not(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_what_rests_on_a_check_that_failed_is_skipped_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("the graphs", partial(check_changed, [])), Check("the numbers", lambda: "", needs="the graphs")]
    assert report("mine", checks, argparse.Namespace(only=None, traceback=False, exitfirst=False)) == 1
    assert "for this did not pass: the graphs" in capsys.readouterr().out


# --- making small -----------------------------------------------------------------------------------------------------


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_two_nodes_that_fail_together_are_kept_with_what_is_between_them() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.exp().sin().neg().cos().abs()
        return [x.tanh(), y.sqrt(), y * 2]

    gm = minimal_fx_tracer(step)(torch.ones(2)).gm
    tried: list[int] = []

    def fails(part: GraphModule) -> bool:
        tried.append(len(part.graph.nodes))
        return {"aten.sin.default", "aten.cos.default"} <= set(targets(part))

    small = shrink(gm, fails)
    assert small is not None and targets(small) == ["aten.sin.default", "aten.neg.default", "aten.cos.default"]
    small.graph.lint()
    x = torch.randn(2)
    assert torch.equal(small(x)[0], x.sin().neg().cos())
    assert shrink(gm, lambda part: False) is None


def test_bits_and_orders_are_compared() -> None:
    zero, nan = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    assert same_bits(zero, zero) and not same_bits(zero, -zero) and same_bits(nan, nan) and not same_bits(zero, nan)
    assert first_difference({0: ["a", "b"], 1: ["a", "b"]}) == ""
    assert first_difference({2: ["a", "b"], 7: ["b", "a"]}) == "number 1 on rank 2 is a, on rank 7 b"
    assert first_difference({0: ["a"], 1: ["a", "b"]}) == "rank 0 sends 1 times, rank 1 2"
