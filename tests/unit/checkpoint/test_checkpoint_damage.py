"""Whatever happens to the files of a checkpoint: an older one is taken, or one clear error says why none can be."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer, SaveError, load_model
from torchtitan_graph.checkpoint.checkpointer import tensors_of
from torchtitan_graph.checkpoint.folder import MANIFEST, TRAIN_STATE, find_damage, find_problem, read_manifest
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer

DATA = "__0_0.distcp"
FILES = (DATA, ".metadata", MANIFEST, TRAIN_STATE)


def checkpointer_of(folder: Path, size: int = 2, **options: Any) -> Checkpointer:
    model = nn.Linear(size, size)
    optimizer = build_optimizer(model, job.Optimizer())
    config = job.Checkpoint(enable=True, last_save_model_only=False, **options)
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, config, model, optimizer, scheduler)


def fill(of: Checkpointer, value: float) -> Checkpointer:
    with torch.no_grad():
        for tensor in tensors_of(of.model, of.optimizer).values():
            tensor.fill_(value)
    return of


def load(folder: Path, **options: Any) -> int | None:
    """Load, check that all that was loaded is of one step, and return the step; None where nothing was loaded."""
    run = fill(checkpointer_of(folder, **options), -1.0)
    state = run.load()
    step = -1 if state is None else state["step"]
    for tensor in tensors_of(run.model, run.optimizer).values():
        assert torch.equal(tensor, torch.full_like(tensor, step))
    return None if state is None else step


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1, 2 and 3, whose every number is the step."""
    folder = tmp_path_factory.mktemp("three")
    for step in (1, 2, 3):
        fill(checkpointer_of(folder), step).save(step, {"step": step})
    return folder


@pytest.fixture
def run(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "run"))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def delete(file: Path, where: float) -> None:
    file.unlink()


def truncate(file: Path, where: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(where * len(content))])


def flip(file: Path, where: float) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    bit = int(where * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def rename(file: Path, where: float) -> None:
    file.rename(file.with_name(f"{file.name}.bak"))


def append(file: Path, where: float) -> None:
    with file.open("ab") as stream:
        stream.write(b"x")


def replace_by_folder(file: Path, where: float) -> None:
    file.unlink()
    file.mkdir()


ATTACKS = (delete, truncate, flip, rename, append, replace_by_folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_older_checkpoint_is_taken_in_the_place_of_a_damaged_one(
    attack: Callable[[Path, float], None], name: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger.propagate = True
    attack(run / "step-3" / name, 0.5)
    good = digests(run / "step-1") | digests(run / "step-2")
    try:
        assert load(run) == 2
    finally:
        logger.propagate = False
    assert "skipping checkpoint" in caplog.text and "step-3" in caplog.text
    assert digests(run / "step-1") | digests(run / "step-2") == good


def test_without_the_checksums_a_flipped_bit_would_be_loaded(run: Path) -> None:
    """Negative control: neither the archive, whose own checksum is forged with it, nor the numbers are refused."""
    manifest = run / "step-3" / MANIFEST
    content = json.loads(manifest.read_text())
    del content["crc32"]
    manifest.write_text(json.dumps(content))
    data = (run / "step-3" / DATA).read_bytes()
    numbers = torch.full((2, 2), 3.0).numpy().tobytes()
    flipped = bytes([numbers[0] ^ 1]) + numbers[1:]
    (run / "step-3" / DATA).write_bytes(data.replace(numbers, flipped))
    with pytest.raises(UserError, match="Bad CRC-32"):
        load(run)
    checksums = [struct.pack("<I", zlib.crc32(content)) for content in (numbers, flipped)]
    (run / "step-3" / DATA).write_bytes(data.replace(numbers, flipped).replace(*checksums))
    with pytest.raises(AssertionError):
        load(run)


def test_when_all_are_damaged_nothing_begins_anew_in_their_place(run: Path) -> None:
    flip(run / "step-1" / DATA, 0.5)
    delete(run / "step-2" / DATA, 0)
    truncate(run / "step-3" / DATA, 0.5)
    before = digests(run)
    with pytest.raises(UserError) as caught:
        load(run)
    message = str(caught.value)
    assert "job.dump_folder: " in message and "another job.dump_folder" in message
    for line in (f"step-1: its file {DATA} is damaged", f"step-2: its file {DATA} is missing", "step-3: its file"):
        assert line in message
    assert digests(run) == before


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(run: Path, tmp_path: Path) -> None:
    flip(run / "step-2" / DATA, 0.5)
    with pytest.raises(UserError, match=r"checkpoint.load_step = 2: that checkpoint is not whole: .* is damaged"):
        load(run, load_step=2)
    path = run / "step-2"
    with pytest.raises(UserError, match=r"checkpoint.initial_load_path = .* is not a checkpoint: .* is damaged"):
        load(tmp_path / "new", initial_load_path=str(path))
    with pytest.raises(UserError, match=r"is not a checkpoint: .* is damaged"):
        load_model(path, nn.Linear(2, 2))


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_the_newest(run: Path) -> None:
    (run / "step-1").rename(run / "step-9")
    assert load(run) == 3


def test_a_manifest_of_an_older_release_without_checksums_is_enough(run: Path) -> None:
    manifest = run / "step-3" / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"files": content["files"]}))
    assert load(run) == 3


def test_another_models_checkpoints_are_left_alone(run: Path) -> None:
    before = digests(run)
    with pytest.raises(UserError, match="of another model"):
        checkpointer_of(run, size=3).load()
    assert digests(run) == before


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    attacks=st.lists(
        st.tuples(
            st.sampled_from(["step-1", "step-2", "step-3"]),
            st.sampled_from(FILES),
            st.sampled_from(ATTACKS),
            st.floats(0, 1, exclude_max=True),
        ),
        max_size=5,
    ),
    leftovers=st.lists(st.sampled_from(["step-3.tmp", "step-4.tmp", "step-2.deleting", "step-7", "other"]), max_size=3),
)
def test_fuzz(three: Path, tmp_path_factory: pytest.TempPathFactory, attacks: list[Any], leftovers: list[str]) -> None:
    folder = Path(shutil.copytree(three, tmp_path_factory.mktemp("fuzz") / "run"))
    for leftover in leftovers:
        shutil.copytree(three / "step-2", folder / leftover, dirs_exist_ok=True)
        (folder / leftover / MANIFEST).unlink()
    for step, name, attack, where in attacks:
        if (folder / step / name).is_file() and (folder / step / name).stat().st_size:
            attack(folder / step / name, where)
    steps = {step: folder / f"step-{step}" for step in (1, 2, 3)}
    good = [step for step, path in steps.items() if not find_problem(path) and not find_damage(path)]
    untouched = [s for s in (1, 2, 3) if digests(steps[s]) == digests(three / f"step-{s}")]
    assert set(untouched) <= set(good)
    try:
        assert load(folder) == max(good)
    except UserError as error:
        assert not good and "holds no checkpoint that is whole" in str(error)
    for step in untouched:
        assert digests(steps[step]) == digests(three / f"step-{step}")
    shutil.rmtree(folder)


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


FULL = r"could not be saved \(the disk at .*/checkpoint is full, or .* 0\.0 MiB of 0\.2 are free\).*Make room"


def test_a_disk_that_is_full_amid_a_tensor_is_named(small_disk: Path) -> None:
    """torch's own words are that it is at an unexpected position."""
    folder = small_disk / "checkpoint"
    with pytest.raises(SaveError, match=FULL) as caught:
        fill(checkpointer_of(folder, size=400), 1.0).save(1, {"step": 1})
    assert "unexpected" not in str(caught.value) and not list(folder.iterdir())


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_leaves_what_was_there_and_room_lets_it_go_on(mode: str, small_disk: Path) -> None:
    folder = small_disk / "checkpoint"
    run = fill(checkpointer_of(folder, size=60, async_mode=mode), 1.0)  # 43 KiB each
    with pytest.raises(SaveError, match=FULL) as caught:
        for step in range(1, 9):
            run.save(step, {"step": 1})
            run.wait()
    failed = int(str(caught.value).split("step-")[1].split()[0])
    assert failed > 2
    assert not list(folder.glob("*.tmp")), "a restart has no room for it"
    shutil.rmtree(folder / "step-1")
    again = checkpointer_of(folder, size=60, keep_latest_k=2)
    assert again.load() == {"step": 1}
    again.save(failed, {"step": 1})
    assert {path.name for path in folder.iterdir()} == {f"step-{failed - 1}", f"step-{failed}"}


def test_a_folder_that_can_not_be_written_to_is_refused_at_the_start(small_disk: Path) -> None:
    fill(checkpointer_of(small_disk / "run"), 1.0).save(1, {"step": 1})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=r"job.dump_folder: .*run can't be written to"):
        load(small_disk / "run")
    assert load(small_disk / "run", load_only=True) == 1
    with pytest.raises(UserError, match=r"job.dump_folder: .*Read-only file system"):
        load(small_disk / "new")


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"job.dump_folder: .*run is there, and is not a folder: move it"):
        load(tmp_path / "run")


# Several ranks


def load_on_ranks(folder: Path) -> str:
    """Go on to step 2, and return what was loaded before, or why nothing could be."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(8, 8, bias=False)
    fully_shard(model)
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    run = Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, scheduler)
    try:
        state = run.load()
    except UserError as error:
        return str(error)
    step = state["step"] if state else 0
    loaded = set(model.weight.to_local().flatten().tolist()) if step else None
    for next_step in range(step + 1, 3):
        fill(run, next_step)
        run.save(next_step, {"step": next_step})
    return f"step {step}, {loaded}"


def test_ranks_look_for_damage_together_and_agree(tmp_path: Path) -> None:
    assert run_on(2, load_on_ranks, tmp_path) == ["step 0, None"] * 2
    assert run_on(2, load_on_ranks, tmp_path) == ["step 2, {2.0}"] * 2
    flip(tmp_path / "step-2" / "__1_0.distcp", 0.5)
    shutil.copytree(tmp_path, tmp_path.with_name("both"))
    assert run_on(2, load_on_ranks, tmp_path) == ["step 1, {1.0}"] * 2
    delete(tmp_path.with_name("both") / "step-1" / "__0_0.distcp", 0)
    first, second = run_on(2, load_on_ranks, tmp_path.with_name("both"))
    assert first == second and "holds no checkpoint that is whole" in first


# Files made to harm


def write_manifest_for(path: Path) -> None:
    """Let the manifest hold again, as one who means harm would."""
    from torchtitan_graph.checkpoint.folder import write_manifest

    (path / MANIFEST).unlink()
    write_manifest(path, {})


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_payload_in_a_checkpoint_of_the_run_is_refused_and_not_run(run: Path, tmp_path: Path) -> None:
    (run / "step-3" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    sizes = {name: file.size for name, file in read_manifest(run / "step-3").items()}
    sizes[".metadata"] = (run / "step-3" / ".metadata").stat().st_size
    (run / "step-3" / MANIFEST).write_text(json.dumps({"files": sizes}))
    with pytest.raises(UserError, match=r"step-3 can't be read .*nothing was run"):
        load(run)
    assert not (tmp_path / "mark").exists()


WHOLE = {"step": 3, "tokens_seen": 8, "data": {"rows": 1, "lanes": [[0, 0, 0, 0]]}, "rng": "00ff"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": "3"}, "step: Expected `int`, got `str`"),
        ({"step": True}, "step: Expected `int`, got `bool`"),
        ({"step": -3}, "step: Expected `int` >= 0"),
        ({"model_only": 1}, "model_only: Expected `bool`, got `int`"),
        ({"train_state": []}, "train_state: Expected `object`, got `array`"),
        ({"train_state": "__import__('os').mkdir('mark')"}, "train_state: Expected `object`, got `str`"),
        ({"train_state": WHOLE | {"tokens_seen": None}}, "train_state.tokens_seen: Expected `int`, got `null`"),
        ({"train_state": WHOLE | {"tokens_seen": 2**70}}, "tokens_seen: "),
        ({"train_state": WHOLE | {"data": {"rows": 1, "corpus": "x"}}}, "data: .*missing required field `lanes`"),
        ({"train_state": WHOLE | {"data": {"rows": 1, "lanes": [[0, 0, 0]]}}}, "lanes.*Expected `array` of length 4"),
        ({"train_state": WHOLE | {"rng": "0g"}}, "train_state.rng: Expected `str` matching regex"),
        ({"train_state": {"step": 3, "rng": "00"}}, "lacks data, tokens_seen"),
        ({"lr_scheduler": None}, "lr_scheduler: Expected `object`, got `null`"),
        ({"lr_scheduler": {}}, "lacks num_steps_done"),
        ({"lr_scheduler": {"num_steps_done": "x"}}, "num_steps_done: Expected `int`, got `str`"),
    ],
    ids=str,
)
def test_odd_values_in_the_train_state_are_refused(change: dict[str, Any], said: str, run: Path) -> None:
    file = run / "step-3" / TRAIN_STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    write_manifest_for(run / "step-3")
    assert load(run) == 2
    with pytest.raises(UserError, match=f"step = 3: .*its {TRAIN_STATE}.*{said}"):
        load(run, load_step=3)


DIGITS = '{"step": ' + "1" * 5000 + "}"


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", "[" * 100_000, '{"step": ', "\x00", '{"step": 1e999}', DIGITS, '{"a":' + "[" * 200]
)
@pytest.mark.parametrize("name", [TRAIN_STATE, MANIFEST])
def test_a_train_state_or_a_manifest_that_is_no_such_thing_is_refused(content: str, name: str, run: Path) -> None:
    (run / "step-3" / name).write_text(content)
    if name == TRAIN_STATE:
        write_manifest_for(run / "step-3")
    assert load(run) == 2


def make_fifo(file: Path) -> None:
    os.mkfifo(file)


def make_link_to_a_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def make_giant(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2**42)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [make_fifo, make_link_to_a_device, make_giant], ids=lambda make: make.__name__)
def test_what_is_no_such_file_is_neither_waited_for_nor_read(
    make: Callable[[Path], None], name: str, run: Path, tmp_path: Path
) -> None:
    file = run / "step-3" / name
    file.unlink()
    make(file)
    assert load(run) == 2
    with pytest.raises(UserError, match="step = 3: that checkpoint is not whole: "):
        load(run, load_step=3)
    with pytest.raises(UserError, match="is not a checkpoint"):
        load(tmp_path / "new", initial_load_path=str(run / "step-3"))


@pytest.mark.parametrize("name", ["../step-2/__0_0.distcp", "/etc/hostname", "a/b", "x" * 300, "é" * 200, "a\0b"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, run: Path) -> None:
    file = run / "step-3" / MANIFEST
    content = json.loads(file.read_text())
    content["files"][name] = 1
    file.write_text(json.dumps(content))
    problem = find_problem(run / "step-3")
    assert problem == f"its {MANIFEST} says 1 of {name[:100]!r}, which is not a file of this folder"
    assert load(run) == 2


@pytest.mark.parametrize("what", ["another key", "a checksum less", "a checksum more"])
def test_a_manifest_that_lost_a_checksum_is_damaged(what: str, run: Path) -> None:
    file = run / "step-3" / MANIFEST
    content = json.loads(file.read_text())
    if what == "another key":
        content["crc33"] = content.pop("crc32")
    elif what == "a checksum less":
        del content["crc32"][DATA]
    else:
        content["crc32"]["more"] = "00000000"
    file.write_text(json.dumps(content))
    assert find_problem(run / "step-3") == f"its {MANIFEST} is damaged: it has not a checksum of each of its files"
    assert load(run) == 2


def test_a_manifest_with_half_a_character_is_refused(run: Path) -> None:
    file = run / "step-3" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text())).replace('"crc32"', '"\\udc80"'))
    assert (
        find_problem(run / "step-3")
        == f"its {MANIFEST}: is not JSON: \\udc80 is half of a surrogate pair, and no character"
    )
    assert load(run) == 2


@pytest.mark.parametrize("suffix", [".tmp", ".deleting"])
def test_what_a_link_in_the_folder_leads_to_is_not_deleted(suffix: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    link = run / f"step-9{suffix}"
    link.symlink_to(tmp_path / "precious")
    assert load(run) == 3
    assert not link.is_symlink()
    assert (tmp_path / "precious" / "file").exists()


def _lead_nowhere(path: Path) -> None:
    path.symlink_to(path.parent.parent / "gone")


def _lead_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("other", [Path.touch, Path.mkdir, _lead_nowhere, _lead_to_itself])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_has_a_checkpoints_name_and_is_none_makes_place(
    is_killed: bool, other: Callable[[Path], None], run: Path
) -> None:
    """For a save, and for one that was killed when it was all but done."""
    if is_killed:
        (run / "step-3").rename(run / "step-3.tmp")
    else:
        shutil.rmtree(run / "step-3")
    other(run / "step-3")
    if not is_killed:
        assert load(run) == 2
        fill(checkpointer_of(run), 3.0).save(3, {"step": 3})
    assert load(run) == 3
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-2", "step-3"]
