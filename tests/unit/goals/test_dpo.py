"""Direct preference optimisation: its closed form, transformers' models on unpacked answers in fp64, and TRL's loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

from torchtitan_graph.capture.own_step import OwnStep, StepModel
from torchtitan_graph.data import IGNORE_INDEX, build_dataloader, load_tokenizer
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.data.feed import pairs
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.goals import dpo
from torchtitan_graph.goals.preference import log_probabilities, pairs_of
from torchtitan_graph.models.hf import from_hf

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]


class Given:
    has_adapters, has_reference = False, True

    def __init__(self, policy: torch.Tensor, reference: torch.Tensor) -> None:
        self._policy, self._reference = policy, reference

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self._policy

    def reference(self, batch: Batch) -> torch.Tensor:
        return self._reference


def test_the_loss_of_one_pair_by_hand() -> None:
    """Two answers of one token each, and padding: log-probabilities are known, and so is the loss."""
    labels = torch.tensor([[1, IGNORE_INDEX, 2, IGNORE_INDEX, IGNORE_INDEX]])
    documents = torch.tensor([[0, 0, 1, 1, 2]])
    batch = Batch(torch.zeros_like(labels), labels, torch.zeros_like(labels), documents)
    p, q = torch.full((2, 1, 5, 3), 0.25, dtype=torch.float64)
    p[0, 0, 1], p[0, 2, 2], q[0, 0, 1], q[0, 2, 2] = 0.5, 0.125, 0.25, 0.25
    p[0, 0, 0], p[0, 2, 0] = 0.25, 0.625
    q[..., 0] = 0.5
    p[0, 1:2, 0] = p[0, 3:, 0] = 0.5
    loss, metrics = dpo(Given(p.log(), q.log()), batch, beta=2.0, label_smoothing=0.1)
    chosen, rejected = 2 * math.log(2), 2 * math.log(0.5)
    margin = chosen - rejected
    expected = 0.9 * math.log1p(math.exp(-margin)) + 0.1 * math.log1p(math.exp(margin))
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {"preference_accuracy": 1, "reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": margin}
    )


def test_a_pair_of_equal_rewards_is_not_right() -> None:
    """As TRL counts: a policy that is its reference has an accuracy of 0."""
    labels, documents = torch.tensor([[1, IGNORE_INDEX, 2, IGNORE_INDEX]]), torch.tensor([[0, 0, 1, 1]])
    batch = Batch(torch.zeros_like(labels), labels, torch.zeros_like(labels), documents)
    logits = torch.randn(1, 4, 3)
    _, metrics = dpo(Given(logits, logits), batch)
    assert pairs(batch) == 1 and float(metrics["preference_accuracy"]) == 0


def test_a_reference_that_is_named_comes_before_the_model_without_its_adapters() -> None:
    labels, documents = torch.tensor([[1, IGNORE_INDEX, 2, IGNORE_INDEX]]), torch.tensor([[0, 0, 1, 1]])
    batch = Batch(torch.zeros_like(labels), labels, torch.zeros_like(labels), documents)
    with_adapters = Given(*torch.randn(2, 1, 4, 3))
    with_adapters.has_adapters, with_adapters.without_adapters = True, with_adapters  # type: ignore[attr-defined]
    assert float(dpo(with_adapters, batch)[1]["reward_margin"]) != 0
    with_adapters.has_reference = False
    assert float(dpo(with_adapters, batch)[1]["reward_margin"]) == 0


def test_rows_without_pairs_count_nothing() -> None:
    empty = torch.full((2, 4), IGNORE_INDEX)
    zeros = torch.zeros(2, 4, dtype=torch.int64)
    batch = Batch(zeros, empty, zeros, zeros)
    logits = torch.randn(2, 4, 3, requires_grad=True)
    loss, metrics = dpo(Given(logits, logits.detach()), batch)
    loss.backward()
    assert float(loss.detach()) == 0 and not any(float(x.detach()) for x in metrics.values())
    assert pairs(batch) == 0 and logits.grad is not None and not logits.grad.any()


# --- against other implementations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words, two tiny models of transformers, and preferences."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("preferences")
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, bos_token_id=0, eos_token_id=1, initializer_range=0.3,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(root / name)
        tokenizer.save(str(root / name / "tokenizer.json"))
        named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (root / name / "tokenizer_config.json").write_text(json.dumps(named))
    generator = torch.Generator().manual_seed(0)

    def text(most: int) -> str:
        length = int(torch.randint(2, most, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    rows = [{"prompt": text(9), "chosen": text(12), "rejected": text(12)} for _ in range(12)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def batch_of(folder: Path, num_rows: int = 8) -> Batch:
    """All pairs, packed."""
    tokenizer = load_tokenizer(str(folder / "policy"))
    data = build_dataloader(
        dataset="", dataset_path=str(folder / "rows.jsonl"), split="all", tokenizer=tokenizer, seed=0,
        reading=RowFormat(tokenizer, format="preference"), seq_len=96, local_batch_size=num_rows, dp_rank=0,
        dp_degree=1, epochs=1,
    )  # fmt: skip
    return next(data)


def ours(folder: Path, batch: Batch, dtype: torch.dtype, **options: float) -> tuple[Any, Any, Any]:
    """Return the loss, the metrics and the policy, which has gradients."""
    policy, reference = (from_hf(folder / name, dtype) for name in ("policy", "reference"))
    masks = policy.masks(batch.documents_BL, batch.positions_BL)
    own = OwnStep("dpo", dpo, reference)

    def run(rows: Batch, own_masks: Any) -> tuple[torch.Tensor, None]:
        return policy(rows.tokens_BL, rows.positions_BL, own_masks), None

    loss, metrics = dpo(StepModel(own, policy, masks, run), batch, **options)
    loss.backward()
    return loss.detach(), {name: x.detach() for name, x in metrics.items()}, policy


def alone(folder: Path, load: Any, beta: float, label_smoothing: float = 0.0) -> tuple[float, Any]:
    """Return the loss of each answer alone, without packing, and the policy with its gradients, in fp64."""
    policy, reference = (load(folder / name, dtype=torch.float64) for name in ("policy", "reference"))
    encode = load_tokenizer(str(folder / "policy")).encode

    def log_probability(model: Any, prompt: str, answer: str) -> torch.Tensor:
        before = [0, *encode(prompt)]
        ids = torch.tensor([[*before, *encode(answer), 1]])
        returned = model(ids)
        logits = getattr(returned, "logits", returned)[0, len(before) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, len(before) :, None]).sum()

    total = torch.zeros((), dtype=torch.float64)
    for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
        gaps = []
        for answer in ("chosen", "rejected"):
            with torch.no_grad():
                before = log_probability(reference, row["prompt"], row[answer])
            gaps.append(beta * (log_probability(policy, row["prompt"], row[answer]) - before))
        margin = gaps[0] - gaps[1]
        total = total - (1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    total.backward()
    return float(total.detach()), policy


def test_packed_pairs_are_answers_alone(folder: Path) -> None:
    batch = batch_of(folder)
    assert pairs(batch) == 12 == int(pairs_of(batch).sum())
    loss, _, policy = ours(folder, batch, torch.float64, beta=0.3, label_smoothing=0.2)
    expected, model = alone(folder, from_hf, 0.3, 0.2)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    for name, parameter in policy.named_parameters():
        wanted = model.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))


def test_the_loss_is_that_of_transformers_models(folder: Path) -> None:
    """Their norms and rotary positions compute in fp32, also in fp64."""
    load = pytest.importorskip("transformers").LlamaForCausalLM.from_pretrained
    loss, _, policy = ours(folder, batch_of(folder), torch.float64, beta=0.3, label_smoothing=0.2)
    expected, model = alone(folder, load, 0.3, 0.2)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    for own, name in (("output", "lm_head"), ("norm", "model.norm"), ("tok_embeddings", "model.embed_tokens")):
        found, wanted = policy.get_submodule(own).weight.grad, model.get_submodule(name).weight.grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))  # type: ignore[arg-type]


def test_a_swapped_pair_is_seen(folder: Path) -> None:
    batch = batch_of(folder)
    swapped = batch._replace(documents_BL=batch.documents_BL ^ 1)
    loss, _, _ = ours(folder, swapped, torch.float64, beta=0.3)
    assert abs(float(loss) - alone(folder, from_hf, 0.3)[0]) > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_loss_is_that_of_trl(folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy", pad_token="</s>")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = f"<s> {row['prompt']} "  # our documents begin with bos
    options = trl.DPOConfig(
        output_dir=str(tmp_path), beta=0.3, per_device_train_batch_size=12, bf16=False, report_to="none", use_cpu=True,
        activation_checkpointing=False, max_length=None, disable_dropout=True,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        load(folder / "policy"), load(folder / "reference"), args=options, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip
    expected = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss, metrics, _ = ours(folder, batch_of(folder), torch.float32, beta=0.3)
    assert float(loss) / 12 == pytest.approx(float(expected.detach()), rel=1e-5)
    logged = {name: sum(x) / len(x) for name, x in trainer._metrics["eval"].items()}
    assert float(metrics["reward_margin"]) / 12 == pytest.approx(logged["rewards/margins"], rel=1e-4)
    assert float(metrics["preference_accuracy"]) / 12 == pytest.approx(logged["rewards/accuracies"])


def test_log_probabilities_have_one_place_for_each_answer(folder: Path) -> None:
    batch = batch_of(folder)
    logits = torch.zeros(*batch.tokens_BL.shape, 18)
    sums = log_probabilities(logits, batch)
    counts = -sums / math.log(18)
    targets = torch.stack([((batch.documents_BL == d) & (batch.labels_BL != IGNORE_INDEX)).sum(1) for d in (0, 1)], 1)
    torch.testing.assert_close(counts[:, 0], targets.float())
