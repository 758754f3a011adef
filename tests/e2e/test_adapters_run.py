"""A run that trains adapters of a Hugging Face model: the base keeps its bits, it resumes bit for bit, and its files
start another run."""

from pathlib import Path

import pytest
import torch
from runs import REPOSITORY, digest, run_script, saved, train
from safetensors.torch import load_file

from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.hf.places import stored_as

TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"
LORA = ("--model.lora.rank", "4", "--model.lora.targets", "*.attention,*.w2")
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


def test_adapters_are_trained_resumed_exported_and_loaded(base: Path, tmp_path: Path) -> None:
    whole, halves, again = (tmp_path / name for name in ("whole", "halves", "again"))
    output = run(base, whole, "--training.steps", "4", *EXPORTS)
    assert "model.lora: 10 weights have adapters of rank 4, 2,560 parameters" in output
    run(base, halves, "--training.steps", "2", "--lr_scheduler.total_steps", "4")
    run(base, halves, "--training.steps", "4")
    end, start = saved(whole, 4), load_file(base / "model.safetensors")
    assert saved(halves, 4) == end, "stopped and resumed"
    moments = {name for name in end if name.startswith("optim.")}
    assert moments and all(".lora_" in name for name in moments), "only adapters have optimizer state"
    parameters = {name.removeprefix("model."): x for name, x in end.items() if name.startswith("model.")}
    frozen = {name: x for name, x in parameters.items() if ".lora_" not in name}
    names = {name: stored_as(llama3.HF_KEYS, name).name for name in frozen}  # type: ignore[union-attr]
    assert {names[name]: x for name, x in frozen.items()} == {name: digest(x) for name, x in start.items()}

    adapter, merged = (load_file(whole / "checkpoint" / name) for name in FILES)
    q_proj = "model.layers.0.self_attn.q_proj"
    A, B = (adapter[f"base_model.model.{q_proj}.lora_{x}.weight"] for x in "AB")
    change = merged[f"{q_proj}.weight"] - start[f"{q_proj}.weight"]
    assert change.abs().max() > 1e-3 and torch.allclose(change, 4 * B @ A, atol=1e-6)
    for options, name in ((("--adapter",), FILES[0]), ((), FILES[1])):
        code, output = run_script("convert_to_hf.py", str(whole / "checkpoint" / "step-4"), str(again / name), *options)
        assert code == 0, output
        (file,) = (again / name).glob("*.safetensors")
        written, expected = load_file(file), load_file(whole / "checkpoint" / name)
        assert written.keys() == expected.keys() and all(torch.equal(x, expected[n]) for n, x in written.items())

    still = ("--training.steps", "1", "--optimizer.lr", "0")
    output = run(base, again, *still, "--checkpoint.initial_load_adapter", str(whole / "checkpoint" / "step-4-adapter"))
    assert f"loaded the adapter of {whole}" in output
    found = {name: x for name, x in saved(again, 1).items() if name.startswith("model.")}
    assert found == {name: x for name, x in end.items() if name.startswith("model.")}


FILES = ("step-4-adapter/adapter_model.safetensors", "step-4-hf/model.safetensors")
