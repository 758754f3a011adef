"""Files of earlier releases load as they are: nothing they say is dropped in silence."""

from pathlib import Path

import pytest

from torchtitan_graph.config import JobConfig, check, dump_toml, load
from torchtitan_graph.errors import UserError

OLD_FILES = Path(__file__).parent / "old_files"


def load_old(name: str) -> JobConfig:
    return load(["--job.config_file", str(OLD_FILES / name)])


def test_every_default_of_the_old_schema_is_ours_and_harmless() -> None:
    config = load_old("every_default.toml")
    assert [notice.partition(": ")[2] for notice in config.notices] == [
        "training.dataloader.pin_memory = false: ignored: batches are always in page-locked memory on a GPU",
        "training.dataset = 'c4_test': changed: is now stdlib, the running Python's own sources,"
        " since nothing is downloaded",
    ]
    config.job.config_file = None
    # Not set, it is the debug model still, unless there is a config.json beside the tokenizer.
    assert config.model.flavor == "debugmodel" and JobConfig().model.flavor is None
    config.model.flavor = None
    # Not set, it is what is trained on; it was the hub's, which the file names.
    assert config.validation.dataset == "c4_validation" and JobConfig().validation.dataset is None
    config.validation.dataset = None
    assert config == JobConfig()


@pytest.mark.parametrize(
    ("name", "world_size", "noticed"),
    [
        (
            "debug.toml",
            2,
            "training.dataset parallelism.context_parallel_rotate_method quantize.linear.float8.filter_fqns"
            " parallelism.pipeline_parallel_schedule job.description profiling.save_traces_folder",
        ),
        (
            "debug_flex.toml",
            8,
            "training.dataset validation.dataset model.flavor activation_checkpoint.early_stop job.description"
            " compile.enable",
        ),
        (
            "8b.toml",
            8,
            "quantize.linear.float8.filter_fqns job.description profiling.save_traces_folder comm.trace_buf_size"
            " compile.enable training.dataloader.persistent_workers",
        ),
        ("70b_hsdp.toml", 128, "model.flavor training.gc_freq"),
        (
            "405b.toml",
            128,
            "compile.enable parallelism.enable_async_tensor_parallel"
            " quantize.linear.float8.enable_fsdp_float8_all_gather"
            " quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        ),
        (
            "early_release.toml",
            2,
            "job.description job.use_for_integration_test model.tokenizer_path lr_scheduler.lr_min training.batch_size"
            " training.compile training.seed training.deterministic training.dataset"
            " parallelism.enable_compiled_autograd checkpoint.enable_checkpoint float8.filter_fqns"
            " float8.force_recompute_fp8_weight_in_bwd validation.enabled"
            " quantize.linear.float8.filter_fqns",
        ),
    ],
)
def test_old_file_runs_and_says_what_it_ignores(name: str, world_size: int, noticed: str) -> None:
    config = load_old(name)
    notices = check(config, world_size)
    (renamed,) = [x for x in notices if "have new names" in x] or [": changed: 0 keys have new names: "]
    count, _, pairs = renamed.split(": ")[2].partition(" keys have new names")
    found = {notice.split(": ")[1].split(" = ")[0] for notice in notices if notice != renamed}
    old = [pair.split(" is ")[0] for pair in renamed.split(": ")[3].split(";")[0].split(", ") if pair]
    assert found | {*old} == set(noticed.split()) and len(old) == int(count)


def test_values_of_an_old_file_arrive() -> None:
    config = load_old("8b.toml")
    assert config.training.max_norm == 1.0 and isinstance(config.training.max_norm, float)
    assert config.training.dataloader.num_workers == 2 and config.compile.codegen == "blocks"
    assert config.lr_scheduler.decay_ratio is None
    assert config.activation_checkpoint.selective_ac_option == "op"


@pytest.mark.parametrize("converter", ["float8", "mx", "quantize.linear.float8", "quantize.grouped_mm.float8"])
def test_what_only_made_quantised_products_faster_is_left_out_with_a_notice(converter: str) -> None:
    words = ["--model.converters", converter, "--compile.enable"]
    config = load(words)
    (notice,) = check(config, 1)
    assert notice == (
        "command line: compile.enable = 'true': changed: is left out, for code by Inductor is not built with"
        " model.converters; the same numbers up to rounding, in more time"
    )
    assert config.compile.codegen == "off" and load(["--compile.enable"]).compile.codegen == "blocks"


def test_renamed_keys_arrive_under_their_new_names() -> None:
    config = load_old("early_release.toml")
    assert config.model.hf_assets_path == "./tests/assets/tokenizer"
    assert config.training.local_batch_size == 4
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert config.checkpoint.enable and config.compile.codegen == "blocks"
    assert config.debug.seed == 7 and config.debug.deterministic


def test_flavours_named_after_attention_choose_it() -> None:
    assert load_old("debug_flex.toml").model.flavor == "debugmodel"
    assert load_old("debug_flex.toml").model.attn == "flex"
    assert load_old("70b_hsdp.toml").model.flavor == "70B"
    assert load_old("70b_hsdp.toml").model.attn == "varlen"


def test_what_is_not_built_is_refused_by_name_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_old("refused.toml")
    first, *lines = str(caught.value).splitlines()
    assert first == "2 problems in the configuration:"
    assert all(line.startswith(f"  {OLD_FILES / 'refused.toml'}: ") for line in lines)
    assert sorted(line.split(": ")[1].split(" = ")[0] for line in lines) == [
        "checkpoint.create_seed_checkpoint",
        "comm.mode",
    ]


def test_the_resolved_configuration_of_an_earlier_run_goes_on(tmp_path: Path) -> None:
    """Such a file holds every option of its time, those at their defaults too."""
    config = load_old("resolved.toml")
    assert check(config, 1) == []
    assert config.training.steps == 7 and config.compile.fusions == ["rope"] and config.compile.codegen == "off"
    new = tmp_path / "config.toml"
    new.write_text(dump_toml(config))
    again = load(["--job.config_file", str(new)])
    again.job.config_file = config.job.config_file
    assert again == config


@pytest.mark.parametrize(
    ("words", "codegen"),
    [
        ("--compile.enable", "blocks"),
        ("--compile.no-enable", "off"),
        ("--training.compile true", "blocks"),
        ("--compile.enable --compile.codegen whole", "whole"),
        ("--compile.enable --compile.codegen off", "off"),
    ],
)
def test_torchtitan_s_word_for_compiled_blocks(words: str, codegen: str) -> None:
    config = load(words.split())
    assert config.compile.codegen == codegen
    assert any("compile.codegen is set as well" in notice for notice in config.notices) == ("codegen" in words)
    with pytest.raises(UserError, match="compile.enable = 'maybe': must be true or false"):
        load(["--compile.enable", "maybe"])
