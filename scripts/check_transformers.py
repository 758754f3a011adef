#!/usr/bin/env python3
"""Check every type of causal language model in the installed transformers as a family of torchtitan_graph.

Each type is built from its default configuration with a few thousand weights, random ones, and then:

  built     on meta, its masks and layers found; else the reason why it is refused
  logits    in fp64, of packed documents: equal to transformers' own model on one document after the other (1e-5)
  files     transformers' folder is read, and what is written is its files again, to the bit
  graph     three optimizer steps in fp32 equal plain autograd, and in bf16 on 2 ranks FSDP2's, to the bit
  TP ... PP on 2 ranks in fp64, losses and gradients of three steps equal one rank's (1e-12); "-": not in its plan

    python scripts/check_transformers.py [--layouts TP,CP,EP,PP] [--out TABLE.md] [TYPE ...]

A type takes 10 seconds, with all layouts 30. The exit status is 1 if anything is neither right nor refused by name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from torchtitan_graph.check import family as checks
from torchtitan_graph.check.matrix import (
    BF16,
    FP64,
    Cell,
    build_graph,
    build_plain,
    far_apart,
    gathered,
    global_rows,
    train,
)
from torchtitan_graph.check.pool import run_on
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import transformers as family
from torchtitan_graph.models.hf import load_weights, save_weights
from torchtitan_graph.models.layers.init import allocate
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.optim import build_lr_scheduler
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.transformers_private import model_types

VOCAB = 509
STEPS = 3
TIMEOUT_S = 300.0
LAYOUTS = {
    "TP": ParallelDims(tp=2),
    "CP": ParallelDims(cp=2),
    "EP": ParallelDims(dp_shard=2, ep=2),
    "PP": ParallelDims(pp=2),
    "PP x FSDP": ParallelDims(pp=2, dp_shard=2),
}
COLUMNS = ("built", "logits", "files", "graph")


class No(Exception):
    """A type that is not supported, and why."""


# Sizes that belong together, where those of other types don't fit: keys of config.json.
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("ministral", "nemotron", "hunyuan_v1_dense", "hunyuan_v1_moe"), {"num_key_value_heads": 2, "head_dim": 16}
    ),
    **dict.fromkeys(("gptj", "codegen"), {"rotary_dim": 8}),
    **dict.fromkeys(("mamba", "falcon_mamba"), {"intermediate_size": 128}),
    **dict.fromkeys(("bamba", "granitemoehybrid"), {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}),
    **dict.fromkeys(("axk1", "bailing_hybrid"), {"n_group": 2, "topk_group": 1}),
    "dots1": {"n_routed_experts": 6},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 64},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
}


def changes_of(kind: str) -> dict[str, Any]:
    """Return the fields of a type's small configuration that are not those of all families."""
    config = family.FLAVORS[kind]
    small = SMALL.get(kind, {})
    fields = {ours: small[theirs] for ours, theirs in family.SIZES.items() if theirs in small}
    return {"rest": json.dumps(json.loads(config.rest) | small), **fields}


def attention_of(kind: str) -> str:
    """Return the attention that a type is checked with: a soft cap of scores needs flex."""
    capped = getattr(family.FLAVORS[kind].of_transformers(), "attn_logit_softcapping", None)
    return "flex" if capped else "sdpa"


def cell_of(kind: str, **changes: Any) -> Cell:
    fields = changes_of(kind)
    given = {"ffn_dim": fields.pop("ffn_dim")} if "ffn_dim" in fields else {}
    return Cell(
        family="transformers",
        flavor=kind,
        attn=attention_of(kind),
        num_steps=STEPS,
        changes=tuple(fields.items()),
        **given,
        **changes,
    )


def check_logits(kind: str) -> str:
    """Compare with transformers' own model, through its files; return the largest difference."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family.FLAVORS[kind], vocab_size=VOCAB, **changes_of(kind))
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(
        config.of_transformers(), dtype=torch.float32, experts_implementation="eager"
    )
    stock = stock.double().eval()  # its tables as we have them: computed in fp32
    with torch.no_grad():  # as they begin, norms and biases are all alike; some are kept in fp32
        for parameter in stock.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    with tempfile.TemporaryDirectory() as folder:
        model = _through_files(stock, Path(folder), attention_of(kind))
    rows = global_rows(VOCAB, step=1)
    gap = 0.0
    with torch.no_grad():
        if model.mixes_documents is None:
            masks = model.masks(rows.documents_BL, rows.positions_BL)
            logits_BLV = model(rows.tokens_BL, rows.positions_BL, masks)
        for i, (tokens_L, documents_L) in enumerate(zip(rows.tokens_BL[:4], rows.documents_BL[:4], strict=True)):
            for document in documents_L.unique():
                is_its_L = documents_L == document
                one_1L = tokens_L[is_its_L].unsqueeze(0)
                alone_LV = stock(input_ids=one_1L, use_cache=False).logits[0]
                ours_LV = logits_BLV[i][is_its_L] if model.mixes_documents is None else model(one_1L)[0]
                gap = max(gap, float((alone_LV - ours_LV).abs().max() / alone_LV.abs().max()))
    if not gap < 1e-5:
        raise AssertionError(f"logits differ by {gap:.1g}")
    return f"{gap:.0e}" + ("" if model.mixes_documents is None else ", one document a row")


def _through_files(stock: Any, folder: Path, attn: str) -> Any:
    first, second = folder / "first", folder / "second"
    stock.save_pretrained(first)
    with torch.device("meta"):
        model = family.Model(family.from_hf_config(json.loads((first / "config.json").read_text())), attn)
    allocate(model, torch.float64)
    load_weights(model, family, first)
    save_weights(model, family, second)
    if not (second / "model.safetensors").exists():
        raise No("its default configuration can't be made small")
    files = [safe_open(path / "model.safetensors", framework="pt") for path in (first, second)]
    names = [set(file.keys()) for file in files]
    if names[0] != names[1]:
        raise AssertionError(f"other names are written: {sorted(names[0] ^ names[1])[:4]}")
    if unequal := [n for n in names[0] if not torch.equal(*(file.get_tensor(n).double() for file in files))]:
        raise AssertionError(f"other numbers are written: {unequal[:4]}")
    again = type(stock).from_pretrained(second, dtype=torch.float64).state_dict()
    if unequal := [n for n, x in stock.state_dict().items() if not torch.equal(x.double(), again[n].double())]:
        raise AssertionError(f"transformers reads other numbers: {unequal[:4]}")
    return model


def check_graph(kind: str) -> str:
    one = cell_of(kind)
    (differing,) = run_on(1, checks._differ_from, one, checks._plain, timeout=TIMEOUT_S)
    _none("one rank, fp32", differing)
    two = cell_of(kind, dims=ParallelDims(dp_shard=2), precision=BF16)
    for differing in run_on(2, checks._differ_from, two, checks._eager, timeout=TIMEOUT_S):
        _none("FSDP 2, bf16", differing)
    return "yes"


def check_layout(dims: ParallelDims, kind: str) -> str:
    cell = cell_of(kind, dims=dims, precision=FP64, num_microbatches=dims.pp)
    try:
        checks.skip_unless_planned(cell)
    except checks.Skipped as reason:
        raise No(str(reason)) from None
    (expected,) = run_on(1, _gradients_of_one, dataclasses.replace(cell, dims=ParallelDims()), timeout=TIMEOUT_S)
    for found in run_on(dims.num_ranks, _gradients, cell, timeout=TIMEOUT_S):
        counted = {name: x for name, x in found.items() if not (_is_zero(expected, name) and _is_zero(found, name))}
        _none("one rank's numbers", far_apart({name: expected[name] for name in counted}, counted, checks.TOLERANCE))
    return "yes"


def _gradients(cell: Cell) -> dict[str, Tensor]:
    """Return losses, norms and gradients of steps of gradient descent. Adam would divide the rounding errors of
    gradients near zero by them."""
    steps = build_graph(cell)
    return _without_parameters(gathered(cell, train(cell, steps, using=_descent(steps))))


def _gradients_of_one(cell: Cell) -> dict[str, Tensor]:
    steps = build_plain(cell)
    return _without_parameters(train(cell, steps, using=_descent(steps)))


def _descent(steps: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(steps.model.parameters(), lr=0.1)
    return optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), STEPS)


def _without_parameters(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in seen.items() if not name.startswith("parameter ")}


def _is_zero(seen: dict[str, Tensor], name: str) -> bool:
    """Return whether a gradient is zero but for rounding, as that of keys' biases without rotary embeddings."""
    largest = max(float(x.abs().max()) for other, x in seen.items() if ": gradient of " in other)
    return ": gradient of " in name and bool(seen[name].abs().max() < 1e-12 * largest)


def _none(what: str, differing: list[str]) -> None:
    if differing:
        raise AssertionError(f"{what}: {', '.join(differing[:2])} differ, of {len(differing)}")


def check_type(kind: str, layouts: list[str]) -> dict[str, str]:
    """Return the results by column: "yes", "-", a number, or "no: WHY" where it is refused, "FAULT: WHY" where not."""
    results: dict[str, str] = {}

    def note(column: str, run: Callable[[str], str]) -> bool:
        try:
            results[column] = run(kind)
        except (UserError, No) as error:
            results[column] = f"no: {_line(error)}"
        except Exception as error:
            report = getattr(error, "first", None) or str(error)
            results[column] = f"FAULT: {type(error).__name__}: {_line(report)}"
            if "UserError: " in report:  # raised on a rank
                results[column] = f"no: {_line(report.rpartition('UserError: ')[2])}"
        return not results[column].startswith(("no", "FAULT"))

    def built(kind: str) -> str:
        with torch.device("meta"):
            model = family.Model(
                tiny_config(family.FLAVORS[kind], vocab_size=VOCAB, **changes_of(kind)), attention_of(kind)
            )
        return "yes" if model.mixes_documents is None else "yes, one document a row"

    if note("built", built):
        if note("logits", check_logits):
            results["files"] = "yes"
        if note("graph", check_graph):
            for name in layouts:
                note(name, partial(check_layout, LAYOUTS[name]))
    return results


def _line(error: object) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (lines[-1] if len(lines) > 5 else " ".join(lines) or type(error).__name__)[:300]


def table(every: dict[str, dict[str, str]], layouts: list[str]) -> str:
    columns = [*COLUMNS, *layouts]
    yes = sum(not any(results.get(name, "no")[:2] in ("no", "FA") for name in COLUMNS) for results in every.values())
    lines = [
        "# Model types of transformers",
        "",
        "Read this page to see what was checked of a model type, and why one is refused.",
        "",
    ]
    lines += [
        f"Written by `scripts/check_transformers.py`, with transformers {transformers.__version__} and torch",
        f"{torch.__version__.partition('+')[0]}: {yes} of {len(every)} types pass all of {', '.join(COLUMNS)}. Its",
        "`--help` says what each column is. A type is checked with its default configuration made small; some have no",
        "complete one. A dash is a layout that the model has no plan for, an empty place one that was not checked.",
        "",
    ]
    lines += ["| type | " + " | ".join(columns) + " | why not |", "|---" * (len(columns) + 2) + "|"]
    for kind, results in every.items():
        words = {name: x.partition(":")[0] for name, x in results.items()}
        words |= {name: "-" for name in layouts if words.get(name) == "no"}
        of_type = {name: x for name, x in results.items() if name not in layouts or x.startswith("FA")}
        why = dict.fromkeys(x.partition(": ")[2].replace("|", "/") for x in of_type.values() if x[:2] in ("no", "FA"))
        lines.append(f"| {kind} | " + " | ".join(words.get(name, "") for name in columns) + f" | {'; '.join(why)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; none: all")
    parser.add_argument("--layouts", default="", help=f"of {', '.join(LAYOUTS)}: several as TP,PP")
    parser.add_argument("--out", type=Path, help="file for the table, written after each type")
    options = parser.parse_args()
    layouts = [name for name in options.layouts.split(",") if name]
    if unknown := {*layouts} - {*LAYOUTS} or {*options.types} - {*model_types()}:
        parser.error(f"{', '.join(sorted(unknown))}: unknown; layouts are {', '.join(LAYOUTS)}")
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    every: dict[str, dict[str, str]] = {}
    for kind in options.types or model_types():
        begin = time.perf_counter()
        with contextlib.redirect_stderr(None):
            every[kind] = check_type(kind, layouts)
        shown = "; ".join(f"{name} {x}" for name, x in every[kind].items())
        print(f"{kind} ({time.perf_counter() - begin:.0f} s): {shown}", flush=True)
        if options.out:
            options.out.write_text(table(every, layouts) + "\n", encoding="utf-8")
    faults = [kind for kind, results in every.items() if any(x.startswith("FAULT") for x in results.values())]
    refused = [k for k, r in every.items() if k not in faults and any(r.get(c, "no").startswith("no") for c in COLUMNS)]
    print(
        f"transformers {transformers.__version__}: {len(every)} types, {len(every) - len(refused) - len(faults)} yes, "
        f"{len(refused)} refused by name, {len(faults)} other: {', '.join(faults) or 'none'}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
