"""A run from a Hugging Face folder and a file of conversations equals a plain loop: transformers' model in fp64, each
document by itself and without padding, torch's AdamW and clipping. Two epochs to their short last step, resumed before
it, on one rank and three. Rows and their targets are those of our own loader: the arithmetic alone is independent."""

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from runs import records, train
from test_fine_tune import TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT reads it
]
ROWS, SEQ_LEN, EPOCHS, BETA = 6, 96, 2, 0.1
WORDS = ["tea", "milk", "water", "juice", "pour", "brew", "drink", "please", "now", "can", "you", "some", "the", "for"]
ADAMW = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def in_double() -> None:
    """Let a run store and compute in fp64, which no user may."""
    from torchtitan_graph.config import job

    for name in ("training.dtype", "training.mixed_precision_param"):
        job.OPTIONS[name] = dataclasses.replace(job.OPTIONS[name], choices=("float64",))


def sentence(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def conversation(draw: random.Random) -> list[dict[str, str]]:
    turns = draw.choice((1, 1, 2))
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": sentence(draw, 12)} for role in roles]


def config_of(kind: str, vocab_size: int) -> Any:
    import transformers

    sizes = dict(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, bos_token_id=0, eos_token_id=3, tie_word_embeddings=False,
        initializer_range=0.1, attn_implementation="eager",
    )  # fmt: skip
    if kind == "experts":
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
        return transformers.Qwen3MoeConfig(**sizes, **experts)
    return transformers.LlamaConfig(**sizes)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    transformers = pytest.importorskip("transformers")
    draw = random.Random(0)
    rows: list[dict[str, Any]] = [{"messages": conversation(draw)} for _ in range(70)]
    if request.param == "dpo":
        rows = [
            {
                "prompt": row["messages"][:1],
                "chosen": row["messages"][1:2],
                "rejected": [{"role": "assistant", "content": sentence(draw, 12) + " no"}],
            }
            for row in rows
        ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(lines, trainer)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(request.param, tokenizer.get_vocab_size()))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    if request.param == "lora":
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        of_adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        peft.get_peft_model(model, of_adapter).save_pretrained(tmp_path / "adapter")
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    return tmp_path


def options(kind: str, folder: Path, out: Path) -> list[str]:
    words = [
        "--job.dump_folder", str(out), "--model.name", "qwen3" if kind == "experts" else "llama3",
        "--model.hf_assets_path", str(folder / "model"), "--training.dataset_path", str(folder / "rows.jsonl"),
        "--training.seq_len", str(SEQ_LEN), "--training.local_batch_size", "2", "--training.epochs", str(EPOCHS),
        "--training.global_batch_size", str(ROWS), "--training.dtype", "float64",
        "--training.mixed_precision_param", "float64", "--optimizer.lr", "1e-3", "--lr_scheduler.warmup_steps", "2",
        "--checkpoint.initial_load_in_hf", "--checkpoint.interval", "1000", "--training.steps", "100000",
        "--validation.no-enable", "--activation_checkpoint.mode", "none",
    ]  # fmt: skip
    if kind == "lora":
        words += ["--model.lora.rank", "4", "--model.lora.alpha", "8"]
        words += ["--checkpoint.initial_load_adapter", str(folder / "adapter")]
    if kind == "dpo":
        words += ["--training.format", "preference", "--training.step", "torchtitan_graph.goals.dpo"]
        words += ["--reference.path", str(folder / "model")]
    return words


def batches(kind: str, folder: Path) -> list[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Return each step's rows, a row's documents as (ids, labels) without padding."""
    from torchtitan_graph.data.forms import RowFormat
    from torchtitan_graph.data.loader import build_dataloader
    from torchtitan_graph.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "model"))
    reading = RowFormat(tokenizer, format="preference" if kind == "dpo" else None)
    data = build_dataloader(
        dataset="", dataset_path=str(folder / "rows.jsonl"), split="train", tokenizer=tokenizer, seed=0,
        reading=reading, seq_len=SEQ_LEN, local_batch_size=ROWS, dp_rank=0, dp_degree=1, epochs=EPOCHS,
    )  # fmt: skip
    steps = []
    while True:
        batch = next(data)
        rows = []
        for tokens_L, labels_L, _, documents_L in zip(*batch, strict=True):
            numbers = documents_L[documents_L >= 0].unique().tolist()
            places = [documents_L == number for number in numbers]
            documents = [(tokens_L[place], labels_L[place]) for place in places]
            rows.append([document for document in documents if (document[1] >= 0).any()])
        if not any(rows):
            return steps
        steps.append(rows)


@contextmanager
def no_float32() -> Iterator[None]:
    """Make transformers compute in fp64 where its code names fp32: in norms, softmax, rotary tables and routers."""
    names = [patch.object(torch, name, torch.float64) for name in ("float32", "float")]
    with names[0], names[1], patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def losses(model: torch.nn.Module, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the sum of each document's losses."""
    found = []
    for ids, labels in documents:
        with no_float32():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        found.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    return found


def plain_loop(kind: str, folder: Path, lrs: list[float]) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of each step."""
    import transformers

    stored = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    stored.config._attn_implementation = stored.config._experts_implementation = "eager"
    with no_float32():
        model, reference = (transformers.AutoModelForCausalLM.from_config(stored.config).double() for _ in range(2))
    for each in (model, reference):
        each.load_state_dict(stored.state_dict())
    reference.requires_grad_(False)
    if kind == "lora":
        import peft

        model = peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).double()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1.0, **ADAMW)
    found = []
    for rows, lr in zip(batches(kind, folder), lrs, strict=True):
        documents = [document for row in rows for document in row]
        by_document = losses(model, documents)
        if kind == "dpo":
            before = losses(reference, documents)
            log_ratios = [b - a for a, b in zip(by_document, before, strict=True)]
            pairs = list(zip(log_ratios[::2], log_ratios[1::2], strict=True))
            loss = sum(-F.logsigmoid(BETA * (chosen - rejected)) for chosen, rejected in pairs) / len(pairs)
        else:
            loss = sum(by_document) / sum(int((labels >= 0).sum()) for _, labels in documents)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [record for record in records(out) if "grad_norm" in record]


@pytest.mark.parametrize("folder", ["full", "experts", "lora", "dpo"], indirect=True)
def test_two_epochs_equal_a_plain_loop(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["folder"]
    for name, ranks in {"one": 1, "three": 3}.items():
        code, output = train(*options(kind, folder, tmp_path / name), ranks=ranks, patch=in_double)
        assert code == 0, output
    lrs = [record["lr"] for record in steps_of(tmp_path / "one")]
    expected = plain_loop(kind, folder, lrs)
    for name in ("one", "three"):
        found = steps_of(tmp_path / name)
        assert len(found) == len(expected)
        for record, (loss, norm) in zip(found, expected, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=1e-7), (name, record["step"])
            assert record["grad_norm"] == pytest.approx(norm, rel=1e-7), (name, record["step"])
    # Resumed before the last step, which is short, on another number of ranks.
    words = [*options(kind, folder, tmp_path / "resumed"), "--lr_scheduler.total_steps", str(len(expected))]
    code, output = train(*words, "--training.steps", str(len(expected) - 1), ranks=3, patch=in_double)
    assert code == 0, output
    code, output = train(*words, patch=in_double)
    assert code == 0, output
    resumed = steps_of(tmp_path / "resumed")
    assert [r["loss"] for r in resumed] == pytest.approx([loss for loss, _ in expected], rel=1e-7)
    assert [r["grad_norm"] for r in resumed] == pytest.approx([norm for _, norm in expected], rel=1e-7)
