"""Every option there is: a dataclass per TOML table, a field per key, with default, legal values and help."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from torchtitan_graph.config.addresses import path_of
from torchtitan_graph.config.option import brief, option, options
from torchtitan_graph.rates import RATES

VALIDATION_LOSS = "validation_loss"  # the metric; of one of several sets, with /NAME
_DOTTED, _NOT_EMPTY = r"\w+(\.\w+)+", "a string that is not empty"
_HERE, _NO_ADDRESS = (
    r"(?s:(?![A-Za-z][A-Za-z0-9+.:-]*://).*)",
    "a path of this machine: copy here what is at an address",
)


@dataclass
class Job:
    """The run as a whole."""

    config_file: str | None = option(
        None, "TOML file to load, or the folder of a run; a bare name is also looked up among the packaged files."
    )
    dump_folder: str = option(
        "./outputs",
        "Folder for everything the run writes. {table.key} in it stands for the value of that option, as in"
        " ./outputs/{model.name}; other braces are refused.",
        pattern=_HERE,
        means="a path of this machine; checkpoint.remote_folder takes the address of a copy",
    )
    allow_changed: list[str] = option(
        [],
        "Options of model, tokenizer or data that may differ from those that this run was started with; any other such"
        " difference is refused when the run resumes.",
    )


@dataclass
class Profiling:
    """Kineto traces of some steps, and snapshots of a GPU's memory."""

    enable_profiling: bool = option(False, "Write a trace every profile_freq steps.")
    profile_freq: int = option(10, "Steps between traces, or snapshots.", minimum=1)
    enable_memory_snapshot: bool = option(
        False, "Write snapshots of a GPU's memory every profile_freq steps, and when memory runs out."
    )


@dataclass
class Metrics:
    """What is logged, and how often."""

    log_freq: int = option(10, "Steps between log lines; the first and the last step are always logged.", minimum=1)
    enable_tensorboard: bool = option(False, "Write TensorBoard event files.")
    save_for_all_ranks: bool = option(False, "Write the metrics of every rank to files, not only those of rank 0.")
    enable_wandb: bool = option(
        False,
        "Log to Weights & Biases; with neither WANDB_API_KEY nor WANDB_MODE in the environment, to a folder in"
        " dump_folder only.",
    )
    enable_mlflow: bool = option(
        False,
        "Log to MLflow, to a folder in dump_folder unless MLFLOW_TRACKING_URI in the environment names another place.",
    )
    histogram_freq: int = option(
        0,
        "Steps between histograms of all parameters and gradients, with enable_tensorboard; 0: none.",
        minimum=0,
    )
    loss_alarm: float = option(
        10.0,
        "Warn when the loss is more than this many deviations above the median of the last 100 steps; 0: never.",
        minimum=0,
    )
    grad_norm_alarm: float = option(20.0, "The same for the gradient norm.", minimum=0)
    log_expert_loads: bool = option(
        False,
        "Write to metrics.jsonl, as expert_loads, how many tokens each expert of each layer received; python -m"
        " torchtitan_graph.plan reads it with --expert_load.",
    )
    straggler_share: float = option(
        0.2,
        "Warn at logged steps when a rank is busy longer than the median rank by more than this share of the step; 0:"
        " don't compare ranks.",
        minimum=0,
    )


@dataclass
class Lora:
    """Low-rank adapters (LoRA): the model is frozen, and small matrices next to its linear layers are trained."""

    rank: int = option(0, "Rank of the adapters; 0: there are none.", minimum=0)
    alpha: float = option(16.0, "A weight W acts as W + alpha / rank * B @ A.", minimum=0)
    rslora: bool = option(False, "Divide alpha by the square root of the rank instead (rank-stabilized LoRA).")
    base: str = option(
        "",
        "How the frozen weights next to adapters are held (QLoRA). nf4: 4 bits a number; float8: 8 bits; both in blocks"
        " of 64 with a scale, unpacked where they are used. Not set: in training.dtype.",
        choices=("", "nf4", "float8"),
    )
    targets: list[str] = option(
        ["*"],
        "Linear layers with adapters, and stacks of experts' weights, as patterns of names or of beginnings of names,"
        " such as *.attention.w[qv] or layers.*.moe.experts; *: all of the blocks.",
    )


@dataclass
class Model:
    """What is trained."""

    name: str = option(
        "llama3",
        "Model family, a file of the package's models/; a dotted name is a module of your own. With neither this nor"
        " flavor set, a config.json in hf_assets_path names it.",
    )
    flavor: str | None = option(
        None,
        "Size of the model, a name in the family's table; not set: that of config.json in hf_assets_path, or without"
        " one debugmodel.",
    )
    hf_assets_path: str | None = option(
        None,
        "Folder with a tokenizer.json, or that file; not set: bytes are the tokens. A config.json in the folder gives"
        " the architecture; with flavor set, the two must agree. This option alone loads no weights.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )
    trust_remote_code: bool = option(
        False,
        "Build the model by the Python code in the folder hf_assets_path, which auto_map in its config.json names. That"
        " code can do anything that you can: read it before. False: it is never run.",
    )
    converters: list[str] = option(
        [],
        "Layers to quantize. float8: linear layers multiply in float8, see [quantize.linear.float8]; mx: in MXFP8,"
        " emulated everywhere; quantize.grouped_mm.float8: experts multiply in float8; quantize.grouped_mm.mx: in"
        " MXFP8, see [quantize.grouped_mm.mx].",
    )
    num_mtp_layers: int = option(
        0,
        "Multi-token prediction: layers that each predict one token further while training (deepseek_v3).",
        minimum=0,
        maximum=16,
    )
    freeze: list[str] = option(
        [],
        "Parameters that are not trained, as patterns of their names, or of beginnings of names, such as tok_embeddings"
        " or layers.[0-3].*; * stands for any part. They have no gradient and no optimizer state.",
    )
    random_base: bool = option(
        False,
        "Let a new run train adapters, next to frozen parts, or on preferences from random weights. False: that is"
        " refused unless weights are loaded.",
    )
    attn: str = option(
        "auto",
        "Implementation of attention; all mask other documents. auto: flex on a GPU, compiled, which skips masked"
        " blocks; varlen on a CPU, or sdpa where a model's masks are not causal within documents, and flex where it"
        " changes scores. varlen: kernels for documents of several lengths, without a mask of rows; on a GPU in"
        " bfloat16, without windows, sinks or context parallelism.",
        choices=("auto", "sdpa", "flex", "varlen"),
    )
    elementwise: str = option(
        "auto",
        "Implementation of rotary positions and SwiGLU, equal up to rounding. fused: one operator each, a single"
        " kernel on a GPU, except for those in compile.fusions; rope: rotary positions alone; torch: torch's operators;"
        " auto: fused on a GPU; on a CPU rope, or torch where compile.codegen compiles blocks.",
        choices=("auto", "fused", "rope", "torch"),
    )
    lora: Lora = field(default_factory=Lora)


@dataclass
class Loss:
    """What a step minimizes: the mean over the targets of all ranks."""

    name: str = option(
        "cross_entropy",
        "Loss of the logits, in validation too. A dotted name is a function of your own, (logits_BLV, labels_BL, batch)"
        " -> the sum over this rank's targets, or a pair of it and a dict of sums to log.",
        choices=("cross_entropy",),
        pattern=_DOTTED,
        means="a dotted name, such as my_package.my_loss, of a function that is imported",
    )
    label_smoothing: float = option(
        0.0,
        "Share of cross entropy that is replaced by its mean over all classes, in training; 0: none.",
        minimum=0,
        below=1,
    )
    z_loss: float = option(
        0.0,
        "Weight of the square of the logits' logsumexp, which keeps it near 0, in training; 0: none.",
        minimum=0,
    )


@dataclass
class MoE:
    """Mixtures of experts, in the families that have them."""

    bias_update_speed: float = option(
        1e-3,
        "Step size of the correction biases, which balance deepseek_v3's experts without a loss.",
        minimum=0,
    )
    load_balance_loss: float = option(0.0, "Weight of the load-balancing loss; 0: none.", minimum=0)
    load_balance_over: str = option(
        "batch",
        "What that loss balances. batch: the loads of a microbatch over all data-parallel ranks; sequence: of each"
        " row.",
        choices=("batch", "sequence"),
    )
    router_z_loss: float = option(
        0.0, "Weight of the z-loss, which keeps the routers' logits small; 0: none.", minimum=0
    )
    early_scores: bool = option(
        False,
        "Multiply the routers' scores into what the experts' last product reads, not into what it returns: equal but"
        " for rounding. Backward then needs no expert's output, which full recomputation would compute again.",
    )


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
    name: str | None = option(
        None,
        "Their optimizer where optimizer.name is Muon; not set: Muon for matrices in blocks, AdamW for all else.",
        choices=("AdamW", "Muon"),
    )


@dataclass
class Muon:
    """Settings of optimizer.name = "Muon" for matrices; AdamW, for all else, has those of [optimizer]."""

    lr: float | None = option(None, "Peak learning rate of matrices; not set: optimizer.lr.", minimum=0)
    adjust_lr: str = option(
        "match_rms_adamw",
        "Factor of a matrix's learning rate: match_rms_adamw, 0.2 * sqrt(max(rows, columns)), with which AdamW's rates"
        " fit; original, sqrt(max(1, rows / columns)).",
        choices=("match_rms_adamw", "original"),
    )
    momentum: float = option(0.95, "Decay of the running mean of the gradients.", minimum=0, below=1)
    nesterov: bool = option(True, "Nesterov momentum.")
    ns_steps: int = option(5, "Steps of the Newton-Schulz iteration.", minimum=1, maximum=99)
    ns_dtype: str = option(
        "bfloat16",
        "dtype of that iteration, and of the messages for it. bfloat16 magnifies the last bits of gradients, which"
        " differ between numbers of ranks.",
        choices=("bfloat16", "float32"),
    )


@dataclass
class Optimizer:
    """The optimizer; see [lr_scheduler] for its learning rate over time."""

    name: str = option(
        "AdamW",
        "Optimizer; Muon steps the matrices in blocks, and AdamW all else; a dotted name is a class of your own, a"
        " torch.optim.Optimizer.",
        choices=("Adam", "AdamW", "Muon"),
        pattern=_DOTTED,
        means="a dotted name, such as my_package.MyOptimizer, of a class that is imported",
    )
    options: dict[str, Any] = option(
        {}, "Further arguments of an optimizer with a dotted name, such as {momentum = 0.9}."
    )
    param_groups: list[ParamGroup] = option(
        [], "Groups of parameters, by patterns of their names, with settings of their own."
    )
    lr: float = option(8e-4, "Peak learning rate.", minimum=0)
    beta1: float = option(0.9, "Decay of the running mean of the gradients.", minimum=0, below=1)
    beta2: float = option(0.95, "Decay of the running mean of their squares.", minimum=0, below=1)
    eps: float = option(1e-8, "Added to the denominator of an update.", minimum=0)
    weight_decay: float = option(0.1, "Weight decay; decoupled in AdamW.", minimum=0)
    implementation: str = option(
        "fused", "Implementation of AdamW and Adam, equal up to rounding.", choices=("for-loop", "foreach", "fused")
    )
    state_dtype: str | None = option(
        None,
        "Dtype in which Adam, AdamW and Muon keep their running means; they compute in fp32. Not set: the parameters'.",
        choices=("float32", "bfloat16"),
    )
    ema_decay: float | None = option(
        None,
        "Decay of an exponential moving average of the weights, such as 0.999, which validation and the export to"
        " Hugging Face's format use in place of the weights; not set: none is kept.",
        minimum=0,
        below=1,
    )
    muon: Muon = field(default_factory=Muon)


@dataclass
class LRScheduler:
    """The learning rate: linear warm-up, constant, decay."""

    warmup_steps: int = option(200, "Steps of linear warm-up.", minimum=0)
    total_steps: int | None = option(None, "Steps that the schedule spans; not set: training.steps.", minimum=1)
    decay_ratio: float | None = option(
        None,
        "Part of total_steps in which the rate decays, from 0 to 1; not set: all that follows warm-up.",
        minimum=0,
        maximum=1,
    )
    decay_type: str = option("linear", "Shape of the decay.", choices=("linear", "sqrt", "cosine"))
    min_lr_factor: float = option(
        0.0,
        "Learning rate at the end of the decay, as a part of the peak.",
        minimum=0,
        maximum=1,
    )


@dataclass
class DataLoader:
    """Processes that prepare batches."""

    num_workers: int = option(
        0, "Worker processes per rank; 0: the trainer prepares its batches itself.", minimum=0, maximum=1024
    )


@dataclass
class DataSource:
    """A corpus of a mixture. Each has its own order and repeats by itself."""

    dataset: str | None = option(None, "As training.dataset.")
    dataset_path: str | None = option(None, "As training.dataset_path.")
    format: str | None = option(None, "As training.format.", choices=("text", "chat", "completion", "preference"))
    columns: dict[str, Any] = option({}, "As training.columns.")
    weight: float = option(1.0, "Its share of the rows, relative to the other weights.", minimum=0)
    name: str | None = option(None, "Its name in the metrics; not set: the last part of dataset_path, or dataset.")


def validation_metrics(config: "JobConfig") -> list[str]:
    """Return the names of a job's validation losses in the metrics."""
    return [f"{VALIDATION_LOSS}/{each.name}" for each in config.validation.sets] or [VALIDATION_LOSS]


def source_name(source: DataSource) -> str:
    """Return the name of a mixture's corpus in the metrics."""
    return source.name or PurePath(path_of(source.dataset_path or source.dataset or "")).name


ROW_MULTIPLE = 16  # of dynamic_seq_len: attention's and float8's kernels want rows aligned, and lengths are fewer


@dataclass
class Training:
    """Data, batch and precision of the run."""

    dataset: str = option(
        "stdlib",
        "Name of the corpus: stdlib (the running Python's own sources, no download), c4 (from the Hugging Face hub),"
        " another owner/name or owner/name:config of the hub, the dotted name of a class of your own, or any name"
        " together with dataset_path.",
    )
    dataset_path: str | None = option(
        None,
        "Files of the corpus: a text, .jsonl, .csv, .tsv (each also .gz and .zst) or .parquet file, a folder of these"
        " and of source files at any depth, a pattern such as data/*.jsonl, a saved Hugging Face dataset, or token"
        " shards of torchtitan_graph.pretokenize; or an address of such, as s3://bucket/corpus, gs://, hf:// or https://.",
    )
    cache_folder: str | None = option(
        None,
        "Folder on the node's own disk, shared by its ranks, for what is read from addresses, unpacked files and"
        " indexes; not set: torchtitan_graph in $XDG_CACHE_HOME or ~/.cache.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )
    cache_gb: float = option(
        500.0,
        "The most GB that cache_folder may hold; what was used longest ago is deleted first, and 5 % of the disk stay"
        " free. A file at an address that does not fit is read from there each time, which is slow.",
        minimum=0,
    )
    sources: list[DataSource] = option(
        [], "Corpora to mix by weight, instead of dataset and dataset_path; the weights may change when a run resumes."
    )
    format: str | None = option(
        None,
        "What a row of JSON lines or a table is. text: a document; chat: messages, rendered by the tokenizer's chat"
        " template; completion: a prompt and its completion; preference: a prompt with a chosen and a rejected answer,"
        " for training.step. Not set: the columns tell, but for preference.",
        choices=("text", "chat", "completion", "preference"),
    )
    columns: dict[str, Any] = option(
        {},
        "Columns that are read, where they have other names: text; messages; user and assistant, texts that are a"
        " conversation of one turn, as in {user = 'question', assistant = 'answer'}; prompt and completion; or prompt,"
        " chosen and rejected; with any but text, tools and system. A dotted path names one inside others: {messages ="
        " 'data.messages'}. {system = ''} leaves that column unread.",
    )
    step: str | None = option(
        None,
        "What a step computes, in place of the forward pass and [loss], in validation too: the dotted name of a"
        " function of your own, (model, batch, **options) -> the sum of the loss over this rank's targets, or a pair of"
        " it and a dict of sums to log. torchtitan_graph.goals.dpo: direct preference optimisation;"
        " torchtitan_graph.goals.distillation: from a teacher.",
        pattern=_DOTTED,
        means="a dotted name, such as my_package.my_step, of a function that is imported (training.steps is a number)",
    )
    step_options: dict[str, Any] = option({}, "Options of that function, such as {beta = 0.1}.")
    loss_on: str = option(
        "assistant",
        "Tokens of conversations and completions that are learned. assistant: what the assistant says, with the token"
        " that ends its turn, or the completion; last_assistant: its last turn; all: every token.",
        choices=("assistant", "last_assistant", "all"),
    )
    split_turns: str = option(
        "auto",
        "Where a chat template renders an assistant's turn in another way when more follows, as those of reasoning"
        " models do. auto: each such turn is learned as it would be generated, in a context of its own, so that a"
        " conversation becomes several documents; never: such a turn is unclear.",
        choices=("auto", "never"),
    )
    unclear_turns: str = option(
        "refuse",
        "What becomes of an assistant's turn whose rendering does not begin with the generation prompt, so that its"
        " tokens can't be known. refuse: an error; skip: it is read, and not learned.",
        choices=("refuse", "skip"),
    )
    too_long: str = option(
        "cut",
        "What becomes of a conversation or completion longer than seq_len, or of a pair with an answer longer than half"
        " of it. cut: its first tokens are kept; drop: none are; refuse: an error.",
        choices=("cut", "drop", "refuse"),
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja template for conversations; not set: the tokenizer's own.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )
    chat_template_kwargs: dict[str, Any] = option(
        {}, "Arguments of the chat template, by the names that it reads, such as {enable_thinking = false}."
    )
    chat_date: str | None = option(
        None,
        "The day that chat templates write, where they do, as 2026-01-31.",
        pattern=r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
        means="a day, such as 2026-01-31",
    )
    epochs: int = option(
        0,
        "Passes over the corpus, each in another order; the run ends after them, or after steps. 0: without end.",
        minimum=0,
    )
    on_bad_row: str = option(
        "refuse",
        "What becomes of rows that can't be read, in validation too: not UTF-8, a broken line, an image, a wrong role,"
        " an empty answer, ... refuse: an error; skip: they are left out, and counted by kind.",
        choices=("refuse", "skip"),
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
        "Fill rows with whole documents up to seq_len tokens; only a longer document is cut. A rank's batch is as long"
        " as its longest row, rounded up to a multiple of 16, and one graph serves all lengths.",
    )
    skip_leaps: float = option(
        0.0,
        "Skip a step whose loss or gradient norm is this many deviations above the median of the last 100, as in"
        " metrics.loss_alarm; the data moves on. 0: no step is skipped.",
        minimum=0,
    )
    roll_back_after: int = option(
        0,
        "After this many steps in a row that skip_leaps skipped, take back the weights, the optimizer's state and the"
        " moving average of the newest checkpoint; the step counts, the schedule and the data go on. 0: never.",
        minimum=0,
    )
    most_roll_backs: int = option(
        3, "How often a run may go back by roll_back_after; it ends in place of the next one.", minimum=1
    )
    one_document_per_row: bool = option(
        False,
        "Begin a row with each document, and pad it to its end: for models that carry a state from token to token,"
        " which documents in one row would share.",
    )
    mtp_loss_weight: float = option(
        0.3, "Weight of the mean loss of multi-token prediction, see model.num_mtp_layers.", minimum=0
    )
    loss_chunks: int = option(
        1,
        "Number of parts of a microbatch's tokens that go through the output layer and the loss one after another, so"
        " that only a part's logits exist at once. The last part may be smaller; no part is empty.",
        minimum=1,
    )
    max_norm: float = option(1.0, "Clip gradients to this norm over all parameters; 0: don't clip.", minimum=0)
    steps: int = option(10000, "Optimizer steps.", minimum=1)
    dtype: str = option(
        "float32", "dtype of the stored parameters and the optimizer's state.", choices=("float32", "bfloat16")
    )
    mixed_precision_param: str = option(
        "bfloat16", "dtype that forward and backward compute in.", choices=("bfloat16", "float32")
    )
    enable_cpu_offload: bool = option(
        False,
        "Keep parameters, gradients and the optimizer's state in the host's memory. Shards are copied to the GPU before"
        " they are gathered, reduced gradients back, and the optimizer steps on the host. Without effect on a CPU.",
    )
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Reference:
    """A frozen model next to the trained one, for training.step: run forward only, and in no checkpoint."""

    path: str | None = option(
        None,
        "Hugging Face folder of the model, whose weights are read whenever the run starts; its vocabulary is as large"
        " as the trained model's, and all else may differ. Not set: there is none.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )


@dataclass
class Parallelism:
    """How the work is divided. The degrees multiply to the number of processes, but for those of experts."""

    data_parallel_replicate_degree: int = option(1, "Replicas of the parameters (DDP, or with shards HSDP).", minimum=1)
    data_parallel_shard_degree: int = option(
        -1, "Shards of the parameters (FSDP); -1: all processes that the other degrees leave.", minimum=1, also=(-1,)
    )
    fsdp_reshard_after_forward: str = option(
        "default",
        "Which gathered parameters are freed after forward and gathered again in backward. default: those of the"
        " layers; always: all, with embedding, last norm and output; never: none.",
        choices=("default", "always", "never"),
    )
    fsdp_once_a_step: str = option(
        "none",
        "Which parameters are gathered, and their gradients reduced, once an optimizer step, not once a microbatch:"
        " they and their gradients are whole in memory until its end. experts: those of expert parallelism; all; auto:"
        " all, else the experts', else none, as memory allows by the forecast. A pipeline's stages do so in any case.",
        choices=("none", "experts", "all", "auto"),
    )
    overlap_microbatches: bool | str = option(
        False,
        "Run a microbatch's backward with the next one's forward, or in a pipeline DualPipeV's pairs, as one graph:"
        " one computes while the other communicates; the activations of both are in memory. auto: where a step then"
        " takes less time by the estimate, and fits into the memory by the forecast; in a pipeline always with"
        " DualPipeV, and with no other schedule.",
        choices=("auto",),
    )
    tensor_parallel_degree: int = option(
        1, "Shards of the matrix products (tensor parallel with sequence parallel).", minimum=1
    )
    enable_async_tensor_parallel: bool = option(
        False,
        "Overlap tensor parallel's communication with its matrix products, by cutting both into the ranks' parts of the"
        " sequence.",
    )
    context_parallel_degree: int = option(1, "Ranks that share a row of tokens (context parallel).", minimum=1)
    pipeline_parallel_degree: int = option(1, "Ranks that share the layers as stages (pipeline parallel).", minimum=1)
    pipeline_parallel_schedule: str = option(
        "1F1B",
        "Order in which a rank's stages compute forward and backward of the microbatches. GPipe and 1F1B have one"
        " stage on each rank, Interleaved1F1B several, ZBVZeroBubble and DualPipeV two, with the first and the last on"
        " one rank.",
        choices=("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"),
    )
    pipeline_parallel_schedule_csv: str | None = option(
        None,
        "File with a schedule of your own, instead of pipeline_parallel_schedule: a line for each rank with its"
        " actions, such as 0F0,0F1,0B0,0B1 (stage, F or B or its halves I and W, microbatch).",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )
    pipeline_parallel_deferred_weights: int | None = option(
        None,
        "Microbatches whose weights' gradients ZBVZeroBubble and DualPipeV put off at once, on each rank: what these"
        " need is in memory until then. Not set: 2 where activations are computed again in backward, which would all be"
        " kept; else as many as the schedule does.",
        minimum=1,
    )
    pipeline_parallel_microbatch_size: int = option(
        1,
        "Rows that a pipeline's stage computes at a time; must divide training.local_batch_size.",
        minimum=1,
    )
    pipeline_parallel_first_stage_less_layers: int = option(
        1, "Layers that the first stage has fewer, since it has the embedding.", minimum=0
    )
    pipeline_parallel_last_stage_less_layers: int = option(
        1, "Layers that the last stage has fewer, since it has the output.", minimum=0
    )
    module_fqns_per_model_part: list[list[str]] = option(
        [],
        "Modules of each stage by name, in order, such as [['tok_embeddings', 'layers.0'], ['layers.1', 'norm',"
        " 'output']]; empty: divided evenly, one stage on each rank, or two where the schedule has several.",
    )
    expert_parallel_degree: int = option(
        1, "Ranks, of those of shard, context and tensor parallel, that share a layer's experts.", minimum=1
    )
    expert_tensor_parallel_degree: int = option(
        1,
        "Ranks that share each expert where expert_parallel_degree is above 1: 1 or tensor_parallel_degree.",
        minimum=1,
    )
    expert_exchange: str = option(
        "direct",
        "How tokens reach the ranks of their experts. direct: each token once for each expert; by_machine: once to each"
        " machine with experts for it, there once to each rank, which copies it for each: fewer bytes between machines,"
        " the same numbers to the bit.",
        choices=("direct", "by_machine"),
    )
    exchange_sums: str = option(
        "exact",
        "How results return where expert_exchange is by_machine. exact: one for each expert, added as without it;"
        " by_machine: added on each rank, then in each machine: as few bytes as on the way out, other rounding.",
        choices=("exact", "by_machine"),
    )
    exchange_dtype: str = option(
        "model",
        "Numbers in which tokens travel to experts, and gradients of results in backward. model: as they are computed;"
        " float8: in e4m3 with a scale for each 128 numbers, which halves the bytes of bf16 and rounds. Results, and"
        " gradients of tokens, travel as they are.",
        choices=("model", "float8"),
    )
    ranks_per_machine: int | None = option(
        None,
        "Processes that share a machine, for expert_exchange; not set: as launched (LOCAL_WORLD_SIZE), or in forecasts"
        " and dry runs as the device's rates say.",
        minimum=1,
    )
    disable_loss_parallel: bool = option(False, "Gather the logits of all vocabulary shards before the loss.")


@dataclass
class Checkpoint:
    """Saving the run, and going on from a saved one."""

    enable: bool = option(False, "Save checkpoints, and resume from the newest complete one.")
    interval: int = option(500, "Steps between checkpoints.", minimum=1)
    interval_minutes: float = option(
        0.0, "Save also when this many minutes have passed since the last save; 0: never.", minimum=0
    )
    keep_every: int = option(0, "Steps between checkpoints that are never deleted; 0: none.", minimum=0)
    remote_folder: str | None = option(
        None,
        "Address of a copy of the checkpoints, such as s3://bucket/run: each complete one but step-N-hf is copied"
        " there, and a run whose folder lacks the newest fetches it.",
    )
    initial_load_path: str | None = option(
        None,
        "Checkpoint to start from while the run has none of its own: a step-N folder, or the address of one, such as"
        " s3://bucket/run/step-100.",
    )
    initial_load_model_only: bool = option(True, "Load only the parameters of initial_load_path.")
    initial_load_in_hf: bool = option(
        False,
        "Start from the weights in initial_load_path, or where that is not set in model.hf_assets_path: a folder in"
        " Hugging Face's format.",
    )
    initial_load_in_hf_quantized: bool = option(
        False, "With initial_load_in_hf: dequantize weights stored in fp8 or MXFP4 blocks."
    )
    initial_load_adapter: str | None = option(
        None,
        "Folder of an adapter in PEFT's format (adapter_config.json, adapter_model.safetensors), from which those of"
        " [model.lora] start while the run has no checkpoint of its own.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )
    last_save_model_only: bool = option(True, "Save only parameters after the last step.")
    last_save_in_hf: bool = option(
        False,
        "After the last step, also write step-N-hf in Hugging Face's format, adapters merged into their weights; it is"
        " not copied to remote_folder.",
    )
    last_save_adapter: bool = option(
        False,
        "After the last step, also write step-N-adapter: the adapters of [model.lora] in PEFT's format; it is not"
        " copied to remote_folder.",
    )
    export_dtype: str = option(
        "float32",
        "dtype of the parameters in step-N-hf and step-N-adapter, or without last_save_in_hf in a last checkpoint of"
        " only parameters, where float32 leaves them as they are.",
        choices=("float16", "bfloat16", "float32"),
    )
    async_mode: str = option(
        "disabled",
        "Save in a thread while training goes on. async: from a new copy in the host's memory for each checkpoint;"
        " async_with_pinned_mem: from a copy that is kept, page-locked on a GPU.",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    keep_latest_k: int = option(
        10,
        "Number of newest checkpoints to keep, in addition to those of keep_every and keep_best; 0: all. 1 is illegal,"
        " since the newest may be incomplete.",
        minimum=2,
        also=(0,),
    )
    keep_best: bool = option(
        False,
        "Save also after each validation whose validation.best_metric is the lowest so far, and keep that checkpoint;"
        " best.json names it.",
    )
    load_step: int = option(-1, "Step to resume from; -1: the newest.", minimum=0, also=(-1,))
    exclude_from_loading: list[str] = option(
        [],
        "Parts that are not loaded from initial_load_path or load_step: optimizer, lr_scheduler, dataloader (the"
        " position in the data), train_state (steps and tokens counted, random states).",
    )
    load_only: bool = option(False, "Load, never save.")


@dataclass
class ActivationCheckpoint:
    """What is recomputed in backward instead of kept."""

    mode: str = option(
        "selective",
        "What is recomputed. none: elementwise results; full: each layer; selective: see selective_ac_option;"
        " memory_budget: the least with which a step fits memory_budget or memory_budget_gib.",
        choices=("none", "selective", "full", "memory_budget"),
    )
    selective_ac_option: str = option(
        "2",
        "What mode selective recomputes. op: all of a layer but attention, sums over ranks and every second matrix"
        " product; an integer n: every n-th layer as a whole.",
        pattern=r"op|[1-9][0-9]{0,8}",
        means="op, or a whole number of at least 1",
    )
    save: list[str] = option(
        [],
        "Modules whose results are kept for backward in every mode, as patterns of names such as layers.*.attention; *"
        " stands for any one part. The innermost module that save or recompute names counts; of both, save.",
    )
    recompute: list[str] = option(
        [],
        "Modules whose results are recomputed in backward in every mode, as patterns of names. What leaves a layer is"
        " kept.",
    )
    offload: list[str] = option(
        [],
        "Modules whose large activations are moved to the host's memory until backward, as patterns of names such as"
        " layers.*; * stands for any one part. Those of the last block stay on the GPU. Without effect on a CPU.",
    )
    memory_budget: float = option(
        0.5,
        "With mode memory_budget: peak memory of a step, from 0, the least possible, to 1, that of mode none.",
        minimum=0,
        maximum=1,
    )
    memory_budget_gib: float | None = option(
        None,
        "With mode memory_budget, instead of memory_budget: memory of a rank in GiB, for parameters, optimizer state,"
        " gradients and a step at its peak.",
        minimum=0,
        maximum=10**6,
    )
    visualize_memory_budget_pareto: bool = option(
        False,
        "With mode memory_budget: draw memory against recomputation to graphs/memory_budget_pareto.svg in dump_folder.",
    )


@dataclass
class ExtraPass:
    """A pass of your own, put into the list of passes; see docs/extend/pass.md."""

    pass_: str = option(
        "",
        "Dotted name of a function that takes a GraphModule and returns one.",
        pattern=_DOTTED,
        means="a dotted name, such as my_package.my_pass, of a function that is imported",
    )
    after: str = option(
        "",
        "Name of the pass that it follows; entries after the same pass run in their order.",
        pattern=r".+",
        means=_NOT_EMPTY,
    )
    exact: bool = option(
        True, "Whether it keeps numbers bit for bit, or only up to rounding; debug.verify_passes checks it."
    )


@dataclass
class Compile:
    """How the training step runs."""

    mode: str = option(
        "graph",
        "How the step runs. graph: one FX graph, edited by passes; eager: FSDP2 and autograd, the reference.",
        choices=("graph", "eager"),
    )
    codegen: str = option(
        "off",
        "What Inductor compiles, equal to eager only up to rounding. off: only flex attention on a GPU; blocks: the"
        " modules of regions, equal ones once; whole: everything between collectives, which takes seconds"
        " to compile for each block.",
        choices=("off", "blocks", "whole"),
    )
    regions: list[str] = option(
        ["layers.*"],
        "Modules that codegen = blocks compiles, as patterns of names such as layers.*.feed_forward; * stands for any"
        " one part. Each is a region in forward and one in backward, cut at collectives.",
    )
    fusions: list[str] = option(
        [],
        "Modules that Inductor compiles one by one wherever the model has them, also with codegen = off: rms_norm,"
        " swiglu, rope.",
    )
    dedupe_layers: bool = option(
        False,
        "Replace equal blocks by calls of one subgraph, forward and backward: a small graph of many layers, bit for"
        " bit.",
    )
    capture: str = option(
        "make_fx",
        "How the step is traced, to the same bits. make_fx: its operations are recorded; dynamo: its code is read,"
        " slower, but the graph's assumptions are checked, and code that it can't represent is refused.",
        choices=("make_fx", "dynamo"),
    )
    record_call_hierarchy: bool = option(
        False,
        "Record on each graph node the module and function calls that made it, for dumps, show_graph, profiles, a table"
        " in TensorBoard, and passes of your own.",
    )
    optimizer_in_graph: bool = option(
        False,
        "Trace clipping and the optimizer's step as a graph too, with the same bits on a CPU: for Adam, AdamW,"
        " Muon, and torch.optim's Adagrad, Muon, RMSprop and SGD.",
    )
    cuda_graphs: bool = option(
        False,
        "Record the training step, and the optimizer's with optimizer_in_graph, as CUDA graphs in the second step, and"
        " replay them from then on; GPUs only.",
    )
    disable_passes: list[str] = option([], "Passes to leave out, by name.")
    extra_passes: list[ExtraPass] = option(
        [], 'Passes of your own, such as {pass = "my_pkg.my_pass", after = "bucket_collectives"}.'
    )
    precompiled: str | None = option(
        None,
        "Folder of this job's graphs, written by python -m torchtitan_graph.precompile with the same options: they are"
        " read instead of traced.",
        pattern=_HERE,
        means=_NO_ADDRESS,
    )


@dataclass
class Float8:
    """How linear layers multiply in float8, with "float8" in model.converters."""

    recipe_name: str | None = option(
        None,
        "Scales. tensorwise (also if not set): one for a tensor, from its largest magnitude; tensorwise_delayed: from"
        " the largest of the last 16 steps, weights from their own; rowwise: one for each row; rowwise_with_gw_hp: the"
        " same with the weights' gradients in training.mixed_precision_param.",
        choices=("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"),
    )
    gradient_format: str | None = option(
        None,
        "Format of gradients; all else is e4m3. Not set: e5m2, or e4m3 with rowwise recipes.",
        choices=("e5m2", "e4m3"),
    )
    filter_fqns: list[str] = option([], "Parts of the names of linear layers that are not converted, such as output.")
    emulate: bool = option(False, "Emulate float8 in fp32 on a GPU too, such as one without float8; a CPU always does.")


@dataclass
class MX:
    """How linear layers multiply in MX formats, with "mx" in model.converters."""

    filter_fqns: list[str] = option(["output"], "Parts of the names of linear layers that are not converted.")


@dataclass
class QuantizeLinear:
    """Linear layers."""

    float8: Float8 = field(default_factory=Float8)
    mx: MX = field(default_factory=MX)


@dataclass
class GroupedFloat8:
    """How experts multiply in float8, with "quantize.grouped_mm.float8" in model.converters."""

    fqns: list[str] = option([], "Parts of the names of experts that multiply in float8; experts is a part of all.")
    recipe_name: str | None = option(
        None,
        "As in [quantize.linear.float8]; each expert's weight has its own scale. Not set: rowwise.",
        choices=("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"),
    )
    gradient_format: str | None = option(None, "As in [quantize.linear.float8].", choices=("e5m2", "e4m3"))
    emulate: bool = option(
        False, "Emulate float8 in fp32 on a GPU too; a CPU always does. A GPU multiplies by rows, in e4m3."
    )


@dataclass
class GroupedMX:
    """How experts multiply in MX formats, with "quantize.grouped_mm.mx" in model.converters."""

    fqns: list[str] = option([], "Parts of the names of experts that multiply in MXFP8; experts is a part of all.")
    recipe_name: str = option(
        "mxfp8",
        "mxfp8: all three products; mxfp8_wgrad_with_hp: the weights' gradients in training.mixed_precision_param.",
        choices=("mxfp8", "mxfp8_wgrad_with_hp"),
    )
    emulate: bool = option(
        False, "Emulate MXFP8 in fp32 on a GPU too, such as one not of compute capability 10; a CPU always does."
    )


@dataclass
class QuantizeGrouped:
    """Experts."""

    float8: GroupedFloat8 = field(default_factory=GroupedFloat8)
    mx: GroupedMX = field(default_factory=GroupedMX)


@dataclass
class Quantize:
    """Products of fewer bits."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    grouped_mm: QuantizeGrouped = field(default_factory=QuantizeGrouped)


@dataclass
class Comm:
    """The processes' communication."""

    init_timeout_seconds: int = option(
        300, "Timeout of a collective until the first step is done.", minimum=1, maximum=10**9
    )
    train_timeout_seconds: int = option(100, "Timeout of a collective after the first step.", minimum=1, maximum=10**9)
    mode: str = option(
        "default",
        "Kind of communication. default: real; fake_backend: a dry run of one rank of any world size, in one process.",
        choices=("default", "fake_backend"),
    )
    fake_rank: int = option(0, "The rank that a dry run builds.", minimum=0)
    fake_device: str = option(
        "H100",
        "Device that a dry run is for, and whose rates it estimates with; eight GPUs share a machine.",
        choices=tuple(RATES),
        any_case=True,
    )


@dataclass
class FaultTolerance:
    """Replica groups that outlive each other, by torchft: a lost one costs the others seconds, and heals from them."""

    enable: bool = option(
        False,
        "Train with replica groups. Each is a mesh of its own, of all degrees of [parallelism]; a step's rows are dealt"
        " to those that live.",
    )
    replicas: int = option(2, "Replica groups of the job.", minimum=2, maximum=10**4)
    min_replicas: int = option(1, "Groups that have to live for a step; with fewer, those wait for others.", minimum=1)
    replica: int | None = option(
        None,
        "This group's number, from 0 to replicas - 1. Not set: python -m torchtitan_graph.launch starts all groups on"
        " this machine.",
        minimum=0,
    )
    lighthouse: str | None = option(
        None,
        "Address of the lighthouse, which knows the groups that live, such as http://host:29510; auto: as dump_folder"
        " says, where python -m torchtitan_graph.launch.lighthouse writes it. Unless it is on loopback, the groups"
        " listen on this machine's address in its network.",
        pattern=r"auto|http://[A-Za-z0-9_.-]+:[0-9]{1,5}",
        means="auto or http://HOST:PORT",
    )
    timeout_seconds: int = option(
        60, "A message between groups that takes longer means that one is lost.", minimum=1, maximum=10**6
    )
    heal_timeout_seconds: int = option(
        600, "The most that a returned group may take to receive the state of another.", minimum=1, maximum=10**6
    )
    heartbeat_timeout_seconds: int = option(
        5, "A group without a heartbeat for so long is lost, for the lighthouse.", minimum=1, maximum=10**6
    )
    join_timeout_seconds: int = option(
        600,
        "How long the lighthouse lets a step wait for a group that lives and has not come to it; must be longer than a"
        " step, or than a round where semi_sync_method is set.",
        minimum=1,
        maximum=10**6,
    )
    semi_sync_method: str | None = option(
        None,
        "How groups with slow links between them train alone for several steps and then meet, by torchft. local_sgd:"
        " their parameters are averaged; diloco: how far these have come is averaged, and taken for a gradient by an"
        " outer optimizer. Not set: they meet in every step.",
        choices=("local_sgd", "diloco"),
    )
    sync_steps: int = option(
        5, "Steps after which all parameters have been synchronised, with semi_sync_method.", minimum=1
    )
    num_fragments: int = option(
        1,
        "Runs of blocks that diloco synchronises in turn, one every sync_steps / num_fragments steps (streaming"
        " DiLoCo).",
        minimum=1,
    )
    fragment_sync_delay: int = option(
        0, "Steps that diloco trains on while a fragment's average is under way.", minimum=0
    )
    fragment_update_alpha: float = option(
        0.0,
        "The part of a group's own parameters in those after a synchronisation of diloco; 0: the groups' common ones"
        " alone.",
        minimum=0,
        maximum=1,
    )
    should_quantize: bool = option(
        False, "Send what diloco averages in float8, by torchft's Triton kernels; on a GPU alone."
    )
    outer_lr: float = option(0.7, "Learning rate of diloco's outer optimizer, SGD.", minimum=0)
    outer_momentum: float = option(0.9, "Its momentum.", minimum=0, below=1)
    outer_nesterov: bool = option(True, "Whether its momentum is Nesterov's.")


@dataclass
class ValidationSet:
    """A corpus for validation, with a loss and a curve of its own; with neither dataset nor dataset_path set: the
    documents that training holds out."""

    name: str = option(
        "",
        "Its name: its loss is the metric validation_loss/NAME.",
        pattern=r"[A-Za-z0-9_.-]{1,100}",
        means="1 to 100 ASCII letters, digits, _, - and .",
    )
    dataset: str | None = option(None, "As validation.dataset.")
    dataset_path: str | None = option(None, "As validation.dataset_path.")
    format: str | None = option(None, "As validation.format.", choices=("text", "chat", "completion"))
    columns: dict[str, Any] = option({}, "As validation.columns.")
    steps: int | None = option(None, "As validation.steps; not set: that.", minimum=1, also=(-1,))


@dataclass
class Validation:
    """Loss on data the model is not trained on."""

    enable: bool = option(False, "Validate every freq steps, and after the last.")
    dataset: str | None = option(
        None,
        "Corpus, as training.dataset, whose validation split is used; with neither this nor dataset_path set: the"
        " corpora of training, by their weights. c4_validation is the hub's.",
    )
    dataset_path: str | None = option(
        None, "As training.dataset_path; files that are not trained on are used as a whole."
    )
    format: str | None = option(
        None,
        "As training.format, for dataset or dataset_path; with neither this nor columns set: as training's are read.",
        choices=("text", "chat", "completion"),
    )
    columns: dict[str, Any] = option({}, "As training.columns, for dataset or dataset_path.")
    sets: list[ValidationSet] = option(
        [], "Several corpora, each with a loss of its own, instead of dataset, dataset_path, format and columns."
    )
    best_metric: str | None = option(
        None,
        "Metric whose lowest value is the best, for patience and checkpoint.keep_best: validation_loss, or"
        " validation_loss/NAME of one of sets; not set: the first.",
    )
    patience: int = option(
        0, "End the run after this many validations in a row without a new best value; 0: never.", minimum=0
    )
    local_batch_size: int = option(8, "Rows per rank and microbatch.", minimum=1)
    seq_len: int = option(2048, "Tokens per row.", minimum=1)
    freq: int = option(10, "Steps between validations.", minimum=1)
    steps: int = option(-1, "Microbatches per rank in a validation; -1: the whole split.", minimum=1, also=(-1,))
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Samples:
    """Texts that the model writes as training goes: in the log, metrics.jsonl and the dashboards."""

    prompts: list[str] = option([], "Texts to continue; none: no samples.")
    freq: int = option(100, "Steps between samples; also after the last.", minimum=1)
    length: int = option(64, "Tokens of a sample, at most.", minimum=1)
    temperature: float = option(0.0, "Of the draws, the same each time; 0: the likeliest token.", minimum=0.0)


@dataclass
class Debug:
    """Reproducing a run, and looking into it."""

    seed: int | None = option(
        None, "Seed of the initial parameters and of the data's order; not set: 0.", minimum=0, below=2**63
    )
    deterministic: bool = option(
        False,
        "Use only deterministic kernels, which are slower on a GPU; an operation without one is an error.",
    )
    moe_force_load_balance: bool = option(False, "Send the same number of tokens to every expert.")
    verify_passes: bool = option(
        False, "Run the training step's graph before and after each pass, and compare the results; slow."
    )
    dump_graphs: bool = option(
        False,
        "Write the training step's graph after each pass to graphs/ in dump_folder, as numbered Python files that run.",
    )
    stack_traces: bool = option(False, "Record the source line of each graph node; tracing is slower.")


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
    loss: Loss = field(default_factory=Loss)
    moe: MoE = field(default_factory=MoE)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    reference: Reference = field(default_factory=Reference)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    comm: Comm = field(default_factory=Comm)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    validation: Validation = field(default_factory=Validation)
    samples: Samples = field(default_factory=Samples)
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


def is_set(config: JobConfig, key: str) -> bool:
    """Return whether an option differs from its default."""
    return bool(get(config, key) != OPTIONS[key].default)


def run_folder(config: JobConfig) -> Path:
    """Return the folder of what this process's run writes: job.dump_folder, or in it the replica group's own."""
    table = config.fault_tolerance
    return replica_folder(config, table.replica) if table.enable else Path(config.job.dump_folder)


def replica_folder(config: JobConfig, number: int | None) -> Path:
    """Return the folder of what a replica group's run writes."""
    return Path(config.job.dump_folder) / f"replica_{number}"


class Problem(NamedTuple):
    """An option, and why its value is wrong or has no effect."""

    key: str
    why: str


def lines(config: JobConfig, found: Iterable[Problem]) -> list[str]:
    """Return a line for each problem."""
    return [f"{named(config, key)}: {why}" for key, why in found]


def unused(config: JobConfig, why: str, *keys: str) -> list[Problem]:
    """Return a notice for each of these options that differs from its default."""
    return [Problem(key, why) for key in keys if is_set(config, key)]
