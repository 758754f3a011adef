"""Checks of model.converters and [quantize]."""

from collections.abc import Sequence

from torchtitan_graph.config.job import OPTIONS, JobConfig, get, named
from torchtitan_graph.config.option import show

CONVERTERS = ("float8", "quantize.linear.float8")  # two names for one
_TABLE = "quantize.linear.float8."
_NOT_BUILT = {
    "mx": "MX formats are",
    "quantize.linear.mx": "MX formats are",
    "quantize.grouped_mm.mx": "MX formats are",
    "quantize.grouped_mm.float8": "products of experts in float8 are",
}
# What can't be set beside float8, and to what instead.
_NOT_TOGETHER = {
    "parallelism.pipeline_parallel_degree": ("a pipeline's stages", 1),
    "parallelism.enable_async_tensor_parallel": ("products cut into parts", False),
    "training.enable_cpu_offload": ("parameters in the host's memory", False),
    "compile.codegen": ("code by Inductor", "off"),
    "compile.enable": ("code by Inductor", False),
    "compile.fusions": ("code by Inductor", []),
}


def is_float8(converters: Sequence[str]) -> bool:
    """Return whether by model.converters linear layers multiply in float8."""
    return not {*converters}.isdisjoint(CONVERTERS)


def find_problems(config: JobConfig) -> list[str]:
    """Return what is wrong with how a model is to be quantised, a line each."""
    converters, problems = named(config, "model.converters"), []
    for name in dict.fromkeys(config.model.converters):
        if name in _NOT_BUILT:
            problems.append(f"{converters}: {name}: {_NOT_BUILT[name]} not built; remove it, or use float8")
        elif name not in CONVERTERS:
            problems.append(f"{converters}: {name} is unknown; legal is {CONVERTERS[0]}")
    if problems or not is_float8(config.model.converters):
        return problems
    for key, (what, instead) in _NOT_TOGETHER.items():
        if get(config, key) != OPTIONS[key].default and get(config, key) != instead:
            problems.append(
                f"{named(config, key)}: model.converters = ['float8'] is not built with {what}; set it to"
                f" {show(instead)}, or remove the converter"
            )
    degrees, training = config.parallelism, config.training
    tokens = training.local_batch_size * training.seq_len // degrees.context_parallel_degree
    if tokens % 16:
        problems.append(
            f"{named(config, 'training.seq_len')}: a rank computes {tokens} tokens at a time, and products in float8"
            " want a multiple of 16; change it or training.local_batch_size, or remove model.converters"
        )
    return problems


def unused(config: JobConfig) -> list[str]:
    """Return the notices about options that are set while nothing is quantised."""
    if is_float8(config.model.converters):
        return []
    keys = [key for key, option in OPTIONS.items() if key.startswith(_TABLE) and get(config, key) != option.default]
    return [f"{named(config, key)}: nothing is quantised while model.converters does not name float8" for key in keys]
