"""Every file of train_configs is right, at the number of ranks it was written for."""

import re
from pathlib import Path

import pytest
from runs import REPOSITORY, Command

from torchtitan_graph.config import check, dump_toml, load
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.models.spec import build_model, family_names, load_family

FILES = sorted((REPOSITORY / "train_configs").glob("*.toml"))
GPU_GIB = 75.0  # of the 80 that the files are made for
RANKS = {
    "llama3_debug": 2,
    "llama3_1b": 8,
    "llama3_3b": 8,
    "llama3_8b": 8,
    "llama3_8b_lora": 1,
    "llama3_8b_qlora": 1,
    "llama3_70b": 128,
    "llama3_405b": 512,
    "llama4_debug": 2,
    "llama4_17bx16e": 64,
    "llama4_17bx128e": 256,
    "qwen3_debug": 2,
    "transformers_debug": 2,
    "qwen3_moe_debug": 2,
    "qwen3_0.6b": 1,
    "qwen3_1.7b": 1,
    "qwen3_4b": 2,
    "qwen3_4b_lora": 1,
    "qwen3_4b_qlora": 1,
    "qwen3_8b": 4,
    "qwen3_8b_lora": 1,
    "qwen3_8b_qlora": 1,
    "qwen3_14b": 8,
    "qwen3_32b": 16,
    "qwen3_30b_a3b": 16,
    "qwen3_30b_a3b_lora": 8,
    "qwen3_30b_a3b_qlora": 1,
    "qwen3_235b_a22b": 128,
    "deepseek_v3_debug": 2,
    "deepseek_v3_16b": 8,
    "deepseek_v3_236b": 128,
    "deepseek_v3_671b": 256,
    "gpt_oss_debug": 2,
    "gpt_oss_20b": 8,
    "gpt_oss_120b": 64,
}
# Degrees that files of the old schema have, by the file of ours with that model: ranks, rows, options.
OLD_DEGREES = {
    "llama3_70b": (128, 8, "tensor_parallel_degree 8"),
    "llama3_405b": (512, 2, "tensor_parallel_degree 8"),
    "llama4_17bx16e": (
        64,
        8,
        "tensor_parallel_degree 8 pipeline_parallel_degree 1 pipeline_parallel_schedule 1F1B overlap_microbatches false"
        " expert_parallel_degree 1 expert_tensor_parallel_degree 8 expert_exchange direct",
    ),
    "llama4_17bx128e": (
        256,
        1,
        "tensor_parallel_degree 8 pipeline_parallel_degree 4 pipeline_parallel_schedule 1F1B overlap_microbatches false"
        " expert_parallel_degree 1 expert_tensor_parallel_degree 8 expert_exchange direct",
    ),
    "deepseek_v3_16b": (8, 4, "expert_parallel_degree 8 expert_tensor_parallel_degree 1"),
    "deepseek_v3_671b": (
        256,
        4,
        "pipeline_parallel_degree 1 pipeline_parallel_schedule 1F1B overlap_microbatches false"
        " expert_parallel_degree 1 expert_exchange direct",
    ),
}
TOKENIZER = str(REPOSITORY / "tests" / "assets" / "tokenizer")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_is_accepted_without_a_notice(file: Path) -> None:
    config = load(["--job.config_file", str(file)])
    assert check(config, RANKS[file.stem]) == []
    build_model(config.model.name, config.model.flavor, "sdpa", 2048)
    assert dump_toml(config).count(str(file)) >= 10


@pytest.mark.parametrize("file", [file for file in FILES if "debug" not in file.stem], ids=lambda file: file.stem)
def test_file_says_only_what_differs_from_the_defaults(file: Path) -> None:
    config = load(["--job.config_file", str(file)])
    assert [
        key for key in config.sources if file.name in config.sources[key] and get(config, key) == OPTIONS[key].default
    ] == []


def test_another_family_has_another_folder() -> None:
    folders = [
        load(["--job.config_file", "llama3_debug.toml", "--model.name", name]).job.dump_folder
        for name in family_names()
    ]
    assert folders == [f"./outputs/{name}_debug" for name in family_names()]


def test_every_flavour_has_a_file() -> None:
    flavors = {(name, flavor) for name in family_names() for flavor in load_family(name).FLAVORS}
    configs = [load(["--job.config_file", str(file)]) for file in FILES]
    assert {(config.model.name, config.model.flavor) for config in configs} == flavors


def dry_run(name: str, num_ranks: int, options: list[str], folder: Path) -> str:
    code, output = Command(
        str(REPOSITORY / "run_train.sh"),
        *["--model.hf_assets_path", TOKENIZER, *options],
        cwd=folder,
        COMM_MODE="fake_backend",
        NGPU=str(num_ranks),
        CONFIG_FILE=f"{name}.toml",
    ).finish()
    assert code == 0, output
    assert f"dry run of {num_ranks} ranks done" in output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_dry_run(name: str, tmp_path: Path) -> None:
    (needed,) = re.findall(r"in all +([\d.]+) GiB", dry_run(name, RANKS[name], [], tmp_path))
    assert float(needed) < GPU_GIB


def old_options(name: str) -> list[str]:
    _, rows, options = OLD_DEGREES[name]
    words = options.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    batch = ["--training.local_batch_size", str(rows), "--training.global_batch_size", "-1"]
    return [*batch, *(word for key, value in pairs for word in (f"--parallelism.{key}", value))]


@pytest.mark.parametrize("name", OLD_DEGREES)
def test_old_degrees_are_accepted(name: str) -> None:
    config = load(["--job.config_file", f"{name}.toml", *old_options(name)])
    unused = ["expert_tensor_parallel_degree = 8"] * ("expert_tensor_parallel_degree 8" in OLD_DEGREES[name][2])
    notices = check(config, OLD_DEGREES[name][0])
    assert len(notices) == len(unused) and all(map(str.__contains__, notices, unused))  # what is not used is told


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD_DEGREES)
def test_dry_run_with_old_degrees(name: str, tmp_path: Path) -> None:
    dry_run(name, OLD_DEGREES[name][0], old_options(name), tmp_path)
