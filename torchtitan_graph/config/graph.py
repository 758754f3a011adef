"""Checks of [compile], [activation_checkpoint], and the options that need or exclude a graph."""

from torchtitan_graph.config.job import OPTIONS, ROW_MULTIPLE, Compile, JobConfig, get
from torchtitan_graph.config.job import named as _name
from torchtitan_graph.config.resolve import one_line

_PP = "parallelism.pipeline_parallel_degree"
_OF_TRACING = (
    "debug.verify_passes",
    "debug.dump_graphs",
    "debug.trace_every_block",
    "debug.stack_traces",
)
_OF_THE_GRAPH = (*_OF_TRACING, "compile.record_call_hierarchy", "compile.disable_passes", "compile.extra_passes")
# The passes that write the tags of an activation_checkpoint.mode, and the one that acts on them.
_PASSES_OF_MODE = {
    "selective": ("tag_recomputation", "rematerialize"),
    "full": ("tag_recomputation", "rematerialize"),
}
COMPONENTS = ("model", "loss", "flex")


def find_problems(config: JobConfig) -> list[str]:
    """Return the problems of the options for capturing, compiling and recomputing, a line each."""
    problems = [*_check_precompiled(config), *_check_capture(config), *_check_lengths(config)]
    if config.comm.mode == "fake_backend" and config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'compile.mode')}: a dry run reads what a step needs from its graph, and an eager step has"
            " none, and needs more; use compile.mode = graph"
        )
    return problems + _check_compile(config) + _check_budget(config)


def chosen_codegen(options: Compile) -> str:
    """Return compile.codegen, or where it is not set what compile.enable implies."""
    return options.codegen or ("blocks" if options.enable else "off")


def _check_compile(config: JobConfig) -> list[str]:
    problems = []
    if unknown := [name for name in config.compile.components if name not in COMPONENTS]:
        problems.append(
            f"{_name(config, 'compile.components')}: {one_line(', '.join(unknown))} can't be compiled; legal are"
            f" {', '.join(COMPONENTS)}"
        )
    options = config.compile
    if options.enable and options.codegen == "off":
        problems.append(f"{_name(config, 'compile.enable')}: contradicts compile.codegen = off; leave one of them out")
    if options.codegen == "whole":
        for key, wrong in (
            ("compile.components", not {"model", "loss"} <= {*options.components}),
            ("compile.regions", options.regions != OPTIONS["compile.regions"].default),
            ("compile.fusions", bool(options.fusions)),
        ):
            if wrong:
                problems.append(
                    f"{_name(config, key)}: compile.codegen = whole compiles all; for parts take codegen = blocks"
                )
    if options.fusions and options.mode == "eager":
        problems.append(
            f"{_name(config, 'compile.fusions')}: fusions are parts of a graph; use compile.mode = graph, or remove it"
        )
    if config.model.elementwise == "fused" and {"swiglu", "rope"} <= {*options.fusions}:
        problems.append(
            f"{_name(config, 'model.elementwise')}: compile.fusions has both, rope and swiglu, so none is left; take "
            "one out of there, or leave this at auto"
        )
    if "cross_entropy" in options.fusions:
        problems.append(
            f"{_name(config, 'compile.fusions')}: the loss is not among them; remove cross_entropy, and set"
            " training.loss_implementation = fused, which is as fast and has eager's bits"
        )
    if options.dedupe_layers and (chosen_codegen(options) != "off" or options.fusions or options.mode == "eager"):
        problems.append(
            f"{_name(config, 'compile.dedupe_layers')}: blocks are calls already where they are compiled, and eager has"
            " no graph; use compile.mode = graph with compile.codegen = off and no fusions, or remove it"
        )
    for region in options.region_options:
        if len(region) < 2 or not all("=" in setting for setting in region[1:]):
            problems.append(
                f"{_name(config, 'compile.region_options')}: {region} must be a pattern of compile.regions, or flex,"
                " loss or whole, and after it name=value, such as ['layers.*', 'max_autotune=true']"
            )
    for key, does in (
        ("offload", "moves activations to the host"),
        ("save", "keeps results by module"),
        ("recompute", "computes results again by module"),
    ):
        key = f"activation_checkpoint.{key}"
        if get(config, key) and config.compile.mode == "eager":
            problems.append(f"{_name(config, key)}: only a graph {does}; use compile.mode = graph, or remove it")
    if config.compile.cuda_graphs and config.compile.mode != "graph":
        problems.append(f"{_name(config, 'compile.mode')}: compile.cuda_graphs records a graph; use graph")
    for key in ("activation_checkpoint.offload", "training.enable_cpu_offload"):
        if config.compile.cuda_graphs and get(config, key):
            problems.append(
                f"{_name(config, key)}: not with compile.cuda_graphs: each step's copies take memory of the host anew,"
                " which can't be recorded; leave one of them out"
            )
    if config.compile.cuda_graphs and config.parallelism.pipeline_parallel_degree > 1:
        problems.append(
            f"{_name(config, _PP)}: not with compile.cuda_graphs: what a stage sends and receives is not recorded; set"
            " that to false, or use another axis"
        )
    if config.compile.cuda_graphs and config.model.attn == "varlen":
        problems.append(
            f"{_name(config, 'model.attn')}: not with compile.cuda_graphs: how many documents there are is no part of a"
            " recording; use flex, or set that to false"
        )
    return problems + _check_async_tensor_parallel(config) + _check_optimizer_in_graph(config)


def _check_precompiled(config: JobConfig) -> list[str]:
    """Return the problems of precompiled graphs together with options that inspect tracing or passes."""
    if config.compile.precompiled is None:
        return []
    problems = [
        f"{_name(config, key)}: with compile.precompiled nothing is traced and no pass runs; leave one of them out"
        for key in _OF_TRACING
        if get(config, key)
    ]
    if config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'compile.precompiled')}: compile.mode = eager has no graphs; leave one of them out"
        )
    return problems


def _check_capture(config: JobConfig) -> list[str]:
    """Return the problems of capture by Dynamo: where its guards would be lost, or where there is no capture."""
    if config.compile.capture != "dynamo":
        return []
    stands_in_the_way = {
        "compile.mode": ("has no graph; use graph", config.compile.mode == "eager"),
        "compile.precompiled": ("a file does not hold Dynamo's guards", config.compile.precompiled is not None),
        "compile.record_call_hierarchy": (
            "Dynamo runs no function of the model's; set it to false",
            config.compile.record_call_hierarchy,
        ),
    }
    return [
        f"{_name(config, key)}: not with compile.capture = dynamo: {why}, or set that to make_fx"
        for key, (why, is_so) in stands_in_the_way.items()
        if is_so
    ]


def _check_lengths(config: JobConfig) -> list[str]:
    """Return the problems of rows whose length differs from batch to batch."""
    training, degrees, options = config.training, config.parallelism, config.compile
    if not training.dynamic_seq_len:
        return []
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    problems = []
    if training.seq_len % ROW_MULTIPLE or training.seq_len == ROW_MULTIPLE:
        problems.append(
            f"{_name(config, 'training.seq_len')}: with training.dynamic_seq_len rows have a multiple of {ROW_MULTIPLE}"
            f" tokens, and up to {2 * ROW_MULTIPLE} or more"
        )
    for name, parts in {"tensor_parallel_degree": cp * tp, "context_parallel_degree": 2 * cp if cp > 1 else 1}.items():
        if ROW_MULTIPLE % parts:
            problems.append(
                f"{_name(config, f'parallelism.{name}')}: with training.dynamic_seq_len rows have a multiple of"
                f" {ROW_MULTIPLE} tokens, which {parts} must divide"
            )
    if options.mode == "eager":
        return problems
    stands_in_the_way = {
        _PP: (
            "what stages send is of one size; use another axis",
            degrees.pipeline_parallel_degree > 1,
        ),
        "compile.precompiled": ("a file holds graphs of one length; leave it out", options.precompiled is not None),
        "compile.cuda_graphs": ("a recording has one length; set it to false", options.cuda_graphs),
        "compile.codegen": ("code is made for one length; set it to off", options.codegen not in (None, "off")),
        "compile.enable": ("code is made for one length; set it to false", options.enable and options.codegen is None),
        "compile.fusions": ("code is made for one length; remove it", bool(options.fusions)),
        "compile.dedupe_layers": ("a call has tensors alone; set it to false", options.dedupe_layers),
        "parallelism.context_parallel_degree": ("a rank's blocks have one length; use another axis", cp > 1),
        "parallelism.enable_async_tensor_parallel": (
            "products are cut for one length; set it to false",
            degrees.enable_async_tensor_parallel,
        ),
    }
    return problems + [
        f"{_name(config, key)}: not with training.dynamic_seq_len: {why}, or set that to false"
        for key, (why, is_so) in stands_in_the_way.items()
        if is_so
    ]


def _check_async_tensor_parallel(config: JobConfig) -> list[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return []
    stands_in_the_way = {
        "parallelism.tensor_parallel_degree": (
            "nothing is sent; use a degree above 1",
            config.parallelism.tensor_parallel_degree == 1,
        ),
        "compile.mode": ("only a graph can be cut; use graph", config.compile.mode != "graph"),
        "compile.disable_passes": (
            "overlap_products does it; leave it in",
            "overlap_products" in config.compile.disable_passes,
        ),
    }
    return [
        f"{_name(config, key)}: not with parallelism.enable_async_tensor_parallel: {why}, or set that to false"
        for key, (why, is_so) in stands_in_the_way.items()
        if is_so
    ]


# Optimizers whose state is in tensors and that don't branch on it.
_TRACED = ("Adam", "AdamW", "torch.optim.Adagrad", "torch.optim.Muon", "torch.optim.RMSprop", "torch.optim.SGD")


def _check_optimizer_in_graph(config: JobConfig) -> list[str]:
    if not config.compile.optimizer_in_graph:
        return []
    optimizer, metrics = config.optimizer, config.metrics
    stands_in_the_way = {
        "compile.mode": ("the step is no graph there; use graph", config.compile.mode != "graph"),
        "optimizer.name": (f"can't be traced; legal are {', '.join(_TRACED)}", optimizer.name not in _TRACED),
        "optimizer.options": ("only Adam and AdamW are traced fused", bool(optimizer.options.get("fused"))),
        "compile.cuda_graphs": (
            f"{optimizer.name} reads numbers on the host; use a fused Adam or AdamW",
            config.compile.cuda_graphs and (optimizer.implementation != "fused" or "." in optimizer.name),
        ),
        "training.enable_cpu_offload": (
            "the update is computed on the host, and its graph would be for the GPU; leave it out",
            config.training.enable_cpu_offload,
        ),
        "metrics.histogram_freq": (
            "histograms are made between clipping and the update; set it to 0",
            metrics.histogram_freq > 0 and metrics.enable_tensorboard,
        ),
    }
    return [
        f"{_name(config, key)}: not with compile.optimizer_in_graph: {why}, or set that to false"
        for key, (why, is_so) in stands_in_the_way.items()
        if is_so
    ]


def _check_budget(config: JobConfig) -> list[str]:
    checkpoint, problems = config.activation_checkpoint, []
    if checkpoint.mode != "memory_budget":
        return []
    if config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'activation_checkpoint.mode')}: is met in the graph alone; use compile.mode = graph, or"
            " mode = selective or full"
        )
    if left_out := {"tag_budget", "rematerialize"} & {*config.compile.disable_passes}:
        problems.append(
            f"{_name(config, 'compile.disable_passes')}: {', '.join(sorted(left_out))} is what meets"
            " activation_checkpoint.mode = memory_budget; leave one of them out"
        )
    if checkpoint.memory_budget_gib is not None:
        name = _name(config, "activation_checkpoint.memory_budget_gib")
        use = "use activation_checkpoint.memory_budget, a fraction"
        if checkpoint.memory_budget_gib == 0:
            problems.append(f"{name}: a rank holds more than nothing; give what it may hold, in GiB, or {use}")
        if checkpoint.memory_budget != OPTIONS["activation_checkpoint.memory_budget"].default:
            problems.append(
                f"{name}: takes the place of memory_budget = {checkpoint.memory_budget}; leave one of them out"
            )
        if "." in config.optimizer.name:
            problems.append(f"{name}: what optimizer.name = {config.optimizer.name!r} keeps is not known before; {use}")
    return problems


def unused(config: JobConfig) -> list[str]:
    """Return a notice for each option of the graph, its memory and its code that is set and has no effect."""

    def unused(why: str, *keys: str) -> list[str]:
        return [f"{_name(config, key)}: {why}" for key in keys if get(config, key) != OPTIONS[key].default]

    options, memory, notices = config.compile, config.activation_checkpoint, []
    table = "activation_checkpoint"
    if memory.mode != "memory_budget":
        keys = [f"{table}.{key}" for key in ("memory_budget", "memory_budget_gib", "visualize_memory_budget_pareto")]
        notices += unused("nothing is budgeted while mode is not memory_budget", *keys)
    if not options.enable and options.codegen in (None, "off"):
        notices += unused("has no effect while compile.codegen is off", "compile.components", "compile.regions")
    if options.mode == "eager":
        key = "compile.codegen" if options.codegen else "compile.enable"
        if get(config, key) not in (False, "off"):
            notices.append(
                f"{_name(config, key)}: compile.mode = eager compiles flex attention alone, on a GPU;"
                " regions are parts of a graph"
            )
        return notices + unused("compile.mode = eager has no graph, and runs no passes", *_OF_THE_GRAPH)
    asked = {f"mode = {memory.mode}": _PASSES_OF_MODE.get(memory.mode, ())}
    asked |= {"offload": ("tag_offload", "offload_activations")} if memory.offload else {}
    for what, passes in asked.items():
        if missing := [name for name in passes if name in options.disable_passes]:
            name = _name(config, "compile.disable_passes")
            notices.append(f"{name}: without {', '.join(missing)} {table}.{what} has no effect")
    return notices
