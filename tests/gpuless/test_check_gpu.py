"""scripts/check_gpu.py on the null GPU: every part runs, and what fails, takes too long or differs is told.

Each test runs the script in a process that has not asked for the GPU, as the script forks it: this file, with the name
of one of its functions that change the script first.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_gpu
from check_gpu import Part, Row

SMALL = "--model.name {} --model.flavor {} --training.seq_len 128 --training.local_batch_size 1"


def check(folder: Path, change: str, minutes: float = 30) -> tuple[int, list[Row]]:
    """Run the script after a change; give its exit code and its rows."""
    options = ["--minutes", str(minutes), "--json", str(folder / "found.json"), "--folder", str(folder / "parts")]
    done = subprocess.run([sys.executable, __file__, change, *options], capture_output=True, text=True)
    assert (folder / "found.json").exists(), done.stdout + done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["device"] == "NVIDIA H100 80GB HBM3" and found["torch"] == torch.__version__
    assert str(folder) not in json.dumps(found)
    for row in found["rows"]:
        print(f"note: {row}", flush=True)
    return done.returncode, found["rows"]


def take_small_models() -> None:
    """Take two families' bits, as test_kernels.py has all, and time tiny models. What is trained there has the caching
    allocator, whose pools CUDA graphs take; without it memory is 0 when it is given out, and so bits are equal."""
    check_gpu.FLAVORS = [("llama3", "debugmodel"), ("qwen3", "debugmodel_moe")]
    names = {"llama3 1B": ("llama3", "debugmodel"), "qwen3": ("qwen3", "debugmodel_moe")}
    check_gpu.MODELS = {name: SMALL.format(*model) for name, model in names.items()}
    training = check_gpu.training

    @contextlib.contextmanager
    def with_caching(options: Sequence[str], *args: Any, **kwargs: Any) -> Iterator[Any]:
        os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
        with training(options, *args, **kwargs) as given:
            assert torch.are_deterministic_algorithms_enabled() == ("--debug.deterministic" in options)
            yield given

    check_gpu.training = with_caching


def test_every_part_runs(tmp_path: Path) -> None:
    code, rows = check(tmp_path, "take_small_models")
    assert code == 0 and not [
        row for row in rows if row["result"] not in (check_gpu.EQUAL, check_gpu.AGREES, check_gpu.MEASURED)
    ]
    assert [len([row for row in rows if row["part"] == part]) for part in ("bits", "numbers")] == [2 * (2 + 1 + 2), 8]
    speeds = {(row["model"], row["mode"]): row for row in rows if row["part"] == "speed"}
    assert len(speeds) == len(check_gpu.MODES) + len(check_gpu.MODES_OF_OTHERS)
    assert all(("planned_ms" in row) == ("eager" not in mode) for (_, mode), row in speeds.items())
    assert all(row["step_ms"] > 0 and row["peak_gib"] > 0 for row in speeds.values())
    assert (tmp_path / "parts" / "trace.json").stat().st_size > 0


def fails() -> Iterator[Row]:
    yield {"result": check_gpu.MEASURED}
    raise RuntimeError("the first line\nand another")


def dies() -> Iterator[Row]:
    os.kill(os.getpid(), 9)
    yield {}


def is_well() -> Iterator[Row]:
    yield {"result": check_gpu.EQUAL}


def takes_long() -> Iterator[Row]:
    time.sleep(600)
    yield {}


def take_parts_that_fail() -> None:
    makes = (fails, dies, is_well, takes_long, is_well)
    check_gpu.all_parts = lambda _: [Part("bits", "", make.__name__, make, (), 1, True) for make in makes]


def test_what_fails_or_has_no_time_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, rows = check(tmp_path, "take_parts_that_fail", minutes=0.2)
    assert [row["result"] for row in rows] == ["measured", "FAILED", "FAILED", "equal", "not run", "not run"]
    assert rows[1]["note"] == "RuntimeError: the first line" and "ended with -9" in rows[2]["note"]
    assert {row["mode"] for row in rows if "cut off" in row.get("note", "")} == {"takes_long"}
    assert code == 3


def put_a_fault_into_graphs() -> None:
    """Nothing is computed on the null GPU: the fault is a parameter that is copied there."""
    build = check_gpu.matrix.build_graph

    def with_fault(*args: Any) -> Any:
        steps = build(*args)
        weight = next(steps.model.parameters())
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        with torch.no_grad():
            local.copy_(torch.ones(local.shape))
        return steps

    check_gpu.matrix.build_graph = with_fault
    part = Part("bits", "llama3", "sdpa", check_gpu.compare_bits, ("llama3", "debugmodel", "sdpa"), 1, False)
    check_gpu.all_parts = lambda _: [part]


def test_bits_that_differ_are_told(tmp_path: Path) -> None:
    code, rows = check(tmp_path, "put_a_fault_into_graphs")
    assert code == 1 and {row["result"] for row in rows} == {check_gpu.DIFFERS}
    assert all("differ, first" in row["note"] for row in rows)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(check_gpu.main(sys.argv[2:]))
