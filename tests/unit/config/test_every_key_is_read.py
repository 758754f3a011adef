"""Every option does something: a module reads it.

Reads are found in the syntax trees of the package outside config/: an attribute chain that ends in `.table.key`, or
`name.key` where `name` (also `self.name`) was annotated with the table's class or assigned from `.table`.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import torchtitan_graph
from torchtitan_graph.config.job import OPTIONS, JobConfig
from torchtitan_graph.config.option import options

PACKAGE = Path(torchtitan_graph.__file__).parent
# In config/: by load(), which finds the other options in it, by shard_degree(), which infers it, by source_name(), by
# validation_metrics(), by check_beginning().
READ_HERE = {
    "job.config_file",
    "model.random_base",
    "parallelism.data_parallel_shard_degree",
    "training.sources.name",
    "validation.sets.name",
}


# The keys of an entry of an array of tables count as well, as optimizer.param_groups.lr.
KEYS = [*OPTIONS, *(f"{key}.{name}" for key, option in OPTIONS.items() if option.row for name in options(option.row))]


def table_classes() -> dict[str, list[str]]:
    """Return which tables each class of the schema describes, as DataLoader does two."""
    classes: dict[str, list[str]] = {}
    for table in sorted({key.rpartition(".")[0] for key in OPTIONS}):
        kind: type = JobConfig
        path = ""
        for part in table.split("."):
            kind, path = get_type_hints(kind)[part], f"{path}.{part}".lstrip(".")
            if path not in classes.setdefault(kind.__name__, []):
                classes[kind.__name__].append(path)
    return classes | {option.row.__name__: [key] for key, option in OPTIONS.items() if option.row}


CLASSES = table_classes()
TABLES = sorted({table for tables in CLASSES.values() for table in tables})


def keys_read(source: str) -> set[str]:
    """Return the keys that a module's source reads."""
    tree = ast.parse(source)
    bound: dict[str, set[str]] = {}
    while True:  # until no more names turn out to hold tables
        before = sum(map(len, bound.values()))
        for name, tables in bindings(tree, bound):
            bound.setdefault(name, set()).update(tables)
        if sum(map(len, bound.values())) == before:
            break
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read |= {f"{table}.{node.attr.removesuffix('_')}" for table in tables_of(node.value, bound)}
    return read & set(KEYS)


def bindings(tree: ast.AST, bound: dict[str, set[str]]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield names of variables, parameters and attributes together with the tables they hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, annotated(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            yield tail(node.target), annotated(node.annotation)
        elif isinstance(node, (ast.For, ast.comprehension)):  # over the entries of an array of tables
            entries = {table for part in ast.walk(node.iter) for table in tables_of(part, bound)}
            for part in ast.walk(node.target):
                yield tail(part), entries & OPTIONS.keys()
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(targets)
                for one, value in zip(targets, values, strict=False):
                    yield tail(one), tables_of(value, bound)


def tables_of(node: ast.AST, bound: dict[str, set[str]]) -> set[str]:
    """Return the tables that an expression may hold."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, set())
    if not isinstance(node, ast.Attribute):
        return set()
    inner = {f"{table}.{node.attr}" for table in tables_of(node.value, bound)} & set(TABLES)
    outer = {node.attr} & set(TABLES) if tail(node.value) in ("config", "job_config") else set()
    return inner | outer | (bound.get(node.attr, set()) if tail(node.value) == "self" else set())


def annotated(node: ast.AST) -> list[str]:
    names = {tail(part) for part in ast.walk(node)}
    return [table for name in names for table in CLASSES.get(name, [])]


def tail(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def readers() -> dict[str, list[str]]:
    """Return the modules that read each key, outside config/."""
    found: dict[str, list[str]] = {key: [] for key in KEYS}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in ("config", "translate.py"):
            for key in keys_read(path.read_text(encoding="utf-8")):
                found[key].append(str(path.relative_to(PACKAGE)))
    return found


READERS = readers()


def test_every_key_is_read() -> None:
    unread = [key for key in KEYS if not READERS[key] and key not in READ_HERE]
    assert not unread, f"nothing reads {unread}: an option that does nothing is not an option"


@pytest.mark.parametrize(
    "source",
    [
        "steps = config.training.steps",
        "steps = self.config.training.steps",
        "def f(t: Training): return t.steps",
        "def f(t: job.Training | None): return t.steps",
        "training = config.training\nprint(training.steps)",
        "a, b = config.model, config.training\nprint(b.steps)",
        "class A:\n def __init__(self, config: job.Training): self.t = config\n def f(self): return self.t.steps",
    ],
)
def test_the_search_finds_a_read(source: str) -> None:
    assert keys_read(source) == {"training.steps"}


def test_the_search_finds_reads_of_entries() -> None:
    source = (
        "def f(all: Sequence[job.DataSource]):\n for i, one in enumerate(all): one.weight\n [x.dataset for x in all]"
    )
    assert keys_read(source) == {"training.sources.weight", "training.sources.dataset"}
    assert keys_read("for one in all: one.weight") == set()


@pytest.mark.parametrize(
    "source",
    [
        "steps = other.training.steps",
        "config.training.steps = 3",
        "# config.training.steps",
        "'config.training.steps'",
        "def f(t: Validation): return t.dataset_name",
        "config.training.stepz",
    ],
)
def test_the_search_finds_nothing_where_nothing_is_read(source: str) -> None:
    assert keys_read(source) == set()
