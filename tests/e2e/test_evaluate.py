"""Evaluation without training: a run's and a Hugging Face folder's, against transformers, its own harness and a run."""

import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Command, evaluate, records, train

ROWS = ["--validation.seq_len", "64", "--validation.local_batch_size", "2"]
WORDS = ["def", "return", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "café", "🙂", "x", "+", "1"]


def say(number: random.Random, most: int) -> str:
    return " ".join(number.choices(WORDS, k=number.randint(1, most)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama of transformers with random weights and a byte-level BPE, two corpora, and questions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root, number = tmp_path_factory.mktemp("hf"), random.Random(0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|eos|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([" ".join(WORDS[:12])] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|eos|>").save_pretrained(root / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(), num_key_value_heads=2, max_position_embeddings=256, **sizes, bos_token_id=None
    )
    config.initializer_range, config.eos_token_id = 0.3, 0
    LlamaForCausalLM(config).save_pretrained(root / "model")
    for name, most in (("short", 12), ("long", 150)):  # within a row, and cut at rows' ends
        texts = [json.dumps({"text": f"x {say(number, most)}"}) for _ in range(9)]
        (root / f"{name}.jsonl").write_text("\n".join(texts))
    questions = [
        {"question": say(number, 20), "choices": [say(number, 5) for _ in range(4)], "answer": number.randrange(4)}
        for _ in range(12)
    ]
    (root / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return root


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Iterator[tuple[Any, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    yield model.eval(), AutoTokenizer.from_pretrained(folder / "model")


def found_by(result: Any) -> dict[str, Any]:
    code, output = result
    assert code == 0, output
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.no_grad()
def log_likelihoods(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, by transformers."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def test_loss_and_perplexity_are_those_of_transformers(folder: Path, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    options = ["--set", f"short={folder / 'short.jsonl'}", *ROWS, "--training.one_document_per_row", "--json"]
    found = found_by(evaluate(str(folder / "model"), *options))["sets"]["short"]
    likelihood = tokens = num_bytes = 0.0
    for line in lines(folder / "short.jsonl"):
        ids = tokenizer.encode(line["text"])
        each = log_likelihoods(model, [*ids, tokenizer.eos_token_id])
        likelihood, tokens = likelihood + sum(each), tokens + len(each)
        first = tokenizer.decode(ids[:1])  # the only token that is no target
        num_bytes += len(line["text"].encode()) - len(first.encode())
    assert (found["tokens"], found["bytes"]) == (tokens, num_bytes)
    assert found["loss"] == pytest.approx(-likelihood / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(-likelihood / tokens), rel=1e-4)
    assert found["byte_perplexity"] == pytest.approx(math.exp(-likelihood / num_bytes), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(-likelihood / num_bytes / math.log(2), rel=1e-5)


def test_the_right_choices_are_those_that_transformers_finds(folder: Path, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    options = ["--choices", f"q={folder / 'questions.jsonl'}", *ROWS, "--json"]
    found = found_by(evaluate(str(folder / "model"), *options))["choices"]["q"]
    right = [0, 0, 0]
    for line in lines(folder / "questions.jsonl"):
        sums, means, by_byte = [], [], []
        for choice in line["choices"]:
            ids, begin = tokenizer.encode(f"{line['question']} {choice}"), len(tokenizer.encode(line["question"]))
            each = log_likelihoods(model, ids)[begin - 1 :]
            sums.append(sum(each))
            means.append(sum(each) / len(each))
            by_byte.append(sum(each) / len(choice.encode()))
        for kind, values in enumerate((sums, means, by_byte)):
            right[kind] += values.index(max(values)) == line["answer"]
    named = [found[name] for name in ("accuracy", "accuracy_by_token", "accuracy_by_byte")]
    assert named == [count / 12 for count in right]
    assert len(set(right)) > 1  # else the three could be one


LAYOUTS = {
    "shard 2": (2, []),
    "tensor 2": (2, ["--parallelism.tensor_parallel_degree", "2", "--training.loss_chunks", "3"]),
    "context 2": (2, ["--parallelism.context_parallel_degree", "2"]),
    "eager, tensor 2": (2, ["--parallelism.tensor_parallel_degree", "2", "--compile.mode", "eager"]),
    "gathered logits": (
        2,
        ["--parallelism.tensor_parallel_degree", "2", "--parallelism.disable_loss_parallel"],
    ),
    "shard 2, tensor 2": (4, ["--parallelism.tensor_parallel_degree", "2"]),
}
SLOW = ("shard 2", "eager, tensor 2", "gathered logits", "shard 2, tensor 2", "context 2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return found_by(evaluate(*_all(folder)))


def _all(folder: Path) -> list[str]:
    sets = ["--set", f"short={folder / 'short.jsonl'}", "--set", f"long={folder / 'long.jsonl'}"]
    return [str(folder / "model"), *sets, "--choices", f"q={folder / 'questions.jsonl'}", *ROWS, "--json"]


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LAYOUTS])
def test_every_layout_has_the_numbers_of_one_rank(name: str, folder: Path, alone: dict[str, Any]) -> None:
    ranks, options = LAYOUTS[name]
    found = found_by(evaluate(*_all(folder), *options, ranks=ranks))
    assert found["choices"] == alone["choices"]
    for each in ("short", "long"):
        assert found["sets"][each] == pytest.approx(alone["sets"][each], rel=1e-5)


@pytest.mark.slow
def test_texts_that_share_a_row_are_scored_as_those_that_have_their_own(folder: Path, alone: dict[str, Any]) -> None:
    found = found_by(evaluate(*_all(folder), "--training.one_document_per_row"))
    assert found["choices"] == alone["choices"]
    for each in ("short", "long"):  # documents are cut at the ends of other rows, but have the same targets
        assert [found["sets"][each][x] for x in ("tokens", "bytes")] == [
            alone["sets"][each][x] for x in ("tokens", "bytes")
        ]


@pytest.mark.slow
def test_a_run_s_checkpoints_have_its_validation_losses(tmp_path: Path) -> None:
    sets = "[{name = 'held_out', steps = 3}, {name = 'none_else', steps = 2}]"
    options = ["--training.steps", "3", "--validation.enable", "--validation.freq", "1", "--validation.sets", sets]
    options += ["--checkpoint.keep_best", "--training.mixed_precision_param", "float32", "--optimizer.lr", "1e-3"]
    code, output = train("--job.dump_folder", str(tmp_path), *options)
    assert code == 0, output
    losses = {r["step"]: r["validation_loss/held_out"] for r in records(tmp_path) if "validation_loss/held_out" in r}
    best = min(losses, key=lambda step: losses[step])
    for step, wanted in (("newest", 3), ("best", best), ("1", 1)):
        found = found_by(evaluate(str(tmp_path), "--step", step, "--json"))
        assert found["sets"]["held_out"]["loss"] == pytest.approx(losses[wanted], rel=1e-5), step
        assert found["model"].endswith(f"step-{wanted}")


@pytest.mark.slow
def test_the_harness_finds_what_it_finds_with_its_own_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = folder / "tasks"
    tasks.mkdir()
    data = "dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: '{}'}}}}\n"
    (tasks / "choice.yaml").write_text(
        "task: choice\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
        + data.format(folder / "questions.jsonl")
    )
    (tasks / "rolling.yaml").write_text(
        "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
        + data.format(folder / "long.jsonl")
    )
    words = [str(folder / "model"), "--include_path", str(tasks), *ROWS, "--json", "--lm_eval"]
    split = ["--parallelism.tensor_parallel_degree", "2"]
    ours = found_by(evaluate(*words, "choice,rolling", *split, ranks=2))["lm_eval"]
    model = HFLM(pretrained=str(folder / "model"), max_length=64, device="cpu", dtype="float32", batch_size=3)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model, tasks=["choice", "rolling"], task_manager=manager, log_samples=False)["results"]
    compared = 0
    for task, metrics in found.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours[task][name.removesuffix(",none")] == pytest.approx(value, rel=1e-5), (task, name)
                compared += 1
    assert compared >= 5


TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.slow
def test_texts_of_the_harness_are_those_of_its_own_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose right answers are what its own class writes, by a chat template and without: all are met; those by
    a template are not met without it."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    asked = {"until": [" fox", "\n"], "max_gen_toks": 8}
    model = HFLM(pretrained=str(folder / "model"), max_length=64, device="cpu", dtype="float32", batch_size=3)
    model.tokenizer.chat_template = TEMPLATE
    (folder / "template.jinja").write_text(TEMPLATE)
    questions = [line["question"] for line in lines(folder / "questions.jsonl")]
    as_chats = [[{"role": "system", "content": "be brief"}, {"role": "user", "content": text}] for text in questions]
    tasks = folder / "writing"
    tasks.mkdir()
    for name, prompts in (("plain", questions), ("chat", [*map(model.apply_chat_template, as_chats)])):
        requests = [Instance("generate_until", {}, (prompt, asked), i) for i, prompt in enumerate(prompts)]
        written = model.generate_until(requests, disable_tqdm=True)
        rows = [{"question": q, "written": text} for q, text in zip(questions, written, strict=True) if text.strip()]
        assert len(rows) > 6 and len({row["written"] for row in rows}) > 3
        (tasks / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tasks / f"{name}.yaml").write_text(
            f"task: {name}\noutput_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
            "doc_to_target: '{{written}}'\ntarget_delimiter: ''\nmetric_list: [{metric: exact_match}]\n"
            'generation_kwargs: {until: [" fox", "\\n"], max_gen_toks: 8}\n'
            f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: '{tasks / name}.jsonl'}}}}\n"
        )
    words = [str(folder / "model"), "--include_path", str(tasks), *ROWS, "--json", "--lm_eval"]
    chat = ["--apply_chat_template", "--system_instruction", "be brief"]
    chat += ["--training.chat_template", str(folder / "template.jinja")]
    assert found_by(evaluate(*words, "plain", ranks=2))["lm_eval"]["plain"]["exact_match"] == 1
    assert found_by(evaluate(*words, "chat", *chat))["lm_eval"]["chat"]["exact_match"] == 1
    assert found_by(evaluate(*words, "chat"))["lm_eval"]["chat"]["exact_match"] < 0.5
    code, output = evaluate(*words, "chat", *chat[:1])
    assert code == 2 and "--apply_chat_template: the tokenizer has no chat template" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, -signal.SIGUSR1)]
)
def test_a_signal_ends_an_evaluation_at_once(number: signal.Signals, code: int, folder: Path, tmp_path: Path) -> None:
    row = (folder / "long.jsonl").read_text().splitlines()[0]
    (tmp_path / "much.jsonl").write_text(f"{row}\n" * 100_000)
    python = [sys.executable, "-m", "torchtitan_graph.evaluate", str(folder / "model")]
    words = ["--set", f"much={tmp_path / 'much.jsonl'}", "--validation.steps", "-1", *ROWS, "--compile.mode", "eager"]
    run = Command(*python, *words)
    while "validation data: " not in run.output():
        assert run.process.poll() is None, run.output()
        time.sleep(0.1)
    time.sleep(2)
    run.process.send_signal(number)
    assert run.finish(timeout_s=3).code == code
    assert "Traceback" not in run.output()
