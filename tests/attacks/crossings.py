"""Cross options at random, as a user could set them, and run each crossing by the trainer's command, with tiny models:

    python tests/attacks/crossings.py [--number 40] [--seed 0] [--only 17]

A crossing trains three steps as a graph; then, in a folder of its own, two steps in eager mode, where that is
available, and goes on to the third. All metrics, the checkpoint with the optimizer's state, and the exported weights
must be equal to the bit; or the crossing is refused before its first step, by exit status 2 and no traceback. A line
each is printed, and the command of what is neither.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
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

import torch
from runs import REPOSITORY, records, saved, train

from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.layers.init import allocate
from torchtitan_graph.models.spec import load_family, tiny_config

STEPS, VOCAB = 3, 2048  # steps of a run; tokens of the tests' tokenizer
TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"
# Numbers of a record that are no result of the computation.
TIMES = ("_s", "tps", "tflops", "mfu", "memory", "gib", "goodput", "tokens_per", "peak", "slowest")
TEMPLATE = "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"  # noqa: E501
# Families and flavours, and how a wrapped model differs from transformers' default of its type.
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


class Crossing(NamedTuple):
    """Options of a run, those of them that eager mode has not, and its ranks."""

    words: list[str]
    of_graph: list[str]
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks} x {shlex.join([*self.words, *self.of_graph])}"


class Outcome(NamedTuple):
    what: str  # equal, resumed (no eager mode to compare with), refused; else a fault
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.what not in ("equal", "resumed", "refused")


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
        with torch.device("meta"):
            model = module.Model(tiny_config(module.FLAVORS[flavor], vocab_size=VOCAB, ffn_dim=64), "sdpa")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            allocate(model, torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0, 0.05)
        to_hf(model, folder / name, assets=assets)
    draw = random.Random(0)
    _write(folder / "text.jsonl", [{"text": _say(draw, 3, 120)} for _ in range(200)])
    _write(folder / "chat.jsonl", [{"messages": _turns(draw)} for _ in range(200)])
    _write(folder / "completion.jsonl", [{"prompt": _say(draw), "completion": _say(draw)} for _ in range(200)])
    rows = [{"prompt": _say(draw), "chosen": _say(draw), "rejected": _say(draw)} for _ in range(200)]
    _write(folder / "preference.jsonl", rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _say(draw: random.Random, fewest: int = 2, most: int = 12) -> str:
    words = ["import", "return", "self", "value", "print", "class", "index", "list", "def", "for", "in", "not"]
    return " ".join(draw.choices(words, k=draw.randint(fewest, most)))


def _turns(draw: random.Random) -> list[dict[str, str]]:
    roles = ("user", "assistant") * draw.randint(1, 3)
    return [{"role": role, "content": _say(draw)} for role in roles]


def cross(draw: random.Random, inputs: Path) -> Crossing:
    """Draw a model, its ranks, its data, and some of the other options."""

    def maybe(share: float, *words: str) -> list[str]:
        return list(words) if draw.random() < share else []

    model = draw.choice([*NATIVE, *(f"transformers-{kind}" for kind in WRAPPED)])
    experts, ranks = model in WITH_EXPERTS, draw.choice([1, 1, 1, 2, 2, 2, 3, 4])
    words = [
        "--model.name",
        model.partition("-")[0].removesuffix("_moe"),
        "--model.hf_assets_path",
        f"{inputs}/{model}",
    ]
    words += ["--training.seq_len", "64", "--training.local_batch_size", draw.choice("12"), "--debug.seed", "7"]
    words += _layout(draw, ranks, experts)
    data = draw.choice(["text", "text", "chat", "completion", "preference", "step"])
    words += ["--training.dataset_path", f"{inputs}/{'text' if data == 'step' else data}.jsonl"]
    if data == "preference":
        words += ["--training.format", "preference", "--training.step", "torchtitan_graph.goals.dpo"]
    elif data == "step":
        words += ["--training.step", draw.choice(["crossings.own_step", "torchtitan_graph.goals.distillation"])]
    lora = draw.random() < 0.25
    if lora:
        words += ["--model.lora.rank", "8", "--checkpoint.initial_load_in_hf"]
        words += maybe(0.4, "--model.lora.base", draw.choice(["nf4", "float8"]))
    elif draw.random() < 0.3 or data == "preference":
        words += ["--checkpoint.initial_load_in_hf"]
        words += maybe(0.3, "--model.freeze", "['*norm*']")
    if data in ("preference", "step") and not lora:
        words += ["--reference.path", f"{inputs}/{model}"]
    words += maybe(0.2, "--training.dynamic_seq_len") or maybe(0.15, "--training.one_document_per_row")
    words += maybe(0.2, "--training.epochs", "1")
    words += maybe(0.2, "--training.global_batch_size", "24")
    words += maybe(0.2, "--training.loss_chunks", "3")
    words += maybe(0.3, "--training.mixed_precision_param", "float32")
    words += maybe(0.2, "--model.attn", draw.choice(["varlen", "sdpa", "flex"]))
    words += maybe(0.15, "--optimizer.name", "Muon") or maybe(0.1, "--optimizer.state_dtype", "bfloat16")
    words += maybe(0.2, "--optimizer.ema_decay", "0.9")
    words += maybe(0.15, "--loss.z_loss", "0.001")
    words += maybe(0.3, "--activation_checkpoint.mode", draw.choice(["none", "full", "memory_budget"]))
    words += maybe(0.2, "--metrics.log_expert_loads") if experts else []
    words += maybe(0.25, "--validation.enable") if data != "text" else []
    if model == "deepseek_v3":
        words += maybe(0.4, "--model.num_mtp_layers", "1")
    if experts:
        words += maybe(0.3, "--moe.load_balance_loss", "0.1") + maybe(0.2, "--moe.router_z_loss", "0.01")
        words += maybe(0.3, "--moe.early_scores") + maybe(0.15, "--moe.load_balance_over", "sequence")
    words += _quantized(draw, experts) if draw.random() < 0.2 and not lora else []
    of_graph = maybe(0.2, "--compile.capture", "dynamo")
    of_graph += maybe(0.2, "--compile.optimizer_in_graph") + maybe(0.1, "--compile.dedupe_layers")
    of_graph += maybe(0.15, "--activation_checkpoint.offload", "['layers.*']")
    return Crossing(words, of_graph, ranks)


def _layout(draw: random.Random, ranks: int, experts: bool) -> list[str]:
    """Draw axes whose degrees make the number of ranks, or all but data parallelism's."""
    names = ["tensor", "context", "pipeline", "data_parallel_replicate", "shard"] + ["expert"] * 2 * experts
    words, left = [], ranks
    while left > 1:
        axis, degree = draw.choice(names), 3 if left == 3 else 2
        left //= degree
        if axis == "expert":
            words += ["--parallelism.expert_parallel_degree", str(degree)]
            if draw.random() < 0.3:
                words += ["--parallelism.exchange_dtype", "float8"]
        elif axis == "data_parallel_replicate":
            words += ["--parallelism.data_parallel_replicate_degree", str(degree)]
        elif axis != "shard":
            words += [f"--parallelism.{axis}_parallel_degree", str(degree)]
        if axis == "pipeline" and draw.random() < 0.6:
            schedule = draw.choice(["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
            words += ["--parallelism.pipeline_parallel_schedule", schedule]
        names.remove(axis)
    return words


def _quantized(draw: random.Random, experts: bool) -> list[str]:
    kind, grouped = draw.choice(["float8", "mx"]), experts and draw.random() < 0.6
    if not grouped:
        table = {"float8": "linear.float8", "mx": "linear.mx"}[kind]
        return ["--model.converters", f"['{kind}']", f"--quantize.{table}.emulate"] if kind == "float8" else [
            "--model.converters", "['mx']"
        ]  # fmt: skip
    words = ["--model.converters", f"['quantize.grouped_mm.{kind}']", f"--quantize.grouped_mm.{kind}.fqns"]
    return [*words, "['experts']", f"--quantize.grouped_mm.{kind}.emulate"]


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
    code, output = _run(crossing.words + crossing.of_graph, folder / "graph", crossing.ranks, STEPS)
    if code:
        return _refused(code, output, folder / "graph")
    alike, words = "equal", [*crossing.words, "--compile.mode", "eager"]
    code, output = _run(words, folder / "other", crossing.ranks, STEPS - 1)
    if code and _refused(code, output, folder / "other").what == "refused":
        alike, words = "resumed", crossing.words + crossing.of_graph
        code, output = _run(words, folder / "another", crossing.ranks, STEPS - 1)
    other = folder / ("other" if alike == "equal" else "another")
    if code:
        return Outcome("failed to begin", _last_line(output))
    code, output = _run(words, other, crossing.ranks, STEPS)
    if code:
        return Outcome("failed to go on", _last_line(output))
    for what, of in (("metrics", _metrics), ("checkpoints", _checkpoint), ("exports", _export)):
        expected, found = of(other), of(folder / "graph")
        if different := [f"{key}: {expected.get(key)} and {found.get(key)}" for key in expected.keys() | found.keys()
                         if expected.get(key) != found.get(key)]:  # fmt: skip
            return Outcome(f"other {what} than {words[-1] if alike == 'equal' else 'uninterrupted'}",
                           f"{len(different)} of {len(found)}: {sorted(different)[0]:.200}")  # fmt: skip
    return Outcome(alike)


def _run(words: list[str], folder: Path, ranks: int, steps: int) -> tuple[int, str]:
    always = ["--training.steps", str(steps), "--lr_scheduler.total_steps", str(STEPS), "--checkpoint.enable"]
    always += ["--checkpoint.no-last_save_model_only", "--checkpoint.interval", "100"]
    always += ["--checkpoint.last_save_in_hf"] if "--parallelism.pipeline_parallel_degree" not in words else []
    always += ["--validation.freq", "2", "--validation.steps", "2", "--validation.seq_len", "64"]
    always += ["--training.global_batch_size", "-1"] if "--training.global_batch_size" not in words else []
    try:
        return train("--model.name", "llama3", *always, *words, "--job.dump_folder", str(folder), ranks=ranks)
    except TimeoutError as error:
        return 1, f"{error}"


def _refused(code: int, output: str, folder: Path) -> Outcome:
    with contextlib.suppress(FileNotFoundError):
        if any("loss" in record for record in records(folder)):
            return Outcome("failed after a step", _last_line(output))
    clear = code == 2 and "Traceback" not in output
    return Outcome("refused" if clear else f"failed with {code}", _last_line(output))


def _last_line(output: str) -> str:
    """Return the line of an error: the first after the count of problems, or the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "SIGTERM" not in line]
    errors = [i for i, line in enumerate(lines) if " ERROR " in line]
    if errors and "in the configuration:" in lines[errors[0]]:
        return lines[min(errors[0] + 1, len(lines) - 1)]
    raised = [line for line in lines if "Error" in line and not line.startswith("File")]
    return lines[errors[0]] if errors and not raised else (raised or lines or ["no output"])[-1]


def _metrics(folder: Path) -> dict[str, Any]:
    """Return all numbers that steps computed, by step and name."""
    found: dict[str, Any] = {}
    for record in records(folder):
        flat = _flat(record) if "step" in record else {}
        found |= {f"{record['step']}: {key}": x for key, x in flat.items() if not any(t in key for t in TIMES)}
    return found


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, x in record.items():
        found |= _flat(x, f"{prefix}{key}.") if isinstance(x, dict) else {f"{prefix}{key}": x}
    return found


def _checkpoint(folder: Path) -> dict[str, Any]:
    return {name: x for name, x in saved(folder, STEPS).items() if isinstance(x, tuple)}


def _export(folder: Path) -> dict[str, str]:
    paths = (folder / "checkpoint" / f"step-{STEPS}-hf").glob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one crossing to run, with its whole command")
    options = parser.parse_args()
    counts, faults = Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name) / "inputs"
        inputs.mkdir()
        make_inputs(inputs)
        for i in range(options.number) if options.only is None else [options.only]:
            crossing, began = cross(random.Random(f"{options.seed} {i}"), inputs), time.monotonic()
            outcome = attack(crossing, Path(name) / str(i))
            counts[outcome.what] += 1
            shown = str(crossing).replace(f"{inputs}/", "")
            print(f"{i:4} {time.monotonic() - began:5.0f} s  {outcome.what:9}  {outcome.detail:.300}", flush=True)
            if outcome.is_fault or options.only is not None:
                print(f"     {shown}", flush=True)
                faults.append(shown)
    print(", ".join(f"{what}: {count}" for what, count in counts.most_common()))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
