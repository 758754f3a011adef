"""What old files may say that this release does not do: refused by name, or ignored where that changes no numbers.

A row applies when its key is set to something other than its default and its harmless values. The first row whose
pattern matches a key counts. `python -m torchtitan_graph.translate OLD.toml` shows what these tables make of a file.
"""

import fnmatch
from typing import Any, NamedTuple

REFUSED, IGNORED = "refused", "ignored"

FAMILIES = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")


class Row(NamedTuple):
    """A key (or a pattern of keys), what becomes of it, what to do instead, and values that are harmless besides."""

    key: str
    verdict: str
    instead: str
    harmless: tuple[Any, ...] = ()


SUPPORT = (
    Row("job.custom_config_module", REFUSED, "the schema can't be extended; remove it"),
    Row("model.converters", REFUSED, "low-precision products are not built yet; remove it to train in bfloat16"),
    Row("model.print_after_conversion", IGNORED, "there are no converters yet"),
    Row("model.num_mtp_layers", REFUSED, "multi-token prediction is not built; the model trains without it"),
    Row("optimizer.early_step_in_backward", REFUSED, "gradients are clipped together before the step; remove it"),
    Row("training.enable_cpu_offload", REFUSED, "not built yet; use more shards, or activation_checkpoint.mode = full"),
    Row("training.gc_debug", IGNORED, "collections are not examined"),
    Row("parallelism.enable_async_tensor_parallel", IGNORED, "not built yet; tensor parallel runs without it"),
    Row("parallelism.pipeline_parallel_degree", REFUSED, "not built yet; use data_parallel_shard_degree"),
    Row("parallelism.context_parallel_degree", REFUSED, "not built yet; use tensor_parallel_degree for long sequences"),
    Row("parallelism.expert_parallel_degree", REFUSED, "not built yet; use data_parallel_shard_degree"),
    Row(
        "parallelism.expert_tensor_parallel_degree",
        REFUSED,
        "not built yet; tensor_parallel_degree splits every expert",
    ),
    Row("parallelism.pipeline_parallel_*", IGNORED, "there are no pipeline stages yet"),
    Row("parallelism.module_fqns_per_model_part", IGNORED, "there are no pipeline stages yet"),
    Row("parallelism.context_parallel_*", IGNORED, "sequences are not sharded yet"),
    Row("parallelism.expert_parallel_comm_backend", IGNORED, "tokens do not travel to experts yet"),
    Row("checkpoint.enable_ft_dataloader_checkpoints", IGNORED, "there are no fault-tolerant replicas"),
    Row("activation_checkpoint.mode", REFUSED, "not built yet; use selective or full", ("none", "selective", "full")),
    Row("activation_checkpoint.memory_budget", IGNORED, "mode = memory_budget is not built yet"),
    Row("activation_checkpoint.visualize_memory_budget_pareto", IGNORED, "mode = memory_budget is not built yet"),
    Row("activation_checkpoint.per_op_sac_*", IGNORED, "op chooses by operation, not by shape; same numbers"),
    Row("activation_checkpoint.early_stop", IGNORED, "only what backward needs is recomputed anyway"),
    Row("activation_checkpoint.preserve_rng_state", IGNORED, "no recomputed operation draws random numbers"),
    Row("activation_checkpoint.determinism_check", IGNORED, "use debug.verify_passes"),
    Row("activation_checkpoint.debug", IGNORED, "use debug.dump_graphs"),
    Row("compile.backend", REFUSED, "regions are compiled by Inductor alone; remove it"),
    Row("quantize.*", IGNORED, "nothing is quantized while model.converters is empty"),
    Row("comm.mode", REFUSED, "not built yet; use fake_backend for a dry run", ("default", "fake_backend")),
    Row("memory_estimation.enable", REFUSED, "not built yet; try comm.mode = fake_backend for a dry run"),
    Row("memory_estimation.*", IGNORED, "there is no memory estimation yet"),
    Row("fault_tolerance.enable", REFUSED, "not built; restart the job, it resumes from the newest checkpoint"),
    Row("fault_tolerance.*", IGNORED, "there are no fault-tolerant replicas"),
    Row("experimental.custom_import", REFUSED, "give model.name as a dotted name to train a model of your own"),
    Row("experimental.custom_args_module", REFUSED, "the schema can't be extended; remove it"),
)

LINEAR_FLOAT8 = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "recipe_name",
    "filter_fqns",
    "emulate",
)
LINEAR_MX = ("recipe_name", "mxfp8_dim1_cast_kernel_choice", "filter_fqns")

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
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "validation.enabled": "validation.enable",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in LINEAR_FLOAT8},
    **{f"mx.{name}": f"quantize.linear.mx.{name}" for name in LINEAR_MX},
}

# Keys of earlier releases that have no successor and change no numbers.
GONE = {
    "job.use_for_integration_test": "it marked files for a test suite",
    "parallelism.enable_compiled_autograd": "backward is part of the graph",
    "parallelism.pipeline_parallel_split_points": "there are no pipeline stages yet",
    "float8.force_recompute_fp8_weight_in_bwd": "nothing is quantized while model.converters is empty",
    "float8.moe_fqns_prototype": "nothing is quantized while model.converters is empty",
    "fault_tolerance.should_quantize": "there are no fault-tolerant replicas",
    "fault_tolerance.fragment_sync_delay": "there are no fault-tolerant replicas",
    "fault_tolerance.fragment_update_alpha": "there are no fault-tolerant replicas",
}

# Flavours that were named after an implementation of attention, which model.attn chooses here. The variable-length
# kernels computed attention inside each document; sdpa under the document mask computes the same up to rounding.
FLAVOR_SUFFIXES = (("_flex_attn", "flex"), ("_varlen_attn", "sdpa"), ("_flex", "flex"), ("_varlen", "sdpa"))


def find_row(key: str, value: Any, default: Any) -> Row | None:
    """Return the row that refuses or ignores this value of a key, or None where the value is supported or harmless."""
    if value == default:
        return None
    row = next((row for row in SUPPORT if fnmatch.fnmatchcase(key, row.key)), None)
    return None if row is None or value in row.harmless else row
