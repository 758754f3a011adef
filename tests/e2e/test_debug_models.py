"""The debug models of every family learn, started as a user starts them."""

from pathlib import Path

import pytest
from runs import REPOSITORY, Command, records

from torchtitan_graph.models.spec import family_names, load_family

DEBUG_MODELS = [
    (name, flavor) for name in family_names() for flavor in load_family(name).FLAVORS if flavor.startswith("debugmodel")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flavor"), DEBUG_MODELS)
def test_a_debug_model_learns(name: str, flavor: str, tmp_path: Path) -> None:
    code, output = Command(
        str(REPOSITORY / "run_train.sh"),
        *["--model.name", name, "--model.flavor", flavor, "--training.steps", "12", "--lr_scheduler.warmup_steps", "2"],
        *["--model.hf_assets_path", str(REPOSITORY / "tests" / "assets" / "tokenizer"), "--metrics.log_freq", "1"],
        *["--training.local_batch_size", "2", "--training.seq_len", "64"],
        *["--checkpoint.no-enable", "--validation.no-enable"],
        cwd=tmp_path,
        NGPU="1",
    ).finish()
    assert code == 0, output
    losses = [record["loss"] for record in records(tmp_path / "outputs" / f"{name}_debug")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5, losses
