"""Checks of model.converters and [quantize]."""

from collections.abc import Sequence

from torchtitan_graph.config.job import OPTIONS, ROW_MULTIPLE, JobConfig, get, named
from torchtitan_graph.config.option import nearest, show

LINEARS = ("float8", "quantize.linear.float8")  # two names for one
LINEARS_MX = ("mx", "quantize.linear.mx")  # as well
EXPERTS = "quantize.grouped_mm.float8"
_EXPERTS_MX = "quantize.grouped_mm.mx"
_AUTO = "auto_filter_small_kn"
# Options that don't combine with float8, and the value each must have.
_NOT_TOGETHER = {
    "parallelism.enable_async_tensor_parallel": ("products cut into parts", False),
    "training.enable_cpu_offload": ("parameters in the host's memory", False),
    "compile.codegen": ("code by Inductor", "off"),
    "compile.enable": ("code by Inductor", False),
    "compile.fusions": ("code by Inductor", []),
}


def converts_linears(converters: Sequence[str]) -> bool:
    """Return whether model.converters makes linear layers multiply in float8."""
    return not {*converters}.isdisjoint(LINEARS)


def converts_to_mx(converters: Sequence[str]) -> bool:
    """Return whether model.converters makes linear layers multiply in MX formats."""
    return not {*converters}.isdisjoint(LINEARS_MX)


def converts_experts(converters: Sequence[str]) -> bool:
    """Return whether model.converters makes experts multiply in float8."""
    return EXPERTS in converters


def find_problems(config: JobConfig) -> list[str]:
    """Return the problems of the options for quantization, a line each."""
    converters, problems = named(config, "model.converters"), []
    for name in dict.fromkeys(config.model.converters):
        if name == _EXPERTS_MX:
            problems.append(f"{converters}: {name}: experts are not built in MX formats; remove it, or use {EXPERTS}")
        elif name not in (*LINEARS, *LINEARS_MX, EXPERTS):
            near = nearest(name, [*LINEARS, *LINEARS_MX, EXPERTS])
            hint = f"; did you mean {near}?" if near else ""
            legal = f"{LINEARS[0]}, {LINEARS_MX[0]} and {EXPERTS}"
            problems.append(f"{converters}: {name} is unknown; legal are {legal}{hint}")
    if converts_linears(config.model.converters) and converts_to_mx(config.model.converters):
        problems.append(
            f"{converters}: linear layers can't be converted by both {LINEARS[0]} and {LINEARS_MX[0]}; remove one"
        )
    if problems or not config.model.converters:
        return problems
    problems += not_together(config, f"model.converters = {config.model.converters!r}", "or remove the converter")
    problems += [
        f"{named(config, key)}: {_AUTO} stood for layers that are not worth it on one kind of GPU, which is not known"
        " here; name parts of their names, such as attention.wk"
        for key in ("quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns")
        if _AUTO in get(config, key)
    ]
    is_mx = converts_to_mx(config.model.converters)
    if is_mx or converts_linears(config.model.converters):
        problems += tokens_problems(config, is_mx, "remove model.converters")
    return problems


def tokens_problems(config: JobConfig, is_mx: bool, instead: str) -> list[str]:
    """Return the problems of the number of tokens that a rank's linear layers compute at a time; `instead` is the
    advice."""
    degrees, training = config.parallelism, config.training
    key = "training.local_batch_size"
    if degrees.pipeline_parallel_degree > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
    format_, multiple = ("MXFP8", 32) if is_mx else ("float8", 16)
    rows, asked = get(config, key), f"products in {format_} want a multiple of {multiple}"
    if training.dynamic_seq_len:
        tokens = rows * ROW_MULTIPLE
        least = 2 * multiple if is_mx else multiple  # one block alone is another case to a trace than several
        if tokens % multiple == 0 and tokens >= least:
            return []
        return [
            f"{named(config, 'training.dynamic_seq_len')}: {key} = {rows} of the shortest rows have {tokens} tokens,"
            f" and {asked}, {least} or more; change that, or {instead}"
        ]
    tokens = rows * training.seq_len // degrees.context_parallel_degree
    if tokens % multiple == 0:
        return []
    return [
        f"{named(config, 'training.seq_len')}: a rank computes {tokens} tokens at a time, and {asked}; change it or"
        f" {key}, or {instead}"
    ]


def not_together(config: JobConfig, what: str, instead: str) -> list[str]:
    """Return the options that don't combine with float8 layers, a line each; `what` is the reason, `instead` the
    advice."""
    return [
        f"{named(config, key)}: {what} is not built with {other}; set it to {show(legal)}, {instead}"
        for key, (other, legal) in _NOT_TOGETHER.items()
        if get(config, key) not in (OPTIONS[key].default, legal)
    ]


def unused(config: JobConfig) -> list[str]:
    """Return a notice for each quantization option whose layers are not quantized."""
    done, notices = config.model.converters, []
    tables = (
        ("quantize.linear.float8", "no linear layer", converts_linears(done), LINEARS[0]),
        ("quantize.linear.mx", "no linear layer", converts_to_mx(done), LINEARS_MX[0]),
        ("quantize.grouped_mm.float8", "nothing of experts", converts_experts(done), EXPERTS),
    )
    for table, what, is_done, name in tables:
        keys = [key for key in OPTIONS if key.startswith(f"{table}.") and get(config, key) != OPTIONS[key].default]
        notices += [
            f"{named(config, key)}: {what} is quantised while model.converters does not name {name}"
            for key in keys
            if not is_done
        ]
    return notices
