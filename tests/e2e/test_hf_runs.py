"""Weights in Hugging Face's format start a run and end one, in any layout; the scripts convert checkpoints."""

import json
from pathlib import Path

import patched_train
import pytest
import torch
from runs import EAGER, REPOSITORY, digest, generate, run_script, saved, saved_steps, train
from safetensors.torch import load_file

from torchtitan_graph.checkpoint import load_model
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, to_hf
from torchtitan_graph.models.hf.places import stored_as
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import family_names, load_family, tiny_config

TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps at TP 2 with everything saved."""
    folder = tmp_path_factory.mktemp("tp") / "run"
    options = ["--parallelism.tensor_parallel_degree", "2", "--checkpoint.last_save_in_hf", *EAGER]
    code, output = train("--job.dump_folder", str(folder), "--training.steps", str(STEPS), *options, ranks=2)
    assert code == 0, output
    return folder


def assert_hf_is_checkpoint(hf: Path, run: Path, step: int) -> None:
    checkpoint = saved(run, step)
    ours = {name.removeprefix("model."): value for name, value in checkpoint.items() if name.startswith("model.")}
    theirs = load_file(hf / "model.safetensors")
    assert len(theirs) == len(ours) > 0
    for name, found in ours.items():
        assert digest(theirs[stored_as(llama3.HF_KEYS, name).name]) == found, name  # type: ignore[union-attr]


def test_what_was_trained_in_a_layout_is_the_checkpoint_and_loads_in_transformers(run: Path) -> None:
    hf = run / "checkpoint" / f"step-{STEPS}-hf"
    assert_hf_is_checkpoint(hf, run, STEPS)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, attn_implementation="eager")
    tokens = torch.randint(258, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = from_hf(hf)(tokens), theirs(input_ids=tokens).logits
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_the_script_converts_a_checkpoint(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint" / f"step-{STEPS}"
    code, output = run_script("convert_to_hf.py", str(checkpoint), str(tmp_path / "hf"))
    assert code == 0, output
    assert_hf_is_checkpoint(tmp_path / "hf", run, STEPS)
    config = (tmp_path / "hf" / "config.json").read_text()
    assert config == (run / "checkpoint" / f"step-{STEPS}-hf" / "config.json").read_text()


def test_the_scripts_undo_each_other(run: Path, tmp_path: Path) -> None:
    hf = run / "checkpoint" / f"step-{STEPS}-hf"
    code, output = run_script("convert_from_hf.py", str(hf), str(tmp_path / "ours"))
    assert code == 0, output
    words = [str(tmp_path / "ours" / "step-0"), str(tmp_path / "hf"), "--like", str(hf)]
    code, output = run_script("convert_to_hf.py", *words)
    assert code == 0, output
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (hf / name).read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published: config.json, weights, tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    torch.manual_seed(0)
    config = llama3.Config(32, 2, 4, 2, 64, vocab_size=2048, rope_scaling=None, rope_theta=1234.0)
    to_hf(llama3.Model(config), folder, assets=TOKENIZER)
    return folder


# Nothing moves at a learning rate of 0: what is saved is what was loaded.
STILL = ["--model.name=llama3", "--training.steps", "1", "--optimizer.lr", "0"]


@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_run_starts_from_the_weights_of_its_assets_and_ends_in_the_dtype_that_is_asked(
    mode: str, small: Path, tmp_path: Path
) -> None:
    options = [*STILL, "--model.hf_assets_path", str(small), "--checkpoint.initial_load_in_hf"]
    options += ["--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", "bfloat16"]
    code, output = train("--job.dump_folder", str(tmp_path), "--compile.mode", mode, *options)
    assert code == 0, output
    assert f"loaded the weights of {small}" in output and "llama3 as in config.json" in output
    assert_hf_is_checkpoint(small, tmp_path, 1)
    hf = tmp_path / "checkpoint" / "step-1-hf"
    assert {x.dtype for x in load_file(hf / "model.safetensors").values()} == {torch.bfloat16}
    assert (hf / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    assert json.loads((hf / "config.json").read_text())["rope_theta"] == 1234.0


@pytest.mark.slow
def test_weights_are_loaded_by_a_run_that_saves_nothing(small: Path, tmp_path: Path) -> None:
    options = [*STILL, "--model.hf_assets_path", str(small), "--checkpoint.initial_load_in_hf"]
    code, output = train("--job.dump_folder", str(tmp_path), "--checkpoint.no-enable", *options)
    assert code == 0, output
    assert f"loaded the weights of {small}" in output and "random" not in output


def test_assets_alone_load_no_weights(small: Path, tmp_path: Path) -> None:
    code, output = train("--job.dump_folder", str(tmp_path), *STILL, *EAGER, "--model.hf_assets_path", str(small))
    assert code == 0, output
    assert "loaded the weights" not in output
    assert f"training begins with random weights: those in {small} (model.hf_assets_path) are loaded with" in output
    with pytest.raises(AssertionError):
        assert_hf_is_checkpoint(small, tmp_path, 1)


def test_a_run_that_goes_on_takes_its_own_checkpoint(small: Path, tmp_path: Path) -> None:
    options = ["--model.hf_assets_path", str(small), "--model.name=llama3", "--checkpoint.initial_load_in_hf", *EAGER]
    for steps in ("2", "3"):
        code, output = train("--job.dump_folder", str(tmp_path), *options, "--training.steps", steps)
        assert code == 0, output
    assert "resuming after step 2" in output and "loaded the weights" not in output


@pytest.mark.slow
def test_an_export_that_fails_loses_no_checkpoint_and_is_done_again(tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--training.steps", "2", "--checkpoint.last_save_in_hf"]
    slow = [*options, "--comm.train_timeout_seconds", "5"]
    code, output = train(*slow, ranks=2, patch=patched_train.export_slowly_and_fail)
    assert code == 4, output
    assert "step-2-hf could not be saved: the disk at" in output
    assert saved_steps(tmp_path) == [2], "neither part of an export"
    code, output = train(*options)
    assert code == 0, output
    assert "resuming after step 2" in output and "step 2/2" not in output
    assert_hf_is_checkpoint(tmp_path / "checkpoint" / "step-2-hf", tmp_path, 2)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--checkpoint.initial_load_in_hf"], ["checkpoint.initial_load_in_hf = true", "no folder to load"]),
        (
            ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", "./nowhere"],
            ["checkpoint.initial_load_in_hf = true", "nowhere holds neither model.safetensors"],
        ),
        (["--checkpoint.initial_load_in_hf_quantized"], ["needs initial_load_in_hf = true"]),
        (
            ["--model.name=llama3", "--model.flavor", "1B", "--model.hf_assets_path", "HF"],
            ["'1B' of llama3 contradicts"],
        ),
        (
            ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", "HF"],
            ["is of another model", "[2048, 32]"],
        ),
    ],
    ids=["no folder", "nowhere", "quantized alone", "flavour", "another model"],
)
def test_a_mistake_is_refused(options: list[str], parts: list[str], small: Path, tmp_path: Path) -> None:
    words = [str(small) if word == "HF" else word for word in options]
    code, output = train("--job.dump_folder", str(tmp_path), *words)
    assert code == 2, output
    assert output.count("ERROR") == 1 and "Traceback" not in output, output
    for part in parts:
        assert part in output, output


# The debug flavour of transformers' is of an architecture that `from_hf` reads as a family of this package.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in family_names() if name != "transformers"])
def test_every_family_goes_from_a_folder_through_a_layout_to_a_folder(name: str, tmp_path: Path) -> None:
    """Published weights -> two steps at FSDP 2 x TP 2 -> what was trained, as our checkpoint and as transformers'."""
    transformers = pytest.importorskip("transformers")
    family = load_family(name)
    flavor = "debugmodel_moe" if "debugmodel_moe" in family.FLAVORS else "debugmodel"
    torch.manual_seed(0)
    model = family.Model(tiny_config(family.FLAVORS[flavor], vocab_size=2048))
    initialize(model, 0)
    published, run = tmp_path / "published", tmp_path / "run"
    to_hf(model, published, assets=TOKENIZER)
    options = ["--model.name", name, "--model.hf_assets_path", str(published), "--checkpoint.initial_load_in_hf"]
    options += ["--parallelism.tensor_parallel_degree", "2", "--checkpoint.last_save_in_hf"]
    code, output = train("--job.dump_folder", str(run), "--training.steps", str(STEPS), *options, ranks=4)
    assert code == 0, output
    hf = run / "checkpoint" / f"step-{STEPS}-hf"
    exported = from_hf(hf).state_dict()
    load_model(run / "checkpoint" / f"step-{STEPS}", model)
    start = from_hf(published).state_dict()
    for key, value in model.state_dict().items():
        assert digest(exported[key]) == digest(value), key
        assert not torch.equal(value, start[key]), f"{key} was not trained"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        hf, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(2048, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = from_hf(hf)(tokens), theirs(input_ids=tokens).logits
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5


# --- generation ------------------------------------------------------------------------------------------------------


def generated(*arguments: str, ranks: int = 1) -> str:
    code, output = generate(*arguments, ranks=ranks)
    assert code == 0, output
    return output


def test_a_checkpoint_and_its_hugging_face_folder_continue_a_text_alike(run: Path) -> None:
    checkpoint = str(run / "checkpoint" / f"step-{STEPS}")
    options = ["def main", "--max_new_tokens", "12", "--temperature", "0.8", "--seed", "3"]
    text = generated(checkpoint, *options)
    assert "def main" in text
    assert text.splitlines()[-1] == generated(f"{checkpoint}-hf", *options).splitlines()[-1]
    assert text.splitlines()[-1] != generated(checkpoint, *options[:-1], "4").splitlines()[-1]


@pytest.mark.parametrize("degree", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_two_ranks_continue_a_text_as_one_and_one_of_them_prints(degree: str, run: Path) -> None:
    options = [str(run), "def main", "--max_new_tokens", "12", "--dtype", "float64"]
    alone, sharded = generated(*options), generated(*options, "--tensor_parallel_degree", degree, ranks=2)
    assert alone.splitlines()[-1] == sharded.splitlines()[-1] and sharded.count("def main") == 1


def test_generation_refuses_more_tokens_than_a_rotation_is_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    factors = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    lengths = dict(max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=None)
    config = transformers.Phi3Config(**sizes, **lengths, num_key_value_heads=4, rope_scaling=factors)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert generated(str(tmp_path), "", "--max_new_tokens", "15")
    code, output = generate(str(tmp_path), "", "--max_new_tokens", "16")
    assert code == 2 and "Traceback" not in output
    assert "--max_new_tokens 16: with the prompt at most 16 tokens: beyond, the frequencies of its rotation" in output
