"""Hugging Face -> here -> Hugging Face loses nothing, for every family; transformers reads the same model."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pool import run_on
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import from_hf, load_weights, save_weights, to_hf
from torchtitan_graph.models.hf.architecture import is_of
from torchtitan_graph.models.hf.places import live_tensors
from torchtitan_graph.models.spec import HF_CONTRACT, family_names, load_family, tiny_config
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import parallelize
from torchtitan_graph.parallel.storage import Precision, materialize, plan_storage

FLAVORS = [(name, flavor) for name in family_names() for flavor in load_family(name).FLAVORS]
DEBUG = [(name, flavor) for name, flavor in FLAVORS if flavor.startswith("debugmodel") and name != "transformers"]


def tiny(name: str, flavor: str, **changes: object) -> nn.Module:
    return filled(built(name, flavor, "cpu", **changes))


def built(name: str, flavor: str, device: str, **changes: object) -> nn.Module:
    family = load_family(name)
    changes |= {"vocab_size": 64, "ffn_dim": 128, "moe_ffn_dim": 32}  # transformers' experts want multiples of 16 bytes
    with torch.device(device):
        return family.Model(tiny_config(family.FLAVORS[flavor], **changes))


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in live_tensors(model).items():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05 + ("norm" in name))
    return model


def tensors_in(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def logits_of_transformers(path: Path, tokens: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return theirs(input_ids=tokens).logits


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


TOKENS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", family_names())
def test_a_family_defines_what_is_needed_for_hugging_face(name: str) -> None:
    assert all(hasattr(load_family(name), attribute) for attribute in HF_CONTRACT)


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_a_flavour_survives_its_config_json(name: str, flavor: str) -> None:
    family: ModuleType = load_family(name)
    written = json.loads(json.dumps(family.to_hf_config(family.FLAVORS[flavor])))
    assert family.from_hf_config(written) == family.FLAVORS[flavor]
    assert is_of(family, written)


@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_what_is_written_is_read_again_and_written_again(name: str, flavor: str, tmp_path: Path) -> None:
    model = tiny(name, flavor)
    to_hf(model, tmp_path / "first")
    again = from_hf(tmp_path / "first")
    assert_same(live_tensors(again), live_tensors(model))
    to_hf(again, tmp_path / "second")
    assert_same(tensors_in(tmp_path / "second"), tensors_in(tmp_path / "first"))
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "second" / "config.json").read_text()


@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_transformers_reads_the_same_model(name: str, flavor: str, tmp_path: Path) -> None:
    model = tiny(name, flavor)
    to_hf(model, tmp_path / "hf")
    with torch.no_grad():
        assert gap(model(TOKENS), logits_of_transformers(tmp_path / "hf", TOKENS)) < 1e-5


@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_what_transformers_writes_is_read(name: str, flavor: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    to_hf(tiny(name, flavor), tmp_path / "ours")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert_same(live_tensors(from_hf(tmp_path / "theirs")), live_tensors(from_hf(tmp_path / "ours")))


def pass_through(name: str, flavor: str, folder: Path, out: Path) -> None:
    """Read into the graph trainer's layout at FSDP 2 x TP 2, and write again."""
    family, layout = load_family(name), ParallelDims(dp_shard=2, tp=2).layout("cpu")
    model = built(name, flavor, "meta")
    parallelize(model, family.PLAN, layout, loss_parallel=True)
    materialize(model, plan_storage(model, layout, Precision()), torch.device("cpu"))
    load_weights(model, family, folder)
    save_weights(model, family, out)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flavor"), DEBUG)
def test_a_layout_changes_nothing(name: str, flavor: str, tmp_path: Path) -> None:
    to_hf(tiny(name, flavor), tmp_path / "first")
    run_on(4, pass_through, name, flavor, tmp_path / "first", tmp_path / "second")
    assert_same(tensors_in(tmp_path / "second"), tensors_in(tmp_path / "first"))


def test_a_changed_number_is_seen(tmp_path: Path) -> None:
    model = tiny("llama3", "debugmodel")
    to_hf(model, tmp_path / "hf")
    with torch.no_grad():
        model.layers[1].attention.wk.weight[0, 0] += 1.0
        assert gap(model(TOKENS), logits_of_transformers(tmp_path / "hf", TOKENS)) > 1e-4


@pytest.mark.parametrize("file_bytes", [20_000, 100_000])
def test_a_model_larger_than_a_file_is_cut(file_bytes: int, tmp_path: Path) -> None:
    model = tiny("llama3", "debugmodel")
    save_weights(model, load_family("llama3"), tmp_path / "hf", file_bytes=file_bytes)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, content in files.items() for name in content}
    sizes = [sum(x.nbytes for x in content.values()) for content in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= file_bytes or len(content) == 1 for size, content in zip(sizes, files.values(), strict=True))
    assert_same(live_tensors(from_hf(tmp_path / "hf")), live_tensors(model))
    with torch.no_grad():
        assert gap(model(TOKENS), logits_of_transformers(tmp_path / "hf", TOKENS)) < 1e-5


def test_a_tied_output_is_not_stored(tmp_path: Path) -> None:
    model = tiny("llama3", "debugmodel", tied=True)
    to_hf(model, tmp_path / "hf")
    assert "lm_head.weight" not in tensors_in(tmp_path / "hf")
    again = from_hf(tmp_path / "hf")
    assert again.output.weight is again.tok_embeddings.weight
    with torch.no_grad():
        assert gap(again(TOKENS), logits_of_transformers(tmp_path / "hf", TOKENS)) < 1e-5


def test_the_dtype_is_chosen_on_both_ways(tmp_path: Path) -> None:
    model = tiny("llama3", "debugmodel")
    to_hf(model, tmp_path / "hf", torch.bfloat16)
    assert {x.dtype for x in tensors_in(tmp_path / "hf").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = {name: x.bfloat16() for name, x in live_tensors(model).items()}
    assert_same(live_tensors(from_hf(tmp_path / "hf", torch.bfloat16)), rounded)
    assert_same(live_tensors(from_hf(tmp_path / "hf")), {name: x.float() for name, x in rounded.items()})


def test_the_tokenizer_and_its_numbers_are_taken_over(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "tokenizer.json").write_text("{}")
    (assets / "config.json").write_text('{"eos_token_id": 7, "hidden_size": 3}')
    to_hf(tiny("llama3", "debugmodel"), tmp_path / "hf", assets=assets)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["eos_token_id"], written["hidden_size"]) == (7, 64)
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_a_family_that_can_not_be_written_is_refused_before_a_file_is(tmp_path: Path) -> None:
    family: Any = SimpleNamespace(__name__="my_pkg.my_model", HF_KEYS=load_family("llama3").HF_KEYS)
    with pytest.raises(UserError, match="my_pkg.my_model defines no to_hf_config"):
        save_weights(tiny("llama3", "debugmodel"), family, tmp_path / "hf")
    assert not list(tmp_path.iterdir())
