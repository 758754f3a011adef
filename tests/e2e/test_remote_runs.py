"""A run whose disk is lost goes on from the copies at an address, as the run that it was."""

import shutil
from pathlib import Path

import patched_train
from runs import EAGER, numbers, saved, train


def test_a_run_goes_on_from_an_empty_disk_to_the_same_bits(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    remote = ["--checkpoint.remote_folder", address, *EAGER]
    lost, found, whole = (tmp_path / name for name in ("lost", "found", "whole"))
    code, output = train(
        *["--job.dump_folder", str(lost), *remote], patch=patched_train.signal_in_step_3, SIGNAL="SIGTERM"
    )
    assert code == 0, output

    options = ["--job.dump_folder", str(found), *remote]
    shutil.rmtree(lost / "checkpoint")
    for folder in (lost, found):  # the one still has its configuration
        code, output = train("--job.dump_folder", str(folder), *remote, "--model.name", "my_models.experts")
        assert code == 2, output
        assert f"would go on with another model, tokenizer or data than {address}/config.toml says" in output
        assert 'model.name = "my_models.experts", was "my_models.tiny"' in output
    assert not (found / "config.toml").exists()
    shutil.rmtree(lost)

    code, output = train(*options)
    assert code == 0, output
    assert f"fetched checkpoint {found}/checkpoint/step-3 from {address}/step-3" in output
    assert "changed since the run was started: job.dump_folder" in output
    code, output = train("--job.dump_folder", str(whole), *EAGER)
    assert code == 0, output
    assert numbers(found) == {step: numbers(whole)[step] for step in (4, 5)}
    assert saved(found, 5) == saved(whole, 5)


def test_an_address_that_can_not_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    address = f"file://{tmp_path / 'there'}"
    code, output = train("--job.dump_folder", str(tmp_path / "run"), "--checkpoint.remote_folder", address)
    assert code == 2, output
    assert f"checkpoint.remote_folder: {address} can't be used" in output
    assert "Traceback" not in output and "parameters" not in output


def test_adapters_on_random_weights_are_refused_also_where_checkpoints_are_remote(tmp_path: Path) -> None:
    address = ["--checkpoint.remote_folder", f"file://{tmp_path / 'there'}"]
    code, output = train("--job.dump_folder", str(tmp_path / "run"), *address, "--model.lora.rank", "4", *EAGER,
        "--training.dataset", "stdlib")  # fmt: skip
    assert code == 2 and "adapters would be trained next to random weights" in output, output
