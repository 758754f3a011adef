"""Every option there is: a dataclass per TOML table, a field per key, with default, legal values and help."""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from torchtitan_graph.config.option import INSIDE, brief, option, options
from torchtitan_graph.rates import RATES

_DOTTED, _NOT_EMPTY = r"\w+(\.\w+)+", "a string that is not empty"


@dataclass
class Job:
    """The run as a whole."""

    config_file: str | None = option(None, "TOML file to load; a bare name is also looked up among the packaged files.")
    dump_folder: str = option(
        "./outputs",
        "Folder for everything the run writes. {table.key} in it stands for the value of that option, as in"
        " ./outputs/{model.name}; other braces are refused.",
    )
    description: str = option("default job", "Free text, logged at the start.")
    print_config: bool = option(False, "Log the resolved configuration at the start.")
    save_config_file: str = option(
        "config.toml",
        "Where in dump_folder the resolved configuration is written, as TOML; empty: nowhere.",
        place=INSIDE,
    )
    allow_changed: list[str] = option(
        [],
        "Options of model, tokenizer or data that may differ from what this run was started with; any other such"
        " difference is refused when the run resumes.",
    )


@dataclass
class Profiling:
    """Kineto traces of some steps, and snapshots of a GPU's memory."""

    enable_profiling: bool = option(False, "Write a trace every profile_freq steps.")
    save_traces_folder: str = option("profile_traces", "Folder in dump_folder for the traces.", place=INSIDE)
    profile_freq: int = option(10, "Steps from one trace, or snapshot, to the next.", minimum=1)
    profiler_active: int = option(1, "Steps that a trace covers.", minimum=1)
    profiler_warmup: int = option(3, "Steps the profiler runs before a trace, unrecorded.", minimum=0)
    enable_memory_snapshot: bool = option(
        False, "Write snapshots of a GPU's memory every profile_freq steps, and when memory runs out; GPUs only."
    )
    save_memory_snapshot_folder: str = option(
        "memory_snapshot", "Folder in dump_folder for memory snapshots.", place=INSIDE
    )


@dataclass
class Metrics:
    """What is logged, and how often."""

    log_freq: int = option(
        10, "Steps from one log line to the next; the first and the last step are always logged.", minimum=1
    )
    enable_tensorboard: bool = option(False, "Write TensorBoard event files.")
    disable_color_printing: bool = option(False, "Never colour the console.")
    save_tb_folder: str = option("tb", "Folder in dump_folder for TensorBoard event files.", place=INSIDE)
    save_for_all_ranks: bool = option(False, "Write the metrics of every rank to files, not only those of rank 0.")
    enable_wandb: bool = option(
        False,
        "Log to Weights & Biases; with neither WANDB_API_KEY nor WANDB_MODE in the environment, to a folder in"
        " dump_folder only.",
    )
    histogram_freq: int = option(
        0,
        "Steps from one set of histograms of all parameters and gradients to the next, with enable_tensorboard; 0:"
        " none.",
        minimum=0,
    )
    loss_alarm: float = option(
        10.0,
        "Warn where the loss is above the median of the last 100 steps by more than so many deviations; 0: never.",
        minimum=0,
    )
    grad_norm_alarm: float = option(20.0, "As loss_alarm, for the gradient norm.", minimum=0)
    log_expert_loads: bool = option(
        False,
        "Write to metrics.jsonl, as expert_loads, how many tokens went to each expert of each layer: what"
        " python -m torchtitan_graph.plan reads with --expert_load.",
    )
    straggler_share: float = option(
        0.2,
        "Compare the ranks at logged steps, and warn where one is busy longer than the median rank by more than this"
        " share of the step; 0: don't compare.",
        minimum=0,
    )


@dataclass
class Model:
    """What is trained."""

    name: str = option(
        "llama3",
        "Model family, a file of the package's models/; a dotted name is a module of your own. With neither this nor"
        " flavor set, a config.json in hf_assets_path says it.",
    )
    flavor: str | None = option(
        None,
        "Size of the model, a name of the family's table; not set: what config.json in hf_assets_path says, or, where"
        " there is none, debugmodel.",
    )
    hf_assets_path: str | None = option(
        None,
        "Folder with a tokenizer.json, or that file; not set: bytes are the tokens. A config.json in the folder is the"
        " architecture, or what flavor is checked against. No weights are loaded by this option alone.",
    )
    converters: list[str] = option(
        [],
        "float8: linear layers multiply in float8, see [quantize.linear.float8] and docs/tune/float8.md; mx: they do in"
        " MXFP8; quantize.grouped_mm.float8: experts multiply in float8.",
    )
    num_mtp_layers: int = option(
        0,
        "Layers that each predict one more token while training (deepseek_v3; its release has 1).",
        minimum=0,
        maximum=16,
    )
    attn: str = option(
        "auto",
        "Implementation of attention; all mask other documents. auto: on a GPU flex, compiled, which leaves out what"
        " masks hide; on a CPU sdpa. varlen: flash attention's kernels for documents of various lengths, which hold no"
        " mask; on a GPU in bfloat16.",
        choices=("auto", "sdpa", "flex", "varlen"),
    )
    elementwise: str = option(
        "auto",
        "Implementation of rotary positions and SwiGLU, the same up to rounding. fused: an operator each, on a GPU one"
        " kernel, in eager mode too, but for what compile.fusions has. torch: torch's operators. auto: on a GPU fused,"
        " on a CPU torch.",
        choices=("auto", "fused", "torch"),
    )


@dataclass
class MoE:
    """Mixtures of experts, in the families that have them."""

    bias_update_speed: float = option(
        1e-3,
        "How far a correction bias (deepseek_v3's way to balance without a loss) moves after each step.",
        minimum=0,
    )
    load_balance_loss: float = option(0.0, "Weight of a loss that evens out the experts' loads; 0: none.", minimum=0)
    load_balance_over: str = option(
        "batch",
        "What that loss evens out: the loads of a microbatch's rows on all data-parallel ranks, or of each row.",
        choices=("batch", "sequence"),
    )
    router_z_loss: float = option(0.0, "Weight of a loss that keeps the routers' logits small; 0: none.", minimum=0)


@dataclass
class ParamGroup:
    """Parameters with settings of their own. A parameter belongs to the first entry that matches its name."""

    pattern: str = option(
        "",
        "Which parameters, by their whole names, such as *_norm.weight or layers.[01].*",
        pattern=r".+",
        means=_NOT_EMPTY,
    )
    lr: float | None = option(None, "Peak learning rate; not set: optimizer.lr.", minimum=0)
    weight_decay: float | None = option(None, "Weight decay; not set: optimizer.weight_decay.", minimum=0)
    beta1: float | None = option(None, "As optimizer.beta1; not set: that.", minimum=0, below=1)
    beta2: float | None = option(None, "As optimizer.beta2; not set: that.", minimum=0, below=1)


@dataclass
class Optimizer:
    """The optimizer; see [lr_scheduler] for its learning rate over time."""

    name: str = option(
        "AdamW",
        "Optimizer; a dotted name is a class of your own, a torch.optim.Optimizer.",
        choices=("Adam", "AdamW"),
        pattern=_DOTTED,
        means="a dotted name, such as my_package.MyOptimizer, of a class that is imported",
    )
    options: dict[str, Any] = option(
        {}, "Further arguments of an optimizer with a dotted name, such as {momentum = 0.9}."
    )
    param_groups: list[ParamGroup] = option(
        [], "Parameters, by patterns of their names, that are trained with other settings than the rest."
    )
    lr: float = option(8e-4, "Peak learning rate.", minimum=0)
    beta1: float = option(0.9, "Decay of the mean of the gradients.", minimum=0, below=1)
    beta2: float = option(0.95, "Decay of the mean of their squares.", minimum=0, below=1)
    eps: float = option(1e-8, "Added to the denominator of an update.", minimum=0)
    weight_decay: float = option(0.1, "Weight decay; decoupled in AdamW.", minimum=0)
    implementation: str = option(
        "fused", "The same update up to rounding, at another speed.", choices=("for-loop", "foreach", "fused")
    )


@dataclass
class LRScheduler:
    """The learning rate: linear warm-up, constant, decay."""

    warmup_steps: int = option(200, "Steps of linear warm-up.", minimum=0)
    total_steps: int | None = option(None, "Steps that the schedule spans; not set: training.steps.", minimum=1)
    decay_ratio: float | None = option(
        None,
        "Part of total_steps spent decaying, from 0 up to 1; not set: all that follows warm-up.",
        minimum=0,
        maximum=1,
    )
    decay_type: str = option("linear", "Shape of the decay.", choices=("linear", "sqrt", "cosine"))
    min_lr_factor: float = option(
        0.0,
        "Where the decay leads, as a part of the peak; the step after the last would have it.",
        minimum=0,
        maximum=1,
    )


@dataclass
class DataLoader:
    """Processes that prepare batches."""

    num_workers: int = option(
        0, "Worker processes per rank; 0: the trainer prepares its batches itself.", minimum=0, maximum=1024
    )
    persistent_workers: bool = option(
        False, "Keep worker processes where reading begins anew, instead of starting them again."
    )
    pin_memory: bool = option(
        True, "On a GPU, put batches in page-locked memory: they are copied while it computes, a step ahead."
    )
    prefetch_factor: int | None = option(None, "Batches a worker prepares ahead; not set: 2.", minimum=1, maximum=1024)


@dataclass
class DataSource:
    """A corpus of a mixture. Each has its own order and repeats by itself."""

    dataset: str | None = option(None, "As training.dataset.")
    dataset_path: str | None = option(None, "As training.dataset_path.")
    weight: float = option(1.0, "Its share of the rows, relative to the weights of the others.", minimum=0)
    name: str | None = option(None, "What the metrics call it; not set: the last part of its path, or dataset.")


def source_name(source: DataSource) -> str:
    """Return the name of a mixture's corpus in the metrics."""
    return source.name or PurePath(source.dataset_path or source.dataset or "").name


ROW_MULTIPLE = 16  # of dynamic_seq_len: attention's and float8's kernels want rows aligned, and lengths are fewer


@dataclass
class Training:
    """Data, batch and precision of the run."""

    dataset: str = option(
        "stdlib",
        "Corpus: stdlib (the running Python's own sources, no download), c4 (from the Hugging Face hub), another"
        " owner/name or owner/name:config of the hub, or any name together with dataset_path. c4_test is an old name of"
        " stdlib.",
    )
    dataset_path: str | None = option(
        None,
        "A text, .jsonl, .jsonl.gz or .parquet file, a folder of these and of source files at any depth, a saved"
        " Hugging Face dataset, or token shards of scripts/pretokenize.py.",
    )
    sources: list[DataSource] = option(
        [], "Corpora to mix by weight, in the place of dataset and dataset_path; the weights may change on a resume."
    )
    repeat: bool = option(True, "Begin the corpus again, in another order, when it is through; else stop there.")
    skip_not_utf8: bool = option(
        False, "Leave out files, lines and pieces that are not UTF-8, of validation too, where they'd be refused."
    )
    local_batch_size: int = option(8, "Rows per rank and microbatch.", minimum=1)
    global_batch_size: int = option(
        -1,
        "Rows per optimizer step over all ranks, by accumulation; -1: local_batch_size * data-parallel degree.",
        minimum=1,
        also=(-1,),
    )
    seq_len: int = option(2048, "Tokens per row.", minimum=1)
    dynamic_seq_len: bool = option(
        False,
        "Rows hold whole documents, as many as seq_len has room for; only a longer one is cut. A rank's batch is as"
        " long as its longest row, up to a multiple of 16, and one graph serves all lengths.",
    )
    mtp_loss_weight: float = option(
        0.3, "Weight of the mean loss of the model.num_mtp_layers tokens further ahead.", minimum=0
    )
    loss_implementation: str = option(
        "auto",
        "Implementation of the loss, the same up to rounding. fused: reads the logits once in forward and once in"
        " backward, on a GPU in one kernel each. torch: torch's operators. auto: on a GPU fused, on a CPU torch.",
        choices=("auto", "fused", "torch"),
    )
    max_norm: float = option(1.0, "Largest gradient norm, over all parameters; 0: measure, never clip.", minimum=0)
    steps: int = option(10000, "Optimizer steps.", minimum=1)
    dtype: str = option(
        "float32", "dtype of the parameters at rest and of the optimizer.", choices=("float32", "bfloat16")
    )
    mixed_precision_param: str = option(
        "bfloat16", "dtype that forward and backward compute in.", choices=("bfloat16", "float32")
    )
    mixed_precision_reduce: str = option("float32", "dtype that gradients are reduced in.", choices=("float32",))
    enable_cpu_offload: bool = option(
        False,
        "On a GPU, keep parameters, gradients and the optimizer's state in the host's memory: shards are copied to the"
        " GPU before they are gathered, reduced gradients back, and the optimizer steps on the host. On a CPU it does"
        " nothing; a dry run counts it, unless comm.fake_device is CPU.",
    )
    gc_freq: int = option(
        50, "Steps between Python's garbage collections, so that all ranks collect together.", minimum=1
    )
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Parallelism:
    """How the work is divided. The degrees multiply to the number of processes, but for those of experts."""

    data_parallel_replicate_degree: int = option(1, "Replicas of the parameters (DDP; with shards: HSDP).", minimum=1)
    data_parallel_shard_degree: int = option(
        -1, "Shards of the parameters (FSDP); -1: all processes that the other degrees leave.", minimum=1, also=(-1,)
    )
    fsdp_reshard_after_forward: str = option(
        "default",
        "Whether parameters that forward has gathered over the shards are freed after it and gathered again for"
        " backward. default: those of the layers; embedding, last norm and output stay. always: all. never: none.",
        choices=("default", "always", "never"),
    )
    tensor_parallel_degree: int = option(1, "Shards of the matrix products, with sequence parallel.", minimum=1)
    enable_async_tensor_parallel: bool = option(
        False,
        "With tensor parallel, cut what its ranks send, and the products beside it, into the ranks' parts of the"
        " sequence, so that they overlap.",
    )
    context_parallel_degree: int = option(1, "Ranks that share a row of tokens.", minimum=1)
    pipeline_parallel_degree: int = option(1, "Stages that the layers are divided into.", minimum=1)
    pipeline_parallel_schedule: str = option(
        "1F1B",
        "The order in which a rank's stages compute forward and backward of the microbatches. GPipe and 1F1B have one"
        " stage on each rank, Interleaved1F1B several, ZBVZeroBubble and DualPipeV two, the first and the last on one"
        " rank.",
        choices=("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"),
    )
    pipeline_parallel_schedule_csv: str | None = option(
        None,
        "File with a schedule of your own, in the place of pipeline_parallel_schedule: a line for each rank, with what"
        " it computes, such as 0F0,0F1,0B0,0B1 (stage, F or B or its halves I and W, microbatch).",
    )
    pipeline_parallel_microbatch_size: int = option(
        1,
        "With a pipeline, rows that a stage computes at a time; divides training.local_batch_size. All rows of a step"
        " are one run of the schedule.",
        minimum=1,
    )
    pipeline_parallel_layers_per_stage: int | None = option(
        None,
        "Layers of each stage, which gives the number of stages; not set: one stage on each rank, or two where the"
        " schedule has several.",
        minimum=1,
    )
    pipeline_parallel_first_stage_less_layers: int = option(
        1, "How many layers fewer the first stage has, for the embedding.", minimum=0
    )
    pipeline_parallel_last_stage_less_layers: int = option(
        1, "How many layers fewer the last stage has, for the output.", minimum=0
    )
    module_fqns_per_model_part: list[list[str]] = option(
        [],
        "The modules of each stage by name, in order, such as [['tok_embeddings', 'layers.0'], ['layers.1', 'norm',"
        " 'output']]; empty: divided evenly.",
    )
    expert_parallel_degree: int = option(
        1, "Ranks among those of shard, context and tensor parallel that share the experts of a layer.", minimum=1
    )
    expert_tensor_parallel_degree: int = option(
        1,
        "Ranks that share each expert where expert_parallel_degree is above 1: 1 or tensor_parallel_degree.",
        minimum=1,
    )
    disable_loss_parallel: bool = option(False, "Gather the logits of all vocabulary shards before the loss.")


@dataclass
class Checkpoint:
    """Saving the run, and going on from a saved one."""

    enable: bool = option(False, "Save checkpoints, and resume from the newest complete one.")
    folder: str = option("checkpoint", "Folder in dump_folder for the checkpoints.", place=INSIDE)
    interval: int = option(500, "Steps from one checkpoint to the next.", minimum=1)
    interval_minutes: float = option(
        0.0, "Save also when this long has passed since the last save, by the clock of rank 0; 0: never.", minimum=0
    )
    keep_every: int = option(
        0, "Save also every so many steps, and never delete those checkpoints; 0: none.", minimum=0
    )
    remote_folder: str | None = option(
        None,
        "Address of a copy of the checkpoints, such as s3://bucket/run: each but step-N-hf is copied there once it is"
        " whole, and a run whose folder lacks the newest fetches it.",
    )
    initial_load_path: str | None = option(
        None,
        "Checkpoint to start from while folder and remote_folder hold none of this run: a step-N folder, or the address"
        " of one, such as s3://bucket/run/step-100.",
    )
    initial_load_model_only: bool = option(True, "Take only parameters from initial_load_path.")
    initial_load_in_hf: bool = option(
        False,
        "Start from the weights in initial_load_path, or where that is not set in model.hf_assets_path: a folder in"
        " Hugging Face's format.",
    )
    initial_load_in_hf_quantized: bool = option(
        False, "With initial_load_in_hf: turn weights stored in fp8 or MXFP4 blocks back into numbers."
    )
    last_save_model_only: bool = option(True, "Save only parameters after the last step.")
    last_save_in_hf: bool = option(
        False,
        "After the last step, also write step-N-hf in folder, in Hugging Face's format; it is not copied to"
        " remote_folder.",
    )
    export_dtype: str = option(
        "float32",
        "dtype of the parameters in step-N-hf; without last_save_in_hf, in a last checkpoint of only them. There"
        " float32 leaves them as they are.",
        choices=("float16", "bfloat16", "float32"),
    )
    async_mode: str = option(
        "disabled",
        "Save while training goes on: a thread writes a copy in the host's memory, made anew for each checkpoint"
        " (async) or kept, on a GPU pinned (async_with_pinned_mem).",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    keep_latest_k: int = option(
        10,
        "Checkpoints to keep, the newest, beside those of keep_every; 0: all. 1 is illegal: the newest may be"
        " incomplete.",
        minimum=2,
        also=(0,),
    )
    load_step: int = option(-1, "Step to resume from; -1: the newest.", minimum=0, also=(-1,))
    exclude_from_loading: list[str] = option(
        [],
        "Parts not to load from initial_load_path or of load_step: optimizer, lr_scheduler, dataloader (the position in"
        " the data), train_state (steps and tokens counted, random states).",
    )
    enable_first_step_checkpoint: bool = option(False, "Save after the first step too.")
    create_seed_checkpoint: bool = option(
        False, "In one process: save the state before the first step, step-0, and stop."
    )
    load_only: bool = option(False, "Load, never save.")


@dataclass
class ActivationCheckpoint:
    """What is recomputed in backward instead of kept."""

    mode: str = option(
        "selective",
        "none: keep all but elementwise results; full: recompute each layer; selective: as selective_ac_option says;"
        " memory_budget: as little as lets a step hold what memory_budget or memory_budget_gib says.",
        choices=("none", "selective", "full", "memory_budget"),
    )
    selective_ac_option: str = option(
        "2",
        "op: of each layer keep attention, sums over ranks and every second matrix product, recompute the rest; an"
        " integer n: recompute every n-th layer as a whole.",
        pattern=r"op|[1-9][0-9]{0,8}",
        means="op, or a whole number of at least 1",
    )
    save: list[str] = option(
        [],
        "Modules of layers whose results backward finds kept, whatever mode says, as patterns of names such as"
        " layers.*.attention; * stands for any one part. Of modules inside one another the innermost that save or"
        " recompute names decides; where both name the same one, save does.",
    )
    recompute: list[str] = option(
        [],
        "Modules of layers whose results backward computes again, whatever mode says, as patterns of names. What leaves"
        " a layer stays kept.",
    )
    offload: list[str] = option(
        [],
        "Modules whose large activations lie in the host's memory from forward to backward, as patterns of names such"
        " as layers.*; * stands for any one part. What the last block's backward reads stays on the GPU. On a CPU it"
        " does nothing; a dry run counts it, unless comm.fake_device is CPU.",
    )
    memory_budget: float = option(
        0.5,
        "With mode memory_budget: what a step may hold at its peak, from 0, the least that can be had, to 1, what mode"
        " none holds.",
        minimum=0,
        maximum=1,
    )
    memory_budget_gib: float | None = option(
        None,
        "With mode memory_budget, in place of memory_budget: what a rank may hold in all, in GiB: parameters, optimizer"
        " state, gradients and a step at its peak.",
        minimum=0,
        maximum=10**6,
    )
    visualize_memory_budget_pareto: bool = option(
        False,
        "With mode memory_budget: draw what can be had for how much work, to memory_budget_pareto.svg in the dump"
        " folder's graphs.",
    )


@dataclass
class ExtraPass:
    """A pass of your own, put into the list of passes; see docs/extend/pass.md."""

    pass_: str = option(
        "",
        "The dotted name of a function that takes a GraphModule and gives one.",
        pattern=_DOTTED,
        means="a dotted name, such as my_package.my_pass, of a function that is imported",
    )
    after: str = option(
        "", "The pass that it follows; entries after the same pass run in their order.", pattern=r".+", means=_NOT_EMPTY
    )
    exact: bool = option(True, "It keeps numbers bit for bit; false: up to rounding. debug.verify_passes checks it.")


@dataclass
class Compile:
    """How the training step runs."""

    codegen: str | None = option(
        None,
        "What of the graph Inductor compiles: faster, and equal to eager only up to rounding. off: only flex attention "
        "on a GPU; blocks: components, alike parts once; whole: all between collectives, which takes seconds for each "
        "block. Not set: blocks with enable, else off.",
        choices=("off", "blocks", "whole"),
    )
    enable: bool = option(False, "torchtitan's word for codegen = blocks.")
    components: list[str] = option(
        ["model", "loss"],
        "What codegen = blocks compiles: model (the modules of regions), loss (what follows the last module, unless "
        "it works in the logits' memory), flex (flex attention also on a CPU, where only the evaluation step's can be "
        "compiled).",
    )
    regions: list[str] = option(
        ["layers.*"],
        "Patterns of module names, such as layers.*.feed_forward, that component model compiles; * stands for any one "
        "part. Each match is a region in forward and one in backward, cut where a collective lies between.",
    )
    fusions: list[str] = option(
        [],
        "What Inductor compiles alone, wherever the model has it, with codegen = off too: rms_norm, swiglu, rope.",
    )
    region_options: list[list[str]] = option(
        [],
        "Options of Inductor for regions: each a pattern of regions, a fusion, or flex, loss or whole, then name=value "
        "as in torch._inductor.config.",
    )
    mode: str = option(
        "graph",
        "graph: one FX graph, edited by passes; eager: FSDP2 and autograd, the reference.",
        choices=("graph", "eager"),
    )
    dedupe_layers: bool = option(
        False,
        "Let equal blocks be calls of one subgraph, forward and backward: a small graph of many layers, bit for bit.",
    )
    capture: str = option(
        "make_fx",
        "How the step becomes a graph. make_fx: it is run, and what ran is recorded; dynamo: its code is read, so that "
        "what the graph rests on is checked, and what it would lose is refused. The same bits; tracing takes longer.",
        choices=("make_fx", "dynamo"),
    )
    record_call_hierarchy: bool = option(
        False,
        "Record on each graph node the calls of modules and functions that it was made in: for dumps, show_graph.py, "
        "profiles, a table in TensorBoard, and passes of your own.",
    )
    optimizer_in_graph: bool = option(
        False,
        "Clip and take the optimizer's step as a graph too, with the same bits on a CPU: Adam, AdamW, and of "
        "torch.optim Adagrad, Muon, RMSprop and SGD.",
    )
    cuda_graphs: bool = option(
        False,
        "Record the training step, and the optimizer's where that is a graph, as CUDA graphs in the second step, and "
        "replay them from then on; GPUs only.",
    )
    disable_passes: list[str] = option([], "Passes to leave out, by name.")
    extra_passes: list[ExtraPass] = option(
        [], 'Passes of your own, such as {pass = "my_pkg.my_pass", after = "bucket_collectives"}.'
    )
    precompiled: str | None = option(
        None,
        "Folder of this job's graphs, which python -m torchtitan_graph.precompile wrote with the same options: they are"
        " read, not traced and rewritten anew.",
    )


@dataclass
class Float8:
    """How linear layers multiply in float8, with "float8" in model.converters."""

    recipe_name: str | None = option(
        None,
        "tensorwise (also if not set): one scale for a tensor, from its largest magnitude; tensorwise_delayed: from the"
        " largest of the last 16 steps, weights from their own; rowwise: one for each row; rowwise_with_gw_hp: the same"
        " with the weights' gradients in training.mixed_precision_param.",
        choices=("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"),
    )
    gradient_format: str | None = option(
        None,
        "Format of gradients; all else is e4m3. Not set: e5m2, with rows e4m3.",
        choices=("e5m2", "e4m3"),
    )
    filter_fqns: list[str] = option(
        [], "Parts of names; linear layers with one of them in their name, such as output, are left as they are."
    )
    emulate: bool = option(
        False, "Multiply in fp32 what float8 stands for, on a GPU too, such as one without float8; a CPU always does."
    )


@dataclass
class MX:
    """How linear layers multiply in MX formats, with "mx" in model.converters."""

    recipe_name: str = option(
        "mxfp8_cublas",
        "All are e4m3 with a power of two for each 32 numbers that a product runs along. A CPU multiplies in fp32 what"
        " they stand for; mxfp8_emulated: a GPU too, which has no other way yet. mxfp8 is mxfp8_cublas.",
        choices=("mxfp8_cublas", "mxfp8", "mxfp8_emulated"),
    )
    filter_fqns: list[str] = option(
        ["output"], "Parts of names; linear layers with one of them in their name are left as they are."
    )


@dataclass
class QuantizeLinear:
    """Linear layers."""

    float8: Float8 = field(default_factory=Float8)
    mx: MX = field(default_factory=MX)


@dataclass
class GroupedFloat8:
    """How experts multiply in float8, with "quantize.grouped_mm.float8" in model.converters."""

    fqns: list[str] = option(
        [], "Parts of names; experts with one of them in their name, such as experts for all, multiply in float8."
    )
    recipe_name: str | None = option(
        None,
        "As of quantize.linear.float8; each expert's weight has a scale of its own. Not set: rowwise.",
        choices=("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"),
    )
    gradient_format: str | None = option(None, "As of quantize.linear.float8.", choices=("e5m2", "e4m3"))
    emulate: bool = option(
        False, "Multiply in fp32 what float8 stands for; a CPU always does. A GPU has products by rows, in e4m3."
    )


@dataclass
class QuantizeGrouped:
    """Experts."""

    float8: GroupedFloat8 = field(default_factory=GroupedFloat8)


@dataclass
class Quantize:
    """Products of fewer bits."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    grouped_mm: QuantizeGrouped = field(default_factory=QuantizeGrouped)


@dataclass
class Comm:
    """The processes' communication."""

    init_timeout_seconds: int = option(
        300, "Longest wait in a collective until the first step is done.", minimum=1, maximum=10**9
    )
    train_timeout_seconds: int = option(100, "Longest wait in a collective after that.", minimum=1, maximum=10**9)
    trace_buf_size: int = option(
        20000, "Collectives that NCCL's flight recorder keeps, written when one of them times out; 0: none.", minimum=0
    )
    save_traces_folder: str = option(
        "comm_traces", "Folder in dump_folder for what is written when a step hangs.", place=INSIDE
    )
    save_traces_file_prefix: str = option("rank_", "How the files in it begin.", place=INSIDE)
    mode: str = option(
        "default",
        "default: real communication; fake_backend: a dry run of one rank of any world size, in one process.",
        choices=("default", "fake_backend"),
    )
    fake_rank: int = option(0, "The rank that a dry run builds.", minimum=0)
    fake_device: str = option(
        "H100",
        "The device that a dry run is for, and by whose rates it estimates; eight GPUs share a machine.",
        choices=tuple(RATES),
        any_case=True,
    )


@dataclass
class Validation:
    """Loss on data the model is not trained on."""

    enable: bool = option(False, "Validate every freq steps, and after the last.")
    dataset: str | None = option(
        None,
        "Corpus, as training.dataset, whose validation split is used; not set, nor dataset_path: what is trained on, of"
        " a mixture each source by its weight. c4_validation is the hub's.",
    )
    dataset_path: str | None = option(
        None, "As training.dataset_path; a path that is not trained on is used as a whole."
    )
    local_batch_size: int = option(8, "Rows per rank and microbatch.", minimum=1)
    seq_len: int = option(2048, "Tokens per row.", minimum=1)
    freq: int = option(10, "Steps from one validation to the next.", minimum=1)
    steps: int = option(-1, "Microbatches per rank of one validation; -1: the whole split.", minimum=1, also=(-1,))
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Debug:
    """Reproducing a run, and looking into it."""

    seed: int | None = option(
        None, "Seed of the initial parameters and of the data's order; not set: 0.", minimum=0, below=2**63
    )
    deterministic: bool = option(
        False,
        "Use deterministic kernels only, on a GPU slower ones; an operation without one is an error.",
    )
    deterministic_warn_only: bool = option(
        False,
        "With deterministic: such an operation is a warning, and on a GPU attention keeps its faster kernels, whose"
        " backward is not deterministic.",
    )
    moe_force_load_balance: bool = option(False, "Send every expert equally many tokens.")
    verify_passes: bool = option(
        False, "Run the training step's graph before and after each pass and compare. Slow, and needs memory."
    )
    dump_graphs: bool = option(
        False,
        "Write the training step's graph after each pass to graphs in dump_folder, numbered, as Python files that run.",
    )
    trace_every_block: bool = option(
        False, "Trace every block of the model. Without it those that are alike are traced once, which is faster."
    )
    stack_traces: bool = option(False, "Record the line of source of each graph node. Tracing is slower.")


@dataclass
class JobConfig:
    """The configuration of a run: one attribute per TOML table.

    `sources` says where each option that was set came from (a file's name or "command line"), `notices` the messages to
    the user about them; neither takes part in comparisons.
    """

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    moe: MoE = field(default_factory=MoE)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)

    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    notices: list[str] = field(default_factory=list, compare=False, repr=False)


OPTIONS = options(JobConfig)


def get(config: JobConfig, key: str) -> Any:
    """Return the value of the option called `key`, as in `training.steps`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def named(config: JobConfig, key: str) -> str:
    """Return an option as a message names it: where it was set, its name and its value."""
    return f"{config.sources.get(key, 'default')}: {key} = {brief(get(config, key))}"


def put(config: JobConfig, key: str, value: Any) -> None:
    """Set the option called `key`."""
    table, _, name = key.rpartition(".")
    setattr(get(config, table), name, value)
