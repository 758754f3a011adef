"""Losses and terms that depend on how rows are cut are refused, with what to change; others pass."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.steps.cuts import check_own_loss, check_terms


def targets(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return cross entropy by target, 0 elsewhere."""
    return F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none")


def check(function: Any, cp: int = 1) -> None:
    check_own_loss("my.loss", function, vocab_size=11, seq_len=32, cp=cp)


def test_a_sum_passes_also_in_fp32_and_in_parts_of_rows() -> None:
    check(lambda logits, labels, batch: targets(logits.float(), labels).sum(), cp=2)


def test_metrics_are_sums_too() -> None:
    check(lambda logits, labels, batch: (targets(logits, labels).sum(), {"n": (labels >= 0).sum().double()}))
    with pytest.raises(UserError, match=r"my.loss.*the metric n depends on .*mean over tokens or rows: return the sum"):
        check(lambda logits, labels, batch: (targets(logits, labels).sum(), {"n": (labels >= 0).double().mean()}))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, y, b: F.cross_entropy(x.flatten(0, 1), y.flatten()), "mean over targets: return the sum"),
        (lambda x, y, b: targets(x, y).mean(), "mean over tokens or rows: return the sum"),
        (lambda x, y, b: targets(x, y).sum() / targets(x, y).mean().sqrt(), "divide by nothing that is"),
        # The value is the same in all cuts, its gradient is not.
        (
            lambda x, y, b: (y >= 0).sum() * x.exp().sum() / x.exp().sum().detach(),
            "divide by nothing",
        ),
    ],
)
def test_what_depends_on_the_cut_is_refused_with_a_remedy(function: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check(function)


def test_a_sum_over_rows_as_a_whole_is_refused_only_where_ranks_share_a_row() -> None:
    def of_rows(logits: Tensor, labels: Tensor, batch: Any) -> Tensor:
        return targets(logits, labels).sum(1).sigmoid().sum()

    check(of_rows)
    with pytest.raises(UserError, match=r"context parallel's ranks"):
        check(of_rows, cp=2)


@pytest.mark.parametrize("function", [lambda x, y, b: targets(x, y), lambda x, y, b: 3.0, lambda x, y, b: y.sum()])
def test_what_is_no_sum_is_refused(function: Any) -> None:
    with pytest.raises(UserError, match="a floating-point tensor without dimensions"):
        check(function)


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(UserError, match="does not depend on the logits"):
        check(lambda x, y, b: (x.argmax(-1) == y).sum().double())


# --- terms of a model -----------------------------------------------------------------------------------------------


def family(term: Any) -> ModuleType:
    """Return a family of the user's whose term is a function of its logits."""

    class Model(llama3.Model):
        def forward(self, tokens_BL: Tensor, *args: Any, side_outputs: bool = False, only: Any = None) -> Any:  # type: ignore[override]
            logits_BLV, side = super().forward(tokens_BL, *args, side_outputs=True, only=only)
            return logits_BLV, side._replace(losses={"mine": term(logits_BLV.logsumexp(-1).square())})

    module = ModuleType("own.family")
    module.Model = Model  # type: ignore[attr-defined]
    return module


def check_family(term: Any) -> str | None:
    return check_terms("own.family", family(term), llama3.FLAVORS["debugmodel"])


@pytest.mark.parametrize("term", [lambda x: x, lambda x: x / x.mean(1, keepdim=True), lambda x: x.mean().expand_as(x)])
def test_a_term_of_rows_passes(term: Any) -> None:
    assert check_family(term) is None


@pytest.mark.parametrize(
    "term",
    [
        lambda x: (x - x.mean()).square(),
        lambda x: x / x.mean(),  # 1 in all cuts, with other gradients
        lambda x: (x.sum() / 100).expand_as(x),
    ],
)
def test_a_term_of_the_microbatch_is_refused_with_a_remedy(term: Any) -> None:
    with pytest.raises(UserError, match=r"own.family.*SideOutputs.losses: mine depends on .*divide by one over the"):
        check_family(term)


def test_why_a_tiny_model_does_not_run_is_returned() -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("not in tiny")

    said = check_family(fail)
    assert said is not None and "was not checked" in said and "not in tiny" in said


def test_the_packages_own_families_are_not_built() -> None:
    assert check_terms("llama3", sys.modules[__name__], None) is None
