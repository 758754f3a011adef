"""The commands of docs/train/fine_tune.md, with a tiny model of transformers: it learns, and is taken away."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY, Command
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAGE = REPOSITORY / "docs" / "train" / "fine_tune.md"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST, SECOND = ("pour", "brew", "drink", "share"), ("tea", "milk", "water", "juice")


def conversations(count: int, seed: int) -> list[str]:
    """Return lines that ask for one of sixteen answers, in words that vary."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        verb, noun = draw.choice(FIRST), draw.choice(SECOND)
        asked = f"{draw.choice(('please', 'can you', 'now'))} {verb} some {noun}"
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"i {verb} the {noun} for you"},
        ]
        lines.append(json.dumps({"messages": messages}))
    return lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    lines = conversations(200, seed=0)
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    (tmp_path / "held_out.jsonl").write_text("\n".join(conversations(40, seed=1)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=3, head_dim=16,
        initializer_range=0.2,  # adapters can't lift the logits of a smaller output layer far: the loss has a floor
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    (job,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "fine_tune.toml").write_text(job)
    return tmp_path


def run(line: str, folder: Path) -> str:
    code, output = Command("bash", "-c", line, cwd=folder).finish(200)
    assert code == 0, f"{line}\n{output}"
    return output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.timeout(900)  # a dozen processes, one after another
def test_a_tiny_model_is_fine_tuned_and_taken_away(folder: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines()]  # one line a command
    losses, outputs = [], {}
    for line in lines:
        if line.endswith("--chat"):
            line = f"printf 'please brew some milk\\n' | {line}"
        outputs[line] = run(line, folder)
        if "evaluate" in line:
            row = re.findall(r"^held_out +[\d,]+ +([\d.]+)", outputs[line], re.MULTILINE)
            assert row, outputs[line]
            losses.append(float(row[0]))
    before, full, lora = losses
    assert full < before / 4 and lora < before / 2
    (chat,) = [output for line, output in outputs.items() if line.endswith("--chat")]
    assert "i brew the milk for you" in chat
    assert "resuming after step 30" in "".join(outputs.values())

    transformers = pytest.importorskip("transformers")
    checkpoint = folder / "outputs" / "lora" / "checkpoint"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "step-60-hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    asked = [{"role": "user", "content": "now pour some tea"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = theirs.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(base, checkpoint / "step-60-adapter")
    with torch.no_grad():
        found, merged = adapted(**ids).logits, theirs(**ids).logits
    assert ((found - merged).abs().max() / merged.abs().max()).item() < 1e-5
    chat_lora = run(
        f"printf 'now pour some tea\\n' | python -m torchtitan_graph.generate {checkpoint}/step-60-hf --chat", folder
    )
    answer = tokenizer.decode(generated, skip_special_tokens=True).strip()
    assert len(answer) > 10 and answer in chat_lora
