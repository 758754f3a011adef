"""The translator reports on old files, and the file it writes means the same without a notice."""

import re
from pathlib import Path

import pytest

from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.config.load import read_file
from torchtitan_graph.config.resolve import Resolution
from torchtitan_graph.config.support import RENAMED
from torchtitan_graph.translate import main, other_meanings

OLD_FILES = Path(__file__).parent / "old_files"
RUNNING = sorted(path.name for path in OLD_FILES.glob("*.toml") if path.name != "refused.toml")


def test_it_lists_what_is_kept_changed_ignored_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job.config_file", str(OLD_FILES / "early_release.toml")]) == 0
    text = capsys.readouterr().out
    assert "\n  training.seq_len = 512\n" in text.split("changed:")[0]
    assert "\n  training.batch_size = 4: is now called training.local_batch_size\n" in text
    assert "\n  parallelism.enable_compiled_autograd = false: backward" in text.split("ignored, ")[1]
    assert text.endswith("0 refused\n")


def test_refused_settings_exit_with_1_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job.config_file", str(OLD_FILES / "refused.toml"), "--out", str(tmp_path / "new.toml")]) == 1
    captured = capsys.readouterr()
    assert "3 refused:" in captured.out and "model.converters = ['quantize.linear.nvfp4']" in captured.out
    assert "is not written" in captured.err
    assert not list(tmp_path.iterdir())


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.toml"
    old.write_text("# mine\n")
    for out, message in ((old, "is there already"), (tmp_path / "nowhere" / "new.toml", "can't be written")):
        with pytest.raises(SystemExit, match="2"):
            main(["--job.config_file", str(old), "--out", str(out)])
        assert f"--out {out}: {message}" in capsys.readouterr().err
    assert old.read_text() == "# mine\n"


@pytest.mark.parametrize("name", RUNNING)
def test_the_translated_file_trains_the_same_without_notices(name: str, tmp_path: Path) -> None:
    new = tmp_path / "new.toml"
    assert main(["--job.config_file", str(OLD_FILES / name), "--out", str(new)]) == 0
    old_config, new_config = (load(["--job.config_file", str(path)]) for path in (OLD_FILES / name, new))
    assert new_config.notices == []
    ignored = {notice.split(": ")[1].split(" = ")[0] for notice in old_config.notices if ": ignored: " in notice}
    ignored = {RENAMED.get(key, key) for key in ignored}
    for key in OPTIONS.keys() - ignored - {"job.config_file"}:
        assert get(new_config, key) == get(old_config, key), key


def translated(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """Return the exit code and the sections of a report, by the first word of their titles."""
    file = tmp_path / "old.toml"
    file.write_text(text)
    code = main(["--job.config_file", str(file)])
    sections = re.split(r"(?m)^\d+ (?=\w)", capsys.readouterr().out)[1:]
    return code, {re.match(r"\w+", section)[0]: section for section in sections}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[model]\nflavor = '8b'", "model.flavor = '8b': legal for llama3 are"),
        ("[training]\nglobal_batch_size = 12", "training.global_batch_size = 12: must be a multiple of"),
        ("[parallelism]\ntensor_parallel_degree = 3", "parallelism.tensor_parallel_degree = 3"),
        ("[training]\nseq_len = 15\n[parallelism]\ntensor_parallel_degree = 2", "training.seq_len = 15: sequence"),
        ("[checkpoint]\nfolder = 's3://a/b'", "checkpoint.folder = 's3://a/b': checkpoints are always in"),
        ("[compile]\nregion_options = [['loss', 'a=1']]", "compile.region_options = [['loss', 'a=1']]: set Inductor's"),
        ("[model]\nname = 'my_models.nothing'", "model.name = 'my_models.nothing': there is no module"),
        ("[optimizer]\nname = 'torch.optim.LBFGSS'", "torch.optim has no LBFGSS"),
        ("[model]\nname = 'lama3'", "model.name = 'lama3': must be one of"),
    ],
)
def test_what_train_refuses_is_not_kept(
    text: str, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, sections = translated(text, tmp_path, capsys)
    assert code == 1 and sections["refused"].startswith("refused:\n") and refused in sections["refused"]
    assert refused.partition(" = ")[0] not in sections["kept"]


def test_what_only_this_machine_refuses_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, sections = translated("[model]\nattn = 'flex'\n[training]\nseq_len = 1048576", tmp_path, capsys)
    assert code == 0 and "on this machine, model.attn = 'flex'" in sections["notices"]


@pytest.mark.parametrize("saved", ["", "enable = true\nlast_save_model_only = false"])
def test_the_dtype_of_what_is_not_exported_is_harmless(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, sections = translated(f"[checkpoint]\nexport_dtype = 'bfloat16'\n{saved}", tmp_path, capsys)
    assert code == 0 and "export_dtype = 'bfloat16': nothing is exported" in sections["notices"]


@pytest.mark.parametrize("old", ["17bx16e", "17bx128e", "17bx16e_irope", "17bx128e_irope", "debugmodel_irope"])
def test_old_names_of_flavours(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, sections = translated(f"[model]\nname = 'llama4'\nflavor = '{old}'", tmp_path, capsys)
    new = old.removesuffix("_irope").replace("x16e", "x16E").replace("x128e", "x128E").replace("17b", "17B")
    assert code == 0 and f"model.flavor = '{old}': is now flavor = '{new}'" in sections["changed"]
    assert ("with model.attn = 'flex'" in sections["changed"]) == old.endswith("_irope")
    # A flavour without the suffix was another model: every layer saw all of the row, and knew positions.
    assert ("see chunks here" in sections["about"]) != old.endswith("_irope")
    assert load(["--model.name=llama4", f"--model.flavor={old}"]).model.flavor == new


@pytest.mark.parametrize(
    ("name", "flavor", "seq_len", "words"),
    [
        ("llama3", "8B", 4096, "document"),
        ("llama3", "8B_flex", 4096, ""),
        ("llama3", "debugmodel_varlen_attn", 4096, "positions are not stretched"),
        ("qwen3", "4B", 4096, "document"),
        ("qwen3", "30B-A3B", 4096, "document experts"),
        ("llama4", "debugmodel_irope", 4096, "experts sizes"),
        ("deepseek_v3", "16B", 4096, "document experts YaRN"),
        ("deepseek_v3", "671B", 8192, "document"),
        ("deepseek_v3", "debugmodel_flex_attn", 4096, "YaRN sigmoid"),
        ("gpt_oss", "20b", 8192, "document experts YaRN"),
    ],
)
def test_a_flavour_that_is_another_model_here_is_said(name: str, flavor: str, seq_len: int, words: str) -> None:
    config = load([f"--model.name={name}", f"--model.flavor={flavor}", f"--training.seq_len={seq_len}"])
    said = other_meanings(config, flavor)
    assert len(said) == len(words.split()) or name == "llama3"
    assert bool(said) == bool(words) and all(any(word in line for line in said) for word in words.split())


def test_every_line_of_a_file_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    file = OLD_FILES / "every_default.toml"
    main(["--job.config_file", str(file)])
    report = capsys.readouterr().out
    for setting in read_file(str(file), Resolution(JobConfig(), [])):
        assert f"  {setting.key} = " in report or setting.key == "model.flavor"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--job.config_file", str(tmp_path / "missing.toml")])
    assert "missing.toml: can't be read: No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["missing.toml"])
    assert "a file is given as --job.config_file missing.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("experimental", "pipeline_parallel_microbatches = 4", "set that to training.local_batch_size / this"),
        ("training", 'fp8_linear = "dynamic"', "set model.converters = ['float8'] in its place"),
        ("training", "fp8_linear = true", "set model.converters = ['float8'] in its place"),
        ("training", "enable_float8_linear = true", "set model.converters = ['float8'] in its place"),
        ("training", "enable_loss_parallel = false", "set parallelism.disable_loss_parallel = true in its place"),
        ("optimizer", "fused = false", "set optimizer.implementation = 'foreach' in its place"),
        ("metrics", "rank_0_only = false", "set metrics.save_for_all_ranks = true in its place"),
        ("model", 'norm_type = "layernorm"', "norms are RMSNorm"),
        ("checkpoint", 'interval_type = "seconds"', "set checkpoint.interval_minutes in its place"),
    ],
)
def test_keys_of_the_first_releases_say_what_to_do_instead(
    table: str, line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, sections = translated(f"[{table}]\n{line}\n", tmp_path, capsys)
    assert code == 1 and said in sections["refused"]


def test_keys_of_the_first_releases_at_values_that_ask_for_nothing_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        [model]
        norm_type = "rmsnorm"
        [optimizer]
        fused = true
        [training]
        fp8_linear = ""
        [checkpoint]
        interval_type = "steps"
    """
    code, sections = translated(text, tmp_path, capsys)
    assert code == 0 and sections["without"].count(" = ") == 4


def test_text_is_read_as_the_list_that_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nconverters = "float8"\n[float8]\nfilter_fqns = "output, wq"\n'
    code, sections = translated(text, tmp_path, capsys)
    assert code == 0
    assert "model.converters = 'float8': is read as the list ['float8']" in sections["changed"]
    assert "float8.filter_fqns = 'output, wq': is read as the list ['output', 'wq']" in sections["changed"]
