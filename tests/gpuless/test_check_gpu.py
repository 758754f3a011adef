"""scripts/check_gpu.py on the null GPU: every part runs, and what fails, takes too long or differs is told."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_gpu
from check_gpu import Part, Row

SMALL = "--model.name {} --model.flavor {} --training.seq_len 128 --training.local_batch_size 1"


def check(folder: Path, parts: list[Part] | None = None, minutes: float = 30) -> tuple[int, list[Row]]:
    """Run the script; give its exit code and its rows."""
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            patch.setattr(check_gpu, "all_parts", lambda _: parts)
        arguments = ["--minutes", str(minutes), "--json", str(folder / "found.json"), "--folder", str(folder / "parts")]
        code = check_gpu.main(arguments)
    found = json.loads((folder / "found.json").read_text())
    assert found["device"] == "NVIDIA H100 80GB HBM3" and found["torch"] == torch.__version__
    assert str(folder) not in json.dumps(found)
    return code, found["rows"]


def test_every_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two families, and with tiny models: all of them take as long as they are tested in test_kernels.py."""
    monkeypatch.setattr(check_gpu, "FLAVORS", [("llama3", "debugmodel"), ("qwen3", "debugmodel_moe")])
    monkeypatch.setattr(check_gpu, "training", with_caching(check_gpu.training))
    models = {"llama3 1B": SMALL.format("llama3", "debugmodel"), "qwen3": SMALL.format("qwen3", "debugmodel_moe")}
    monkeypatch.setattr(check_gpu, "MODELS", models)
    code, rows = check(tmp_path)
    for row in rows:
        null_gpu.tell(str(row))
    assert code == 0 and not [row for row in rows if row["result"] not in (check_gpu.EQUAL, check_gpu.MEASURED)]
    assert len([row for row in rows if row["part"] == "bits"]) == 2 * 2 * 2
    speeds = {(row["model"], row["mode"]): row for row in rows if row["part"] == "speed"}
    assert len(speeds) == 2 * len(check_gpu.MODES) - 1
    assert all(("planned_ms" in row) == ("eager" not in mode) for (_, mode), row in speeds.items())
    assert all(row["mfu"] > 0 and row["peak_gib"] > 0 for row in speeds.values())
    assert (tmp_path / "parts" / "trace.json").stat().st_size > 0


def with_caching(training: Callable[..., Any]) -> Callable[..., Any]:
    """Let the process of a part that trains have the caching allocator, whose pools CUDA graphs take. Without it
    memory is 0 when it is given out, and so bits are equal."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
        return training(*args, **kwargs)

    return changed


def fails() -> Iterator[Row]:
    yield {"result": check_gpu.MEASURED}
    raise RuntimeError("the first line\nand another")


def dies() -> Iterator[Row]:
    os.kill(os.getpid(), 9)
    yield {}


def takes_long() -> Iterator[Row]:
    time.sleep(600)
    yield {}


def is_well() -> Iterator[Row]:
    yield {"result": check_gpu.EQUAL}


def test_what_fails_or_has_no_time_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    makes = (fails, dies, is_well, takes_long, is_well)
    parts = [Part("bits", "", make.__name__, make, (), 1, True) for make in makes]
    code, rows = check(tmp_path, parts, minutes=0.2)
    assert [row["result"] for row in rows] == ["measured", "FAILED", "FAILED", "equal", "not run", "not run"]
    assert rows[1]["note"] == "RuntimeError: the first line" and "ended with -9" in rows[2]["note"]
    assert "cut off" in rows[4]["note"] or "cut off" in rows[5]["note"]
    assert code == 3


def test_bits_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed on the null GPU: the fault is a parameter that is copied there."""
    build = check_gpu.matrix.build_graph

    def with_fault(*args: object) -> object:
        steps = build(*args)  # type: ignore[arg-type]
        weight = next(steps.model.parameters())
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        with torch.no_grad():
            local.copy_(torch.ones(local.shape))
        return steps

    monkeypatch.setattr(check_gpu.matrix, "build_graph", with_fault)
    part = Part("bits", "llama3", "sdpa", check_gpu.compare_bits, ("llama3", "debugmodel", "sdpa"), 1, False)
    code, rows = check(tmp_path, [part])
    assert code == 1 and {row["result"] for row in rows} == {check_gpu.DIFFERS}
    assert all("differ, first" in row["note"] for row in rows)
