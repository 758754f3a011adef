"""A dumped graph runs from its file, and is read back as it was."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.check.matrix import BF16, Cell, build_model
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.replay import random_inputs, read
from torchtitan_graph.formats.show import line_of, readable
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import Plain, signature_of
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group


def final(ep: int) -> GraphModule:
    """Give the step of a family with experts on two ranks, after all passes."""
    cell = Cell(ParallelDims(dp_shard=2, ep=ep), BF16, family="deepseek_v3")
    graphs = build_graphs(
        Assembly(build_model(cell), load_family(cell.family), cell.dims.layout("cpu"), cell.options("graph"))
    )
    return graphs.train.gm


@pytest.fixture
def two_ranks() -> Iterator[None]:
    init_fake_process_group(2)
    yield
    dist.destroy_process_group()


def test_what_is_read_is_what_was_written(two_ranks: None, tmp_path: Path) -> None:
    path, gm = tmp_path / "final.py", final(ep=2)
    path.write_text(readable(gm))
    again = read(path)
    kept = ("call_function", "placeholder")
    found, expected = ([line_of(n) for n in each.graph.nodes if n.op in kept] for each in (again, gm))
    assert found == expected
    names = [[(s.kind, s.name) for s in (*signature_of(x).inputs, *signature_of(x).outputs)] for x in (again, gm)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_file_runs_alone(two_ranks: None, tmp_path: Path) -> None:
    path, gm = tmp_path / "final.py", final(ep=1)
    path.write_text(readable(gm))
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    names = [f"{slot.kind} {slot.name}" for slot in signature_of(gm).outputs]
    assert [line.partition(": ")[0] for line in ended.stdout.splitlines()] == names


def test_a_read_graph_gives_the_numbers_of_the_one_that_was_written(tmp_path: Path) -> None:
    limits = torch.tensor([0.5, -1.0])
    gm = minimal_fx_tracer(lambda x: ((x * 2).split(2, 1)[0].sin() * limits).clamp(max=float("inf")))(
        torch.ones(3, 4)
    ).gm
    (path := tmp_path / "one.py").write_text(readable(gm))
    x = torch.randn(3, 4)
    assert torch.equal(read(path)(x)[0], gm(x)[0])
    (sin,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.target = torch.ops.aten.cos.default
    path.write_text(readable(gm))
    assert not torch.equal(read(path)(x)[0], (x * 2)[:, :2].sin() * limits)


def test_words_are_read(tmp_path: Path) -> None:
    gm = minimal_fx_tracer(lambda x: x.sin())(torch.ones(2)).gm
    (sin,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    words = {
        "phase": "backward",
        "module": "layers.0.w",
        "tag": "save",
        "role": "gather",
        "region": "a b",
        "param": "w",
    }
    meta.write(sin, **words)
    (path := tmp_path / "one.py").write_text(readable(gm))
    (again,) = read(path).graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert {key: again.meta[key] for key in words} == words


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="is no graph that debug.dump_graphs wrote"):
        read(path)


def test_random_inputs_differ_between_ranks_and_names_but_not_between_calls() -> None:
    layouts = {name: Plain((3,), torch.float32) for name in "ab"} | {"i": Plain((9,), torch.int64)}
    first, again, other = random_inputs(layouts), random_inputs(layouts), random_inputs(layouts, rank=1)
    assert all(torch.equal(first[name], again[name]) for name in layouts)
    assert not torch.equal(first["a"], first["b"]) and not torch.equal(first["a"], other["a"])
    assert torch.equal(first["i"], other["i"])
