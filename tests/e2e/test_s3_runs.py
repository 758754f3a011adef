"""Runs whose checkpoints are copied to a real S3 server, which fails as planned."""

import gzip
import itertools
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import patched_train
import pytest
from runs import EAGER, numbers, records, saved, train

from s3 import Store, at_first


def options(folder: Path, store: Store) -> list[str]:
    return ["--job.dump_folder", str(folder), "--checkpoint.remote_folder", f"{store.address}/run", *EAGER]


def whole_checkpoints(store: Store) -> dict[str, dict[str, int]]:
    """Return the checksums of the tensors' files of each checkpoint there; every one must be whole."""
    found: dict[str, dict[str, bytes]] = {}
    for key in store.list_keys():
        if key.startswith("run/step-"):
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


def validation_losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["validation_loss"] for record in records(folder) if "validation_loss" in record}


def fill(store: Store) -> list[str]:
    """Write two corpora to train on and one to validate on; return the options that name them."""
    random = Random(0)
    texts = [" ".join(random.choices(["one", "two", "three", "four"], k=random.randint(5, 60))) for _ in range(300)]
    lines = [json.dumps({"text": text}).encode() for text in texts]
    store.put("corpus/lines.jsonl.gz", gzip.compress(b"\n".join(lines), mtime=0))
    store.put("held_out/lines.jsonl", b"\n".join(lines[:20]))
    for number, text in enumerate(texts[:20]):
        store.put(f"folder/{number % 3}/{number}.txt", text.encode())
    paths = [f"{store.address}/corpus", f"{store.address}/folder/*/*.txt"]
    sources = ", ".join(f'{{name="{number}", dataset_path="{path}", weight=1}}' for number, path in enumerate(paths))
    return [
        *["--training.sources", f"[{sources}]", "--checkpoint.keep_latest_k", "2", "--validation.enable"],
        *["--validation.freq", "2", "--validation.dataset_path", f"{store.address}/held_out"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_data_and_checkpoints_in_a_bucket_that_fails_and_vanishes(seed: int, store: Store, tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    run = [*fill(store), "--training.cache_folder"]
    code, output = train(
        *options(calm, store), *run, str(tmp_path / "a"), ranks=2, patch=patched_train.find_s3, **store.env()
    )
    assert code == 0, output
    expected = whole_checkpoints(store)
    store.reset()
    fill(store)

    def storms() -> Iterator[str]:
        random = Random(seed)
        while True:
            if random.random() < 0.9:
                yield "pass"
                continue
            has_begun = any("step-" in request.path and request.method == "PUT" for request in store.requests)
            faults = ["503", "500", "429", "reset", "stall", "half", "lost", *["404"] * has_begun]
            yield from [random.choice(faults)] * random.choice([1, 1, 2, 6])

    store.plan = storms()
    run = [*options(stormy, store), *run, str(tmp_path / "b")]
    code, output = train(*run, "--training.steps", "3", ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    (stormy / "metrics.jsonl").rename(tmp_path / "before")
    code, output = train(*run, ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    (tmp_path / "before").rename(tmp_path / "metrics.jsonl")
    assert numbers(tmp_path) | numbers(stormy) == numbers(calm)
    losses = validation_losses(stormy)
    assert losses.items() <= validation_losses(calm).items() and 4 in losses
    assert saved(stormy, 5) == saved(calm, 5)
    assert whole_checkpoints(store)["step-5"] == expected["step-5"]
    store.plan = at_first([])


@pytest.mark.slow
def test_a_bucket_that_is_gone_for_good_ends_a_run_that_goes_on_once_it_is_back(store: Store, tmp_path: Path) -> None:
    run = [*options(tmp_path / "run", store), *fill(store), "--training.cache_folder", str(tmp_path / "cache")]
    code, output = train(*run, ranks=2, patch=patched_train.have_no_patience, **store.env())
    assert code == 0, output
    calm = numbers(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    store.reset()
    fill(store)
    store.plan = ("404" if any("step-4/" in x.path for x in store.requests) else "pass" for _ in itertools.count())
    for _ in range(2):  # as a launcher would
        code, output = train(*run, ranks=2, patch=patched_train.have_no_patience, **store.env())
        assert code == 6, output
        assert "storage is unavailable; start the run again once it is back" in output and "Traceback" not in output
    store.plan = at_first([])
    code, output = train(*run, ranks=2, patch=patched_train.find_s3, **store.env())
    assert code == 0, output
    assert numbers(tmp_path / "run") == calm and "step-5" in whole_checkpoints(store)
