"""What a run begins with: fine-tuning has its data named, and weights to begin from."""

import pytest

from torchtitan_graph.config import check, check_beginning, load
from torchtitan_graph.errors import UserError

LORA, FREEZE = "--model.lora.rank 4", "--model.freeze norm"
DPO = "--training.format preference --training.step torchtitan_graph.goals.dpo"
LOADED = "--checkpoint.initial_load_in_hf --model.hf_assets_path model"


def problems(words: str, is_new: bool = True) -> list[str]:
    try:
        check_beginning(load(words.split()), is_new)
    except UserError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize(
    "words",
    [
        LOADED,
        "--checkpoint.initial_load_path run/checkpoint/step-10",
        f"{LORA} --model.random_base",
        f"{FREEZE} --model.random_base",
        f"{DPO} --model.random_base",
        "--reference.path teacher --training.step my.step",
    ],
)
def test_data_must_be_named_where_weights_matter(words: str) -> None:
    (said,) = problems(words)
    assert "no training data is named" in said and "set training.dataset_path" in said
    assert problems(words, is_new=False) == [said], "a resumed run learns from it too"
    for named in ("dataset stdlib", "dataset_path data.jsonl", "sources [{dataset='stdlib'}]"):
        assert problems(f"{words} --training.{named}") == []


def test_a_file_names_the_data_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.toml"
    file.write_text('[training]\ndataset = "stdlib"\n')
    assert problems(f"--job.config_file {file} {LOADED}") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LORA, "model.lora.rank = 4: adapters would be trained next to random weights"),
        (FREEZE, "model.freeze = ['norm']: random weights would be frozen"),
        (DPO, "training.format = 'preference': random weights would be trained on preferences"),
        (f"{LORA} --checkpoint.initial_load_adapter a", "adapters would be trained next to random weights"),
        (
            f"{LORA} --model.hf_assets_path model",
            "initial_load_in_hf = true loads those in model.hf_assets_path = 'model'",
        ),
        (f"{DPO} --reference.path model", "random weights would be trained on preferences"),
    ],
)
def test_random_weights_must_be_asked_for(words: str, said: str) -> None:
    words += " --training.dataset_path data.jsonl"
    (problem,) = problems(words)
    assert said in problem and "model.random_base = true asks for random ones" in problem
    assert problems(words, is_new=False) == [], "the weights are those of the run's checkpoint"
    for other in ("--model.random_base", LOADED, "--checkpoint.initial_load_path step-1"):
        assert problems(f"{words} {other}") == []


def test_a_run_from_scratch_needs_neither() -> None:
    assert problems("") == problems("--training.step torchtitan_graph.goals.distillation") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [("", "nothing needs trained weights"), (f"{LORA} {LOADED}", "random_base = true: weights are loaded; remove it")],
)
def test_a_needless_random_base_is_said(words: str, said: str) -> None:
    (notice,) = check(load(f"--model.random_base {words}".split()), 1)
    assert said in notice
