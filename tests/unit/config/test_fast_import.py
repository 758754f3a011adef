"""A launcher checks a configuration before any process starts, so that config/ imports nothing that takes seconds."""

import subprocess
import sys

from torchtitan_graph.config import check, load

SLOW = ("torch", "numpy", "transformers", "datasets")


def test_a_configuration_is_checked_without_torch() -> None:
    code = (
        "import sys; from torchtitan_graph.config import check, dump_toml, load\n"
        "import torchtitan_graph.config.manual, torchtitan_graph.errors\n"
        "config = load(['--job.config_file', 'llama3_debug.toml', '--checkpoint.remote_folder', 'file:///tmp/run'])\n"
        "check(config, 8); dump_toml(config)\n"
        f"print(*[name for name in {SLOW} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


def test_the_trainer_is_imported_without_what_few_runs_need() -> None:
    """Dynamo and Inductor are a third of the time that all else takes; the others are optional, or read on demand."""
    heavy = ["torch._dynamo", "torch._inductor", "tensorboard", "transformers", "datasets", "pyarrow", "wandb"]
    code = f"import sys, torchtitan_graph.train\nprint(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


def test_that_fast_part_knows_families_but_neither_flavours_nor_passes() -> None:
    """Those need torch: models/spec.py and compiler.py check them, before a process group starts."""
    for arguments in ("--model.flavor=nothing", "--compile.disable_passes=nothing"):
        check(load([arguments]), 1)
