"""How options are set: syntax of the command line, precedence, and what an error says."""

from pathlib import Path

import pytest

import torchtitan_graph
from torchtitan_graph.config import JobConfig, dump_toml, job, load
from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.config.manual import COMMON, option_help, tables
from torchtitan_graph.config.option import brief
from torchtitan_graph.config.resolve import NAMES, family_names
from torchtitan_graph.config.support import ANSWERS, NAMES_ELSEWHERE
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import GENERIC


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_nothing_set_means_the_defaults() -> None:
    assert load([]) == JobConfig()


def test_command_line_wins_over_file_wins_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 20\nseq_len = 64")
    config = load(["--training.steps", "30", "--job.config_file", file])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (30, 64, 8)
    assert config.sources == {
        "training.steps": "command line",
        "training.seq_len": file,
        "job.config_file": "command line",
    }


def test_the_last_of_a_repeated_option_counts() -> None:
    assert load(["--training.steps", "30", "--training.steps=40"]).training.steps == 40


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--training.steps", "5"], "steps", 5),
        (["--training.steps=5"], "steps", 5),
        (["--training.local-batch-size", "5"], "local_batch_size", 5),
        (["--training.global_batch_size", "-1"], "global_batch_size", -1),
        (["--training.max_norm", "2"], "max_norm", 2.0),
        (["--training.dataset_path="], "dataset_path", None),
        (["--training.dataset_path", "a=b"], "dataset_path", "a=b"),
        (["--training.no-dynamic_seq_len"], "dynamic_seq_len", False),
        (["--training.dynamic_seq_len", "false"], "dynamic_seq_len", False),
        (["--training.dynamic_seq_len=false", "--training.dynamic_seq_len"], "dynamic_seq_len", True),
        (["--training.no-dynamic_seq_len", "--training.dynamic_seq_len", "true"], "dynamic_seq_len", True),
    ],
)
def test_command_line_syntax(argv: list[str], key: str, value: object) -> None:
    assert getattr(load(argv).training, key) == value


def test_nested_tables_and_lists() -> None:
    config = load(["--training.dataloader.num_workers", "2", "--compile.disable_passes", "cleanup, rematerialize"])
    assert config.training.dataloader.num_workers == 2
    assert config.compile.disable_passes == ["cleanup", "rematerialize"]
    assert load(["--model.freeze", '["norm", "layers.[01].*"]']).model.freeze == ["norm", "layers.[01].*"]  # as in TOML
    assert load(["--model.freeze", "[ab]*, norm"]).model.freeze == ["[ab]*", "norm"]
    assert load(["--compile.regions="]).compile.regions == []


@pytest.mark.parametrize("text", ["a,b;c", "[['a', 'b'], ['c']]"])
def test_a_list_of_lists(text: str) -> None:
    argv = ["--parallelism.module_fqns_per_model_part", text]
    assert load(argv).parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]


def test_no_true_default_can_only_be_set_with_a_value() -> None:
    assert load(["--checkpoint.no-last_save_model_only"]).checkpoint.last_save_model_only is False
    assert load(["--checkpoint.no-last-save-model-only"]).checkpoint.last_save_model_only is False


def test_an_old_name_works_on_the_command_line() -> None:
    config = load(["--training.batch_size", "3", "--checkpoint.enable_checkpoint"])
    assert config.training.local_batch_size == 3 and config.checkpoint.enable


def test_old_and_new_name_together_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nbatch_size = 3\nlocal_batch_size = 4")
    assert problems(["--job.config_file", file]) == [
        f"{file}: training.batch_size = 3: is the old name of training.local_batch_size, which is set as well;"
        " keep one of them"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps = '5'", "training.steps = '5': must be a whole number of at least 1"),
        ("steps = 5.0", "training.steps = 5.0: must be a whole number of at least 1"),
        ("steps = true", "training.steps = true: must be a whole number of at least 1"),
        ("steps = 0", "training.steps = 0: must be a whole number of at least 1"),
        ("max_norm = inf", "training.max_norm = inf: must be a number of at least 0"),
        ("max_norm = nan", "training.max_norm = nan: must be a number of at least 0"),
        ("dynamic_seq_len = 1", "training.dynamic_seq_len = 1: must be true or false"),
        (
            "steps = 9223372036854775808",
            "training.steps = 9223372036854775808: must be a whole number of at least 1, in 64 bits",
        ),
        ('"zzz\\nzzz" = 1', "training.zzz\\nzzz = 1: is not an option; --help lists all options"),
        ("dataset = 4", "training.dataset = 4: must be a string in quotes"),
        ("dataset = ['c4']", "training.dataset = ['c4']: must be a string"),
        (
            "dtype = 'bfloat61'",
            "training.dtype = 'bfloat61': must be one of float32, bfloat16; did you mean bfloat16?",
        ),
        (
            "global_batch_size = 0",
            "training.global_batch_size = 0: must be a whole number of at least 1 or -1",
        ),
        ("stepss = 5", "training.stepss = 5: is not an option; did you mean training.steps?"),
        ("lr = 1e-3", "training.lr = 0.001: is not an option; did you mean optimizer.lr?"),
        ("zzzzzzzzzz = 5", "training.zzzzzzzzzz = 5: is not an option; --help lists all options"),
        ("dataloader = 5", "training.dataloader = 5: is a table; write [training.dataloader] and its keys below"),
    ],
)
def test_error_names_file_key_value_legal_and_nearest(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, f"[training]\n{line}")
    assert problems(["--job.config_file", file]) == [f"{file}: {message}"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.steps", "five"], "training.steps = 'five': must be a whole number of at least 1"),
        (["--training.steps"], "training.steps: needs a value: a whole number of at least 1"),
        (["--training.steps", "--checkpoint.enable"], "training.steps: needs a value: a whole number of at least 1"),
        (
            ["--parallelism.module_fqns_per_model_part", "[[a], [b]]"],
            "parallelism.module_fqns_per_model_part = '[[a], [b]]': must be a list of lists of strings; on the command"
            " line 'a,b;c'",
        ),
        (
            ["--parallelism.pipeline_parallel_schedule", "1f1b"],
            "parallelism.pipeline_parallel_schedule = '1f1b': must be one of GPipe, 1F1B, Interleaved1F1B,"
            " ZBVZeroBubble, DualPipeV; did you mean 1F1B?",
        ),
        (["--trainin.steps", "5"], "trainin.steps = '5': is not an option; did you mean training.steps?"),
        (["--training", "5"], "training = '5': is a table; write [training] and its keys below"),
        (["--checkpoint.enable", "maybe"], "checkpoint.enable = 'maybe': must be true or false"),
        (["train.toml"], "train.toml: unexpected; a file is given as --job.config_file train.toml"),
        (
            ["--training.steps", "10", "20"],
            "20: unexpected; options are given as --table.key value, a list as first,second",
        ),
        (["--model.name", ".llama3"], "model.name = '.llama3': is not the dotted name of a module, such as my_pkg."),
        (
            ["--comm.train_timeout_seconds", "1000000000000"],
            "comm.train_timeout_seconds = '1000000000000': must be a whole number of at least 1 and at most 1000000000",
        ),
        (["--activation_checkpoint.selective_ac_option", "9" * 10], "activation_checkpoint.selective_ac_option ="),
        (["--steps", "10"], "steps = '10': is not an option; see training.steps"),
        (
            ["--validation.max_seq_length", "9"],
            "validation.max_seq_length = '9': is not an option; see validation.seq_len",
        ),
        (["--train.steps", "10"], "train.steps = '10': is not an option; did you mean training.steps?"),
        (["--eval.seq_len", "10"], "eval.seq_len = '10': is not an option; did you mean validation.seq_len?"),
        (["--lr=1"], "lr = '1': is not an option; did you mean optimizer.lr?"),
        (["training.steps=10"], "training.steps=10: unexpected; did you mean --training.steps=10?"),
        (["--training-steps", "10"], "training_steps = '10': is not an option; did you mean training.steps?"),
        (["--no-checkpoint.enable"], "no_checkpoint.enable: is not an option; did you mean --checkpoint.no-enable?"),
        (["--no-checkpoint.interval"], "no_checkpoint.interval: is not an option; did you mean checkpoint.interval?"),
        (["--training.steps", "9" * 5000], f"training.steps = '{'9' * 199}...: must be a whole number of at least 1"),
        (["--optimizer.options", "{a = 0x" + "f" * 5000 + "}"], "optimizer.options = '{a = 0x"),
        (["--training.batch_sise", "2"], "training.batch_sise = '2': is not an option; did you mean training.local_"),
        (
            ["--training.no-steps"],
            "training.steps: only true-or-false options have a --table.no-flag, without value",
        ),
        (
            ["--activation_checkpoint.selective_ac_option", "0"],
            "activation_checkpoint.selective_ac_option = '0': must be op, or a whole number of at least 1",
        ),
        (
            ["--checkpoint.keep_latest_k", "1"],
            "checkpoint.keep_latest_k = '1': must be a whole number of at least 2 or 0",
        ),
        (["--optimizer.beta2", "1"], "optimizer.beta2 = '1': must be a number of at least 0 and below 1"),
        (
            ["--model.name", "llama5"],
            f"model.name = 'llama5': must be one of {', '.join(family_names())}, or the dotted name of a"
            " module of your own; did you mean llama3?",
        ),
    ],
)
def test_error_on_the_command_line(argv: list[str], message: str) -> None:
    (problem,) = problems(argv)
    assert problem.startswith(f"command line: {message}")


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 0\nstepz = 1\n[modle]\nname = 'llama3'")
    found = problems(["--job.config_file", file, "--compile.mode", "fast", "extra"])
    assert [problem.split(":")[1].split("=")[0].strip() for problem in found] == [
        "extra",
        "training.steps",
        "training.stepz",
        "modle",
        "compile.mode",
    ]


def test_a_missing_file_unlike_all_others_gets_no_hint(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert problems(["--job.config_file", str(tmp_path / "mine.toml")])[0].endswith("No such file or directory")


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert problems(["--job.config_file", str(tmp_path / "runs.toml")]) == [
        f"command line: job.config_file = {str(tmp_path / 'runs.toml')!r}: can't be read: No such file or directory;"
        " did you mean run.toml?"
    ]


def test_a_folder_stands_for_the_configuration_of_the_run_in_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "is not a run's folder, for it has no config.toml" in problems(["--job.config_file", str(run)])[0]
    (run / "config.toml").write_text("[training]\nsteps = 3")
    assert load(["--job.config_file", str(run)]).training.steps == 3
    assert f"no config.toml; these are runs: {run}" in problems(["--job.config_file", str(tmp_path)])[0]


def test_a_syntax_error_is_located(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = = 3")
    found = problems(["--job.config_file", file])
    assert len(found) == 1 and "is not valid TOML" in found[0] and "line 2" in found[0] and file in found[0]


@pytest.mark.parametrize("text", ["[a{}]\nx = 1", "[training]\na{} = 1", "[compile.regions]\na{} = 1"])
def test_a_name_of_thousands_of_parts_is_refused(text: str, tmp_path: Path) -> None:
    (found,) = problems(["--job.config_file", write(tmp_path, text.format(".a" * 3000))])
    assert "is not valid TOML: nested more than 100 levels deep" in found


@pytest.mark.parametrize("text", ["\ufeff[training]\nsteps = 7\n", "[training]\r\nsteps = 7\r\n"])
def test_a_mark_of_the_encoding_and_line_ends_of_windows_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode())
    assert load(["--job.config_file", str(path)]).training.steps == 7


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"torchtitan_graph {torchtitan_graph.__version__}\n"


def test_a_file_in_models_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my_family.py").touch()
    monkeypatch.setattr(torchtitan_graph, "__file__", str(tmp_path / "__init__.py"))
    assert load(["--model.name", "my_family"]).model.name == "my_family"
    assert "must be one of my_family, or the dotted name" in problems(["--model.name", "llama3_"])[0]


@pytest.mark.parametrize("text", ["[training]\nmax_norm = 1" + "0" * 400, "a = " + "[" * 5000 + "]" * 5000])
def test_absurd_files_are_refused(tmp_path: Path, text: str) -> None:
    assert len(problems(["--job.config_file", write(tmp_path, text)])) == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[training]\n\xff")
    assert "is not UTF-8 (invalid start byte at byte 11, in line 2)" in problems(["--job.config_file", str(path)])[0]


def test_a_file_cannot_name_another_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[job]\nconfig_file = 'other.toml'")
    assert "on the command line" in problems(["--job.config_file", file])[0]


def test_a_bare_name_is_looked_up_among_the_packaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama3.py").touch()
    (tmp_path / "train_configs" / "packaged.toml").write_text("[training]\nsteps = 77")
    monkeypatch.setattr(torchtitan_graph, "__file__", str(tmp_path / "__init__.py"))
    assert load(["--job.config_file", "packaged.toml"]).training.steps == 77
    assert "can't be read" in problems(["--job.config_file", "./packaged.toml"])[0]


@pytest.mark.parametrize(
    ("folder", "resolved"),
    [
        ("./outputs/{model.name}_debug", "./outputs/qwen3_debug"),
        ("{model.name}/{model.flavor}-{training.steps}", "qwen3/8B-7"),
        ("{model.attn}", "flex"),  # which the flavour's name says
        ("{checkpoint.enable}{optimizer.lr}{compile.regions}", "false0.001layers.*"),
        ("plain", "plain"),
    ],
)
def test_a_dump_folder_is_named_by_other_options(tmp_path: Path, folder: str, resolved: str) -> None:
    file = write(tmp_path, f"[job]\ndump_folder = '{folder}'\n[model]\nname = 'llama3'\nflavor = '8B_flex'")
    options = ["--model.name", "qwen3", "--training.steps", "7", "--optimizer.lr", "1e-3"]
    config = load(["--job.config_file", file, *options])
    assert config.job.dump_folder == resolved
    assert load(["--job.config_file", write(tmp_path, dump_toml(config))]).job.dump_folder == resolved


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (
            "{model.nam}/{seed}",
            "{model.nam} is not an option; did you mean model.name?; {seed} is not an option; did you mean debug.seed?",
        ),
        ("{model.flavor}", "{model.flavor} has no value; set model.flavor as well"),
        ("{job.dump_folder}", "{job.dump_folder} is '{job.dump_folder}', which has braces itself"),
        ("a{b", "has a brace without its other half; {table.key} stands for the value of that option"),
        ("", "must not be empty"),
    ],
)
def test_a_dump_folder_named_by_nothing_is_refused(folder: str, why: str) -> None:
    found = problems(["--job.dump_folder", folder])
    assert found == [f"command line: job.dump_folder = {folder!r}: {why}"]


def test_rows_of_a_table_are_shown_by_what_is_set_in_them() -> None:
    assert brief([job.ParamGroup("*", beta1=0.5), True]) == "[{'pattern': '*', 'beta1': 0.5}, True]"
    assert brief(False) == "false" and brief("x" * 300) == repr("x" * 300)[:200] + "..."


def test_an_explicit_attention_wins_over_a_flavour_name() -> None:
    config = load(["--model.flavor", "8B_flex", "--model.attn", "sdpa"])
    assert (config.model.flavor, config.model.attn) == ("8B", "sdpa")


def test_a_users_own_model_keeps_its_flavour_names() -> None:
    config = load(["--model.name", "my.model", "--model.flavor", "tiny_flex"])
    assert (config.model.name, config.model.flavor, config.model.attn) == ("my.model", "tiny_flex", "auto")


def test_help_shows_the_common_options_and_each_table_s_explains_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help", "--training.steps", "3"])
    assert not caught.value.code
    text = capsys.readouterr().out
    assert all(f"\n  --{key} (" in text for key in COMMON) and len(text.splitlines()) < 75
    assert all(f"\n  --help {name} " in text for name in tables())
    for option in OPTIONS.values():
        page = option_help(option.key.rpartition(".")[0])
        assert option.help.endswith(".") and f"--{option.key}  ({option.legal()}; default: " in page
        assert " ".join(option.help.split()) in " ".join(page.split()) and len(page.splitlines()) < 116


def test_help_on_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help", "training"])
    text = capsys.readouterr().out
    assert "--training.steps" in text and "--training.dataloader.num_workers" in text and "--model.name" not in text
    with pytest.raises(SystemExit):
        load(["-h", "training.steps"])
    text = capsys.readouterr().out
    assert "--training.steps" in text and "--training.seq_len" not in text
    with pytest.raises(SystemExit):
        load(["--help", "comm", "debug", "--training.steps", "3"])
    text = capsys.readouterr().out
    assert "--comm.mode" in text and "--debug.seed" in text and "--training.steps" not in text
    with pytest.raises(UserError, match="did you mean training"):
        load(["--help", "trainin"])


@pytest.mark.parametrize(
    "name",
    ["do_train", "training.max_tokens", "compile.fullgraph"],
)
def test_what_is_like_no_option_gets_no_hint(name: str) -> None:
    (problem,) = problems([f"--{name}", "1"])
    assert problem == f"command line: {name} = '1': is not an option; --help lists all options"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_iters", "training.steps"),
        ("learning-rate", "optimizer.lr"),
        ("per_device_train_batch_size", "training.local_batch_size"),
        ("trainer.max_steps", "training.steps"),
        ("validation.interval", "validation.freq"),
        ("pretrained_model_name_or_path", "model.hf_assets_path"),
        ("packing", "training.one_document_per_row"),
        ("checkpoint.freq", "checkpoint.interval"),
        ("save", "job.dump_folder"),
        ("training.freeze", "model.freeze"),
        ("lora_r", "model.lora.rank"),
        ("use_ema", "optimizer.ema_decay"),
        ("label_smoothing_factor", "loss.label_smoothing"),
        ("sample_every", "samples.freq"),
        ("rollback", "training.roll_back_after"),
    ],
)
def test_what_other_trainers_call_it_is_known(name: str, ours: str) -> None:
    (problem,) = problems([f"--{name}", "1"])
    assert problem.endswith(f"is not an option; see {ours}")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("neftune_noise_alpha", "noise on embeddings (NEFTune) is not built; remove it"),
        ("model.lora_dropout", "adapters have no dropout; remove it"),
    ],
)
def test_what_is_not_built_is_said_to_be_so(name: str, answer: str) -> None:
    (problem,) = problems([f"--{name}", "1"])
    assert problem.endswith(f"is not an option: {answer}")


def test_what_is_known_from_elsewhere_is_no_name_of_ours() -> None:
    leaves = {key.rpartition(".")[2] for key in NAMES}
    assert {*NAMES_ELSEWHERE.values()} <= {*OPTIONS} and not {*NAMES_ELSEWHERE} & ((leaves - GENERIC) | {*NAMES})
    assert not {*ANSWERS} & {*leaves, *NAMES_ELSEWHERE}


def test_a_dotted_name_is_said_in_words() -> None:
    (problem,) = problems(["--optimizer.name", "Lion"])
    assert problem == (
        "command line: optimizer.name = 'Lion': must be one of Adam, AdamW, Muon, or a dotted name, such as"
        " my_package.MyOptimizer, of a class that is imported"
    )


@pytest.mark.parametrize(
    "key", ["job.dump_folder", "training.cache_folder", "model.hf_assets_path", "compile.precompiled", "reference.path"]
)
def test_an_address_is_no_folder_of_this_machine(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} = 's3://bucket/a': must be a path of this machine"):
        load([f"--{key}", "s3://bucket/a"])
    assert load([f"--{key}", "./a:b/c://d"])
