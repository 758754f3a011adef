"""Steps of the user's: what they are given, what they return, and what depends on how rows are cut."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchtitan_graph.capture.own_step import OwnStep, StepModel, divided, together
from torchtitan_graph.capture.step import SideOutputs, make_train_step
from torchtitan_graph.config import job
from torchtitan_graph.config.own import find_own_step
from torchtitan_graph.data import IGNORE_INDEX
from torchtitan_graph.errors import UserError
from torchtitan_graph.goals import distillation, dpo
from torchtitan_graph.models import llama3, qwen3
from torchtitan_graph.models.layers.adapt import add_adapters
from torchtitan_graph.models.layers.lora import adapters_off
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.steps.cuts import _example, check_own_step
from torchtitan_graph.steps.options import NamedStep
from torchtitan_graph.steps.reference import Reference, shares_masks


def tiny(family: Any = llama3, lora: int = 0, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = family.Model(tiny_config(family.FLAVORS["debugmodel"], vocab_size=33, **changes), "sdpa").double()
    if lora:
        add_adapters(model, family, job.Lora(rank=lora))
        model.double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def check(function: Any, lora: int = 0, reference: Any = None, cp: int = 1) -> str | None:
    beside = None if reference is None else Reference(tiny(reference), reference, None)  # type: ignore[arg-type]
    return check_own_step(NamedStep("my.step", function), llama3, tiny(lora=lora), beside, cp)


def cross_entropy(model: Any, batch: Any, reduction: str = "sum") -> Any:
    logits_BLV = model(batch)
    return F.cross_entropy(logits_BLV.flatten(0, 1), batch.labels_BL.flatten(), reduction=reduction)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (cross_entropy, {}),
        (dpo, {"lora": 2}),
        (dpo, {"reference": qwen3}),
        (functools.partial(distillation, temperature=2.0), {"reference": qwen3}),
    ],
)
def test_sums_pass(function: Any, options: dict[str, Any]) -> None:
    assert check(function, **options) is None


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (functools.partial(cross_entropy, reduction="mean"), "the loss depends on .*mean over targets: return the sum"),
        (lambda m, b: (cross_entropy(m, b), {"n": (b.labels_BL >= 0).double().mean()}), "the metric n depends on"),
        (lambda m, b: cross_entropy(m, b, "none"), "must return the sum of the loss"),
        (lambda m, b: m(b).detach().sum(), "does not depend on model"),
        (lambda m, b: m(b).mean() * (m(b) * 1.0).detach().numel() ** 0.5, "depends on how rows"),
        (dpo, "needs a frozen model next to the trained one; name its Hugging Face folder in reference.path"),
        (lambda m, b: m.without_adapters(b).sum(), "the model has no adapters; set model.lora.rank"),
    ],
)
def test_what_is_no_sum_or_needs_what_there_is_not_is_refused(function: Any, what: str) -> None:
    with pytest.raises(UserError, match=f"my.step.*{what}"):
        check(function)


def test_sums_over_documents_are_refused_only_where_ranks_share_a_row() -> None:
    assert check(distillation, reference=qwen3, cp=2) is None
    assert check(dpo, lora=2) is None
    with pytest.raises(UserError, match="my.step.*context parallel's ranks"):
        check(dpo, lora=2, cp=2)


def test_a_step_that_fails_on_a_small_vocabulary_is_reported_not_refused() -> None:
    said = check(lambda model, batch: model(batch)[..., 50_000].sum())
    assert said is not None and "was not checked" in said and "IndexError" in said


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bta": 0.1}, "training.step_options: bta is no option of torchtitan_graph.goals.dpo; did you mean beta"),
        ({"model": 1}, "its options are beta, label_smoothing|did you mean"),
    ],
)
def test_options_are_the_functions_own(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        find_own_step("torchtitan_graph.goals.dpo", options)
    assert find_own_step("torchtitan_graph.goals.dpo", {"beta": 0.2}).keywords == {"beta": 0.2}  # type: ignore[attr-defined]


def test_a_function_of_less_than_a_model_and_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be called with \(model, batch\)"):
        find_own_step("os.path.basename", {})


# --- the model that a step is given ---------------------------------------------------------------------------------


def test_without_adapters_the_model_is_what_it_adapts() -> None:
    adapted, base = tiny(lora=2), tiny()
    batch = _example(33, 16)
    masks = base.masks(batch.documents_BL, batch.positions_BL)
    for name, parameter in base.named_parameters():
        adapted.get_parameter(name).data.copy_(parameter)
    given = StepModel(OwnStep("s", dpo, adapters_off=adapters_off), adapted, masks, lambda *_: (None, None))  # type: ignore[arg-type, return-value]
    found = given.without_adapters(batch)
    expected = base(batch.tokens_BL, batch.positions_BL, masks)
    assert torch.equal(found, expected) and not found.requires_grad
    assert not torch.equal(adapted(batch.tokens_BL, batch.positions_BL, masks), expected)  # they are on again


def test_side_losses_state_and_metrics_of_each_call_are_added() -> None:
    """Two calls with gradients, one without: the third adds nothing."""

    class Model(llama3.Model):
        def forward(self, tokens_BL: Any, *args: Any, side_outputs: bool = False, **kwargs: Any) -> Any:
            logits_BLV = super().forward(tokens_BL, *args, **kwargs)
            one_BL = torch.ones_like(tokens_BL, dtype=logits_BLV.dtype)
            counts = torch.tensor([1, tokens_BL.shape[0]])
            side = SideOutputs(losses={"mine": one_BL}, state={"seen.load": counts}, metrics={"m": 2 * one_BL})
            return (logits_BLV, side) if side_outputs else logits_BLV

    def twice(model: Any, batch: Any) -> Any:
        return cross_entropy(model, batch) + cross_entropy(model, batch), {"own": model(batch).detach().sum() * 0 + 6}

    model = Model(tiny_config(llama3.FLAVORS["debugmodel"], vocab_size=33), "sdpa")
    batch = _example(33, 16)
    masks, own = model.masks(batch.documents_BL, batch.positions_BL), OwnStep("twice", twice)
    loss, gradients, state = make_train_step(model, own)(batch, masks, torch.tensor(3))
    assert torch.equal(state["seen.load"], torch.tensor([3, 12]))
    assert float(state["metric/own"]) == 2 and float(state["metric/m"]) == 6
    assert float(state["loss/mine"]) == 3
    assert float(loss.detach()) == pytest.approx(float(state["loss/step"]) + 3)
    assert gradients.keys() == dict(model.named_parameters()).keys()


def test_layers_that_predict_further_tokens_are_refused() -> None:
    class Model(llama3.Model):
        def forward(self, *args: Any, side_outputs: bool = False, **kwargs: Any) -> Any:
            logits_BLV = super().forward(*args, **kwargs)
            return (logits_BLV, SideOutputs(ahead=[logits_BLV])) if side_outputs else logits_BLV

    model = Model(tiny_config(llama3.FLAVORS["debugmodel"], vocab_size=33), "sdpa")
    batch = _example(33, 16)
    masks = model.masks(batch.documents_BL, batch.positions_BL)
    with pytest.raises(UserError, match=r"set model.num_mtp_layers = 0"):
        make_train_step(model, OwnStep("s", cross_entropy))(batch, masks, torch.tensor(3))


# --- the reference beside the model ---------------------------------------------------------------------------------


def test_both_models_state_is_in_one_module_and_neither_is_changed() -> None:
    model, reference = tiny(), tiny(qwen3)
    names = dict(model.named_parameters())
    both = dict(together(model, reference).named_parameters())
    assert both == names | {f"reference.{name}": p for name, p in reference.named_parameters()}
    assert dict(model.named_parameters()) == names and not hasattr(model, "reference")


def test_masks_are_shared_where_both_models_have_every_decoders() -> None:
    from torchtitan_graph.models import gpt_oss

    model, windowed = tiny(), tiny(gpt_oss)
    assert shares_masks(model, tiny(qwen3)) and not shares_masks(model, windowed)
    own, others = divided({"causal": 1, "reference.causal": 2, "reference.window": 3})
    assert own == {"causal": 1} and others == {"causal": 2, "window": 3}
    assert divided({"causal": 1}) == ({"causal": 1}, {"causal": 1})
    assert IGNORE_INDEX < 0
