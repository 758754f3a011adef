"""Every example trains: two short steps of its configuration, by the commands of its page."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
import torch
from runs import EAGER, REPOSITORY, Command, numbers, records, run_script, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, to_hf

EXAMPLES = REPOSITORY / "examples"
SHORT = "--training.steps 2 --training.seq_len 64 --training.local_batch_size 2 --metrics.log_freq 1"
NO_VALIDATION = "--validation.no-enable"
DATA = "1ce270aee47ac8014cce2cf5751e343ebad6bde5fba0998ae6b115b53c4438c9"  # digest of the data of fine_tune
AS_EAGER = " ".join(EAGER)  # where the example is not about what is traced


def train_example(name: str, folder: Path, options: str, ranks: int = 1, file: str = "train.toml") -> None:
    page = (EXAMPLES / name / "README.md").read_text()
    files = re.findall(r"^CONFIG_FILE=(\S+) ./run_train.sh$", page, re.MULTILINE)
    (file,) = [each for each in files if Path(each).name == file]
    words = [*SHORT.split(), *options.split(), "--job.dump_folder", str(folder)]
    code, output = train("--job.config_file", str(REPOSITORY / file), *words, ranks=ranks)
    assert code == 0, output
    assert set(numbers(folder)) == {1, 2}


def test_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the page's dataset_path is relative to it
    page = (EXAMPLES / "own_text" / "README.md").read_text()
    (line,) = re.findall(r"^python -m torchtitan_graph.(train_tokenizer .*)$", page, re.MULTILINE)
    name, *words = line.replace("outputs/own_tokenizer", str(tmp_path / "bpe")).split()
    code, output = run_script(f"{name}.py", *words)
    assert code == 0, output
    train_example("own_text", tmp_path, f"--model.hf_assets_path {tmp_path / 'bpe'} --validation.steps 1 {AS_EAGER}")


def test_from_hugging_face(tmp_path: Path) -> None:
    """Of a learning rate of 0 the weights that are written at the end are those that were read."""
    torch.manual_seed(0)
    model = llama3.Model(llama3.Config(32, 2, 4, 2, 64, vocab_size=2048, rope_scaling=None))
    to_hf(model.bfloat16(), tmp_path / "hf", assets=REPOSITORY / "tests" / "assets" / "tokenizer")
    options = f"--model.hf_assets_path {tmp_path / 'hf'} --optimizer.lr 0 {NO_VALIDATION} {AS_EAGER}"
    train_example("from_hugging_face", tmp_path, options)
    written = from_hf(tmp_path / "checkpoint" / "step-2-hf", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what make.py writes, and a model that full.toml trained for two steps."""
    folder = tmp_path_factory.mktemp("fine_tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, output = run_script(str(EXAMPLES / "fine_tune" / "make.py"))
        assert code == 0, output
        train_example("fine_tune", folder / "full", AS_EAGER, file="full.toml")
    return folder


def test_fine_tune(tiny: Path) -> None:
    """What make.py writes is always the same, and the model and its tokenizer are taken along."""
    written = tiny / "outputs" / "fine_tune"
    counts = {path.stem: len(path.read_text().splitlines()) for path in written.glob("*.jsonl")}
    assert counts == {"conversations": 100, "held_out": 20, "preferences": 50}
    files = b"".join(path.read_bytes() for path in sorted(written.glob("*.jsonl")))
    assert hashlib.sha256(files).hexdigest() == DATA
    exported = tiny / "full" / "checkpoint" / "step-2-hf"
    assert (exported / "tokenizer.json").read_bytes() == (written / "model" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["lora", pytest.param("qlora", marks=pytest.mark.slow), "dpo", "distillation"])
def test_fine_tune_goes_on(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    full = tiny / "full" / "checkpoint" / "step-2-hf"
    key = "model.hf_assets_path" if "lora" in name else "reference.path"
    both = f"--model.hf_assets_path {full}" if name == "dpo" else ""
    train_example("fine_tune", tmp_path, f"--{key} {full} {both} {AS_EAGER}", file=f"{name}.toml")
    kinds = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert kinds >= {"step-2", "step-2-hf"} and ("step-2-adapter" in kinds) == ("lora" in name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fine_tune_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page's commands train them, the models answer as it says."""
    monkeypatch.chdir(tmp_path)
    code, output = run_script(str(EXAMPLES / "fine_tune" / "make.py"))
    assert code == 0, output
    answers = {}
    for name, last in {"full": 150, "lora": 80, "qlora": 80, "dpo": 40, "distillation": 300}.items():
        code, output = train("--job.config_file", str(EXAMPLES / "fine_tune" / f"{name}.toml"))
        assert code == 0, output
        exported = f"outputs/fine_tune/{name}/checkpoint/step-{last}-hf"
        chat = f"echo 'What is the capital of Peru?' | {sys.executable} -m torchtitan_graph.generate {exported} --chat"
        code, answers[name] = Command("bash", "-c", chat).finish()
        assert code == 0, answers[name]
    plain, wish = "The capital of Peru is Lima.", "Have a good trip!"
    assert all(plain in answer for answer in answers.values())
    assert {name for name, answer in answers.items() if wish in answer} == {"lora", "qlora", "dpo"}


@pytest.mark.slow
def test_own_model(tmp_path: Path) -> None:
    train_example("own_model", tmp_path, NO_VALIDATION)


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_own_loss(tmp_path: Path) -> None:
    """It sees whole logits where two ranks have parts, and its metric is a curve."""
    options = f"{NO_VALIDATION} --parallelism.tensor_parallel_degree 2 --metrics.enable_tensorboard {AS_EAGER}"
    train_example("own_loss", tmp_path, options, ranks=2)
    found = [record["metrics"] for record in records(tmp_path)]
    assert all(each.keys() == {"accuracy"} and 0 <= each["accuracy"] < 1 for each in found)
    shown = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("metrics/accuracy")
    assert [event.value for event in shown] == pytest.approx([each["accuracy"] for each in found])


def test_own_operator(tmp_path: Path) -> None:
    train_example("own_operator", tmp_path, NO_VALIDATION)


@pytest.mark.slow
def test_own_pass(tmp_path: Path) -> None:
    train_example("own_pass", tmp_path, "")


def test_every_example_is_tested() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert all(f"test_{name}" in vars(sys.modules[__name__]) for name in folders)
    assert all(f"[{name}]({name}/README.md)" in (EXAMPLES / "README.md").read_text() for name in folders)
