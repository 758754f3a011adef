"""The import rules of pyproject.toml hold, private torch names have their owner, and a break would be seen."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNER_OF_PRIVATE_NAMES = "torch_private/"
# Private in name only: both are in wide use, and torch's public interfaces hand them out.
NOT_REALLY_PRIVATE = ("torch._ops", "torch.utils._pytree")


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    command = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run([sys.executable, "-c", command, *options], cwd=folder, capture_output=True, text=True)


def write_package(folder: Path, **imports: str) -> None:
    """Write a package of empty modules named as the real one's; `imports` gives some of them a line of code."""
    package = folder / "torchtitan_graph"
    package.mkdir()
    for path in (ROOT / "torchtitan_graph").iterdir():
        if path.suffix == ".py":
            (package / path.name).touch()
        elif (path / "__init__.py").exists():
            (package / path.name).mkdir()
            (package / path.name / "__init__.py").touch()
    for module in ("cleanup", "shard_params"):
        (package / "passes" / f"{module}.py").touch()
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
        ("graph__edit", "import torchtitan_graph.capture", "imports go down only"),
        ("capture__trace", "import torchtitan_graph.models", "imports go down only"),
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


def private_torch_names(code: str) -> set[str]:
    """Return the names with a leading underscore that `code` takes from torch's modules (operators not counted)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    allowed = ("torch.ops.", *NOT_REALLY_PRIVATE)
    return {
        name for name in names if re.match(r"torch\.([\w.]+\.)?_(?!_)[\w.]+$", name) and not name.startswith(allowed)
    }


def test_private_torch_names_stay_with_their_owner() -> None:
    package = ROOT / "torchtitan_graph"
    files = {str(path.relative_to(package)): private_torch_names(path.read_text()) for path in package.rglob("*.py")}
    assert {name: found for name, found in files.items() if found and not name.startswith(OWNER_OF_PRIVATE_NAMES)} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._guards", {"torch._guards"}),
        ("from torch._guards import tracing", {"torch._guards.tracing"}),
        ("from torch.distributed.tensor import _x", {"torch.distributed.tensor._x"}),
        ("import torch\ntorch.distributed._x()", {"torch.distributed._x"}),
        ("import torch\ntorch.ops._c10d_functional.all_reduce\ntorch.zeros(1)._x", set()),
    ],
)
def test_a_private_torch_name_is_found(code: str, found: set[str]) -> None:
    assert private_torch_names(code) == found


AXES = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "fsdp", "efsdp"}


def axes_named_in(source: str) -> list[str]:
    return [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and n.value in AXES]


def test_axes_of_the_mesh_are_named_in_one_file_and_in_the_plans_of_models() -> None:
    package = ROOT / "torchtitan_graph"
    others = (package / "parallel/layout.py", package / "config/support.py")  # the second has values of torchtitan's
    files = [p for p in package.rglob("*.py") if p not in others and package / "models" not in p.parents]
    assert {
        str(path.relative_to(package)): axes_named_in(path.read_text())
        for path in files
        if axes_named_in(path.read_text())
    } == {}


def test_an_axis_named_elsewhere_is_seen() -> None:
    assert axes_named_in("group = mesh.get_group('dp_shard')  # tp") == ["dp_shard"]
