"""The import rules of pyproject.toml hold, and would be seen to break."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    command = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run([sys.executable, "-c", command, *options], cwd=folder, capture_output=True, text=True)


def write_package(folder: Path, **imports: str) -> None:
    """Write an empty package with the layers' modules; `imports` gives some of them a line of code."""
    package = folder / "torchtitan_graph"
    for module in ("passes", "graph", "config", "models"):
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
    for module in ("__init__", "train", "translate", "log", "device", "passes/cleanup", "passes/shard_params"):
        (package / f"{module}.py").touch()
    for module, line in imports.items():
        (package / f"{module.replace('__', '/')}.py").write_text(line + "\n")


def test_the_package_keeps_its_layers() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_empty_package_of_that_shape_passes(tmp_path: Path) -> None:
    write_package(tmp_path)
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("log", "import torchtitan_graph.config", "imports go down only"),
        ("log", "import torchtitan_graph.device", "imports go down only"),
        ("graph__trace", "import torchtitan_graph.models", "imports go down only"),
        ("passes__cleanup", "import torchtitan_graph.models", "imports go down only"),
        ("passes__cleanup", "import torchtitan_graph.passes.shard_params", "passes never import each other"),
        ("passes__cleanup", "import torchtitan_graph.config", "passes never read the job config"),
        ("utils", "", "imports go down only"),
    ],
)
def test_a_forbidden_import_or_an_unknown_module_is_found(tmp_path: Path, module: str, line: str, broken: str) -> None:
    write_package(tmp_path, **{module: line})
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert broken in result.stdout
