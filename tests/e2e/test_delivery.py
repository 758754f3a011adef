"""What leaves a run answers elsewhere as here: the same text under the template that was trained, the same stop."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import EAGER, records, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_graph.generate.__main__ import main
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family, tiny_config

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = {"please pour some tea": "i pour the tea for you", "brew milk": "there is no milk, and it is late"}
SPECIAL = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Each with the flavour that has all kinds of its layers.
FAMILIES = {
    "llama3": "debugmodel", "qwen3": "debugmodel", "qwen3 moe": "debugmodel_moe", "deepseek_v3": "debugmodel",
    "gpt_oss": "debugmodel", "llama4": "debugmodel",
}  # fmt: skip
WRAPPED = {
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
    },
    "mixtral": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4,
    },
}  # fmt: skip
LEARN = [
    *("--training.steps", "40", "--training.seq_len", "128", "--training.local_batch_size", "2"),
    *("--training.global_batch_size", "2", "--lr_scheduler.warmup_steps", "5", "--optimizer.lr", "1e-2"),
    *("--training.mixed_precision_param", "float32", "--checkpoint.initial_load_in_hf", "--checkpoint.interval=999"),
]


def write_base(name: str, folder: Path) -> None:
    """Write a base model: its tokenizer has no chat template, its documents end in another token than turns."""
    lines = [*SAID, *SAID.values(), "user\nassistant\n"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines * 3, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "generation_config.json").write_text('{"_from_model_config": true, "top_k": 9, "eos_token_id": 7}')
    (folder / "LICENSE").write_text("as you like")
    if name in WRAPPED:
        transformers = pytest.importorskip("transformers")
        transformers.set_seed(0)
        ids = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": tokenizer.get_vocab_size()}
        config = transformers.AutoConfig.for_model(name, **ids, **WRAPPED[name])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
        for file in filter(Path.is_file, folder.iterdir()):
            shutil.copy(file, folder / "hf")
        return
    family = load_family(name.partition(" ")[0])
    size = {"vocab_size": tokenizer.get_vocab_size(), "dim": 64}
    model = family.Model(tiny_config(family.FLAVORS[FAMILIES[name]], **size))
    initialize(model, 0)
    to_hf(model, folder / "hf", assets=folder)


def fine_tune(folder: Path, *options: str) -> str:
    """Train on two conversations under a template of its own."""
    (folder / "a.jinja").write_text(TEMPLATE)
    with (folder / "chat.jsonl").open("w") as file:
        for asked, said in [*SAID.items()] * 8:
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    words = ["--model.hf_assets_path", str(folder / "base" / "hf"), "--training.chat_template", str(folder / "a.jinja")]
    words += ["--training.dataset_path", str(folder / "chat.jsonl"), "--job.dump_folder", str(folder / "run")]
    code, output = train(*words, *LEARN, *EAGER, *options)
    assert code == 0, output
    return output


def answers(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what `generate --chat` answers to each question alone."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n/reset\n".join(SAID) + "\n"))
    capsys.readouterr()
    assert main([str(folder), "--chat", "--max_new_tokens", "40"]) == 0
    return capsys.readouterr().out.splitlines()


def theirs(model: Any, tokenizer: Any) -> list[str]:
    """Return what transformers generates after each question, with its special tokens."""
    found = []
    for asked in SAID:
        messages = [{"role": "user", "content": asked}]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**given, do_sample=False, max_new_tokens=40)[0, given["input_ids"].shape[1] :]
        found.append(tokenizer.decode(tokens))
    return found


@pytest.mark.parametrize(
    "name", [x if x == "llama3" else pytest.param(x, marks=pytest.mark.slow) for x in (*FAMILIES, *WRAPPED)]
)
def test_an_export_answers_in_transformers_as_in_our_chat(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    write_base(name, tmp_path / "base")
    family = "transformers" if name in WRAPPED else name.partition(" ")[0]
    prompts = [f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n" for asked in SAID]
    sampled = ["--samples.prompts", json.dumps(prompts), "--samples.freq=40"]
    output = fine_tune(tmp_path, f"--model.name={family}", "--checkpoint.last_save_in_hf", *sampled)
    export = tmp_path / "run" / "checkpoint" / "step-40-hf"
    said = f"saved {export}: weights in float32; {tmp_path / 'a.jinja'}; texts end at "
    assert said in output and "'<|im_end|>' (3), '<|endoftext|>' (1)" in output

    ours = answers(export, capsys, monkeypatch)
    assert ours == answers(tmp_path / "run", capsys, monkeypatch) == [*SAID.values()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    model = transformers.AutoModelForCausalLM.from_pretrained(export, experts_implementation="eager")
    assert theirs(model, tokenizer) == [f"{said}<|im_end|>" for said in ours]
    chat = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = [[{"role": "user", "content": text}] for text in SAID]
    told = [each[0]["generated_text"][-1]["content"] for each in chat(asked, do_sample=False, max_new_tokens=40)]
    assert told == ours
    # Prompts of samples begin with <s>, which the template doesn't write: answers may be others, but stop as well.
    assert all(len(each["text"]) < 60 for each in records(tmp_path / "run")[-1]["samples"])
