"""Checks that need several options, or the number of processes."""

import math
import re

from fsspec import available_protocols, get_filesystem_class

from torchtitan_graph.config import quantize
from torchtitan_graph.config.job import OPTIONS, ROW_MULTIPLE, JobConfig, get, source_name
from torchtitan_graph.config.job import named as _name
from torchtitan_graph.config.resolve import problem_list
from torchtitan_graph.errors import UserError

SMALLEST_WEIGHT = 10000  # parts of the sum: a mixture rounds weights to parts of somewhat more rows
_SHARD = "data_parallel_shard_degree"
_DEGREES = (  # that multiply to the number of processes
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    _SHARD,
    "context_parallel_degree",
    "tensor_parallel_degree",
)
_ONLY_DRY = {"fake_rank": "builds another rank", "fake_device": "estimates for another device"}
_PP = "parallelism.pipeline_parallel_degree"
_PARTS = "parallelism.module_fqns_per_model_part"
_OF_THE_GRAPH = (
    "debug.verify_passes",
    "debug.dump_graphs",
    "debug.trace_every_block",
    "debug.stack_traces",
    "compile.record_call_hierarchy",
    "compile.disable_passes",
    "compile.extra_passes",
)
# What writes the tags of an activation_checkpoint.mode, and what acts on them.
_PASSES_OF_MODE = {
    "selective": ("tag_recomputation", "rematerialize"),
    "full": ("tag_recomputation", "rematerialize"),
}
COMPONENTS = ("model", "loss", "flex")
EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state")
# What makes a run another run, where it changes between a start and a resume; job.allow_changed names exceptions.
RUN_DEFINING = (
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "model.num_mtp_layers",
    "training.dataset",
    "training.dataset_path",
    "training.seq_len",
    "training.dynamic_seq_len",
    "training.dtype",
    "debug.seed",
)


def check(config: JobConfig, world_size: int) -> list[str]:
    """Return what the user should be told about a configuration on `world_size` processes, a line each.

    Raises:
        UserError: options contradict each other or the number of processes; the message lists all of it.
    """
    problems = [*_check_degrees(config, world_size), *_check_tables(config, world_size), *_check_compile(config)]
    problems += _check_checkpoint(config, world_size) + _check_budget(config) + quantize.find_problems(config)
    if problems:
        raise UserError(problem_list(problems))
    return [*config.notices, *_notices(config)]


def shard_degree(config: JobConfig, world_size: int) -> int:
    """Return data_parallel_shard_degree, inferred from the number of processes where it is -1."""
    given = config.parallelism.data_parallel_shard_degree
    return given if given != -1 else max(1, world_size // _other_degrees(config))


def smallest_world(config: JobConfig) -> int:
    """Return the smallest number of processes that the degrees allow."""
    others, experts = _other_degrees(config), config.parallelism.expert_parallel_degree
    given = config.parallelism.data_parallel_shard_degree
    if given != -1 or experts == 1:
        return max(1, given) * others
    experts *= config.parallelism.expert_tensor_parallel_degree
    inside = config.parallelism.context_parallel_degree * config.parallelism.tensor_parallel_degree
    return others * (math.lcm(experts, inside) // inside)


def _other_degrees(config: JobConfig) -> int:
    return math.prod(getattr(config.parallelism, key) for key in _DEGREES if key != _SHARD)


def _check_degrees(config: JobConfig, world_size: int) -> list[str]:
    degrees, problems = config.parallelism, []
    shards = shard_degree(config, world_size)
    product = shards * _other_degrees(config)
    if product != world_size:
        of = {key: getattr(degrees, key) for key in _DEGREES} | {_SHARD: shards}
        inferred = degrees.data_parallel_shard_degree == -1
        shown = [
            f"{key} {degree}" + " (inferred)" * (key == _SHARD and inferred)
            for key, degree in of.items()
            if degree > 1 or not key.startswith(("pipeline", "context"))
        ]
        culprit = next((key for key in _DEGREES if getattr(degrees, key) > 1), _SHARD)
        problems.append(
            f"{_name(config, f'parallelism.{culprit}')}: the degrees must multiply to the number of processes:"
            f" {' * '.join(shown)} = {product}, not {world_size}; start {product} processes, or let"
            f" data_parallel_shard_degree be -1 and the product of the others divide {world_size}"
        )
    problems += _check_expert_degrees(config, shards) + _check_pipeline(config)
    if config.model.num_mtp_layers and max(degrees.pipeline_parallel_degree, degrees.context_parallel_degree) > 1:
        problems.append(
            f"{_name(config, 'model.num_mtp_layers')}: not with pipeline or context parallel, whose ranks lack the next"
            " tokens; use data_parallel_shard_degree, tensor_parallel_degree or expert_parallel_degree"
        )
    data_degree = degrees.data_parallel_replicate_degree * shards
    microbatch = config.training.local_batch_size * data_degree
    rows = config.training.global_batch_size
    if product == world_size and rows != -1 and rows % microbatch:
        problems.append(
            f"{_name(config, 'training.global_batch_size')}: must be a multiple of training.local_batch_size"
            f" {config.training.local_batch_size} * data-parallel degree {data_degree} = {microbatch}, or -1"
        )
    return problems + _check_rows(config)


def _check_rows(config: JobConfig) -> list[str]:
    cp, tp = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    problems = []
    for key in ["training.seq_len"] + ["validation.seq_len"] * config.validation.enable:
        seq_len = get(config, key)
        if cp > 1 and seq_len % (2 * cp):
            problems.append(
                f"{_name(config, key)}: context parallel deals equal blocks of a row forth and back, which needs a"
                f" multiple of 2 * parallelism.context_parallel_degree {cp} = {2 * cp}"
            )
        elif seq_len % (cp * tp):
            of = f"parallelism.tensor_parallel_degree {tp}"
            problems.append(
                f"{_name(config, key)}: sequence parallel needs a multiple of"
                f" {f'parallelism.context_parallel_degree {cp} * {of} = {cp * tp}' if cp > 1 else of}"
            )
    return problems


def _check_expert_degrees(config: JobConfig, shards: int) -> list[str]:
    degrees, problems = config.parallelism, []
    ep, etp, tp = (
        degrees.expert_parallel_degree,
        degrees.expert_tensor_parallel_degree,
        degrees.tensor_parallel_degree,
    )
    if etp not in (1, tp):
        problems.append(
            f"{_name(config, 'parallelism.expert_tensor_parallel_degree')}: legal are 1, each expert whole, and"
            f" parallelism.tensor_parallel_degree {tp}"
        )
    reused = shards * degrees.context_parallel_degree * tp
    if ep > 1 and reused % (ep * etp):
        problems.append(
            f"{_name(config, 'parallelism.expert_parallel_degree')}: experts reuse the ranks of"
            f" data_parallel_shard_degree {shards} * context_parallel_degree {degrees.context_parallel_degree}"
            f" * tensor_parallel_degree {tp} = {reused}; expert_parallel_degree * expert_tensor_parallel_degree {etp}"
            " must divide that"
        )
    return problems


def _check_pipeline(config: JobConfig) -> list[str]:
    degrees, problems = config.parallelism, []
    if degrees.pipeline_parallel_degree == 1:
        return []
    size, rows = degrees.pipeline_parallel_microbatch_size, config.training.local_batch_size
    if rows % size:
        problems.append(
            f"{_name(config, 'parallelism.pipeline_parallel_microbatch_size')}: must divide training.local_batch_size"
            f" {rows}"
        )
    if config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'parallelism.pipeline_parallel_degree')}: a pipeline runs parts of a graph, and"
            " compile.mode = eager has none; use compile.mode = graph"
        )
    if config.checkpoint.last_save_in_hf:
        problems.append(
            f"{_name(config, 'checkpoint.last_save_in_hf')}: no rank of a pipeline can gather the whole model; convert"
            " the last checkpoint with scripts/convert_to_hf.py"
        )
    return problems


def _check_precompiled(config: JobConfig) -> list[str]:
    """Refuse what looks at tracing or passes together with graphs that are read instead."""
    if config.compile.precompiled is None:
        return []
    looks = (
        "debug.verify_passes",
        "debug.dump_graphs",
        "debug.trace_every_block",
        "debug.stack_traces",
    )
    problems = [
        f"{_name(config, key)}: with compile.precompiled nothing is traced and no pass runs; leave one of them out"
        for key in looks
        if get(config, key)
    ]
    if config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'compile.precompiled')}: compile.mode = eager has no graphs; leave one of them out"
        )
    return problems


def _check_capture(config: JobConfig) -> list[str]:
    """Refuse Dynamo where what it checks would be lost, or where nothing is captured."""
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
    """Refuse what does not go with rows whose length differs from batch to batch."""
    training, degrees, options = config.training, config.parallelism, config.compile
    if not training.dynamic_seq_len:
        return []
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    problems = []
    if training.seq_len % ROW_MULTIPLE:
        name = _name(config, "training.seq_len")
        problems.append(f"{name}: with training.dynamic_seq_len rows have a multiple of {ROW_MULTIPLE} tokens")
    for name, parts in {"tensor_parallel_degree": cp * tp, "context_parallel_degree": 2 * cp if cp > 1 else 1}.items():
        if ROW_MULTIPLE % parts:
            problems.append(
                f"{_name(config, f'parallelism.{name}')}: with training.dynamic_seq_len rows have a multiple of"
                f" {ROW_MULTIPLE} tokens, which {parts} must divide"
            )
    if options.mode == "eager":
        return problems
    stands_in_the_way = {
        _PP: ("what stages send is of one size; use another axis", degrees.pipeline_parallel_degree > 1),
        "compile.precompiled": ("a file holds graphs of one length; leave it out", options.precompiled is not None),
        "compile.cuda_graphs": ("a recording has one length; set it to false", options.cuda_graphs),
        "compile.codegen": ("code is made for one length; set it to off", options.codegen not in (None, "off")),
        "compile.enable": ("code is made for one length; set it to false", options.enable and options.codegen is None),
        "compile.fusions": ("code is made for one length; remove it", bool(options.fusions)),
        "compile.dedupe_layers": ("a call has tensors alone; set it to false", options.dedupe_layers),
        "compile.capture": ("Dynamo is given one length; use make_fx", options.capture == "dynamo"),
        "model.attn": ("block masks have one length; use sdpa", config.model.attn == "flex"),
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


def _check_tables(config: JobConfig, world_size: int) -> list[str]:
    problems = []
    if unknown := [key for key in config.job.allow_changed if key not in RUN_DEFINING]:
        problems.append(
            f"{_name(config, 'job.allow_changed')}: {', '.join(unknown)} may change anyway, or is no option; legal are"
            f" {', '.join(RUN_DEFINING)}"
        )
    profiling = config.profiling
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_active + profiling.profiler_warmup:
        problems.append(
            f"{_name(config, 'profiling.profile_freq')}: must be at least profiler_active {profiling.profiler_active}"
            f" + profiler_warmup {profiling.profiler_warmup}"
        )
    if config.debug.verify_passes and config.comm.mode == "fake_backend":
        problems.append(
            f"{_name(config, 'debug.verify_passes')}: a dry run sends nothing, so there are no numbers to compare; "
            "remove it, or comm.mode = fake_backend"
        )
    problems += _check_precompiled(config) + _check_capture(config) + _check_lengths(config)
    if config.comm.mode == "fake_backend" and config.comm.fake_rank >= world_size:
        name = _name(config, "comm.fake_rank")
        problems.append(f"{name}: must be from 0 to {world_size - 1}, as NGPU, the number of ranks, is {world_size}")
    for table in ("training", "validation"):
        loader = get(config, f"{table}.dataloader")
        for name in ("persistent_workers", "prefetch_factor"):
            if getattr(loader, name) and not loader.num_workers:
                key = f"{table}.dataloader.{name}"
                problems.append(f"{_name(config, key)}: needs {table}.dataloader.num_workers of at least 1")
    return problems + _check_sources(config) + _check_hugging_face(config)


def _check_sources(config: JobConfig) -> list[str]:
    training, sources, problems = config.training, config.training.sources, []
    if not sources:
        return []
    for key in ("training.dataset", "training.dataset_path"):
        if get(config, key) != OPTIONS[key].default:
            problems.append(f"{_name(config, key)}: is not used beside training.sources; make it an entry")
    if not training.repeat:
        problems.append(f"{_name(config, 'training.repeat')}: each of training.sources repeats by itself; remove it")
    validation = config.validation
    if validation.enable and validation.steps == -1 and not (validation.dataset or validation.dataset_path):
        problems.append(
            f"{_name(config, 'validation.steps')}: the sources of a mixture don't end together; set a number of"
            " microbatches, or name one corpus in validation.dataset or validation.dataset_path"
        )
    where = f"{config.sources.get('training.sources', 'default')}: training.sources"
    for number, source in enumerate(sources, 1):
        if not source.dataset and not source.dataset_path:
            problems.append(f"{where}, entry {number}: needs dataset or dataset_path")
    total = sum(source.weight for source in sources)
    if not 0 < total < math.inf or any(0 < source.weight < total / SMALLEST_WEIGHT for source in sources):
        problems.append(f"{where}: each weight must be 0 or at least 1/{SMALLEST_WEIGHT} of their sum")
    names = [source_name(source) for source in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{where}: several entries are called {', '.join(repeated)}; give each a name of its own")
    return problems


def _check_hugging_face(config: JobConfig) -> list[str]:
    checkpoint, problems = config.checkpoint, []
    in_hf = _name(config, "checkpoint.initial_load_in_hf")
    if checkpoint.initial_load_in_hf and not (checkpoint.initial_load_path or config.model.hf_assets_path):
        where = "checkpoint.initial_load_path or model.hf_assets_path"
        problems.append(f"{in_hf}: there is no folder to load; name it in {where}")
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        problems.append(f"{in_hf}: such a folder holds only the model; leave out initial_load_model_only = false")
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        problems.append(f"{_name(config, 'checkpoint.initial_load_in_hf_quantized')}: needs initial_load_in_hf = true")
    exported = checkpoint.enable and checkpoint.last_save_model_only and not checkpoint.last_save_in_hf
    if checkpoint.export_dtype != "float32" and exported:
        problems.append(
            f"{_name(config, 'checkpoint.export_dtype')}: is the dtype of what last_save_in_hf = true writes; other"
            " checkpoints, with last_save_model_only too, are written as trained"
        )
    return problems


def _check_checkpoint(config: JobConfig, world_size: int) -> list[str]:
    checkpoint, problems = config.checkpoint, []
    if "://" in checkpoint.folder:
        problems.append(
            f"{_name(config, 'checkpoint.folder')}: is a folder in job.dump_folder; name the address in"
            " checkpoint.remote_folder, which each checkpoint is copied to"
        )
    if checkpoint.remote_folder is not None and (problem := _find_bad_address(checkpoint.remote_folder)):
        problems.append(f"{_name(config, 'checkpoint.remote_folder')}: {problem}")
    initial = checkpoint.initial_load_path or ""
    if "://" in initial and (problem := _find_bad_initial_address(initial, checkpoint.initial_load_in_hf)):
        problems.append(f"{_name(config, 'checkpoint.initial_load_path')}: {problem}")
    excluded = _name(config, "checkpoint.exclude_from_loading")
    if unknown := [part for part in checkpoint.exclude_from_loading if part not in EXCLUDABLE]:
        problems.append(f"{excluded}: {', '.join(unknown)} can't be left out; legal are {', '.join(EXCLUDABLE)}")
    whole_initial = checkpoint.initial_load_path and not checkpoint.initial_load_model_only
    if checkpoint.exclude_from_loading and checkpoint.load_step < 0 and not whole_initial:
        problems.append(
            f"{excluded}: is about checkpoint.load_step, or checkpoint.initial_load_path with initial_load_model_only ="
            " false: set one; a run that goes on from its own newest checkpoint takes all of it"
        )
    if checkpoint.load_step >= 0 and not checkpoint.enable:
        problems.append(
            f"{_name(config, 'checkpoint.load_step')}: needs checkpoint.enable = true; with checkpoint.load_only = true"
            " nothing is saved. The checkpoint of another run is named by checkpoint.initial_load_path"
        )
    if checkpoint.create_seed_checkpoint and "." in config.optimizer.name:
        problems.append(
            f"{_name(config, 'checkpoint.create_seed_checkpoint')}: an optimizer of your own has its state from the"
            " first step on; use enable_first_step_checkpoint"
        )
    if checkpoint.create_seed_checkpoint and (world_size > 1 or not checkpoint.enable or checkpoint.load_only):
        problems.append(
            f"{_name(config, 'checkpoint.create_seed_checkpoint')}: needs one process (here {world_size}),"
            " checkpoint.enable = true and load_only = false; the seed then loads on any number of processes"
        )
    return problems


def _find_bad_initial_address(address: str, in_hf: bool) -> str | None:
    if in_hf:
        return "with initial_load_in_hf it is a folder of the file system; copy it to one"
    if not re.search(r"/step-\d+/?$", address):
        return "an address must be that of one checkpoint, and end in step-N"
    return _find_bad_address(address)


def _find_bad_address(address: str) -> str | None:
    """Say why fsspec can't open an address, as far as that can be said without opening it."""
    protocol, separator, path = address.partition("://")
    if not separator or not path.strip("/"):
        return "must be an address such as s3://bucket/run; a plain folder is file:///path/of/the/folder"
    if set(path) & set("*?[]"):
        return "must not hold any of * ? [ ], which file systems take for patterns"
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        return f"the package that opens {protocol}:// is not installed; pip install it ({error})"
    except ValueError:
        return f"unknown protocol {protocol!r}; known are {', '.join(sorted(available_protocols()))}"
    return None


def _check_compile(config: JobConfig) -> list[str]:
    problems = []
    if unknown := [name for name in config.compile.components if name not in COMPONENTS]:
        problems.append(
            f"{_name(config, 'compile.components')}: {', '.join(unknown)} can't be compiled; legal are"
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
    in_place = [name for name in ("reuse_logits", "reuse_sharded_logits") if name not in options.disable_passes]
    if "cross_entropy" in options.fusions and in_place:
        problems.append(
            f"{_name(config, 'compile.fusions')}: the loss works in the logits' memory, by rows, and Inductor can't"
            f" compile that; remove cross_entropy, or add {' and '.join(in_place)} to compile.disable_passes"
        )
    codegen = options.codegen or ("blocks" if options.enable else "off")
    if options.dedupe_layers and (codegen != "off" or options.fusions or options.mode == "eager"):
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
    return problems + _check_async_tensor_parallel(config) + _check_optimizer_in_graph(config)


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


# Optimizers that have their state in tensors, and don't branch on it.
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


def _notices(config: JobConfig) -> list[str]:
    notices = _graph_notices(config) + quantize.unused(config)
    total_steps, steps = config.lr_scheduler.total_steps, config.training.steps
    if total_steps is not None and total_steps < steps:
        notices.append(
            f"{_name(config, 'lr_scheduler.total_steps')}: the schedule ends before training.steps {steps};"
            " the learning rate then stays where it is"
        )
    if config.checkpoint.export_dtype != "float32" and not config.checkpoint.last_save_in_hf:
        name = _name(config, "checkpoint.export_dtype")
        notices.append(f"{name}: nothing is exported while checkpoint.last_save_in_hf is false")
    if not config.checkpoint.enable:
        if config.checkpoint.remote_folder is not None:
            name = _name(config, "checkpoint.remote_folder")
            notices.append(f"{name}: nothing is copied while checkpoint.enable is false")
        if config.checkpoint.last_save_in_hf:
            name = _name(config, "checkpoint.last_save_in_hf")
            notices.append(f"{name}: nothing is saved while checkpoint.enable is false")
    if config.parallelism.expert_tensor_parallel_degree > 1 and config.parallelism.expert_parallel_degree == 1:
        name = _name(config, "parallelism.expert_tensor_parallel_degree")
        notices.append(f"{name}: experts are split as all else while parallelism.expert_parallel_degree is 1")
    if config.metrics.histogram_freq and not config.metrics.enable_tensorboard:
        name = _name(config, "metrics.histogram_freq")
        notices.append(f"{name}: there are no histograms while metrics.enable_tensorboard is false")
    if (
        config.training.mtp_loss_weight != OPTIONS["training.mtp_loss_weight"].default
        and not config.model.num_mtp_layers
    ):
        name = _name(config, "training.mtp_loss_weight")
        notices.append(f"{name}: there is no such loss while model.num_mtp_layers is 0")
    notices += _stage_notices(config)
    if config.comm.mode != "fake_backend":
        notices += [
            f"{_name(config, f'comm.{key}')}: only a dry run, comm.mode = fake_backend, {what}"
            for key, what in _ONLY_DRY.items()
            if getattr(config.comm, key) != OPTIONS[f"comm.{key}"].default
        ]
    return notices


def _graph_notices(config: JobConfig) -> list[str]:
    """Name the options of the graph, its memory and its code that are set and not used."""

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


def _stage_notices(config: JobConfig) -> list[str]:
    """Name the options of a pipeline that are set and not used."""
    options = config.parallelism
    keys = [key for key in OPTIONS if key.startswith("parallelism.pipeline_parallel_") and key != _PP]
    chosen = [key for key in [*keys, _PARTS] if get(config, key) != OPTIONS[key].default]
    if options.pipeline_parallel_degree == 1:
        return [f"{_name(config, key)}: there are no stages while {_PP} is 1" for key in chosen]
    divides = [key for key in chosen if key.endswith(("_layers", "_layers_per_stage"))]
    if options.module_fqns_per_model_part:
        return [f"{_name(config, key)}: {_PARTS} says what each stage has" for key in divides]
    if not options.pipeline_parallel_schedule_csv:
        return []
    counted = [key for key in divides if key.endswith("_per_stage")]
    return [f"{_name(config, key)}: there are as many stages as pipeline_parallel_schedule_csv has" for key in counted]
