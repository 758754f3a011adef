"""A graph as text: for people, and for `diff`."""

import inspect
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.show import dump, readable
from torchtitan_graph.graph.step import SideOutputs, trace_train_step
from torchtitan_graph.graph.trace import make_fx_capture
from torchtitan_graph.loss import cross_entropy


class Batch(NamedTuple):
    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: None, *, side_outputs: bool) -> Any:
        return self.output(self.table(tokens_BL).tanh()), SideOutputs([], {})


@pytest.fixture
def gm() -> Iterator[torch.fx.GraphModule]:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    batch = Batch(tokens, tokens, tokens)
    yield trace_train_step(Tiny(), cross_entropy, batch, None, torch.tensor(4.0), device="cpu").gm


def test_the_signature_stands_first_with_names_and_kinds(gm: torch.fx.GraphModule) -> None:
    assert [" ".join(line.split()) for line in readable(gm).splitlines() if line.startswith("# ")] == [
        "# input param table.weight",
        "# input param output.weight",
        "# input param output.bias",
        "# input input batch.tokens_BL",
        "# input input batch.labels_BL",
        "# input input batch.positions_BL",
        "# input input num_tokens",
        "# output loss loss",
        "# output grad table.weight",
        "# output grad output.weight",
        "# output grad output.bias",
    ]


def test_a_line_says_shape_phase_and_module_and_the_words_of_passes(gm: torch.fx.GraphModule) -> None:
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    (embedding,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    meta.write(embedding, tag=meta.SAVE, role=meta.GATHER)
    lines = {line.split(" = ")[0]: line for line in readable(gm).splitlines()}
    assert lines[tanh.name] == f"{tanh.name} = aten.tanh.default({embedding})  # float32[1, 4, 3] forward"
    assert lines[embedding.name].endswith("# float32[1, 4, 3] forward table save gather")


def test_with_stack_traces_each_line_ends_with_the_line_of_source_outside_torch() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    texts = []
    for stack_traces in (False, True):
        step = (Tiny(), cross_entropy, Batch(tokens, tokens, tokens), None, torch.tensor(4.0))
        texts.append(
            readable(
                trace_train_step(*step, device="cpu", capture=partial(make_fx_capture, stack_traces=stack_traces)).gm
            ).splitlines()
        )
    number = inspect.getsourcelines(Tiny.forward)[1] + 1
    for short, long in zip(*texts, strict=True):
        assert long.startswith(short)
        if any(op in short for op in ("aten.embedding.", "aten.tanh.", "aten.tanh_backward.", "aten.addmm.")):
            assert long == f"{short} graph/test_show.py:{number}"


def test_the_same_step_gives_the_same_text() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    batch = Batch(tokens, tokens, tokens)
    texts = {
        readable(trace_train_step(Tiny(), cross_entropy, batch, None, torch.tensor(4.0), device="cpu").gm)
        for _ in range(2)
    }
    assert len(texts) == 1


def test_a_change_is_one_line_of_a_diff(gm: torch.fx.GraphModule, tmp_path: Path) -> None:
    dump(gm, tmp_path, 0, "traced")
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    tanh.target = torch.ops.aten.sin.default
    dump(gm, tmp_path, 1, "changed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00_traced.txt", "01_changed.txt"]
    found = subprocess.run(["diff", *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True).stdout
    assert [line[:2] for line in found.splitlines() if line[0] in "<>"] == ["< ", "> "]


def test_a_compiled_region_is_shown_without_an_address(gm: torch.fx.GraphModule) -> None:
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)

    def compiled(x: Tensor) -> Tensor:
        return x.tanh()

    tanh.target = compiled
    meta.write(tanh, region="layers.0 forward")
    assert f"tanh = compiled({tanh.args[0]})  # float32[1, 4, 3] forward layers.0 forward\n" in readable(gm)
