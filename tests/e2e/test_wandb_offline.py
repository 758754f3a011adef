"""The real wandb, without a network."""

import json
import re
from pathlib import Path

from runs import EAGER, records, train


def test_numbers_are_kept_and_a_resumed_run_is_the_same_one(tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--metrics.enable_wandb", *EAGER]
    seen: set[Path] = set()
    for steps in (2, 3):
        code, output = train(*options, "--training.steps", str(steps), WANDB_MODE="offline")
        assert code == 0, output
        (new,) = {*tmp_path.glob("wandb/offline-run-*")} - seen
        seen.add(new)
        (file,) = new.glob("*.wandb")  # what `wandb sync` sends: protocol buffers, with names and JSON values in them
        kept, last = file.read_bytes(), records(tmp_path)[-1]
        assert last["step"] == steps
        for name in ("train/loss", "train/grad_norm", "train/lr", "train/tokens_seen"):
            values = re.findall(re.escape(name.encode()) + rb"[\x00-\x1f\x80-\xff]{2,4}([-.e\d]+)", kept)
            assert json.loads(values[-1]) == last[name.removeprefix("train/")], name
    assert {path.name.split("-")[-1] for path in seen} == {(tmp_path / "wandb_run_id").read_text()}
