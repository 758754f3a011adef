"""`python -m torchtitan_graph.check` passes a right family of a user's own, and finds what is wrong with another."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import REPOSITORY

from torchtitan_graph.check import __main__ as command
from torchtitan_graph.check.family import Failed, check_layout, check_visibility, checks
from torchtitan_graph.check.matrix import FP64, Cell, build_plain, global_rows
from torchtitan_graph.check.runner import Check
from torchtitan_graph.parallel.layout import ParallelDims

SOFT_CAP = "own_model.soft_cap"
DOCS = REPOSITORY / "docs" / "extend"


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))


@pytest.fixture
def write_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give a function that writes a family that is `my_models.tiny` but for `code`, and returns its name."""

    def write(name: str, code: str) -> str:
        (tmp_path / f"mine_{name}").mkdir()  # a package each: what was imported stays so
        (tmp_path / f"mine_{name}" / "family.py").write_text(f"from my_models.tiny import *\n{code}")
        return f"mine_{name}.family"

    monkeypatch.syspath_prepend(tmp_path)
    return write


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Give the exit code and what is printed."""
    return command.main(arguments), capsys.readouterr().out


def test_what_needs_one_process_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_one_rank(*arguments: Any) -> Iterator[Check]:
        return (check for check in checks(*arguments) if not re.search(r"(FSDP|TP|CP|EP|PP) 2", check.title))

    monkeypatch.setattr(command, "checks", on_one_rank)
    code, output = outcome(capsys, "my_models.tiny")
    assert code == 0, output
    assert re.search(r"my_models.tiny debugmodel: \d passed, 0 failed, 0 skipped\n$", output), output


@pytest.mark.slow
def test_a_right_family_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = outcome(capsys, "my_models.tiny")
    assert code == 0, output
    assert output.count("expert_parallel_degree = 2: this model has no experts; leave it at 1") == 1
    assert output.endswith("my_models.tiny debugmodel: 22 passed, 0 failed, 3 skipped\n")


# --- what is wrong is found -------------------------------------------------------------------------------------------


def test_a_parameter_that_hugging_face_has_no_name_for(write_family, capsys: pytest.CaptureFixture[str]) -> None:
    name = write_family("keys", "HF_KEYS = {k: v for k, v in HF_KEYS.items() if 'wk' not in k}")
    code, output = outcome(capsys, name, "-x")
    assert code == 1
    assert "HF_KEYS of mine_keys.family has no entry for layers.0.attention.wk.weight" in output


def test_a_parameter_without_a_role(write_family, capsys: pytest.CaptureFixture[str]) -> None:
    name = write_family("role", "PLAN = {k: v for k, v in PLAN.items() if 'w3' not in k}")
    code, output = outcome(capsys, name, "-x")
    assert code == 1
    assert "the plan gives no role to layers.0.feed_forward.w3.weight" in output


@pytest.mark.slow
def test_a_layer_that_every_rank_adds_in_full(write_family) -> None:
    """Graph and eager agree on it; one rank and two do not."""
    name = write_family("sum", "PLAN = PLAN | {k: {'tp': 'replicate'} for k in PLAN if 'feed_forward.w' in k}")
    with pytest.raises(Failed, match="look at PLAN's roles.* First to differ: step 1: loss"):
        check_layout(Cell(ParallelDims(tp=2), FP64, family=name))


COUNTS_CALLS = """
import torch
from my_models.tiny import Model as Tiny

class Model(Tiny):
    def __init__(self, config, attn="sdpa"):
        super().__init__(config, attn)
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, *args, **kwargs):
        self.num_calls += 1
        return super().forward(*args, **kwargs)
"""


def test_a_buffer_that_forward_writes_to(write_family, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = outcome(capsys, write_family("buffer", COUNTS_CALLS), "-x")
    assert code == 1
    assert "\n      the traced function writes in place to num_calls" in output


def test_an_error_in_forward_is_told_in_two_lines(write_family, capsys: pytest.CaptureFixture[str]) -> None:
    name = write_family("error", "class Model(Model):\n    rope = None")
    code, output = outcome(capsys, name, "-x")
    assert code == 1
    assert "\n      TypeError: 'NoneType' object is not callable\n      in forward, " in output
    assert "decoder.py" in output


SEES_OTHER_DOCUMENTS = """
from my_models.tiny import Model as Tiny
from torchtitan_graph.models.layers.masks import causal

class Model(Tiny):
    def mask_rules(self, documents_BL, positions_BL):
        return {"causal": causal}
"""


def test_a_mask_that_lets_documents_see_each_other(write_family) -> None:
    with pytest.raises(Failed, match="earlier or in another document"):
        check_visibility(Cell(family=write_family("mask", SEES_OTHER_DOCUMENTS)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["my_models.nothing"], "there is no module 'my_models.nothing' to import; is it on PYTHONPATH?"),
        (["lama3"], "did you mean llama3?"),
        (["my_models.tiny", "--flavor", "debugmodl"], "did you mean debugmodel?"),
    ],
    ids=["module", "family", "flavour"],
)
def test_a_name_that_there_is_not(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = outcome(capsys, *arguments)
    assert code == 1
    assert said in output
    assert output.count("FAIL") == 1 and "Traceback" not in output


# --- what the page shows --------------------------------------------------------------------------------------------

OF_THE_PAGE = """
import torch.nn.functional as F
from torch import nn
from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.init import RESIDUAL

{}

PLAN = decoder_plan(attention=Attention.PLAN, feed_forward=Gelu.PLAN)

class Model(Decoder):
    rope = llama3.Model.rope

    def __init__(self, c, attn="sdpa"):
        attention = Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        super().__init__(c, attn, [Block(c.dim, c.norm_eps, attention, Gelu(c.dim, c.ffn_dim))])
"""


@pytest.mark.slow
def test_the_pages_own_layer_is_the_same_on_two_ranks(write_family) -> None:
    (layer,) = re.findall(r"```python\n(class Gelu.*?)```", (DOCS / "family.md").read_text(), re.DOTALL)
    check_layout(Cell(ParallelDims(tp=2), FP64, family=write_family("gelu", OF_THE_PAGE.format(layer))))


def test_the_page_shows_the_variant_as_it_is() -> None:
    example = REPOSITORY / "examples" / "own_model" / "soft_cap.py"
    assert f"```python\n{example.read_text()}```" in (DOCS / "attention.md").read_text()


def test_the_variants_cap_and_window_change_its_logits() -> None:
    batch = global_rows(509, step=1)
    logits = []
    for changes in ((), (("cap", 0.1),), (("window", 3),)):
        model = build_plain(Cell(family=SOFT_CAP, attn="flex", changes=changes)).model
        with torch.no_grad():
            logits.append(model(batch.tokens_BL))
    assert not torch.allclose(logits[1], logits[0], rtol=1e-3)
    assert not torch.allclose(logits[2], logits[0], rtol=1e-3)
