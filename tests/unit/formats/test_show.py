"""A graph as text: for people, and for `diff`."""

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.capture.step import SideOutputs, trace_train_step
from torchtitan_graph.capture.trace import make_fx_capture, minimal_fx_tracer
from torchtitan_graph.formats.show import dump, readable, without_bytes
from torchtitan_graph.graph import meta
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
        return self.output(self.table(tokens_BL).tanh()), SideOutputs({}, {})


@pytest.fixture
def gm() -> Iterator[torch.fx.GraphModule]:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    batch = Batch(tokens, tokens, tokens)
    yield trace_train_step(Tiny(), cross_entropy, batch, None, torch.tensor(4.0), device="cpu").gm


def test_inputs_and_outputs_are_shown_with_names_and_kinds(gm: torch.fx.GraphModule) -> None:
    lines = readable(gm).splitlines()
    begin, body, result = lines.index("def graph("), lines.index("):"), lines.index("    return {")
    assert [line.partition(": ")[2] for line in lines[begin + 1 : body]] == [
        "'param float32[5, 3] table.weight',",
        "'param float32[5, 3] output.weight',",
        "'param float32[5] output.bias',",
        "'input int64[1, 4] batch.tokens_BL',",
        "'input int64[1, 4] batch.labels_BL',",
        "'input int64[1, 4] batch.positions_BL',",
        "'input float32[] num_tokens',",
    ]
    assert [line.split('"')[1] for line in lines[result + 1 : lines.index("    }")]] == [
        "loss loss",
        "grad table.weight",
        "grad output.weight",
        "grad output.bias",
    ]


def calls(text: str) -> dict[str, str]:
    """Give the lines of nodes by their names, without the bytes that are held."""
    lines = (line.strip() for line in text.splitlines() if line.endswith(" MiB"))
    return {line.split(" = ")[0]: line.rpartition(" | ")[0] for line in lines}


def test_a_line_says_shape_phase_and_module_and_the_words_of_passes(gm: torch.fx.GraphModule) -> None:
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    (embedding,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    meta.write(embedding, tag=meta.SAVE, role=meta.GATHER)
    lines = calls(readable(gm))
    assert lines[tanh.name] == f"{tanh.name} = aten.tanh.default({embedding})  # float32[1, 4, 3] forward"
    assert lines[embedding.name].endswith("# float32[1, 4, 3] forward table tag='save' role='gather'")


def test_a_line_ends_with_what_is_held_beside_the_inputs() -> None:
    def step(x: Tensor) -> Tensor:
        return x.sin().cos()[:1].clone()

    text = readable(minimal_fx_tracer(step)(torch.ones(2**18)).gm)
    held = {line.split()[0]: line.rpartition(" | ")[2] for line in text.splitlines() if line.endswith(" MiB")}
    assert [held[name] for name in ("sin", "cos", "slice_1", "clone")] == [
        "1.000 MiB",
        "2.000 MiB",
        "1.000 MiB",
        "1.000 MiB",
    ]
    assert "2.000 MiB at its peak without the inputs." in text


def test_with_stack_traces_each_line_ends_with_the_line_of_source_outside_torch() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    texts = []
    for stack_traces in (False, True):
        step = (Tiny(), cross_entropy, Batch(tokens, tokens, tokens), None, torch.tensor(4.0))
        texts.append(
            readable(
                trace_train_step(*step, device="cpu", capture=partial(make_fx_capture, stack_traces=stack_traces)).gm
            )
        )
    number = inspect.getsourcelines(Tiny.forward)[1] + 1
    for short, long in zip(*(calls(text).values() for text in texts), strict=True):
        assert long.startswith(short)
        if any(op in short for op in ("aten.embedding.", "aten.tanh.", "aten.tanh_backward.", "aten.addmm.")):
            assert long == f"{short} at formats/test_show.py:{number}"


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00_traced.py", "01_changed.py"]
    before, after = (without_bytes(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert [a != b for a, b in zip(before, after, strict=True)].count(True) == 1


def test_a_compiled_region_is_shown_without_an_address(gm: torch.fx.GraphModule) -> None:
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)

    def compiled(x: Tensor) -> Tensor:
        return x.tanh()

    tanh.target = compiled
    meta.write(tanh, region="layers.0 forward")
    shown = f"tanh = python.compiled({tanh.args[0]})  # float32[1, 4, 3] forward region='layers.0 forward'"
    assert calls(readable(gm))["tanh"] == shown
