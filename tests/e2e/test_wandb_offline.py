"""The real wandb, without a network."""

import re
from pathlib import Path

from runs import EAGER, records, train


def test_numbers_are_kept_and_a_resumed_run_is_the_same_one(tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--metrics.enable_wandb", *EAGER]
    for steps in (2, 3):
        code, output = train(*options, "--training.steps", str(steps), WANDB_MODE="offline", WANDB_SILENT="false")
        assert code == 0, output
        summary = dict(re.findall(r"^wandb: +(\S+) ([-.e\d]+)$", output[output.index("Run summary:") :], re.MULTILINE))
        last = records(tmp_path)[-1]
        assert int(summary["step"]) == last["step"] == steps
        for name in ("loss", "grad_norm", "lr", "tokens_seen"):
            assert float(summary[f"train/{name}"]) == float(f"{last[name]:.5f}")
    kept = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(kept) == 2
    assert {path.name.split("-")[-1] for path in kept} == {(tmp_path / "wandb_run_id").read_text()}
