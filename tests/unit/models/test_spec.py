"""Finding a family and building its model: by name, with errors that say what to do."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import CONTRACT, build_model, family_names, load_family


def test_every_family_of_the_package_loads_and_builds_on_meta() -> None:
    assert "llama3" in family_names()
    for name in family_names():
        family = load_family(name)
        assert all(hasattr(family, attribute) for attribute in CONTRACT)
        model = build_model(name, "debugmodel", "sdpa", tokenizer_vocab_size=300)
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_debug_models_vocabulary_is_the_tokenizers() -> None:
    assert build_model("llama3", "debugmodel", "sdpa", 123).tok_embeddings.num_embeddings == 123


@pytest.mark.parametrize(
    ("name", "hint"), [("lama3", "did you mean llama3?"), ("spec", "legal are"), ("layers", "legal are")]
)
def test_an_unknown_family_is_refused_naming_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"^model.name = '{name}': legal are .*llama3") as error:
        load_family(name)
    assert hint in str(error.value)


@pytest.mark.parametrize(("flavor", "hint"), [("7B", "3B, 8B, 70B"), ("405b", "did you mean 405B?")])
def test_an_unknown_flavour_is_refused_naming_the_nearest(flavor: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"^model.flavor = '{flavor}': legal for llama3 are debugmodel, 1B") as error:
        build_model("llama3", flavor, "sdpa", 100)
    assert hint in str(error.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.flavor = '8B' has 128256 rows .* 128257 tokens: take"):
        build_model("llama3", "8B", "sdpa", 128257)
    build_model("llama3", "8B", "sdpa", 128256)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("their_package"):
            del sys.modules[name]


def test_a_dotted_name_is_a_module_of_the_users_own(package: Path) -> None:
    (package / "their_package").mkdir()
    (package / "their_package" / "model.py").write_text("from torchtitan_graph.models.llama3 import *\n")
    family = load_family("their_package.model")
    assert family.__name__ == "their_package.model"
    assert build_model("their_package.model", "debugmodel", "sdpa", 50).tok_embeddings.num_embeddings == 50


def test_a_module_without_the_contract_is_refused_naming_what_it_lacks(package: Path) -> None:
    (package / "their_package").mkdir()
    (package / "their_package" / "model.py").write_text("FLAVORS = {}\nPLAN = {}\n")
    with pytest.raises(UserError, match="'their_package.model': the module defines no Model, HF_KEYS"):
        load_family("their_package.model")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("FLAVORS = ['debugmodel']", "FLAVORS is a list: must be a dict of configurations by name, with at least one"),
        ("FLAVORS = {}", "FLAVORS is a dict: must be a dict of configurations by name, with at least one"),
        ("FLAVORS = {'8B': Config}", r"FLAVORS\['8B'\] is the class Config: must be an object of a frozen dataclass"),
        ("FLAVORS = {'8B': {'dim': 8}}", r"FLAVORS\['8B'\] is a dict: must be an object of a frozen dataclass"),
        ("FLAVORS = {'8B': Short(8)}", r"FLAVORS\['8B'\] has no num_layers, num_heads, vocab_size, tied, norm_eps"),
        ("Model = nn.Linear", "Model is the class Linear: must be a class derived from .*decoder.Decoder"),
        ("Model = lambda config, attn: None", "Model is a function: must be a class derived from"),
        ("class Model(Decoder): pass", r"Model defines no rope\(positions_BL\)"),
        (
            "Model.__init__ = lambda self, config: None",
            r"Model\(config\) must be built by Model\(config, attn\): too many",
        ),
        ("PLAN = None", "PLAN is a NoneType: must be a dict of patterns of names, to a role by axis"),
        ("HF_KEYS = []", "HF_KEYS is a list: must be a dict of our parameters' names"),
        ("HF_KEYS = {'a': 1}", "HF_KEYS is a dict: must be a dict of our parameters' names"),
    ],
)
def test_a_module_with_something_else_is_refused_naming_it(line: str, words: str, package: Path) -> None:
    (package / "their_package").mkdir()
    text = """
import dataclasses
from torch import nn
from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.llama3 import FLAVORS, HF_KEYS, PLAN, Config

class Model(llama3.Model): pass

@dataclasses.dataclass(frozen=True)
class Short:
    dim: int
"""
    (package / "their_package" / "model.py").write_text(f"{text}\n{line}\n")
    with pytest.raises(UserError, match=f"^model.name = 'their_package.model': {words}.*; see models/llama3.py$"):
        load_family("their_package.model")


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"there is no module 'their_package' to import; is it on PYTHONPATH\?"):
        load_family("their_package.model")


def test_an_import_that_fails_inside_the_users_module_is_one_error(package: Path) -> None:
    (package / "their_package").mkdir()
    (package / "their_package" / "model.py").write_text("import not_installed_anywhere\n")
    message = (
        "model.name = 'their_package.model': their_package.model can't be imported: No .* 'not_installed_anywhere'"
    )
    with pytest.raises(UserError, match=message):
        load_family("their_package.model")
