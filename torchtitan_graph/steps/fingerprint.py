"""The fingerprint of a job's graphs, as words: jobs with equal words have equal graphs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import torchtitan_graph
from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.config.dump import in_toml
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps.held import in_flight
from torchtitan_graph.steps.options import StepOptions, num_replicas

# Options that no stored graph depends on: whole tables, then single ones. Any other counts, also a new one.
_NO_MATTER = (
    "job.",
    "profiling.",
    "metrics.",
    "optimizer.",
    "lr_scheduler.",
    "checkpoint.",
    "comm.",
    "fault_tolerance.",  # the number of replica groups counts, see below
    "samples.",
    "training.global_batch_size",  # the number of microbatches counts, see below
    "training.dataset",
    "training.dataset_path",
    "training.cache_folder",
    "training.cache_gb",
    "training.sources",
    "training.epochs",
    "training.format",
    "training.columns",
    "training.loss_on",
    "training.split_turns",
    "training.unclear_turns",
    "training.too_long",
    "training.chat_template",
    "training.chat_template_kwargs",
    "training.chat_date",
    "training.on_bad_row",
    "training.max_norm",
    "training.skip_leaps",
    "training.roll_back_after",
    "training.most_roll_backs",
    "training.steps",
    "training.dataloader.",
    "validation.dataset",
    "validation.dataset_path",
    "validation.format",
    "validation.columns",
    "validation.sets",
    "validation.best_metric",
    "validation.patience",
    "validation.freq",
    "validation.steps",
    "validation.dataloader.",
    "model.elementwise",  # the layers that it makes one operator count, see below
    "reference.path",  # as of the next
    "model.random_base",
    "model.hf_assets_path",  # its effect on the model is in the model's own configuration
    "parallelism.data_parallel_shard_degree",  # -1 is a number of ranks, see below
    "activation_checkpoint.visualize_memory_budget_pareto",  # the curve is stored
    "compile.precompiled",
    # Code is generated, and the optimizer's step traced, when the run starts.
    "compile.codegen",
    "compile.regions",
    "compile.fusions",
    "compile.dedupe_layers",
    "compile.optimizer_in_graph",
    "compile.cuda_graphs",
    "debug.seed",
)


def fingerprint(
    config: JobConfig,
    model: Decoder,
    dims: ParallelDims,
    options: StepOptions,
    reference: Decoder | None = None,
) -> dict[str, str]:
    """Return all that a job's graphs depend on: the options that matter, the model, the ranks, the device, torch, and
    the sources of this package and of the user's own."""
    set_to = {
        key: in_toml(job.get(config, key))
        for key in job.OPTIONS
        if not any(key == each or (each.endswith(".") and key.startswith(each)) for each in _NO_MATTER)
    }
    pipeline = options.pipeline
    microbatches = pipeline and [in_flight(pipeline, stage) for stage in range(len(pipeline.stages))]
    return {
        **set_to,
        # The modules in compile.fusions are not among them.
        "layers that are an operator each": str(sorted(kind.__name__ for kind in options.fused)),
        "microbatches of a step": str(options.num_microbatches),
        "replica groups": str(num_replicas(config)),  # how few microbatches share what is done once
        "sums over replica groups": in_toml(options.sums_over_replicas),
        # They may come from a file, whose name is not content.
        "the pipeline's stages": str((pipeline.stages, pipeline.rank_of, microbatches) if pipeline else "none"),
        **{f"degree of {axis}": str(degree) for axis, degree in dataclasses.asdict(dims).items()},
        **{f"the model's {key}": str(value) for key, value in vars(model.config).items() if key != "code"},
        "the model's parameters": _hash_of_parameters(model),
        **_of_reference(reference),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        # Another library's models are its source.
        **({"transformers": metadata.version("transformers")} if model.conversion is not None else {}),
        **({"source of the model": _hash_of_source(model.source)} if model.source is not None else {}),
        "device": _describe(options.target.device),
        "source of torchtitan_graph": _hash_of_source(Path(torchtitan_graph.__file__).parent),
        **{f"source of {name}": _hash_of_source(*_files_of(name)) for name in _own_packages(_own_names(config))},
    }


def _of_reference(reference: Decoder | None) -> dict[str, str]:
    if reference is None:
        return {}
    found = {f"the reference's {key}": str(value) for key, value in vars(reference.config).items() if key != "code"}
    kind = type(reference)
    return {
        **found,
        "the reference's class": f"{kind.__module__}.{kind.__qualname__}",
        "the reference's parameters": _hash_of_parameters(reference),
        **({"source of the reference": _hash_of_source(reference.source)} if reference.source is not None else {}),
    }


def _own_names(config: JobConfig) -> list[str]:
    """Return the dotted names of the user's own code that graphs depend on."""
    named = (
        config.model.name,
        config.loss.name,
        config.training.step or "",
        *(each.pass_ for each in config.compile.extra_passes),
    )
    return [name for name in named if "." in name and not name.startswith("torchtitan_graph.")]


def _own_packages(names: Iterable[str]) -> list[str]:
    """Return the user's packages of these dotted names, and those that they import, recursively; not installed ones."""
    found: set[str] = set()
    pending = [name.partition(".")[0] for name in names]
    while pending:
        if (package := pending.pop()) in found:
            continue
        found.add(package)
        for path in _python_files(_files_of(package)):
            pending += filter(_is_own, _imports(path))
    return sorted(found)


def _imports(path: Path) -> list[str]:
    """Return the packages that a file imports; none if it can't be parsed as Python, for then nobody imports it."""
    found: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append(node.module)
    return [name.partition(".")[0] for name in found]


def _is_own(package: str) -> bool:
    """Return whether an import is of a user's file: loaded, and neither Python's nor installed."""
    if package in sys.stdlib_module_names or package in ("torch", "torchtitan_graph") or package not in sys.modules:
        return False
    return not any({"site-packages", "dist-packages"} & {*path.parts} for path in _files_of(package))


def _files_of(package: str) -> list[Path]:
    """Return the paths of a user's module or package: all its files count."""
    module = importlib.import_module(package)
    if hasattr(module, "__path__"):
        return [Path(folder) for folder in module.__path__]
    return [Path(module.__file__)] if module.__file__ else []


def _hash_of_source(*places: Path) -> str:
    found = hashlib.sha256()
    for place in places:
        for path in _python_files([place]):
            found.update(f"{path.relative_to(place)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _python_files(places: Iterable[Path]) -> list[Path]:
    return [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


def _hash_of_parameters(model: nn.Module) -> str:
    """Return a hash of the parameters' names, shapes and requires_grad."""
    all_of_them = [[name, list(p.shape), p.requires_grad] for name, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(all_of_them).encode()).hexdigest()


def _describe(device: torch.device) -> str:
    """Return the device's kind; for a GPU its model, by which torch chooses attention kernels."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_capability(device)}"
