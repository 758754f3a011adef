"""The code in docs/03_graph.md runs, and its table of passes is the compiler's list."""

import re
from pathlib import Path

import pytest
import torch

from torchtitan_graph import compiler
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.trace import minimal_fx_tracer

PAGE = (Path(__file__).parents[3] / "docs" / "03_graph.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_block_traces_and_runs() -> None:
    names: dict = {}
    exec(BLOCKS[0], names)
    assert names["loss"].shape == ()
    assert [g.shape for g in names["gradients"]] == [(8, 4)]


def test_the_second_block_takes_other_sizes() -> None:
    names: dict = {}
    exec(BLOCKS[0] + BLOCKS[1], names)
    with pytest.raises(UserError, match=r"x.shape\[0\] is 65: the trace holds for 2 to 64"):
        names["run"](torch.zeros(65, 4))


def test_the_third_block_tells_where_nodes_were_made(capsys: pytest.CaptureFixture[str]) -> None:
    first = BLOCKS[0].replace("minimal_fx_tracer(step,", "minimal_fx_tracer(step, call_hierarchy=True,")
    assert first != BLOCKS[0]
    exec(first + BLOCKS[2], {})
    assert " backward " in capsys.readouterr().out


def test_the_pass_does_what_it_says() -> None:
    names: dict = {}
    exec(BLOCKS[3], names)
    gm = minimal_fx_tracer(lambda x: (x * 1).sin())(torch.ones(2)).gm
    expected = gm(torch.ones(2))
    gm = names["drop_unit_products"](gm)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert torch.equal(gm(torch.ones(2))[0], expected[0])


def test_the_table_of_passes_is_the_list_in_its_order() -> None:
    names = [each.name for each in compiler.passes(compiler.PassPlan({}, (), ()))]
    assert re.findall(r"^\| `(\w+_?\w*)` \| `?[^|]*\| [^|]* \|$", PAGE.split("## Passes")[1], re.MULTILINE) == names
