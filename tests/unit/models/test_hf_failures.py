"""A folder in Hugging Face's format that rank 0 can't write is an error on every rank, not a wait."""

import resource
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from pool import run_on
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import save_weights


def save(folder: Path, largest_file: int) -> str:
    """Save, where rank 0 can't write files larger than that; return what this rank raised."""
    model = llama3.Model(llama3.FLAVORS["debugmodel"], "sdpa")
    fully_shard(model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        save_weights(model, llama3, folder, file_bytes=2**20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


@pytest.mark.parametrize("largest_file", [100, 10_000], ids=["weights", "no file at all"])
def test_no_room_is_told_to_all_ranks(largest_file: int, tmp_path: Path) -> None:
    first, second = run_on(2, save, tmp_path / "hf", largest_file, timeout=60)
    assert first == second
    assert "File too large" in first or "Safetensor" in first
    assert not (tmp_path / "hf").exists()


def test_what_is_there_already_is_told_to_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    message = f"UserError: {tmp_path / 'hf'} is there already: name a new folder"
    assert run_on(2, save, tmp_path / "hf", 2**30, timeout=60) == [message] * 2
    assert run_on(2, save, tmp_path / "other", 2**30, timeout=60) == ["saved"] * 2
