"""Cross options at random, as a user could set them, and run each crossing by the trainer, with tiny models:

    python tests/attacks/crossings.py [--number 40] [--first 0] [--seed 0]

A crossing trains three steps as a graph, or to the end of its one epoch; then, in a folder of its own, all but the last
in eager mode, where that is available, and goes on to the end. All metrics, the checkpoint with the optimizer's state,
and the exported weights must be equal to the bit; or the crossing is refused before its first step, by exit status 2
and no traceback. Crossings that the check of a configuration refuses are drawn again, but for one in TRIED, whose line
must be that of the run too. A line each is printed, with the command of what is neither, and at the end each line of a
refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "e2e")]

import runs
import torch
from groups import groups
from runs import REPOSITORY, TINY, Result, records, run_script, saved, train

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import check, check_beginning, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.layers.init import allocate
from torchtitan_graph.models.spec import load_family, tiny_config

STEPS, VOCAB, TRIED = 3, 2048, 10  # steps of a run; tokens of the tests' tokenizer; one in TRIED refused draws is run
TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"
# Numbers of a record that are no result of the computation.
TIMES = ("_s", "tps", "tflops", "mfu", "memory", "gib", "goodput", "tokens_per", "peak", "slowest")
# With `thinking` the last turn is rendered in another way than the ones before.
TEMPLATE = "{% for m in messages %}<|bos|>{{ m.role }}: {% if thinking and m.role == 'assistant' and loop.last %}self self {% endif %}{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"  # noqa: E501
# Families and flavours.
NATIVE = {
    "llama3": "debugmodel",
    "llama4": "debugmodel",
    "qwen3": "debugmodel",
    "qwen3_moe": "debugmodel_moe",
    "deepseek_v3": "debugmodel",
    "gpt_oss": "debugmodel",
}
WRAPPED = ("gpt2", "qwen3", "mixtral")
WITH_EXPERTS = ("llama4", "qwen3_moe", "deepseek_v3", "gpt_oss", "transformers-mixtral")
# Four layers are enough for stages of a pipeline, and MX formats want multiples of 32.
SIZES = dict(vocab_size=VOCAB, num_layers=4, ffn_dim=64, dense_ffn_dim=64, moe_ffn_dim=64, num_experts=12)
SIZES |= dict(kv_lora_rank=32, nope_dim=16, rope_dim=32, v_dim=16)
TIMEOUT_S = 600  # a run takes seconds; a busy machine takes longer
EAGER = ["--compile.mode", "eager"]


class Crossing(NamedTuple):
    """Options of a run, those of them that eager mode has not, its ranks, and its replica groups (0: no groups)."""

    words: list[str]
    of_graph: list[str]
    ranks: int
    groups: int

    def __str__(self) -> str:
        groups = f"{self.groups} groups of " * bool(self.groups)
        return f"{groups}{self.ranks} x {shlex.join([*self.words, *self.of_graph])}"


class Draw(random.Random):
    def maybe(self, share: float, *words: str) -> list[str]:
        """Return some words in a share of the draws, else none."""
        return list(words) if self.random() < share else []


class Outcome(NamedTuple):
    what: str  # equal, resumed (no eager mode to compare with), refused; else a fault, or timed out
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.what not in ("equal", "resumed", "refused", "timed out")


# --- what is crossed -------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Write models in Hugging Face's format with a tokenizer and a chat template, and small files of each format."""
    torch.manual_seed(0)
    named = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    assets = folder / "assets"
    assets.mkdir()
    (assets / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    (assets / "tokenizer_config.json").write_text(json.dumps(named))
    kinds = [(name, name.removesuffix("_moe"), flavor) for name, flavor in NATIVE.items()]
    kinds += [(f"transformers-{kind}", "transformers", kind) for kind in WRAPPED]
    for name, family, flavor in kinds:
        module = load_family(family)
        config = module.FLAVORS[flavor]
        sizes = {key: size for key, size in SIZES.items() if getattr(config, key, 0)}  # without experts: 0
        with torch.device("meta"):
            model = module.Model(tiny_config(config, **sizes), "sdpa")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            allocate(model, torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0, 0.05)
        to_hf(model, folder / name, assets=assets)
    draw = Draw(0)
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": _say(draw, 3, 120)} for _ in range(200)],
        "chat": [{"messages": _turns(draw)} for _ in range(200)],
        "completion": [{"prompt": _say(draw), "completion": _say(draw)} for _ in range(200)],
        "preference": [{"prompt": _say(draw), "chosen": _say(draw), "rejected": _say(draw)} for _ in range(200)],
    }
    image = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, {"role": "assistant", "content": "a"}]
    bad: dict[str, dict[str, Any]] = {
        "text": {"text": 3},
        "chat": {"messages": image},
        "completion": {"prompt": "value", "completion": ""},
        "preference": {"prompt": "value", "chosen": None, "rejected": "self"},
    }
    for kind, all_rows in rows.items():
        _write(folder / f"{kind}.jsonl", all_rows)
        _write(folder / f"{kind}_few.jsonl", all_rows[: FEW[kind]])
        _write(folder / f"{kind}_bad.jsonl", [bad[kind] if i % 9 == 4 else row for i, row in enumerate(all_rows)])
    with (folder / "table.csv").open("w") as file:
        file.write("question,answer\n")
        file.writelines(f"{row['prompt']},{row['completion']}\n" for row in rows["completion"])
    words = ["--dataset_path", f"{folder}/text.jsonl", "--hf_assets_path", str(assets), "--out", f"{folder}/shards"]
    code, output = run_script("pretokenize.py", *words)
    assert code == 0, output


FEW = {"text": 30, "chat": 50, "completion": 90, "preference": 60}  # rows of an epoch of about two and a half steps


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _say(draw: Draw, fewest: int = 2, most: int = 12) -> str:
    words = ["import", "return", "self", "value", "print", "class", "index", "list", "def", "for", "in", "not"]
    return " ".join(draw.choices(words, k=draw.randint(fewest, most)))


def _turns(draw: Draw) -> list[dict[str, str]]:
    roles = ("system",) * (draw.random() < 0.3) + ("user", "assistant") * draw.randint(1, 3)
    return [{"role": role, "content": _say(draw)} for role in roles]


def cross(draw: Draw, inputs: Path) -> tuple[Crossing, list[str]]:
    """Draw crossings until the check of a configuration accepts one, or refuses one that is tried nevertheless; return
    it, and the lines of all refusals."""
    refusals: list[str] = []
    while True:
        crossing = _cross(draw, inputs)
        if (refusal := refusal_of(crossing, crossing.of_graph)) is None:
            return crossing, refusals
        refusals.append(refusal.replace(f"{inputs}/", ""))
        if draw.randrange(TRIED) == 0:
            return crossing, refusals


def refusal_of(crossing: Crossing, further: list[str]) -> str | None:
    """Return the first problem that the check of a configuration has with a crossing; None if it has none."""
    words = [*_all_words(crossing, [*crossing.words, *further], STEPS), "--job.dump_folder", "/nowhere/outputs"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(crossing.ranks)
    try:
        config = load(["--job.config_file", TINY, *words])
        check(config, crossing.ranks)
        check_beginning(config, is_new=True)
        Blueprint(config, crossing.ranks)
    except UserError as error:
        return _problem(str(error))
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"]
    return None


def _problem(message: str) -> str:
    """Return the first line of a message that names a problem, not how many there are."""
    lines = [line.strip() for line in message.splitlines()]
    return lines[1] if lines[0].endswith("in the configuration:") else lines[0]


def _cross(draw: Draw, inputs: Path) -> Crossing:
    """Draw a model, its ranks, its data, and some of the other options."""
    model = draw.choice([*NATIVE, *(f"transformers-{kind}" for kind in WRAPPED)])
    is_wrapped, experts = model.startswith("transformers"), model in WITH_EXPERTS
    groups = 2 if draw.random() < 0.04 else 0
    ranks = draw.choice([1, 1, 2]) if groups else draw.choice([1, 1, 1, 1, 2, 2, 2, 2, 3, 4])
    words = ["--model.name", model.partition("-")[0].removesuffix("_moe"), "--model.hf_assets_path"]
    words += [f"{inputs}/{model}", "--training.seq_len", "64", "--training.local_batch_size", draw.choice("122")]
    words += ["--debug.seed", "7", *_layout(draw, ranks, experts)]
    data = draw.choice(["text", "text", "chat", "chat", "completion", "table", "shards", "mixture", "preference"])
    words += (of_data := _data(draw, inputs, data))
    step = "torchtitan_graph.goals.dpo" if data == "preference" else draw.choice(
        ["crossings.own_step", "torchtitan_graph.goals.distillation", *[""] * 6]
    )  # fmt: skip
    words += ["--training.step", step] if step else []
    lora = model != "transformers-gpt2" and draw.random() < 0.25  # its layers are no nn.Linear
    freeze = "['*ln*']" if model == "transformers-gpt2" else "['*norm*']"
    if lora:
        words += ["--model.lora.rank", "8", "--checkpoint.initial_load_in_hf", *draw.maybe(0.3, "--model.lora.rslora")]
        words += draw.maybe(0.4, "--model.lora.base", draw.choice(["nf4", "float8"]))
        words += draw.maybe(0.4, "--checkpoint.last_save_adapter")
    elif draw.random() < 0.3 or data == "preference":
        words += ["--checkpoint.initial_load_in_hf", *draw.maybe(0.3, "--model.freeze", freeze)]
    if step.endswith("distillation") or (step.endswith("dpo") and not lora):
        words += ["--reference.path", f"{inputs}/{model}"]
    rest = [*_numbers(draw, bool(step)), *_of_experts(draw, model, "dpo" not in step)] + _validation(draw, inputs, data)
    if "--training.global_batch_size" not in of_data:
        rest += draw.maybe(0.25, "--training.global_batch_size", "12")
    if model == "deepseek_v3" and not step:
        rest += draw.maybe(0.4, "--model.num_mtp_layers", "1")
    if not is_wrapped:
        rest += _quantized(draw, experts) if draw.random() < 0.25 and not lora else []
        rest += draw.maybe(0.1, "--model.elementwise", "fused")
    of_graph = draw.maybe(0.2, "--compile.capture", "dynamo") if not is_wrapped else []
    of_graph += draw.maybe(0.2, "--compile.optimizer_in_graph") + draw.maybe(0.1, "--compile.dedupe_layers")
    of_graph += draw.maybe(0.1, "--activation_checkpoint.offload", "['layers.*']") if not is_wrapped else []
    of_graph += draw.maybe(0.1, "--activation_checkpoint.mode", "memory_budget")
    of_graph += draw.maybe(0.1, "--parallelism.overlap_microbatches")
    return Crossing([*words, *rest], of_graph, ranks, groups)


def _data(draw: Draw, inputs: Path, data: str) -> list[str]:
    """Draw how rows are read and packed."""
    key, words = "--training.dataset_path", draw.maybe(0.2, "--training.dynamic_seq_len")
    words += [] if words or data == "preference" else draw.maybe(0.15, "--training.one_document_per_row")
    if data == "mixture":
        others = draw.sample(["text", "chat", "completion"], 2)
        tables = [f'{{dataset_path = "{inputs}/{other}.jsonl", weight = {i + 1}}}' for i, other in enumerate(others)]
        return [*words, "--training.sources", f"[{', '.join(tables)}]"]
    if data == "shards":
        return [*words, key, f"{inputs}/shards"]
    if data == "table":
        columns = "{prompt = 'question', completion = 'answer'}"
        return [*words, key, f"{inputs}/table.csv", "--training.columns", columns]
    if data != "text":
        words += draw.maybe(0.15, "--training.too_long", "drop")
    if data == "preference":
        words += ["--training.format", "preference"]
    elif data == "chat":
        words += draw.maybe(0.3, "--training.loss_on", draw.choice(["all", "last_assistant"]))
        if draw.random() < 0.5:
            words += ["--training.chat_template_kwargs", "{thinking = true}"]
            words += draw.maybe(0.3, "--training.split_turns", "never", "--training.unclear_turns", "skip")
    rows = draw.choice(["", "", "", "_few", "_bad"])
    if rows == "_few":
        words += ["--training.epochs", "1", "--training.global_batch_size", "12"]
    words += ["--training.on_bad_row", "skip"] if rows == "_bad" and draw.random() < 0.8 else []
    return [*words, key, f"{inputs}/{data}{rows}.jsonl"]


def _validation(draw: Draw, inputs: Path, data: str) -> list[str]:
    """Draw whether, and on what, the model is validated."""
    if draw.random() < 0.7:
        return []
    if data == "preference" or draw.random() < 0.4:
        return ["--validation.enable"]  # on what training holds out
    kind = draw.choice(["text", "chat"])
    if draw.random() < 0.6:
        of_kind = ["--validation.format", kind] if data == "table" else []  # else read by training.columns
        return ["--validation.enable", "--validation.dataset_path", f"{inputs}/{kind}.jsonl", *of_kind]
    other = f'dataset_path = "{inputs}/{kind}.jsonl", format = "{kind}", steps = 1'
    of_sets = f'[{{name = "held_out"}}, {{name = "other", {other}}}]'
    return ["--validation.enable", "--validation.sets", of_sets]


def _numbers(draw: Draw, own_step: bool) -> list[str]:
    """Draw options of the loss, the optimizer, the precision and the memory."""
    words: list[str] = []
    if not own_step:
        words += draw.maybe(0.2, "--training.loss_chunks", "3") + draw.maybe(0.15, "--loss.z_loss", "0.001")
        words += draw.maybe(0.1, "--loss.label_smoothing", "0.1")
    words += draw.maybe(0.3, "--training.mixed_precision_param", "float32")
    words += draw.maybe(0.25, "--model.attn", draw.choice(["varlen", "sdpa", "flex"]))
    optimizers = ["Muon", "Muon", "Adam", "torch.optim.SGD", "my_optimizers.Lion"]
    words += draw.maybe(0.3, "--optimizer.name", draw.choice(optimizers))
    words += draw.maybe(0.1, "--optimizer.state_dtype", "bfloat16") + draw.maybe(0.2, "--optimizer.ema_decay", "0.9")
    words += draw.maybe(0.3, "--activation_checkpoint.mode", draw.choice(["none", "full"]))
    words += draw.maybe(0.1, "--activation_checkpoint.selective_ac_option", "op")
    words += draw.maybe(0.1, "--parallelism.fsdp_reshard_after_forward", draw.choice(["always", "never"]))
    words += draw.maybe(0.1, "--parallelism.fsdp_once_a_step", "all")
    words += draw.maybe(0.1, "--parallelism.disable_loss_parallel")
    return words + draw.maybe(
        0.1, "--samples.prompts", "['import self']", "--samples.freq", "1", "--samples.length", "4"
    )


def _of_experts(draw: Draw, model: str, terms: bool) -> list[str]:
    """Draw options of mixtures of experts; `terms`: whether the step adds losses of routers."""
    if model not in WITH_EXPERTS:
        return []
    words = draw.maybe(0.2, "--metrics.log_expert_loads")
    if terms:
        words += draw.maybe(
            0.3, "--moe.load_balance_loss", "0.1", *draw.maybe(0.4, "--moe.load_balance_over", "sequence")
        )
        words += draw.maybe(0.2, "--moe.router_z_loss", "0.01")
    if model in ("qwen3_moe", "deepseek_v3"):
        words += draw.maybe(0.3, "--moe.early_scores")
    return words


def _layout(draw: Draw, ranks: int, experts: bool) -> list[str]:
    """Draw axes whose degrees make the number of ranks, or all but data parallelism's."""
    names = ["tensor", "context", "pipeline", "data_parallel_replicate", "shard"] + ["expert"] * 2 * experts
    words, left = [], ranks
    while left > 1:
        axis, degree = draw.choice(names), 3 if left == 3 else draw.choice([2, left])
        left //= degree
        if axis == "expert":
            words += ["--parallelism.expert_parallel_degree", str(degree), *_exchange(draw, degree)]
        elif axis == "data_parallel_replicate":
            words += ["--parallelism.data_parallel_replicate_degree", str(degree)]
        elif axis != "shard":
            words += [f"--parallelism.{axis}_parallel_degree", str(degree)]
        if axis == "pipeline" and draw.random() < 0.6:
            schedule = draw.choice(["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
            words += ["--parallelism.pipeline_parallel_schedule", schedule]
        names = [name for name in names if name != axis]
    return words


def _exchange(draw: Draw, degree: int) -> list[str]:
    """Draw how tokens reach the ranks of their experts."""
    words = draw.maybe(0.35, "--parallelism.exchange_dtype", "float8")
    if draw.random() < 0.5:
        words += ["--parallelism.expert_exchange", "by_machine"]
        words += ["--parallelism.ranks_per_machine", draw.choice(["1", str(max(1, degree // 2))])]
        words += draw.maybe(0.3, "--parallelism.exchange_sums", "by_machine")
    return words


def _quantized(draw: Draw, experts: bool) -> list[str]:
    kind, grouped = draw.choice(["float8", "mx"]), experts and draw.random() < 0.6
    if not grouped:
        recipe = draw.choice(["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"])
        of_float8 = ["--quantize.linear.float8.recipe_name", recipe] if kind == "float8" else []
        return ["--model.converters", f"['{kind}']", *of_float8]
    words = ["--model.converters", f"['quantize.grouped_mm.{kind}']"]
    return [*words, f"--quantize.grouped_mm.{kind}.fqns", "['experts']"]


def own_step(model: Any, batch: Any) -> Any:
    """Cross entropy, and a smaller part of that of masked tokens."""
    masked_BL = torch.where(batch.positions_BL % 7 == 6, 0, batch.tokens_BL)
    noisy = _entropy(model(batch._replace(tokens_BL=masked_BL)), batch.labels_BL)
    return _entropy(model(batch), batch.labels_BL) + 0.1 * noisy, {"noisy": noisy}


def _entropy(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    logits = logits_BLV.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels_BL.flatten(), reduction="sum")


# --- a crossing's runs -----------------------------------------------------------------------------------------------


def attack(crossing: Crossing, folder: Path) -> Outcome:
    """Run a crossing, and return what became of it."""
    try:
        return _attack(crossing, folder)
    except TimeoutError as error:
        return Outcome("timed out", _last_line(str(error)))


def _attack(crossing: Crossing, folder: Path) -> Outcome:
    words, graph = [*crossing.words, *crossing.of_graph], folder / "graph"
    code, output = _run(crossing, words, graph, STEPS)
    if code:
        return _refused(code, output, graph)
    last = max(record["step"] for record in _records(graph) if "loss" in record)
    alike, other = "resumed", folder / "other"
    if refusal_of(crossing, EAGER) is None:
        alike, words = "equal", [*crossing.words, *EAGER]
    for steps in (last - 1, STEPS) if last > 1 else (STEPS,):
        code, output = _run(crossing, words, other, steps)
        if code and _refused(code, output, other).what == "refused" and alike == "equal":
            alike, words, other = "resumed", [*crossing.words, *crossing.of_graph], folder / "another"
            code, output = _run(crossing, words, other, steps)
        if code:
            return Outcome(f"failed {'to go on' if steps == STEPS else 'to begin'}", _last_line(output))
    for what, of in (("metrics", _metrics), ("checkpoints", _checkpoint), ("exports", _export)):
        expected, found = of(other, last), of(graph, last)
        if different := [f"{key}: {expected.get(key)} and {found.get(key)}" for key in expected.keys() | found.keys()
                         if expected.get(key) != found.get(key)]:  # fmt: skip
            return Outcome(f"other {what} than {'eager' if alike == 'equal' else 'uninterrupted'}",
                           f"{len(different)} of {len(found)}: {sorted(different)[0]:.200}")  # fmt: skip
    return Outcome(alike)


def _all_words(crossing: Crossing, words: list[str], steps: int) -> list[str]:
    """Return the options of a run, with those that all crossings have in common."""
    always = ["--training.steps", str(steps), "--lr_scheduler.total_steps", str(STEPS), "--checkpoint.enable"]
    always += ["--checkpoint.no-last_save_model_only", "--checkpoint.interval", "100"]
    always += ["--checkpoint.last_save_in_hf"] if "--parallelism.pipeline_parallel_degree" not in words else []
    always += [
        "--comm.train_timeout_seconds",
        str(TIMEOUT_S),
        "--validation.freq",
        "1",
        "--validation.steps",
        "2",
        "--validation.seq_len",
        "64",
    ]
    always += ["--training.global_batch_size", "-1"] if "--training.global_batch_size" not in words else []
    if crossing.groups:
        always += ["--fault_tolerance.enable", "--fault_tolerance.replicas", str(crossing.groups)]
        for option in ("timeout_seconds", "heartbeat_timeout_seconds"):
            always += [f"--fault_tolerance.{option}", str(TIMEOUT_S)]
    return [*always, *words]


def _run(crossing: Crossing, words: list[str], folder: Path, steps: int) -> Result:
    words = _all_words(crossing, words, steps)
    if not crossing.groups:
        return train(*words, "--job.dump_folder", str(folder), ranks=crossing.ranks)
    with groups(folder, *words, ranks=crossing.ranks, number=crossing.groups) as run:
        run.start(*range(crossing.groups))
        results = [group.finish() for group in run.running.values()]
    return max(results, key=lambda result: result.code)


def _refused(code: int, output: str, folder: Path) -> Outcome:
    with contextlib.suppress(FileNotFoundError):
        if any("loss" in record for record in _records(folder)):
            return Outcome("failed after a step", _last_line(output))
    clear = code == 2 and "Traceback" not in output
    return Outcome("refused" if clear else f"failed with {code}", _last_line(output))


def _last_line(output: str) -> str:
    """Return the line of an error: the first after the count of problems, or the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "SIGTERM" not in line]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    if errors and "in the configuration:" in lines[errors[0]]:
        return lines[min(errors[0] + 1, len(lines) - 1)]
    raised = [line for line in lines if "Error" in line and " INFO " not in line and not line.startswith("File")]
    return lines[errors[0]] if errors and not raised else (raised or lines or ["no output"])[-1]


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return all records of a run, or of each of its replica groups."""
    return [record for path in sorted(folder.rglob("metrics.jsonl")) for record in records(path.parent)]


def _metrics(folder: Path, _: int) -> dict[str, Any]:
    """Return all numbers that steps computed, by replica group, step and name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("metrics.jsonl")):
        group = path.parent.relative_to(folder)
        for record in records(path.parent):
            flat = _flat(record) if "step" in record else {}
            results = {key: x for key, x in flat.items() if not any(word in key for word in TIMES)}
            found |= {f"{group} {record['step']}: {key}": x for key, x in results.items()}
    return found


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, x in record.items():
        found |= _flat(x, f"{prefix}{key}.") if isinstance(x, dict) else {f"{prefix}{key}": x}
    return found


def _checkpoint(folder: Path, last: int) -> dict[str, Any]:
    return {name: x for name, x in saved(folder, last).items() if isinstance(x, tuple)}


def _export(folder: Path, last: int) -> dict[str, str]:
    paths = (folder / "checkpoint").glob(f"step-{last}-*/**/*.safetensors")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first crossing of the seed to run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, refusals, faults = Counter[str](), Counter[str](), 0
    # What a fork would import itself, in seconds: for the tokenizer's templates, wrapped models and exports.
    runs.TIMEOUT_S = TIMEOUT_S
    preload = ["torchtitan_graph.train", "torch._dynamo", "torchtitan_graph.transformers_private"]
    runs._fork.set_forkserver_preload(preload)
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name) / "inputs"
        inputs.mkdir()
        make_inputs(inputs)
        for i in range(options.first, options.first + options.number):
            crossing, refused = cross(Draw(f"{options.seed} {i}"), inputs)
            began, outcome = time.monotonic(), attack(crossing, Path(name) / str(i))
            if outcome.what == "timed out":  # under load; once more
                outcome = attack(crossing, Path(name) / f"{i} again")
            counts[outcome.what] += 1
            refusals.update(map(_pattern, refused))
            faults += outcome.is_fault
            detail = outcome.detail.replace(f"{inputs}/", "")
            print(f"{i:4} {time.monotonic() - began:5.0f} s  {outcome.what:9}  {detail:.300}", flush=True)
            if outcome.what not in ("equal", "resumed", "refused"):
                print("     " + str(crossing).replace(f"{inputs}/", ""), flush=True)
    print(", ".join(f"{what}: {count}" for what, count in counts.most_common()))
    for line, count in refusals.most_common():
        print(f"{count:5} refused: {line}")
    return bool(faults)


def _pattern(line: str) -> str:
    """Return a refusal's line without its numbers."""
    return re.sub(r"\d+", "N", line)


if __name__ == "__main__":
    sys.exit(main())
