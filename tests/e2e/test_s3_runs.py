"""Runs whose checkpoints are copied to a real S3 server, which fails as planned."""

import itertools
import json
import shutil
import zlib
from pathlib import Path
from random import Random

import patched_train
import pytest
from runs import EAGER, numbers, train

from s3 import Store, at_first


def options(folder: Path, store: Store) -> list[str]:
    return ["--job.dump_folder", str(folder), "--checkpoint.remote_folder", f"{store.address}/run", *EAGER]


def whole_checkpoints(store: Store) -> dict[str, dict[str, int]]:
    """Return the checksums of the tensors' files of each checkpoint there; every one must be whole."""
    found: dict[str, dict[str, bytes]] = {}
    for key in store.list_keys():
        if key.count("/") == 2:
            _, step, name = key.split("/")
            found.setdefault(step, {})[name] = store.get(key)
    for files in found.values():
        listed = json.loads(files["manifest.json"])["crc32"]
        assert listed == {name: f"{zlib.crc32(x):08x}" for name, x in files.items() if name != "manifest.json"}
    return {
        step: {name: zlib.crc32(x) for name, x in files.items() if name.endswith(".distcp")}
        for step, files in found.items()
    }


@pytest.mark.parametrize("when", [pytest.param("at start", marks=pytest.mark.slow), "amid the last copy"])
def test_an_address_that_stays_away_ends_a_run_with_a_code_that_launchers_try_again(
    when: str, store: Store, tmp_path: Path
) -> None:
    run = [*options(tmp_path / "run", store), "--training.steps", "1"]

    def is_away() -> bool:
        return when == "at start" or any("step-1/" in request.path for request in store.requests)

    store.plan = ("500" if is_away() else "pass" for _ in itertools.count())
    code, output = train(*run, patch=patched_train.have_no_patience, **store.env())
    assert code == 6, output
    assert "storage is unavailable; start the run again once it is back" in output and "Traceback" not in output
    assert (tmp_path / "run" / "checkpoint" / "step-1").exists() == (when != "at start")
    store.plan = at_first([])
    code, output = train(*run, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    assert list(whole_checkpoints(store)) == ["step-1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_through_faults_has_the_numbers_of_one_without(seed: int, store: Store, tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    code, output = train(*options(calm, store), ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    expected = whole_checkpoints(store)
    store.reset()
    random, faults = Random(seed), ["pass", "pass", "503", "500", "429", "reset", "half", "lost"]
    store.plan = (random.choice(faults) for _ in itertools.count())
    run = options(stormy, store)
    code, output = train(*run, "--training.steps", "3", ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    before = numbers(stormy)
    shutil.rmtree(stormy)
    code, output = train(*run, ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    assert before | numbers(stormy) == numbers(calm)
    found = whole_checkpoints(store)
    assert found.keys() == {"step-2", "step-3", "step-4", "step-5"}
    assert {step: found[step] for step in expected} == expected
