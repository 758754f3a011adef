"""The documentation is true: its commands run, its links lead somewhere, its tree of the code is the tree."""

import ast
import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
from runs import REPOSITORY, Command

from torchtitan_graph import capture
from torchtitan_graph.config import check, dump_toml, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import kubernetes
from torchtitan_graph.plan.__main__ import parser
from torchtitan_graph.plan.ranks import ranks_of_group

DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(REPOSITORY / name for name in FIRST), *sorted((REPOSITORY / "examples").rglob("*.md")), *DOCS]
# Appended to every command that trains, so that it takes seconds; what the page shows is run, but for its size.
FEWER = "--training.steps 2 --training.seq_len 64 --validation.seq_len 64 --training.local_batch_size 2"
FEWER += " --validation.local_batch_size 2 --validation.steps 1 --model.name my_models.tiny"


def path_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def commands(page: Path) -> list[str]:
    """Return the lines of all blocks of bash that are marked to be run."""
    blocks = re.findall(r"^<!-- test: run -->\n```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes, one after another
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=path_of)
def test_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    for name in ("run_train.sh", "train_configs", "scripts", "docs", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    lines = [
        f"{line} {FEWER}" if re.search(r"run_train\.sh|torchtitan_graph\.train\b(?! --help)", line) else line
        for line in commands(page)
    ]
    text = "\n".join(lines).replace("outputs/llama3_debug", "outputs/my_models.tiny_debug")  # named by the model
    code, output = Command("bash", "-euxc", text, cwd=tmp_path, NGPU="1").finish(550)
    assert code == 0, output


def outcome_of(line: str) -> list[str]:
    """Check a command without running it, and return what is wrong with it."""
    words = shlex.split(line)
    env = dict(itertools.takewhile(lambda pair: len(pair) == 2, (word.split("=", 1) for word in words)))
    program, *arguments = words[len(env) :]
    if program == "./run_train.sh":
        named = {"CONFIG_FILE": "--job.config_file", "COMM_MODE": "--comm.mode"}
        arguments = [word for key in named if key in env for word in (named[key], env[key])] + arguments
    if program == "torchrun":
        env["NGPU"], arguments = arguments[1], arguments[2:]
    if program in ("python", "torchrun"):
        program, *arguments = arguments if arguments[0] != "-m" else arguments[1:]
    if program == "torchtitan_graph.train" and arguments[0] == "--help":
        with pytest.raises(SystemExit) as end:
            load(arguments)
        return [str(end.value)] if end.value.code else []
    if program in ("./run_train.sh", "torchtitan_graph.train"):
        return check(load(arguments), int(env.get("NGPU", "1")))
    if program == "torchtitan_graph.plan":
        known, of_training = parser().parse_known_args(arguments)
        config = load([*of_training, "--comm.mode", "fake_backend"])
        return check(config, ranks_of_group(config, known.world))
    if program == "torchtitan_graph.launch" and "--kubernetes" in arguments:
        return [] if kubernetes.main(arguments) == 0 else ["writes no manifest"]
    if program == "cat":  # a file of the run before it
        return []
    # A script, or a module with a command line of its own: its options are words of its source.
    file = REPOSITORY / program
    if not file.exists():
        spec = importlib.util.find_spec(program)
        if spec is None or spec.origin is None:
            return [f"there is no {program}"]
        file = Path(spec.origin.replace("__init__", "__main__"))
    sources = file.parent.glob("*.py") if file.name == "__main__.py" else [file]
    text = "".join(source.read_text() for source in sources)
    options = [word for word in arguments if word.startswith("-")]
    return [option for option in options if f'"{option}"' not in text]


@pytest.fixture
def where_a_reader_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository, with what the commands of a page leave for those after them."""
    for name in ("train_configs", "docs", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "outputs" / "llama3_debug").mkdir(parents=True)
    for name in ("tokenizer", "docs_tokens"):
        (tmp_path / "outputs" / name).symlink_to(REPOSITORY / "tests" / "assets" / "tokenizer")
    (tmp_path / "outputs" / "llama3_debug" / "config.toml").write_text(dump_toml(load([])))
    monkeypatch.chdir(tmp_path)


LINES = [pytest.param(line, id=f"{path_of(page)}: {line}") for page in PAGES for line in commands(page)]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.usefixtures("where_a_reader_is")
def test_a_command_names_what_there_is(line: str) -> None:
    """What it does is run in the slow tier, and by the tests of each program."""
    assert outcome_of(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "./run_train.sh --training.stepz 3",
        "NGPU=4 ./run_train.sh --parallelism.tensor_parallel_degree 3",
        "torchrun --nproc_per_node 2 -m torchtitan_graph.train --job.config_file llama3_debg.toml",
        "python -m torchtitan_graph.train --help trainin",
        "python -m torchtitan_graph.check llama3 --atn flex",
        "python -m torchtitan_graph.chek llama3",
        "python -m torchtitan_graph.pretokenize --dataset_pat docs",
        "python -m torchtitan_graph.launch --kubernetes jobst --image i --name n --volume-claim c",
    ],
)
@pytest.mark.usefixtures("where_a_reader_is")
def test_a_mistake_in_a_command_is_found(line: str) -> None:
    """Negative control."""
    try:
        found = outcome_of(line)
    except UserError as error:
        found = [str(error)]
    assert found


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{path_of(page)}: {target}"
        headings = (
            [
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            ]
            if anchor
            else []
        )
        assert not anchor or anchor in headings, f"{path_of(page)}: {target}"


def test_no_page_is_long() -> None:
    lines = {path_of(page): page.read_text().count("\n") for page in PAGES if page.name != "CHANGELOG.md"}
    assert {page: number for page, number in lines.items() if number > (150 if page == "README.md" else 250)} == {}


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_lines_fit_120_columns(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))] == []


def test_every_page_is_listed_and_the_sites_navigation_is_the_list() -> None:
    """By docs/README.md, or by the README of a folder that it lists."""
    home = REPOSITORY / "docs" / "README.md"
    readmes = [page for page in DOCS if page.name == "README.md"]
    listed = {page: re.findall(r"\]\(([\w/]+\.md)\)", page.read_text()) for page in readmes}
    assert sorted({home, *(page.parent / name for page in readmes for name in listed[page])}) == DOCS
    navigation = re.findall(r'"([\w/]+\.md)"', (REPOSITORY / "zensical.toml").read_text())
    assert navigation == ["README.md", *listed[home]]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "log"], ids=path_of)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text().split("## 0.1.0")[0]  # of CHANGELOG only the head: it names files of earlier releases
    names = re.findall(r"`(?!graphs/)((?:\w+/)+[a-z]\w*\.(?:py|sh|toml|slurm))`", text)
    places = (REPOSITORY, REPOSITORY / "torchtitan_graph")
    assert [name for name in names if not any((place / name).exists() for place in places)] == []


def python_of(page: Path) -> list[ast.Module]:
    return [
        ast.parse(block) for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=path_of)
def test_what_a_page_imports_is_there(page: Path) -> None:
    for tree in python_of(page):
        for line in (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))):
            exec(ast.unparse(line), {})


def test_the_page_of_the_api_names_what_is_public() -> None:
    """What it imports of `capture` is all of that."""
    (tree,) = python_of(REPOSITORY / "docs" / "reference" / "api.md")
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    named = sorted(each.name for node in lines if node.module == "torchtitan_graph.capture" for each in node.names)
    assert named == sorted(capture.__all__)


def test_the_tree_of_the_code_has_a_line_for_every_file() -> None:
    shown, folders = set(), [""]
    for page in (REPOSITORY / "docs" / "reference").glob("code*.md"):
        for line in page.read_text().split("```")[1].strip().splitlines():
            name = line.split()[0]
            del folders[(len(line) - len(line.lstrip())) // 2 + 1 :]
            if name.endswith("/"):
                folders.append(folders[-1] + name)
            elif name.endswith(".py"):
                shown.add(folders[-1] + name)
    there = {
        str(path.relative_to(REPOSITORY))
        for top in ("torchtitan_graph", "scripts")
        for path in (REPOSITORY / top).rglob("*.py")
        if not path.name.startswith("__")
    }
    assert shown == there


def worked_examples(page: Path) -> list[tuple[str, list[str]]]:
    """Return the dry runs of a page, and the lines that it shows of what each prints."""
    found = re.findall(
        r"^<!-- test: dry run -->\n```bash\n(.*?)^```\n\n(.*?)^(?=\S)", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [(line.replace("\\\n", ""), [x.strip() for x in shown.splitlines() if x.strip()]) for line, shown in found]


EXAMPLES = [example for page in DOCS for example in worked_examples(page)]


@pytest.mark.parametrize("line", [line for line, _ in EXAMPLES])
@pytest.mark.usefixtures("where_a_reader_is")
def test_a_worked_example_names_what_there_is(line: str) -> None:
    assert outcome_of(line) == []


@pytest.mark.slow
@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_a_worked_example_prints_what_the_page_shows(line: str, shown: list[str], tmp_path: Path) -> None:
    for name in ("run_train.sh", "train_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    code, output = Command("bash", "-euc", line, cwd=tmp_path).finish(550)
    assert code == 0, output
    assert shown and [x for x in shown if x not in output] == []
