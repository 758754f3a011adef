"""A rank that dies is never taken for a mistake of the user's."""

import json
from pathlib import Path

import patched_train
import pytest
from runs import EAGER, REPOSITORY, start

TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    """A tiny model of the library transformers, as it is published."""
    folder = tmp_path / "hf"
    folder.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_rank_that_dies_in_the_forward_of_a_wrapped_model(wrapped: Path, tmp_path: Path) -> None:
    options = ["--model.name", "transformers", "--model.hf_assets_path", str(wrapped), "--model.flavor", ""]
    options += ["--job.dump_folder", str(tmp_path / "run"), *EAGER]
    run = start(*options, ranks=2, patch=patched_train.lose_rank_1_in_a_forward)
    for process in run.processes:
        process.join(60)
    assert [process.exitcode for process in run.processes] == [1, -9], run.output()
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "run" / "failures").glob("*.json"))
    assert record["code"] == 1 and record["lost_peer"], record
    assert "UserError" not in record["traceback"]
