"""Checks of model.converters and [quantize]."""

from collections.abc import Iterator, Sequence

from torchtitan_graph.config.job import OPTIONS, ROW_MULTIPLE, JobConfig, Problem, get, unused
from torchtitan_graph.config.option import show
from torchtitan_graph.nearest import did_you_mean

LINEARS = ("float8", "quantize.linear.float8")  # two names for one
LINEARS_MX = ("mx", "quantize.linear.mx")  # as well
EXPERTS = "quantize.grouped_mm.float8"
EXPERTS_MX = "quantize.grouped_mm.mx"
_ALSO_CALLED = {"fp8": LINEARS[0], "mxfp8": LINEARS_MX[0]}
_AUTO = "auto_filter_small_kn"
# Options that don't combine with float8, and the value each must have.
_NOT_TOGETHER = {
    "parallelism.enable_async_tensor_parallel": ("products cut into parts", False),
    "training.enable_cpu_offload": ("parameters in the host's memory", False),
    "compile.codegen": ("code by Inductor", "off"),
    "compile.fusions": ("code by Inductor", []),
}


def converts_linears(converters: Sequence[str]) -> bool:
    """Return whether model.converters makes linear layers multiply in float8."""
    return not {*converters}.isdisjoint(LINEARS)


def converts_to_mx(converters: Sequence[str]) -> bool:
    """Return whether model.converters makes linear layers multiply in MX formats."""
    return not {*converters}.isdisjoint(LINEARS_MX)


def problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the options for quantization."""
    converters, key = config.model.converters, "model.converters"
    known = (*LINEARS, *LINEARS_MX, EXPERTS, EXPERTS_MX)
    for name in dict.fromkeys(converters):
        if name not in known:
            legal = f"{LINEARS[0]}, {LINEARS_MX[0]}, {EXPERTS} and {EXPERTS_MX}"
            whole = next((each for each in (EXPERTS, EXPERTS_MX) if name and each.endswith(f".{name}")), name)
            hint = did_you_mean(_ALSO_CALLED.get(name, whole), known)
            yield Problem(key, f"{name} is unknown; legal are {legal}{hint}")
    is_mx, is_float8 = converts_to_mx(converters), converts_linears(converters)
    twice = [
        (what, one, other)
        for what, one, other, is_twice in (
            ("linear layers", LINEARS[0], LINEARS_MX[0], is_float8 and is_mx),
            ("experts", EXPERTS, EXPERTS_MX, {EXPERTS, EXPERTS_MX} <= {*converters}),
        )
        if is_twice
    ]
    for what, one, other in twice:
        yield Problem(key, f"{what} can't be converted by both {one} and {other}; remove one")
    if not converters or not {*converters} <= {*known} or twice:
        return
    yield from not_together(config, f"model.converters = {converters!r}", "or remove the converter")
    for filters in ("quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns"):
        if _AUTO in get(config, filters):
            yield Problem(
                filters,
                f"{_AUTO} stood for layers that are not worth it on one kind of GPU, which is not known here; name"
                " parts of their names, such as attention.wk",
            )
    if is_mx or is_float8:
        yield from tokens_problems(config, is_mx, "remove model.converters")


def tokens_problems(config: JobConfig, is_mx: bool, instead: str) -> Iterator[Problem]:
    """Yield the problem of the number of tokens that a rank's linear layers compute at a time, if there is one;
    `instead` is the advice."""
    degrees, training = config.parallelism, config.training
    key = "training.local_batch_size"
    if degrees.pipeline_parallel_degree > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
    format_, multiple = ("MXFP8", 32) if is_mx else ("float8", 16)
    rows, asked = get(config, key), f"products in {format_} want a multiple of {multiple}"
    if training.dynamic_seq_len:
        tokens = rows * ROW_MULTIPLE
        least = 2 * multiple if is_mx else multiple  # one block alone is another case to a trace than several
        if tokens % multiple or tokens < least:
            yield Problem(
                "training.dynamic_seq_len",
                f"{key} = {rows} of the shortest rows have {tokens} tokens, and {asked}, {least} or more; change that,"
                f" or {instead}",
            )
    elif (tokens := rows * training.seq_len // degrees.context_parallel_degree) % multiple:
        yield Problem(
            "training.seq_len",
            f"a rank computes {tokens} tokens at a time, and {asked}; change it or {key}, or {instead}",
        )


def not_together(config: JobConfig, what: str, instead: str) -> Iterator[Problem]:
    """Yield the options that don't combine with float8 layers; `what` is the reason, `instead` the advice."""
    for key, (other, legal) in _NOT_TOGETHER.items():
        if get(config, key) not in (OPTIONS[key].default, legal):
            yield Problem(key, f"{what} is not built with {other}; set it to {show(legal)}, {instead}")


def notices(config: JobConfig) -> Iterator[Problem]:
    """Yield each quantization option whose layers are not quantized."""
    done = config.model.converters
    for table, what, is_done, name in (
        ("quantize.linear.float8", "no linear layer", converts_linears(done), LINEARS[0]),
        ("quantize.linear.mx", "no linear layer", converts_to_mx(done), LINEARS_MX[0]),
        (EXPERTS, "nothing of experts", EXPERTS in done, EXPERTS),
        (EXPERTS_MX, "nothing of experts", EXPERTS_MX in done, EXPERTS_MX),
    ):
        keys = [key for key in OPTIONS if key.startswith(f"{table}.") and not is_done]
        yield from unused(config, f"{what} is quantised while model.converters does not name {name}", *keys)
