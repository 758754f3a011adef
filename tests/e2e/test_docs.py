"""The documentation is true: its commands run, its links lead somewhere, README's tree is the tree."""

import re
from pathlib import Path

import pytest
from runs import REPOSITORY, Command

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Appended to every command that trains, so that it takes seconds; what the page shows is run, but for its size.
FEWER = "--training.steps 2 --training.seq_len 64 --validation.seq_len 64 --training.local_batch_size 2"
FEWER += " --validation.local_batch_size 2 --validation.steps 1 --model.name my_models.tiny"


def commands(page: Path) -> list[str]:
    """Return the lines of all blocks marked `bash run`."""
    blocks = re.findall(r"^```bash run\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


@pytest.mark.timeout(600)  # a dozen processes, one after another
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name}: {target}"
        headings = (
            [
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            ]
            if anchor
            else []
        )
        assert not anchor or anchor in headings, f"{page.name}: {target}"


def test_readme_links_every_page() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    order = [readme.find(f"](docs/{page.name})", readme.index("## Documentation")) for page in PAGES[2:]]
    assert -1 not in order
    assert order == sorted(order)


def test_readme_tree_has_a_line_for_every_file() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    tree = readme[readme.index("## The code") :].split("```")[1]
    shown, folders = set(), [""]
    for line in tree.strip().splitlines():
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
