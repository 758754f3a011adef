"""Distillation: against torch's own divergence, and transformers' models of two sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchtitan_graph.data import IGNORE_INDEX
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.goals import distillation


class Given:
    def __init__(self, student: Any, teacher: Any) -> None:
        self._student, self._teacher = student, teacher

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self._student(batch.tokens_BL)  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference(self, batch: Batch) -> torch.Tensor:
        return self._teacher(batch.tokens_BL)  # type: ignore[no-any-return]


def batch_of(vocab_size: int) -> Batch:
    """Rows of one document each; every third position has no target."""
    tokens_BL = torch.randint(vocab_size, (3, 13), generator=torch.Generator().manual_seed(0))
    labels_BL = tokens_BL[:, 1:].clone()
    labels_BL[:, ::3] = IGNORE_INDEX
    places_BL = torch.arange(12).expand(3, -1)
    return Batch(tokens_BL[:, :-1], labels_BL, places_BL, torch.zeros_like(labels_BL))


def expected(student_NV: torch.Tensor, teacher_NV: torch.Tensor, labels_N: torch.Tensor, alpha: float, t: float) -> Any:
    log_q, log_p = (x.div(t).log_softmax(-1) for x in (student_NV, teacher_NV))
    divergence = t**2 * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return alpha * divergence + (1 - alpha) * F.cross_entropy(student_NV, labels_N, reduction="sum"), divergence


@pytest.mark.parametrize(("alpha", "temperature"), [(0.5, 1.0), (1.0, 3.0), (0.0, 2.0)])
def test_the_loss_is_torchs_divergence_and_cross_entropy(alpha: float, temperature: float) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 12, 7, dtype=torch.float64)
    batch = batch_of(7)
    given = Given(lambda _: student, lambda _: teacher)
    loss, metrics = distillation(given, batch, alpha=alpha, temperature=temperature)
    is_target = batch.labels_BL != IGNORE_INDEX
    total, divergence = expected(student[is_target], teacher[is_target], batch.labels_BL[is_target], alpha, temperature)
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["kl_divergence"], divergence, rtol=1e-12, atol=0)


def test_a_student_equal_to_its_teacher_has_no_divergence() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 12, 7)
    _, metrics = distillation(Given(lambda _: logits, lambda _: logits), batch_of(7))
    assert float(metrics["kl_divergence"]) == 0


def test_two_models_of_transformers_give_the_same(tmp_path: Path) -> None:
    """Theirs compute norms in fp32, also in fp64."""
    transformers = pytest.importorskip("transformers")
    from torchtitan_graph.models.hf import from_hf

    for seed, (name, size) in enumerate({"student": 32, "teacher": 48}.items()):
        torch.manual_seed(seed)
        config = transformers.Qwen3Config(
            vocab_size=40, hidden_size=size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3, tie_word_embeddings=False,
        )  # fmt: skip
        transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / name)
    batch = batch_of(40)
    student, teacher = (from_hf(tmp_path / name, torch.float64) for name in ("student", "teacher"))
    loss, _ = distillation(Given(student, teacher), batch, alpha=0.7, temperature=2.0)
    loss.backward()
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, of_teacher = (load(tmp_path / name, dtype=torch.float64) for name in ("student", "teacher"))
    is_target = batch.labels_BL != IGNORE_INDEX
    with torch.no_grad():
        teacher_NV = of_teacher(batch.tokens_BL).logits[is_target]
    student_NV = theirs(batch.tokens_BL).logits[is_target]
    total, _ = expected(student_NV, teacher_NV, batch.labels_BL[is_target], 0.7, 2.0)
    total.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-6)
    found, wanted = student.output.weight.grad, theirs.lm_head.weight.grad
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
