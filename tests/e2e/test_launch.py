"""Every way to start training works."""

import contextlib
import functools
import json
import os
import pty
import re
from pathlib import Path

import patched_train
import pytest
from runs import EAGER, REPOSITORY, TINY, Command, Result, numbers, records, saved_steps, train

OLD_FILE = REPOSITORY / "tests" / "unit" / "config" / "old_files" / "debug.toml"


def test_run_train_sh_from_another_folder(reference: tuple[Path, Result]) -> None:
    folder, (code, output) = reference
    assert code == 0, output
    assert list(numbers(folder)) == [1, 2, 3, 4, 5]
    allowed = 'allow_changed = ["training.dataset", "training.dtype"]'
    assert allowed in (folder / "config.toml").read_text(), "an option with a space in its value is passed on whole"


def test_log_rank_chooses_whose_output_is_shown(reference: tuple[Path, Result]) -> None:
    _, (_, output) = reference
    assert "[rank0]:" in output and "[rank1]:" in output  # the fixture sets LOG_RANK=0,1


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal_and_none_but_rank_0_there(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    options = ["--training.steps", "3", "--metrics.log_freq", "3", "--job.dump_folder", "./run"]
    command = Command(
        str(REPOSITORY / "run_train.sh"), *options, cwd=tmp_path, output=theirs, NGPU="2", CONFIG_FILE=TINY
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # that is how a terminal ends on Linux
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert command.process.wait() == 0, shown
    assert "\r\033[K━" in shown.decode()
    assert b"[rank0] " in shown and b"[rank1]" not in shown


def test_nothing_listens_beyond_loopback(watched_reference: tuple[Path, Result, set[str]]) -> None:
    _, _, addresses = watched_reference
    assert addresses == {"127.0.0.1"}


def test_console_command_with_one_process(tmp_path: Path) -> None:
    options = ["--job.config_file", TINY, "--training.steps", "1", "--checkpoint.no-enable"]
    code, output = Command("torchtitan_graph", *options, cwd=tmp_path).finish()
    assert code == 0, output
    assert list(numbers(tmp_path / "outputs")) == [1]


def test_old_file_trains(tmp_path: Path) -> None:
    code, output = train(
        *["--job.config_file", str(OLD_FILE), "--job.dump_folder", str(tmp_path), "--training.steps", "1"],
        *["--training.seq_len", "64", "--training.local_batch_size", "2"],
        patch=functools.partial(os.chdir, REPOSITORY),  # the file names ./tests/assets/tokenizer
    )
    assert code == 0, output
    assert "training.dataset = 'c4_test': changed: is now stdlib" in output
    assert list(numbers(tmp_path)) == [1]


@pytest.mark.slow
def test_dry_run_of_a_released_model_on_16_ranks_in_one_process(tmp_path: Path) -> None:
    """Of rows whose mask alone would take 4 GiB: nothing of that size is allocated."""
    code, output = Command(
        str(REPOSITORY / "run_train.sh"),
        *["--model.flavor", "1B", "--parallelism.tensor_parallel_degree", "8"],
        *["--model.hf_assets_path", "./nowhere"],
        *["--training.seq_len", "65536", "--training.local_batch_size", "1"],
        cwd=tmp_path,
        NGPU="16",
        COMM_MODE="fake_backend",
    ).finish()
    assert code == 0, output
    told = re.search(r"dry run of 16 ranks done in [\d.]+ s, peak memory of this process ([\d.]+) GiB", output)
    assert told and float(told[1]) < 2, output
    assert "./nowhere is not there" in output and "llama3 1B has its own vocabulary of 128256" in output
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


@pytest.mark.parametrize(("mode", "code"), [("default", 2), ("fake_backend", 0)])
def test_dry_run_needs_no_room_for_the_scores_of_flex_attention(mode: str, code: int, tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--comm.mode", mode, "--model.attn", "flex"]
    result = train(*options, patch=patched_train.have_a_kibibyte_of_memory)
    assert result.code == code, result.output


def test_one_process_computes_what_two_do(reference: tuple[Path, Result], tmp_path: Path) -> None:
    code, output = train("--job.dump_folder", str(tmp_path))
    assert code == 0, output
    (loss, *_), (other_loss, *_) = numbers(tmp_path)[1], numbers(reference[0])[1]
    assert loss == pytest.approx(other_loss, rel=1e-6)


def test_run_ends_where_the_data_ends(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(4):
        (corpus / f"{number}.txt").write_text(f"Document number {number}. " * 60)
    code, output = train(
        *["--job.dump_folder", str(tmp_path / "run"), "--training.steps", "1000", "--training.epochs", "1"],
        *EAGER,
        *["--training.dataset_path", str(corpus), "--validation.enable", "--validation.dataset_path", str(corpus)],
        *["--validation.freq", "1000", "--checkpoint.interval", "1000"],
    )
    assert code == 0, output
    last = records(tmp_path / "run")[-1]
    assert f" in {last['step']} steps of " in output
    assert 2 < last["step"] < 20
    assert last["validation_loss"] > 0
    assert saved_steps(tmp_path / "run") == [last["step"]]


@pytest.mark.slow
def test_a_crash_on_one_of_two_ranks_is_told_once_with_its_exit_code(tmp_path: Path) -> None:
    options = ["--optimizer.name", "my_optimizers.BreaksInStep3"]
    code, output = launch(*options, folder=tmp_path, ranks=2)
    assert code == 1, output
    _, _, told = output.partition("step 2/5")
    assert told.count("Traceback") == 1 and "ERROR   rank 1 failed:\nTraceback" in told, output
    assert 'my_optimizers.py", line' in told and "\nValueError: too many values to unpack\n" in told
    assert len(re.findall(r"ERROR   rank 0: .*(Connection closed by peer|ended by SIGTERM)", told)) == 1, output
    assert "ChildFailedError" not in output and "[rank0]:[rank0]" not in output


@pytest.mark.slow
def test_numbers_that_are_not_finite_stop_the_run_and_name_the_rank(tmp_path: Path) -> None:
    code, output = launch("--model.name", "my_models.infinite", folder=tmp_path, ranks=2)
    assert code == 3, output
    assert output.count("step 1: the loss is not finite on ranks [1]") == 1, "told once"
    assert "Traceback" not in output
    assert not list((tmp_path / "run" / "checkpoint").glob("*"))


@pytest.mark.parametrize(
    ("optimizer", "code", "told"),
    [
        ("FillsTheDisk", 4, "step-2 could not be saved (rank 0: OSError: [Errno 27] File too large)"),
        pytest.param("LosesItsStorage", 6, "Stale file handle", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_became_of_storage_is_the_launcher_s_exit_code(
    optimizer: str, code: int, told: str, tmp_path: Path
) -> None:
    result = launch("--optimizer.name", f"my_optimizers.{optimizer}", folder=tmp_path, ranks=1)
    assert result.code == code, result.output
    assert result.output.count(told) == 1 and "Traceback" not in result.output, result.output
    failure = json.loads(next((tmp_path / "run" / "failures").iterdir()).read_text())
    assert failure["code"] == code


def launch(*options: str, folder: Path, ranks: int) -> Result:
    """Train with `tiny.toml` through run_train.sh, in `folder`/run."""
    command = [str(REPOSITORY / "run_train.sh"), "--job.dump_folder", "./run", *options]
    return Command(*command, cwd=folder, NGPU=str(ranks), CONFIG_FILE=TINY).finish()


def test_numbers_that_are_not_finite_leave_the_last_checkpoint(tmp_path: Path) -> None:
    """Step 3 is the first with an absurd learning rate; its update makes step 4's loss infinite."""
    options = ["--job.dump_folder", str(tmp_path), *EAGER, "--training.steps"]
    assert train(*options, "2").code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    code, output = train(*options, "6", "--optimizer.lr", "1e38", "--lr_scheduler.decay_ratio", "0")
    assert code == 3, output
    assert "step 4: the loss is not finite on ranks [0]" in output
    assert "Traceback" not in output
    assert files == {path: path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert list(numbers(tmp_path)) == [1, 2, 3]
