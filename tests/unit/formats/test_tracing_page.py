"""The examples of docs/extend/tracing.md run, one after another, and give what the page says."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "extend" / "tracing.md"


def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The default backend takes a C++ compiler half a minute; what it makes of a graph is torch's own.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    results = []
    for block in blocks:
        exec(block, names)
        if "rematerialize(" in block:
            recomputed = [n for n in names["gm"].graph.nodes if n.target is torch.ops.aten.tanh.default]
            assert len(recomputed) == 4  # two blocks, twice each
        x = torch.ones(2, 4)
        results.append([names["run"](x), names["step"](x)])
        if "fast" in names:
            results.append([names["fast"](x), names["step"](x)])
    assert len(blocks) == 5 and "again" in names
    for (loss, gradients), (expected_loss, expected) in results:
        assert torch.equal(loss, expected_loss)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
