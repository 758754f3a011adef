"""What can't run is refused at once: exit code 2, one message that says what to change, and nothing else happens."""

import sys
from pathlib import Path

import patched_train
import pytest
from runs import REPOSITORY, Command, train

TOO_LONG = "x" * 300  # the system refuses to look for it, as it does below a folder of somebody else


def assert_refused(tmp_path: Path, options: list[str], parts: list[str], num_ranks: int = 1) -> None:
    folder = tmp_path / "run"
    code, output = train(
        *["--job.dump_folder", str(folder), *options],
        patch=patched_train.forbid_process_group,
        WORLD_SIZE=str(num_ranks),
    )
    assert code == 2, output
    assert output.count("ERROR") == 1 and "WARNING" not in output, output
    for part in parts:
        assert part in output, output
    assert "Traceback" not in output
    assert not folder.exists(), "something was written"


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ("[training]\nsteqs = 3", ["training.steqs = 3", "is not an option", "did you mean training.steps?"]),
        ("[trainig]\nsteps = 3", ["trainig", "did you mean training"]),
        ("[training]\nsteps = 'ten'", ["training.steps = 'ten'", "must be a whole number of at least 1"]),
        ("[compile]\nmode = 'grpah'", ["compile.mode = 'grpah'", "one of graph, eager", "did you mean graph?"]),
        ("[training\n", ["is not valid TOML", "line 1"]),
    ],
    ids=["key", "table", "type", "value", "syntax"],
)
def test_mistake_in_a_file(toml: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(toml)
    assert_refused(tmp_path, ["--job.config_file", str(file)], ["mine.toml", *parts])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--training.stepz 3", ["command line: training.stepz = '3'", "did you mean training.steps?"]),
        ("--training.steps 3 --optimizer.lr -1 --compile.mode x", ["2 problems", "optimizer.lr", "compile.mode"]),
        ("--job.config_file llama3_debg.toml", ["llama3_debg.toml", "did you mean llama3_debug.toml?"]),
        (f"--job.config_file {TOO_LONG}", ["job.config_file = ", "can't be read: File name too long"]),
        (f"--model.hf_assets_path {TOO_LONG}", ["model.hf_assets_path = 'xxx"]),
        ("--model.name lama3", ["model.name = 'lama3'", "must be one of", "did you mean llama3?"]),
        ("--model.name my_models.nothing", ["model.name = 'my_models.nothing'", "is it on PYTHONPATH?"]),
        ("--moe.early_scores", ["moe.early_scores = true: ", "has no experts of this package's; set it to false"]),
        ("--moe.early_scores --model.name gpt_oss", ["moe.early_scores = true: gpt_oss", "adds a bias after"]),
        ("--moe.early_scores --model.name llama4", ["moe.early_scores = true: llama4", "products read already"]),
        ("--model.flavor debugmodl", ["model.flavor = 'debugmodl'", "did you mean debugmodel?"]),
        ("--model.hf_assets_path ./nowhere", ["model.hf_assets_path = './nowhere'", "there is no such folder"]),
        ("--compile.disable_passes rematerialise", ["compile.disable_passes", "did you mean rematerialize?"]),
        ("--compile.cuda_graphs", ["compile.cuda_graphs = true: needs a GPU", "computes on cpu"]),
        ("--compile.disable_passes shard_params", ["compile.disable_passes", "can't be left out"]),
        (
            "--parallelism.pipeline_parallel_degree 2 --compile.mode eager",
            ["pipeline_parallel_degree = 2: only a graph can be cut into", "use compile.mode = graph"],
        ),
        (
            "--model.attn sdpa --training.seq_len 4194304",
            ["training.seq_len = 4194304", "'sdpa'", "GiB", "use shorter rows"],
        ),
        (
            "--model.attn sdpa --validation.enable --validation.seq_len 4194304",
            ["validation.seq_len = 4194304", "use shorter rows"],
        ),
        ("--model.attn flex --training.seq_len 16777216", ["model.attn = 'flex'", "GiB", 'use attn = "sdpa"']),
        (
            '--optimizer.param_groups [{pattern="layres.*"}]',
            ["entry 1: pattern = 'layres.*'", "names are such as layers."],
        ),
        ("--optimizer.name torch.optim.LBFGSS", ["optimizer.name", "torch.optim has no LBFGSS"]),
        ("--job.dump_folder /dev/null", ["job.dump_folder = '/dev/null': /dev/null is a file; name a folder"]),
        ("--comm.mode fake_backend --job.dump_folder /dev/null/x", ["job.dump_folder = '/dev/null/x': /dev/null is"]),
        (
            "--model.lora.rank 4 --training.dataset_path data.jsonl",
            ["model.lora.rank = 4: adapters would be trained next to random weights"],
        ),
        ("--comm.mode fake_backend --training.dataset nonsense", ["training.dataset = 'nonsense' is not a corpus"]),
        ("--comm.mode fake_backend --optimizer.name torch.optim.LBFGS", ["LBFGS can't take a step"]),
        (f"--job.dump_folder {TOO_LONG}", ["job.dump_folder = 'xxx", "File name too long"]),
        ("--checkpoint.load_step 3", ["checkpoint.load_step = 3", "no such complete checkpoint", "there are: none"]),
        ("--checkpoint.initial_load_path ./nowhere", ["initial_load_path = './nowhere'", "there is no such folder"]),
        (
            "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path ./nowhere",
            ["checkpoint.initial_load_in_hf = true: nowhere holds neither model.safetensors"],
        ),
        (
            "--training.global_batch_size 7",
            ["training.global_batch_size = 7", "multiple of", "= 2, such as 6 or 8, or -1"],
        ),
    ],
    ids=lambda value: value.split()[0].removeprefix("--") if isinstance(value, str) else "",
)
def test_mistake_in_an_option(options: str, parts: list[str], tmp_path: Path) -> None:
    assert_refused(tmp_path, options.split(), parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--parallelism.tensor_parallel_degree 3", ["tensor_parallel_degree = 3", "multiply", "= 3, not 4"]),
        ("--parallelism.data_parallel_replicate_degree 3", ["data_parallel_replicate_degree = 3", "not 4"]),
        ("--training.global_batch_size 12", ["training.global_batch_size = 12", "4 = 8, such as 8 or 16, or -1"]),
        ("--parallelism.tensor_parallel_degree 4", ["parallelism.tensor_parallel_degree = 4"]),  # 2 key-value heads
    ],
)
def test_mistake_for_four_ranks(options: str, parts: list[str], tmp_path: Path) -> None:
    assert_refused(tmp_path, options.split(), parts, num_ranks=4)


def test_check_itself_accepts_what_is_right(tmp_path: Path) -> None:
    """Negative control: without a mistake the run gets as far as the process group, which is forbidden here."""
    code, output = train("--job.dump_folder", str(tmp_path), patch=patched_train.forbid_process_group)
    assert code == 1 and "a process group was started" in output


def test_storage_that_is_away_is_no_mistake(tmp_path: Path) -> None:
    code, output = train("--job.dump_folder", str(tmp_path / "run"), patch=patched_train.lose_storage)
    assert code == 6, output
    assert "storage is unavailable; start the run again" in output and "Stale file handle" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "run.lock").exists()


def test_mistake_in_an_option_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    script = """
import sys
from torchtitan_graph.launch.__main__ import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""
    code, output = Command(sys.executable, "-c", script, "--training.stepz", "3", cwd=tmp_path).finish()
    assert code == 2, output
    assert "training.stepz = '3': is not an option; did you mean training.steps?" in output
    assert output.count("ERROR") == 1 and len(output.splitlines()) == 2, output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mistake_that_all_ranks_find_is_told_once(tmp_path: Path) -> None:
    options = ["--model.hf_assets_path", "./nowhere"]
    code, output = Command(str(REPOSITORY / "run_train.sh"), *options, cwd=tmp_path, NGPU="3").finish()
    assert code == 2, output
    assert "model.hf_assets_path = './nowhere': there is no such folder" in output
    assert len(output.splitlines()) == 1, output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ("--model.name my_models.faulty", "my_models/faulty.py"),
        ("--optimizer.name my_optimizers.BreaksInStep3 --optimizer.weight_decay 2", "my_optimizers.py"),
    ],
    ids=["forward", "optimizer"],
)
def test_fault_in_code_of_the_users_own_shows_its_place(options: str, place: str, tmp_path: Path) -> None:
    """A ValueError that is not ours, at set-up, where ours are one line."""
    code, output = train("--job.dump_folder", str(tmp_path / "run"), *options.split())
    assert code == 1, output
    assert "Traceback" in output and "\nValueError: too many values to unpack" in output, output
    assert f'{place}", line' in output
