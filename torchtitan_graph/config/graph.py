"""Checks of [compile], [activation_checkpoint], and the options that need or exclude a graph."""

from collections.abc import Iterator

from torchtitan_graph.config.job import ROW_MULTIPLE, JobConfig, Problem, get, is_set, unused

_PP = "parallelism.pipeline_parallel_degree"
_ASYNC_TP = "parallelism.enable_async_tensor_parallel"
_ONCE, _PAIRS = "parallelism.fsdp_once_a_step", "parallelism.overlap_microbatches"
_BUDGET = "activation_checkpoint.memory_budget"
_OF_TRACING = ("debug.verify_passes", "debug.dump_graphs", "debug.stack_traces")
_OF_THE_GRAPH = (*_OF_TRACING, "compile.record_call_hierarchy", "compile.disable_passes", "compile.extra_passes")
# Options that compile.mode = eager can't follow: the value that needs a graph (None: any but the default), and why.
_NEED_A_GRAPH = {
    "activation_checkpoint.mode": ("memory_budget", "can be fitted to a memory budget"),
    "activation_checkpoint.offload": (None, "moves activations to the host"),
    "activation_checkpoint.save": (None, "keeps results by module"),
    "activation_checkpoint.recompute": (None, "computes results again by module"),
    "compile.capture": (None, "is captured"),
    "compile.cuda_graphs": (None, "is recorded for replays"),
    "compile.dedupe_layers": (None, "has equal blocks as calls of one subgraph"),
    "compile.fusions": (None, "has parts that are compiled alone"),
    "compile.optimizer_in_graph": (None, "includes the optimizer's step"),
    "compile.precompiled": (None, "is read from a folder"),
    _ASYNC_TP: (None, "can have its products cut"),
    _ONCE: ("auto", "has a forecast of its memory to choose by"),
    _PAIRS: (None, "runs two microbatches side by side"),
    _PP: (None, "can be cut into a pipeline's stages"),
}
# The passes that an option needs: those that write its tags, and the one that acts on them.
_PASSES_OF_MODE = {
    "selective": ("tag_recomputation", "rematerialize"),
    "full": ("tag_recomputation", "rematerialize"),
}
# Optimizers whose state is in tensors and that don't branch on it.
_TRACED = ("Adam", "AdamW", "Muon", "torch.optim.Adagrad", "torch.optim.Muon", "torch.optim.RMSprop", "torch.optim.SGD")
_RECORDED = ("Adam", "AdamW")  # read no number on the host


def problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the options for capturing, compiling and recomputing."""
    if config.compile.mode == "eager":
        for key, (value, does) in _NEED_A_GRAPH.items():
            if get(config, key) == value if value else is_set(config, key):
                yield Problem(key, f"only a graph {does}; use compile.mode = graph, or leave this out")
        if config.comm.mode == "fake_backend":  # set by commands too
            yield Problem("compile.mode", "a dry run reads what a step needs from its graph; use compile.mode = graph")
    checks = (
        _codegen,
        _precompiled,
        _dynamo,
        _lengths,
        _async_tensor_parallel,
        _accumulation,
        _cuda_graphs,
        _optimizer,
    )
    for check in (*checks, _budget):
        yield from check(config)


def _not_with(option: str, off: str, *rows: tuple[str, bool, str]) -> Iterator[Problem]:
    """Yield a problem for each of `rows` (key, whether it excludes `option`, why) that does; `off` unsets `option`."""
    for key, excludes, why in rows:
        if excludes:
            yield Problem(key, f"not with {option}: {why}, or set {option.partition(' = ')[0]} to {off}")


def _codegen(config: JobConfig) -> Iterator[Problem]:
    options = config.compile
    for key in ("compile.regions", "compile.fusions"):
        if options.codegen == "whole" and is_set(config, key):
            yield Problem(key, "compile.codegen = whole compiles all; for parts take codegen = blocks")
    if options.dedupe_layers and (options.codegen != "off" or options.fusions):
        yield Problem(
            "compile.dedupe_layers",
            "blocks are calls already where they are compiled; use compile.codegen = off and no fusions, or remove it",
        )
    if config.model.elementwise == "fused" and {"swiglu", "rope"} <= {*options.fusions}:
        yield Problem(
            "model.elementwise",
            "compile.fusions has both, rope and swiglu, so none is left; take one out of there, or leave this at auto",
        )


def _precompiled(config: JobConfig) -> Iterator[Problem]:
    for key in _OF_TRACING if config.compile.precompiled is not None else ():
        if get(config, key):
            yield Problem(key, "with compile.precompiled nothing is traced and no pass runs; leave one of them out")


def _dynamo(config: JobConfig) -> Iterator[Problem]:
    options = config.compile
    if options.capture == "dynamo":
        yield from _not_with(
            "compile.capture = dynamo",
            "make_fx",
            ("compile.precompiled", options.precompiled is not None, "a file does not hold Dynamo's guards"),
            (
                "compile.record_call_hierarchy",
                options.record_call_hierarchy,
                "Dynamo runs no function of the model's; set it to false",
            ),
        )


def _lengths(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of rows whose length differs from batch to batch."""
    training, degrees, options = config.training, config.parallelism, config.compile
    if not training.dynamic_seq_len:
        return
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    rows = f"with training.dynamic_seq_len rows have a multiple of {ROW_MULTIPLE} tokens"
    if training.seq_len % ROW_MULTIPLE or training.seq_len == ROW_MULTIPLE:
        yield Problem("training.seq_len", f"{rows}, and up to {2 * ROW_MULTIPLE} or more")
    for name, parts in {"tensor_parallel_degree": cp * tp, "context_parallel_degree": 2 * cp if cp > 1 else 1}.items():
        if ROW_MULTIPLE % parts:
            yield Problem(f"parallelism.{name}", f"{rows}, which {parts} must divide")
    if options.mode == "graph":
        yield from _not_with(
            "training.dynamic_seq_len",
            "false",
            (_PP, degrees.pipeline_parallel_degree > 1, "what stages send is of one size; use another axis"),
            (
                "compile.precompiled",
                options.precompiled is not None,
                "a file holds graphs of one length; leave it out",
            ),
            ("compile.cuda_graphs", options.cuda_graphs, "a recording has one length; set it to false"),
            ("compile.codegen", options.codegen != "off", "code is made for one length; set it to off"),
            ("compile.fusions", bool(options.fusions), "code is made for one length; remove it"),
            ("compile.dedupe_layers", options.dedupe_layers, "a call has tensors alone; set it to false"),
            ("parallelism.context_parallel_degree", cp > 1, "a rank's blocks have one length; use another axis"),
            (_ASYNC_TP, degrees.enable_async_tensor_parallel, "products are cut for one length; set it to false"),
        )


def _async_tensor_parallel(config: JobConfig) -> Iterator[Problem]:
    if config.parallelism.enable_async_tensor_parallel:
        is_one = config.parallelism.tensor_parallel_degree == 1
        is_left_out = "overlap_products" in config.compile.disable_passes
        yield from _not_with(
            _ASYNC_TP,
            "false",
            ("parallelism.tensor_parallel_degree", is_one, "nothing is sent; use a degree above 1"),
            ("compile.disable_passes", is_left_out, "overlap_products does it; leave it in"),
        )


def _accumulation(config: JobConfig) -> Iterator[Problem]:
    """Yield what a step that microbatches share does not go together with."""
    degrees, options = config.parallelism, config.compile
    which, pairs = degrees.fsdp_once_a_step, degrees.overlap_microbatches
    if degrees.pipeline_parallel_degree > 1:
        if which != "none":
            yield Problem(_ONCE, "a pipeline's stages reduce all gradients once a step in any case; set it to none")
        return
    if which == "experts" and degrees.expert_parallel_degree == 1:
        yield Problem(
            _ONCE,
            "the experts' weights are with their layer's while parallelism.expert_parallel_degree is 1; use all, or a"
            " higher degree",
        )
    if options.mode == "eager" or (which == "none" and not pairs):
        return
    option, off = (f"{_ONCE} = {which}", "none") if which != "none" else (f"{_PAIRS} = {str(pairs).lower()}", "false")
    yield from _not_with(
        option,
        off,
        (
            "training.dynamic_seq_len",
            config.training.dynamic_seq_len,
            "the parts of a step have one length; set it to false",
        ),
        (
            "training.enable_cpu_offload",
            config.training.enable_cpu_offload,
            "what is on the host would be copied in each part; leave it out",
        ),
        ("compile.cuda_graphs", options.cuda_graphs, "parts of a step are not recorded; set it to false"),
    )
    for key, value, others in ((_ONCE, which, "all, experts or none"), (_PAIRS, pairs, "true or false")):
        if value != "auto":
            continue
        yield from _not_with(
            f"{key} = auto",
            others,
            (
                "compile.precompiled",
                options.precompiled is not None,
                "the memory of the machine that precompiles would choose; leave it out",
            ),
            (
                f"{_BUDGET}_gib",
                config.activation_checkpoint.memory_budget_gib is not None,
                "both choose by the memory that is left; remove it",
            ),
            (
                "optimizer.name",
                "." in config.optimizer.name,
                "what such an optimizer keeps is not known before its first step; take AdamW",
            ),
        )


def _cuda_graphs(config: JobConfig) -> Iterator[Problem]:
    if config.compile.cuda_graphs:
        copies = "a step's copies take new memory of the host, which can't be recorded; leave it out"
        yield from _not_with(
            "compile.cuda_graphs",
            "false",
            ("activation_checkpoint.offload", bool(config.activation_checkpoint.offload), copies),
            ("training.enable_cpu_offload", config.training.enable_cpu_offload, copies),
            (
                _PP,
                config.parallelism.pipeline_parallel_degree > 1,
                "what a stage sends and receives is not recorded; use another axis",
            ),
            (
                "model.attn",
                config.model.attn == "varlen",
                "the number of documents is not part of a recording; use flex",
            ),
        )


def _optimizer(config: JobConfig) -> Iterator[Problem]:
    if not config.compile.optimizer_in_graph:
        return
    optimizer, metrics = config.optimizer, config.metrics
    yield from _not_with(
        "compile.optimizer_in_graph",
        "false",
        ("optimizer.name", optimizer.name not in _TRACED, f"can't be traced; legal are {', '.join(_TRACED)}"),
        ("optimizer.options", bool(optimizer.options.get("fused")), "only Adam and AdamW are traced fused"),
        (
            "compile.cuda_graphs",
            config.compile.cuda_graphs and (optimizer.implementation != "fused" or optimizer.name not in _RECORDED),
            f"{optimizer.name} reads numbers on the host; use a fused Adam or AdamW",
        ),
        (
            "training.enable_cpu_offload",
            config.training.enable_cpu_offload,
            "the update is computed on the host, and its graph would be for the GPU; leave it out",
        ),
        (
            "metrics.histogram_freq",
            metrics.histogram_freq > 0 and metrics.enable_tensorboard,
            "histograms are made between clipping and the update; set it to 0",
        ),
    )


def _budget(config: JobConfig) -> Iterator[Problem]:
    options = config.activation_checkpoint
    if options.mode != "memory_budget":
        return
    if left_out := {"tag_budget", "rematerialize"} & {*config.compile.disable_passes}:
        yield Problem(
            "compile.disable_passes",
            f"{', '.join(sorted(left_out))} is what meets activation_checkpoint.mode = memory_budget; leave one of them"
            " out",
        )
    if options.memory_budget_gib is None:
        return
    key, instead = f"{_BUDGET}_gib", f"use {_BUDGET}, a fraction"
    if options.memory_budget_gib == 0:
        yield Problem(key, f"a rank holds more than nothing; give what it may hold, in GiB, or {instead}")
    if is_set(config, _BUDGET):
        yield Problem(key, f"takes the place of memory_budget = {options.memory_budget}; leave one of them out")
    if "." in config.optimizer.name:
        yield Problem(key, f"what optimizer.name = {config.optimizer.name!r} keeps is not known before; {instead}")


def notices(config: JobConfig) -> Iterator[Problem]:
    """Yield each option of the graph, its memory and its code that is set and has no effect."""
    options, memory, table = config.compile, config.activation_checkpoint, "activation_checkpoint"
    if memory.mode != "memory_budget":
        keys = (_BUDGET, f"{_BUDGET}_gib", f"{table}.visualize_memory_budget_pareto")
        yield from unused(config, f"nothing is budgeted while {table}.mode is not memory_budget", *keys)
    if options.codegen == "off":
        yield from unused(config, "has no effect while compile.codegen is off", "compile.regions")
    if options.mode == "eager":
        flex_alone = "compile.mode = eager compiles flex attention alone, on a GPU; regions are parts of a graph"
        yield from unused(config, flex_alone, "compile.codegen")
        yield from unused(config, "compile.mode = eager has no graph, and runs no passes", *_OF_THE_GRAPH)
        return
    asked = {f"mode = {memory.mode}": _PASSES_OF_MODE.get(memory.mode, ())}
    asked |= {"offload": ("tag_offload", "offload_activations")} if memory.offload else {}
    for what, passes in asked.items():
        if missing := [name for name in passes if name in options.disable_passes]:
            yield Problem("compile.disable_passes", f"without {', '.join(missing)} {table}.{what} has no effect")
