"""Keys of torchtitan's TOML files and of earlier releases that are no options: refused, or ignored with a notice.

Each is a line of UNSUPPORTED, and no option: --help, the dumps and JobConfig do not show it. To build one, take its
line out and declare it in job.py. `python -m torchtitan_graph.translate OLD.toml` shows what becomes of a file.
"""

from typing import Any, NamedTuple

REFUSED, IGNORED, CHANGED = "refused", "ignored", "changed"


class Unsupported(NamedTuple):
    """The verdict on a key that is not an option, the reason or advice, and the values that have no effect: its
    defaults."""

    verdict: str
    instead: str
    harmless: tuple[Any, ...] = ()

    @property
    def is_flag(self) -> bool:
        """Whether its values were true and false, which the command line may leave out."""
        return any(isinstance(value, bool) for value in self.harmless)

    def is_harmless(self, value: Any) -> bool:
        """Return whether a value, or its text on the command line, is one that means nothing."""
        return any(_same(value, one) for one in self.harmless)


def _same(value: Any, other: Any) -> bool:
    if type(value) is type(other):
        return bool(value == other)
    text = "" if other is None else ",".join(other) if isinstance(other, list) else str(other)
    return isinstance(value, str) and value.lower() == text.lower()


def _refuse(harmless: Any, instead: str) -> Unsupported:
    return Unsupported(REFUSED, instead, (harmless,))


def _ignore(harmless: Any, why: str) -> Unsupported:
    return Unsupported(IGNORED, why, (harmless,))


def _gone(why: str) -> Unsupported:
    """Return an ignored name without a harmless value: every value of it gets a notice."""
    return Unsupported(IGNORED, why)


_WORKERS = {
    "persistent_workers": Unsupported(IGNORED, "worker processes always stay", (False,)),
    "pin_memory": Unsupported(IGNORED, "batches are always in page-locked memory on a GPU", (True,)),
    "prefetch_factor": Unsupported(IGNORED, "each worker prepares 2 batches ahead", (None, 2)),
}
_GATHERS = "weights with one scale are gathered in float8 anyway, all their scales in one message; same numbers"
_DELAYED = "one recipe is for all: set quantize.linear.float8.recipe_name = 'tensorwise_delayed' in its place"
_FLOAT8 = "set model.converters = ['float8'] in its place"
_NO_MX = "experts are not quantised in MX formats"
_INDUCTOR = (
    "set Inductor's own environment variables in its place, such as TORCHINDUCTOR_MAX_AUTOTUNE=1 or"
    " TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1, which hold for all that it compiles"
)
_ESTIMATE = "memory is not estimated"
_REPLICAS = "there are no fault-tolerant replicas"

UNSUPPORTED = {
    "job.custom_config_module": _refuse("", "the schema can't be extended; remove it"),
    "job.use_for_integration_test": _gone("it marked files for a test suite"),
    "job.description": _ignore("default job", "comments in the file describe it"),
    "job.print_config": _ignore(False, "the resolved configuration is in config.toml, in job.dump_folder"),
    "job.save_config_file": _refuse(
        "config.toml",
        "the resolved configuration is always config.toml in job.dump_folder; rename a file of an earlier start to"
        " that, and remove this line",
    ),
    "profiling.profiler_active": _ignore(1, "a trace covers one step"),
    "profiling.profiler_warmup": _ignore(3, "up to 3 steps before a trace warm the profiler up"),
    "profiling.save_traces_folder": _ignore("profile_traces", "traces are in profile_traces, in job.dump_folder"),
    "profiling.save_memory_snapshot_folder": _ignore(
        "memory_snapshot", "snapshots are in memory_snapshot, in job.dump_folder"
    ),
    "model.norm_type": Unsupported(
        REFUSED,
        "norms are RMSNorm; remove it, or give model.name as a dotted name to train a model of your own",
        ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"),
    ),
    "model.print_after_conversion": _ignore(False, "the log says which layers are converted"),
    "metrics.disable_color_printing": _ignore(
        False, "set the environment variable NO_COLOR=1 for a log without colour"
    ),
    "metrics.save_tb_folder": _ignore("tb", "TensorBoard files are in tb, in job.dump_folder"),
    "metrics.rank_0_only": _refuse(True, "set metrics.save_for_all_ranks = true in its place"),
    "optimizer.fused": _refuse(True, "set optimizer.implementation = 'foreach' in its place"),
    "optimizer.early_step_in_backward": _refuse(False, "gradients are clipped together before the step; remove it"),
    "training.enable_loss_parallel": _refuse(True, "set parallelism.disable_loss_parallel = true in its place"),
    "training.gc_freq": _ignore(50, "garbage is collected every 50 steps, on all ranks together"),
    "training.loss_implementation": _ignore("auto", "the loss is one operator, on every device"),
    "training.mixed_precision_reduce": _refuse("float32", "gradients are reduced in float32; remove it"),
    **{f"{table}.dataloader.{name}": gone for table in ("training", "validation") for name, gone in _WORKERS.items()},
    "training.gc_debug": _ignore(False, "collections are not examined"),
    "parallelism.enable_compiled_autograd": _gone("backward is part of the graph"),
    "parallelism.pipeline_parallel_split_points": _gone("use module_fqns_per_model_part"),
    "parallelism.pipeline_parallel_layers_per_stage": _refuse(
        None, "list the modules of each stage in parallelism.module_fqns_per_model_part in its place"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": _ignore(
        True, "experts' messages are not hidden behind another microbatch"
    ),
    "parallelism.context_parallel_load_balancer": _ignore(
        "headtail", "a row is dealt to the ranks in short blocks, forth and back, which balances documents too"
    ),
    "parallelism.context_parallel_rotate_method": _ignore(
        "allgather", "keys and values are gathered, whatever the method; same numbers"
    ),
    "parallelism.expert_parallel_comm_backend": _ignore("standard", "tokens travel by all-to-all alone; same numbers"),
    "checkpoint.folder": _refuse(
        "checkpoint",
        "checkpoints are always in the folder checkpoint of job.dump_folder; rename that of an earlier start, and"
        " remove this line; an address belongs in checkpoint.remote_folder",
    ),
    "checkpoint.enable_first_step_checkpoint": _ignore(
        False, "the first checkpoint is that of checkpoint.interval; a folder that can't be written is found at start"
    ),
    "checkpoint.create_seed_checkpoint": _refuse(
        False,
        "initial parameters are the same in every layout, by debug.seed alone; remove it and start the run itself",
    ),
    "checkpoint.interval_type": Unsupported(
        REFUSED, "set checkpoint.interval_minutes in its place, and checkpoint.interval to steps", ("steps", "step")
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": _ignore(True, _REPLICAS),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _ignore(
        ["moe.router.gate"], "op chooses by operation, not by shape; same numbers"
    ),
    "activation_checkpoint.early_stop": _ignore(False, "only what backward needs is recomputed anyway"),
    "activation_checkpoint.preserve_rng_state": _ignore(True, "no recomputed operation draws random numbers"),
    "activation_checkpoint.determinism_check": _ignore("default", "use debug.verify_passes"),
    "activation_checkpoint.debug": _ignore(False, "use debug.dump_graphs"),
    "compile.enable": Unsupported(CHANGED, "is read as compile.codegen = blocks", (False,)),
    "compile.components": _ignore(["model", "loss"], "compile.codegen = blocks compiles compile.regions and the loss"),
    "compile.region_options": _refuse([], _INDUCTOR),
    "compile.backend": _refuse("inductor", "regions are compiled by Inductor alone; remove it"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _ignore(False, _GATHERS),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _ignore(False, _GATHERS),
    "quantize.linear.mx.recipe_name": Unsupported(
        REFUSED, "MXFP8 is the one format; remove it", ("mxfp8_cublas", "mxfp8", "mxfp8_emulated")
    ),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _ignore("triton", "casts are operations of the graph"),
    "quantize.linear.mx.use_fp8_dim1_cast_triton_kernel": _gone("casts are operations of the graph"),
    "quantize.grouped_mm.mx.recipe_name": _ignore("mxfp8", _NO_MX),
    "quantize.grouped_mm.mx.fqns": _ignore([], _NO_MX),
    "float8.enable_float8_linear": _refuse(False, _FLOAT8),
    "training.enable_float8_linear": _refuse(False, _FLOAT8),
    "training.fp8_linear": Unsupported(REFUSED, _FLOAT8, ("", False)),
    **{f"float8.scaling_type_{name}": _refuse("dynamic", _DELAYED) for name in ("input", "weight", "grad_output")},
    "float8.force_recompute_fp8_weight_in_bwd": _gone("weights are quantised outside the graph"),
    "comm.trace_buf_size": _ignore(
        20000, "NCCL's flight recorder keeps 20,000 collectives, or as many as TORCH_FR_BUFFER_SIZE in the environment"
    ),
    "comm.save_traces_folder": _ignore("comm_traces", "files of a hung step are in comm_traces, in job.dump_folder"),
    "comm.save_traces_file_prefix": _ignore("rank_", "these files are called rank_R"),
    "debug.deterministic_warn_only": _ignore(
        False, "with debug.deterministic an operation without a deterministic kernel is an error"
    ),
    "debug.trace_every_block": _ignore(False, "equal blocks are traced once, with the same graph"),
    "memory_estimation.enable": _refuse(False, "not built yet; try comm.mode = fake_backend for a dry run"),
    "memory_estimation.disable_fake_mode": _ignore(False, _ESTIMATE),
    "fault_tolerance.enable": _refuse(False, "not built; restart the job, it resumes from the newest checkpoint"),
    "fault_tolerance.process_group": _ignore("gloo", _REPLICAS),
    "fault_tolerance.process_group_timeout_ms": _ignore(10000, _REPLICAS),
    "fault_tolerance.replica_id": _ignore(0, _REPLICAS),
    "fault_tolerance.group_size": _ignore(0, _REPLICAS),
    "fault_tolerance.min_replica_size": _ignore(1, _REPLICAS),
    "fault_tolerance.semi_sync_method": _ignore(None, _REPLICAS),
    "fault_tolerance.sync_steps": _ignore(5, _REPLICAS),
    "fault_tolerance.num_fragments": _ignore(1, _REPLICAS),
    "fault_tolerance.should_quantize": _gone(_REPLICAS),
    "fault_tolerance.fragment_sync_delay": _gone(_REPLICAS),
    "fault_tolerance.fragment_update_alpha": _gone(_REPLICAS),
    "experimental.pipeline_parallel_microbatches": _refuse(
        None,
        "it counted the parts of a batch; parallelism.pipeline_parallel_microbatch_size is the rows of one: set that to"
        " training.local_batch_size / this in its place",
    ),
    "experimental.custom_import": _refuse("", "give model.name as a dotted name to train a model of your own"),
    "experimental.custom_args_module": _refuse("", "the schema can't be extended; remove it"),
}

# Values of options that torchtitan has and that are not built.
UNSUPPORTED_VALUES = {
    **{
        ("parallelism.pipeline_parallel_schedule", name): "leave it out: pipeline_parallel_schedule_csv alone says it"
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")
    },
    ("comm.mode", "local_tensor"): "not built yet; use fake_backend for a dry run",
}

_ONCE_EXPERIMENTAL = (
    "enable_async_tensor_parallel",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_split_points",
    "context_parallel_degree",
    "context_parallel_rotate_method",
    "enable_compiled_autograd",
)
_LINEAR_FLOAT8 = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "recipe_name",
    "filter_fqns",
    "emulate",
)
_LINEAR_MX = ("recipe_name", "mxfp8_dim1_cast_kernel_choice", "use_fp8_dim1_cast_triton_kernel", "filter_fqns")

REMOVED_PASSES = ("reuse_logits", "reuse_sharded_logits")  # in compile.disable_passes of earlier releases

# Names that keys had in earlier releases; the values kept their meaning.
RENAMED = {
    "job.print_args": "job.print_config",
    "model.tokenizer_path": "model.hf_assets_path",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    **{f"experimental.{name}": f"parallelism.{name}" for name in _ONCE_EXPERIMENTAL},
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "validation.enabled": "validation.enable",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in _LINEAR_FLOAT8},
    "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
    **{f"mx.{name}": f"quantize.linear.mx.{name}" for name in _LINEAR_MX},
}

# Options by their names in other trainers; values may differ in meaning. A name with a table stands for itself, one
# without for that key in any table.
NAMES_ELSEWHERE = {
    name: option
    for option, names in {
        "training.steps": "max_iters max_steps num_iterations train_iters epochs num_epochs max_epochs"
        " num_train_epochs",
        "optimizer.lr": "learning_rate peak_lr max_lr",
        "optimizer.beta1": "adam_beta1",
        "optimizer.beta2": "adam_beta2",
        "optimizer.eps": "adam_eps adam_epsilon",
        "optimizer.name": "optim optimizer_type",
        "training.local_batch_size": "per_device_train_batch_size micro_batch_size device_batch_size",
        "training.global_batch_size": "gradient_accumulation_steps accumulate_grad_batches total_batch_size",
        "training.seq_len": "block_size max_seq_length max_seq_len sequence_len sequence_length cutoff_len max_length"
        " context_length model_max_length",
        "training.max_norm": "grad_clip max_grad_norm gradient_clip gradient_clip_val clip_grad gradient_clipping",
        "training.mixed_precision_param": "bf16 fp16 precision mixed_precision torch_dtype",
        "training.dataset_path": "train_file train_data data_path data.path",
        "training.dataloader.num_workers": "dataloader_num_workers",
        "lr_scheduler.warmup_steps": "warmup warmup_iters lr_warmup_steps warmup_ratio",
        "lr_scheduler.decay_type": "lr_scheduler_type lr_decay_style lr_scheduler.type",
        "lr_scheduler.min_lr_factor": "min_lr",
        "lr_scheduler.total_steps": "lr_decay_iters",
        "job.dump_folder": "output_dir out_dir save_dir",
        "activation_checkpoint.mode": "gradient_checkpointing activation_checkpointing",
        "checkpoint.interval": "save_steps save_interval save_every checkpoint.every",
        "checkpoint.keep_latest_k": "save_total_limit",
        "checkpoint.keep_best": "load_best_model_at_end save_best",
        "checkpoint.enable": "resume resume_from_checkpoint auto_resume",
        "checkpoint.initial_load_path": "init_from",
        "validation.freq": "eval_steps eval_interval eval_every val_check_interval eval.interval validation.interval",
        "validation.steps": "eval_iters",
        "validation.sets": "eval_dataset eval_datasets eval_file validation_file val_data",
        "validation.patience": "early_stopping early_stopping_patience",
        "validation.best_metric": "metric_for_best_model monitor",
        "metrics.log_freq": "logging_steps log_interval log_every",
        "metrics.enable_wandb": "report_to wandb_log use_wandb wandb",
        "metrics.enable_tensorboard": "tensorboard",
        "model.hf_assets_path": "base_model model_name_or_path tokenizer_name tokenizer_name_or_path model.path",
        "model.flavor": "n_layer n_layers num_layers n_head n_heads num_heads n_embd hidden_size model.layers model.dim"
        " model.vocab_size",
        "model.attn": "attn_implementation flash_attention use_flash_attention",
        "compile.codegen": "torch_compile",
        "parallelism.tensor_parallel_degree": "tp tp_size tensor_model_parallel_size tensor_parallel",
        "parallelism.pipeline_parallel_degree": "pp pp_size pipeline_model_parallel_size pipeline_parallel",
        "parallelism.context_parallel_degree": "cp cp_size cp_degree context_parallel_size context_parallel",
        "parallelism.expert_parallel_degree": "ep ep_size expert_model_parallel_size expert_parallel",
        "parallelism.data_parallel_shard_degree": "fsdp fsdp_size deepspeed zero_stage",
    }.items()
    for name in names.split()
}

# Flavours that were named after an implementation of attention, which model.attn chooses here.
FLAVOR_SUFFIXES = (
    ("_flex_attn", "flex"),
    ("_varlen_attn", "varlen"),
    ("_flex", "flex"),
    ("_varlen", "varlen"),
    ("_irope", "flex"),
)
# Flavours of a family that had another name.
OLD_FLAVORS = {("llama4", "17bx16e"): "17Bx16E", ("llama4", "17bx128e"): "17Bx128E"}
