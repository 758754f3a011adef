"""A run that trains adapters of a Hugging Face model: the base keeps its bits, it resumes bit for bit, and its files
start another run."""

from pathlib import Path

import pytest
import torch
from runs import EAGER, REPOSITORY, digest, run_script, saved, train
from safetensors.torch import load_file

from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.hf.places import stored_as
from torchtitan_graph.ops.packed import pack, unpack

TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"
LORA = ("--model.lora.rank", "4", "--model.lora.targets", "*.attention,*.w2")
FILES = ("step-4-adapter/adapter_model.safetensors", "step-4-hf/model.safetensors")
EXPORTS = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_adapter")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "hf"
    torch.manual_seed(0)
    config = llama3.Config(32, 2, 4, 2, 64, vocab_size=2048, rope_scaling=None)
    to_hf(llama3.Model(config), folder, assets=TOKENIZER)
    return folder


def run(base: Path, folder: Path, *options: str, ranks: int = 2) -> str:
    of_base = ("--model.name=llama3", "--model.hf_assets_path", str(base), "--checkpoint.initial_load_in_hf")
    code, output = train("--job.dump_folder", str(folder), *of_base, *LORA, *options, ranks=ranks)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of FSDP on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    output = run(base, folder, "--training.steps", "4", *EXPORTS, *EAGER)
    assert "model.lora: 10 weights have adapters of rank 4, 2,560 parameters; all else is frozen" in output
    return folder


def parameters(folder: Path, step: int) -> dict[str, object]:
    found = {name: x for name, x in saved(folder, step).items() if name.startswith("model.")}
    return {name.removeprefix("model."): x for name, x in found.items()}


def test_adapters_alone_are_trained(base: Path, whole: Path) -> None:
    start = load_file(base / "model.safetensors")
    frozen = {name: x for name, x in parameters(whole, 4).items() if ".lora_" not in name}
    names = {name: stored_as(llama3.HF_KEYS, name).name for name in frozen}  # type: ignore[union-attr]
    assert {names[name]: x for name, x in frozen.items()} == {name: digest(x) for name, x in start.items()}
    moments = {name for name in saved(whole, 4) if name.startswith("optim.")}
    assert moments and all(".lora_" in name for name in moments), "only adapters have optimizer state"


def test_the_exports_are_the_base_plus_the_adapters(base: Path, whole: Path) -> None:
    start, adapter, merged = (
        load_file(path) for path in (base / "model.safetensors", *(whole / "checkpoint" / name for name in FILES))
    )
    q_proj = "model.layers.0.self_attn.q_proj"
    A, B = (adapter[f"base_model.model.{q_proj}.lora_{x}.weight"] for x in "AB")
    change = merged[f"{q_proj}.weight"] - start[f"{q_proj}.weight"]
    assert change.abs().max() > 1e-3 and torch.allclose(change, 4 * B @ A, atol=1e-6)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(merged[norm], start[norm])


def test_an_adapter_starts_another_run_in_another_layout(base: Path, whole: Path, tmp_path: Path) -> None:
    still = ("--training.steps", "1", "--optimizer.lr", "0", *EAGER)
    adapter = whole / "checkpoint" / "step-4-adapter"
    output = run(base, tmp_path, *still, "--checkpoint.initial_load_adapter", str(adapter), ranks=1)
    assert f"loaded the adapter of {adapter}" in output
    assert parameters(tmp_path, 1) == parameters(whole, 4)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(base: Path, whole: Path, tmp_path: Path) -> None:
    run(base, tmp_path, "--training.steps", "2", "--lr_scheduler.total_steps", "4")
    run(base, tmp_path, "--training.steps", "4")
    assert saved(tmp_path, 4) == saved(whole, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "options"), [(0, ("--adapter",)), (1, ())])
def test_the_script_writes_the_same_files(number: int, options: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    code, output = run_script("convert_to_hf.py", str(whole / "checkpoint" / "step-4"), str(tmp_path / "a"), *options)
    assert code == 0, output
    written, expected = (
        load_file(path) for path in (tmp_path / "a" / Path(FILES[number]).name, whole / "checkpoint" / FILES[number])
    )
    assert written.keys() == expected.keys() and all(torch.equal(x, expected[n]) for n, x in written.items())


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["nf4", "float8"])
def test_a_packed_base_is_that_of_the_folder_in_every_layout_and_goes_on(packing: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    to_hf(
        llama3.Model(llama3.Config(128, 2, 4, 2, 256, vocab_size=2048, rope_scaling=None)),
        tmp_path / "hf",
        assets=TOKENIZER,
    )
    of_lora = ("--model.lora.base", packing, "--lr_scheduler.total_steps", "4", *EXPORTS)
    four = ("--training.steps", "4", *of_lora)
    run(tmp_path / "hf", tmp_path / "a", *four)
    run(tmp_path / "hf", tmp_path / "b", "--training.steps", "2", *of_lora)
    run(tmp_path / "hf", tmp_path / "b", *four)
    assert saved(tmp_path / "a", 4) == saved(tmp_path / "b", 4)
    run(tmp_path / "hf", tmp_path / "tp", *four, "--parallelism.tensor_parallel_degree", "2")
    start = load_file(tmp_path / "hf" / "model.safetensors")
    for folder in ("a", "tp"):
        found = parameters(tmp_path / folder, 4)
        for name in ("layers.0.attention.wo.weight", "layers.1.feed_forward.w2.weight"):
            whole = start[stored_as(llama3.HF_KEYS, name).name]  # type: ignore[union-attr]
            assert found[name] == digest(pack(whole, packing)), (folder, name)
    adapter, merged = (load_file(tmp_path / "a" / "checkpoint" / name) for name in FILES)
    q_proj = "model.layers.0.self_attn.q_proj"
    A, B = (adapter[f"base_model.model.{q_proj}.lora_{x}.weight"] for x in "AB")
    base = unpack(pack(start[f"{q_proj}.weight"], packing), packing, torch.float32)
    torch.testing.assert_close(merged[f"{q_proj}.weight"], base + 4 * B @ A, rtol=0, atol=1e-6)
    code, output = train(
        "--job.dump_folder",
        str(tmp_path / "a"),
        *LORA,
        "--model.name=llama3",
        "--model.hf_assets_path",
        str(tmp_path / "hf"),
        "--training.steps",
        "5",
    )
    assert code and "model.lora.base" in output, "another run"
