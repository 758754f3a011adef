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
_INDUCTOR = (
    "set Inductor's own environment variables in its place, such as TORCHINDUCTOR_MAX_AUTOTUNE=1 or"
    " TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1, which hold for all that it compiles"
)
_ESTIMATE = "memory is not estimated"

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
    "metrics.enable_color_printing": _ignore(True, "set the environment variable NO_COLOR=1 for a log without colour"),
    "metrics.save_tb_folder": _ignore("tb", "TensorBoard files are in tb, in job.dump_folder"),
    "metrics.rank_0_only": _refuse(True, "set metrics.save_for_all_ranks = true in its place"),
    "optimizer.fused": _refuse(True, "set optimizer.implementation = 'foreach' in its place"),
    "optimizer.early_step_in_backward": _refuse(False, "gradients are clipped together before the step; remove it"),
    "training.enable_loss_parallel": _refuse(True, "set parallelism.disable_loss_parallel = true in its place"),
    "training.gc_freq": _ignore(50, "garbage is collected every 50 steps, on all ranks together"),
    "training.loss_implementation": _ignore("auto", "the loss is one operator, on every device"),
    "training.mixed_precision_reduce": _refuse("float32", "gradients are reduced in float32; remove it"),
    **{f"{table}.dataloader.{name}": gone for table in ("training", "validation") for name, gone in _WORKERS.items()},
    "training.skip_not_utf8": Unsupported(CHANGED, "is read as training.on_bad_row = skip", (False,)),
    "training.repeat": _refuse(True, "set training.epochs = 1 in its place"),
    "training.gc_debug": _ignore(False, "collections are not examined"),
    "parallelism.enable_compiled_autograd": _gone("backward is part of the graph"),
    "parallelism.pipeline_parallel_split_points": _gone("use module_fqns_per_model_part"),
    "parallelism.pipeline_parallel_layers_per_stage": _refuse(
        None, "list the modules of each stage in parallelism.module_fqns_per_model_part in its place"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": _ignore(
        True, "parallelism.overlap_microbatches = true does it, with pipeline_parallel_schedule DualPipeV"
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
    "checkpoint.enable_ft_dataloader_checkpoints": _ignore(
        True, "the position in the data is one for all replicas, and part of every checkpoint"
    ),
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
    "float8.enable_float8_linear": _refuse(False, _FLOAT8),
    "training.enable_float8_linear": _refuse(False, _FLOAT8),
    "training.enable_fp8_linear": _refuse(False, _FLOAT8),
    "training.data_parallel_type": _refuse("fsdp", "set parallelism.data_parallel_replicate_degree in its place"),
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
    "model.lora.dropout": _refuse(0.0, "dropout draws random numbers, which a graph can't; remove it"),
    "memory_estimation.enable": _refuse(False, "not built yet; try comm.mode = fake_backend for a dry run"),
    "memory_estimation.disable_fake_mode": _ignore(False, _ESTIMATE),
    "fault_tolerance.process_group": _ignore("gloo", "NCCL on GPUs, gloo on CPUs"),
    "fault_tolerance.process_group_timeout_ms": _refuse(10000, "set fault_tolerance.timeout_seconds in its place"),
    "fault_tolerance.group_size": _refuse(0, "set fault_tolerance.replicas in its place"),
    "fault_tolerance.min_replica_size": _refuse(1, "set fault_tolerance.min_replicas in its place"),
    "fault_tolerance.replica_id": _refuse(0, "set fault_tolerance.replica in its place"),
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
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    **{f"experimental.{name}": f"parallelism.{name}" for name in _ONCE_EXPERIMENTAL},
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "validation.enabled": "validation.enable",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in _LINEAR_FLOAT8},
    "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
    **{f"mx.{name}": f"quantize.linear.mx.{name}" for name in _LINEAR_MX},
}

# Options by their names in other trainers; values may differ in meaning. A name with a table stands for itself, one
# without for that key in any table, unless it says nothing without its table (`nearest.GENERIC`).
NAMES_ELSEWHERE = {
    name: option
    for option, names in {
        "training.epochs": "num_epochs max_epochs num_train_epochs",
        "training.steps": "step steps max_iters max_steps num_iterations train_iters"
        " train_steps num_steps max_train_steps num_training_steps num_train_steps",
        "optimizer.lr": "learning_rate peak_lr max_lr base_lr init_lr initial_lr lr_max",
        "optimizer.beta1": "adam_beta1 betas adam_betas",
        "optimizer.beta2": "adam_beta2",
        "optimizer.eps": "adam_eps adam_epsilon epsilon",
        "optimizer.name": "optim optimizer_type optimizer_name optimizer.type use_muon",
        "optimizer.muon.lr": "muon_lr muon_learning_rate",
        "optimizer.muon.momentum": "muon_momentum muon_beta",
        "optimizer.muon.ns_steps": "muon_ns_steps newton_schulz_steps num_ns_steps",
        "optimizer.ema_decay": "ema use_ema ema_beta ema_rate ema_weight ema_alpha model_ema model_ema_decay polyak"
        " polyak_decay weight_averaging average_weights",
        "loss.name": "loss_type loss_fn loss_function",
        "loss.label_smoothing": "label_smoothing_factor label_smoothing_epsilon",
        "loss.z_loss": "z_loss_weight z_loss_coef z_loss_multiplier",
        "samples.prompts": "sample_prompts eval_prompts sample_prompt",
        "samples.freq": "sample_every sample_freq sample_interval sample_steps generate_every generate_freq"
        " generate_interval",
        "samples.length": "max_new_tokens sample_length",
        "optimizer.options": "optim_args optimizer_kwargs",
        "training.local_batch_size": "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size"
        " device_batch_size train_micro_batch_size_per_gpu micro_batch_size_per_gpu batch_size_per_device"
        " per_device_batch_size mbs",
        "training.global_batch_size": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps"
        " grad_acc_steps accumulation_steps accumulate_grad_batches total_batch_size train_batch_size gbs",
        "training.seq_len": "block_size max_seq_length max_seq_len sequence_len sequence_length seq_length cutoff_len"
        " max_length context_length context_len ctx_len n_ctx model_max_length max_packed_sequence_len"
        " packed_sequence_size encoder_seq_length",
        "training.columns": "text_column dataset_text_field prompt_column completion_column messages_column"
        " input_column",
        "training.loss_on": "train_on_inputs assistant_only_loss completion_only_loss train_on_prompt roles_to_train",
        "training.one_document_per_row": "packing packed sample_packing pack_sequences",
        "training.skip_leaps": "skip_spikes spike_threshold loss_spike_threshold loss_spike",
        "training.roll_back_after": "rollback roll_back rollback_on_spike",
        "training.max_norm": "grad_clip max_grad_norm gradient_clip gradient_clip_val clip_grad clip_grad_norm"
        " grad_norm_clip clip_norm gradient_clipping",
        "training.mixed_precision_param": "bf16 fp16 bfloat16 float16 half precision mixed_precision"
        " mixed_precision_policy torch_dtype amp use_amp amp_dtype compute_dtype param_dtype",
        "training.dtype": "weight_dtype master_dtype",
        "training.dataset": "dataset_name",
        "training.dataset_path": "train_file train_files train_data train_path train_data_path train_dir"
        " training_data data_path data_dir data_file data_files dataset_dir data_root data.path data.train",
        "training.dataloader.num_workers": "dataloader_num_workers",
        "training.loss_chunks": "loss_chunk_size chunked_cross_entropy chunked_cross_entropy_num_chunks",
        "training.enable_cpu_offload": "cpu_offload fsdp_cpu_offload offload_optimizer offload_param offload_params"
        " optimizer_offload",
        "training.mtp_loss_weight": "mtp_loss_scaling_factor",
        "lr_scheduler.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters"
        " lr_warmup_fraction warmup_ratio warmup_fraction warmup_steps_ratio",
        "lr_scheduler.decay_type": "lr_scheduler_type lr_decay_style lr_schedule scheduler scheduler_type"
        " lr_scheduler_name lr_scheduler.type lr_scheduler.name",
        "lr_scheduler.decay_ratio": "warmdown_ratio cooldown_ratio cooldown_fraction",
        "lr_scheduler.min_lr_factor": "min_lr end_lr final_lr final_lr_frac min_lr_ratio cosine_min_lr_ratio"
        " min_learning_rate eta_min",
        "lr_scheduler.total_steps": "lr_decay_iters lr_decay_steps lr_scheduler.steps",
        "job.config_file": "config cfg config_path",
        "job.dump_folder": "output_dir out_dir output output_path output_folder save save_dir save_path run_dir"
        " work_dir exp_dir experiment_dir log_dir logging_dir logdir tensorboard_dir default_root_dir checkpoint_dir"
        " ckpt_dir checkpoint.dir",
        "activation_checkpoint.mode": "gradient_checkpointing use_gradient_checkpointing activation_checkpointing"
        " enable_activation_checkpointing use_activation_checkpointing recompute_activations recompute_granularity"
        " recompute_method selective_checkpointing",
        "activation_checkpoint.offload": "activation_offloading enable_activation_offloading",
        "checkpoint.interval": "save_steps save_interval save_every save_freq save_frequency checkpoint_interval"
        " checkpoint_every checkpoint_freq ckpt_interval ckpt_freq ckpt_every_steps checkpoint.every checkpoint.freq"
        " checkpoint.steps",
        "checkpoint.keep_latest_k": "save_total_limit max_to_keep keep_last keep_last_n checkpoint.keep",
        "checkpoint.keep_best": "load_best_model_at_end save_best",
        "checkpoint.enable": "resume resume_from_checkpoint auto_resume auto_resume_from_checkpoints"
        " enable_checkpointing save_strategy",
        "checkpoint.async_mode": "async_save async_checkpoint",
        "checkpoint.load_step": "resume_from_step",
        "checkpoint.initial_load_path": "init_from load load_path load_from load_dir load_checkpoint checkpoint_path"
        " ckpt_path pretrained_checkpoint pretrained_path initial_checkpoint_dir checkpoint.path checkpoint.load",
        "checkpoint.last_save_model_only": "save_only_model",
        "validation.enable": "do_eval validate evaluate eval_strategy evaluation_strategy",
        "validation.freq": "eval_steps eval_interval eval_every eval_freq eval_frequency val_check_interval val_freq"
        " val_interval val_every val_every_steps eval.interval eval.every validation.interval validation.every",
        "validation.steps": "eval_iters val_steps limit_val_batches eval_batches eval.max_iters",
        "validation.dataset_path": "validation_file validation_data val_file val_data val_path val_dir valid_file"
        " valid_data_path eval_file eval_data validation.path",
        "validation.dataset": "eval_dataset val_dataset",
        "validation.sets": "eval_datasets",
        "validation.patience": "early_stopping early_stopping_patience",
        "validation.best_metric": "metric_for_best_model monitor",
        "validation.local_batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size"
        " validation.batch_size",
        "metrics.log_freq": "logging_steps logging_freq logging_interval log_interval log_every log_steps"
        " log_every_n_steps log_frequency log_remote_every_steps print_freq print_every print_interval"
        " steps_per_print metrics.freq metrics.interval",
        "metrics.enable_wandb": "report_to wandb_log use_wandb wandb wandb_project wandb_entity wandb_name"
        " wandb_run_name wandb_mode",
        "metrics.enable_mlflow": "use_mlflow mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name",
        "metrics.enable_tensorboard": "tensorboard use_tensorboard tensorboard_log",
        "profiling.enable_profiling": "profile profiler use_profiler profiler.enabled",
        "profiling.profile_freq": "profiling.freq",
        "model.name": "model_type model_arch arch architecture",
        "model.hf_assets_path": "base_model base_model_name_or_path model_name_or_path pretrained_model_name_or_path"
        " model_path model_dir model_id hf_model hf_path tokenizer tokenizer_dir tokenizer_file tokenizer_model"
        " tokenizer_name tokenizer_name_or_path tokenizer.path model.path model.tokenizer",
        "model.flavor": "n_layer n_layers num_layers num_hidden_layers n_head n_heads num_heads num_attention_heads"
        " n_kv_heads num_kv_heads num_key_value_heads num_query_groups n_embd embed_dim d_model d_ff hidden_size"
        " hidden_dim head_dim ffn_hidden_size intermediate_size vocab_size num_experts depth model.layers model.dim",
        "model.num_mtp_layers": "mtp_num_layers num_nextn_predict_layers",
        "model.attn": "attn_implementation attn_impl attention_backend flash_attn flash_attention flex_attention"
        " use_flex_attn use_flash_attn use_flash_attention sdp_attention xformers_attention",
        "model.freeze": "freeze_layers frozen_modules unfrozen_parameters freeze_trainable_layers training.freeze",
        "model.lora.rank": "lora_r lora_rank lora.r model.lora.r peft_rank adapter peft use_peft use_lora",
        "model.lora.alpha": "lora_alpha",
        "reference.path": "ref_model ref_model_path reference_model reference_model_path ref_model_name_or_path teacher"
        " teacher_model teacher_path teacher_model_name_or_path teacher_model_path",
        "training.step": "distill distillation knowledge_distillation",
        "model.lora.base": "load_in_4bit load_in_8bit qlora use_qlora quantize_base bnb_4bit_quant_type",
        "model.lora.rslora": "use_rslora",
        "model.lora.targets": "target_modules lora_target_modules lora_target",
        "model.converters": "fp8 use_fp8",
        "quantize.linear.float8.recipe_name": "fp8_recipe",
        "moe.load_balance_loss": "aux_loss_coef moe_aux_loss_coeff router_aux_loss_coef",
        "moe.router_z_loss": "moe_z_loss_coeff router_z_loss_coef",
        "compile.codegen": "torch_compile torch_compile_mode torch_compile_backend use_compile compile_model"
        " compile.inductor",
        "parallelism.tensor_parallel_degree": "tp tp_size tp_degree tensor_model_parallel_size tensor_parallel_size"
        " tensor_parallel",
        "parallelism.pipeline_parallel_degree": "pp pp_size pp_degree pipeline_model_parallel_size"
        " pipeline_parallel_size pipeline_parallel",
        "parallelism.pipeline_parallel_schedule": "pp_schedule",
        "parallelism.context_parallel_degree": "cp cp_size cp_degree context_parallel_size context_parallel"
        " sequence_parallel_degree",
        "parallelism.expert_parallel_degree": "ep ep_size ep_degree expert_model_parallel_size expert_parallel_size"
        " expert_parallel",
        "parallelism.expert_tensor_parallel_degree": "expert_tensor_parallel_size",
        "parallelism.data_parallel_shard_degree": "fsdp fsdp_size fsdp_degree use_fsdp fsdp_config dp dp_size"
        " dp_shard dp_shard_size dp_shard_degree data_parallel_size deepspeed zero_stage"
        " zero_optimization sharding_strategy",
        "parallelism.data_parallel_replicate_degree": "ddp dp_replicate dp_replicate_size dp_replicate_degree",
        "parallelism.fsdp_reshard_after_forward": "reshard_after_forward",
        "debug.seed": "random_seed manual_seed rng_seed data_seed",
        "debug.deterministic": "full_determinism debug.deterministic_mode",
        "comm.train_timeout_seconds": "ddp_timeout nccl_timeout",
    }.items()
    for name in names.split()
}
# Words of other trainers for what no option of the same kind does, each with what is there instead.
_PREFERENCES = "set training.step = 'torchtitan_graph.goals.dpo', its options in training.step_options"
ANSWERS = {
    **dict.fromkeys(("dpo", "use_dpo", "dpo_beta", "pref_beta"), _PREFERENCES),
    "beta": f"of DPO: {_PREFERENCES}; of Adam: see optimizer.beta1 and optimizer.beta2",
    **dict.fromkeys(
        ("neftune", "neftune_noise_alpha", "use_neftune"), "noise on embeddings (NEFTune) is not built; remove it"
    ),
    "lora_dropout": "adapters have no dropout; remove it",
    **dict.fromkeys(("use_dora", "dora"), "DoRA is not built; [model.lora] has plain LoRA, and rslora"),
    "modules_to_save": "with adapters only they are trained, no module as a whole; remove it",
    "loraplus_lr_ratio": "give B a rate of its own by an entry of optimizer.param_groups",
    **dict.fromkeys(("swa", "use_swa"), "an exponential average takes its place: see optimizer.ema_decay"),
}
TABLES_ELSEWHERE = {
    "train": "training",
    "trainer": "training",
    "data": "training",
    "dataset": "training",
    "optim": "optimizer",
    "scheduler": "lr_scheduler",
    "eval": "validation",
    "val": "validation",
    "ckpt": "checkpoint",
    "checkpointing": "checkpoint",
    "logging": "metrics",
    "parallel": "parallelism",
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
