"""The commands of docs/train/goals.md, with tiny models of transformers: preferences, distillation, a step of one's
own."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import REPOSITORY, TINY
from test_fine_tune import FIRST, SECOND, TEMPLATE, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAGE = REPOSITORY / "docs" / "train" / "goals.md"


def preferences(count: int) -> list[str]:
    draw = random.Random(0)
    lines = []
    for _ in range(count):
        verb, noun = draw.choice(FIRST), draw.choice(SECOND)
        said = {"chosen": f"i {verb} the {noun} for you", "rejected": f"no , {verb} it yourself"}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
        lines.append(json.dumps({"prompt": [{"role": "user", "content": f"please {verb} some {noun}"}], **answers}))
    return lines


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    lines = preferences(100)
    (tmp_path / "preferences.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(lines, trainer)
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for seed, (name, size) in enumerate({"model": 64, "teacher": 96}.items()):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=size, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=size // 16, num_key_value_heads=2, bos_token_id=0, eos_token_id=3, head_dim=16,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    for name, text in zip(("preferences", "distillation"), blocks("toml"), strict=False):
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def records(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("step", "loss", "grad_norm", "metrics", "validation_loss")
    return [{key: record[key] for key in keys if key in record} for record in found]


@pytest.mark.slow
@pytest.mark.timeout(900)  # ten processes, one after another
def test_tiny_models_learn_preferences_and_from_a_teacher(folder: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", "").splitlines()]
    outputs = "".join(run(f"{line} --metrics.log_freq 1" if ".train" in line else line, folder) for line in lines)
    assert "resuming after step 11" in outputs and "[[i " in outputs
    whole = "torchrun --nproc_per_node 2 -m torchtitan_graph.train --job.config_file preferences.toml"
    run(f"{whole} --job.dump_folder outputs/whole --metrics.log_freq 1", folder)
    first, *_, last = (x for x in records(folder / "outputs" / "whole") if "metrics" in x)
    assert first["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert last["metrics"]["preference_accuracy"] == 1 and last["metrics"]["reward_margin"] > 0.5
    by_step = {x["step"]: x for x in records(folder / "outputs" / "whole") if "metrics" in x}
    resumed = {x["step"]: x for x in records(folder / "outputs" / "dpo") if "metrics" in x}
    assert resumed == by_step  # bit for bit
    lora = [x["metrics"]["reward_margin"] for x in records(folder / "outputs" / "dpo_lora") if "metrics" in x]
    assert lora[0] == 0 and lora[-1] > 0.1
    losses = [x["loss"] for x in records(folder / "outputs" / "distillation")]
    assert losses[-1] < 0.95 * losses[0]
    transformers = pytest.importorskip("transformers")
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "outputs" / "dpo" / "checkpoint" / "step-20-hf"
    )
    sizes = [sum(p.numel() for p in x.parameters()) for x in (exported, _model(transformers, folder))]
    assert sizes[0] == sizes[1]  # the reference is in no folder


def _model(transformers: Any, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.mark.slow
def test_the_pages_own_step_trains(tmp_path: Path) -> None:
    (source,) = blocks("python")
    (tmp_path / "my_package.py").write_text(f"import torch\nimport torch.nn.functional as F\n\n\n{source}")
    start = f"PYTHONPATH=.:$PYTHONPATH torchrun --nproc_per_node 2 -m torchtitan_graph.train --job.config_file {TINY}"
    own = "--training.step my_package.my_step --training.step_options '{weight = 0.5}'"
    for mode in ("graph", "eager"):
        run(f"{start} {own} --job.dump_folder {mode} --compile.mode {mode}", tmp_path)
    found, expected = records(tmp_path / "graph"), records(tmp_path / "eager")
    assert found == expected and "noisy" in found[-1]["metrics"]
