"""Weights as DeepSeek (fp8 blocks) and gpt_oss (MXFP4) publish them, in small files of that layout."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import from_hf, load_weights, to_hf
from torchtitan_graph.models.hf.files import Folder
from torchtitan_graph.models.hf.quantized import DequantizedFolder, dequantize_mxfp4
from torchtitan_graph.models.hf.read import check_weights
from torchtitan_graph.models.layers.stored import Stored
from torchtitan_graph.models.spec import load_family, tiny_config

ROWS, COLUMNS = 200, 300  # neither is a multiple of 128
E, GROUPS, FFN = 3, 2, 5  # MXFP4: (E, 2 * FFN, GROUPS * 32)


def fp8_file() -> tuple[dict[str, Tensor], Tensor]:
    """Make a matrix in fp8 and its scales, and say by hand, block by block, what they stand for."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) + 0.5
    whole = weight.float()
    for i in range(2):
        for j in range(3):
            whole[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scales[i, j]
    return {"proj.weight": weight, "proj.weight_scale_inv": scales}, whole


def mxfp4_file() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (E, 2 * FFN, GROUPS, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 136, (E, 2 * FFN, GROUPS), generator=generator, dtype=torch.uint8)
    return {"gate_up_blocks": blocks, "gate_up_scales": scales}


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.zeros(ROWS, COLUMNS))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(E, GROUPS * 32, FFN))
        self.w3 = nn.Parameter(torch.zeros(E, FFN, GROUPS * 32))


def family() -> ModuleType:
    module = ModuleType("toy")
    w1 = Stored("gate_up", part=(0, 2), interleaved=True)
    w3 = Stored("gate_up", part=(1, 2), interleaved=True, transpose=True)
    module.__dict__["HF_KEYS"] = {"proj": "proj.weight", "w1": w1, "w3": w3}
    return module


def test_fp8_blocks_are_numbers_again(tmp_path: Path) -> None:
    content, expected = fp8_file()
    save_file(content, tmp_path / "model.safetensors")
    model = Matrix()
    load_weights(model, family(), tmp_path, quantized=True)
    assert torch.equal(model.proj, expected)


@pytest.mark.parametrize("ranges", [((0, 200), (0, 300)), ((100, 150), (120, 260)), ((129, 129), (0, 300))])
def test_a_part_of_an_fp8_matrix_is_that_part_of_the_whole(ranges: tuple, tmp_path: Path) -> None:
    content, expected = fp8_file()
    save_file(content, tmp_path / "model.safetensors")
    found = DequantizedFolder(Folder(tmp_path)).read("proj.weight", ranges)
    assert torch.equal(found, expected[slice(*ranges[0]), slice(*ranges[1])])


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    content = mxfp4_file()
    blocks, scales = content["gate_up_blocks"], content["gate_up_scales"]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales), theirs)


def test_mxfp4_experts_are_numbers_again(tmp_path: Path) -> None:
    content = mxfp4_file()
    save_file(content, tmp_path / "model.safetensors")
    model = Experts()
    load_weights(model, family(), tmp_path, quantized=True)
    whole = dequantize_mxfp4(content["gate_up_blocks"], content["gate_up_scales"])
    assert torch.equal(model.w1, whole[..., ::2]) and torch.equal(model.w3, whole[..., 1::2].mT)


@pytest.mark.parametrize("ranges", [((0, 3), (0, 64), (0, 10)), ((1, 2), (20, 40), (3, 7)), ((0, 3), (32, 64), (0, 1))])
def test_a_part_of_mxfp4_experts_is_that_part_of_the_whole(ranges: tuple, tmp_path: Path) -> None:
    content = mxfp4_file()
    save_file(content, tmp_path / "model.safetensors")
    found = DequantizedFolder(Folder(tmp_path)).read("gate_up", ranges)
    whole = dequantize_mxfp4(content["gate_up_blocks"], content["gate_up_scales"])
    assert torch.equal(found, whole[tuple(slice(*r) for r in ranges)])


@pytest.mark.parametrize(("model", "content"), [(Matrix, fp8_file()[0]), (Experts, mxfp4_file())])
def test_quantized_files_are_refused_unless_that_was_asked_for(model: type, content: dict, tmp_path: Path) -> None:
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is quantized \(1 tensors.*initial_load_in_hf_quantized = true"):
        load_weights(model(), family(), tmp_path)


def test_plain_files_are_read_also_where_quantized_ones_are_allowed(tmp_path: Path) -> None:
    save_file({"proj.weight": torch.ones(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    model = Matrix()
    load_weights(model, family(), tmp_path, quantized=True)
    assert model.proj.min() == 1.0


@pytest.mark.parametrize(
    ("key", "value", "is_read"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, False),
        ("quantization_config", {"load_in_4bit": True}, False),
        ("quantization_config", {"quant_method": ["fp8"]}, False),
        ("quantization_config", "awq", False),
        ("compression_config", {"quant_method": "compressed-tensors"}, False),
        ("quantization_config", {"quant_method": "fp8"}, True),
        ("quantization_config", {}, True),
        ("quantization_config", None, True),
    ],
)
def test_a_quantization_that_is_not_read_is_refused_by_name(
    key: str, value: object, is_read: bool, tmp_path: Path
) -> None:
    """Also where the tensors have the names and the dtype of plain ones."""
    save_file({"proj.weight": torch.ones(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: value}))
    model = Matrix()
    if is_read:
        load_weights(model, family(), tmp_path)
        return
    with pytest.raises(UserError, match=rf"config.json: {key} has the quant_method .*; fp8, mxfp4 are"):
        check_weights(model, family(), tmp_path, quantized=True)


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    content, _ = fp8_file()
    content["proj.weight_scale_inv"] = torch.ones(4, 5)
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"proj.weight of shape \[200, 300\] .* has scales of shape \[4, 5\]"):
        load_weights(Matrix(), family(), tmp_path, quantized=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_up_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8)},
        {"gate_up_scales": torch.zeros(2, 3, dtype=torch.uint8)},
        {"gate_up_scales": torch.zeros(1, dtype=torch.uint8)},
        {"gate_up_blocks": mxfp4_file()["gate_up_blocks"].float()},
    ],
)
def test_mxfp4_of_another_form_is_refused(changes: dict, tmp_path: Path) -> None:
    save_file(mxfp4_file() | changes, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_up of shape \[.*\] .* has scales of shape \["):
        load_weights(Experts(), family(), tmp_path, quantized=True)


@pytest.mark.parametrize("name", ["proj.weight_scale_inv", "gate_up_scales"])
def test_a_lost_scale_is_not_overlooked(name: str, tmp_path: Path) -> None:
    content = fp8_file()[0] if name.startswith("proj") else mxfp4_file()
    del content[name]
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="proj.weight: F8_E4M3, quantized in a way|missing: gate_up"):
        load_weights(Matrix() if name.startswith("proj") else Experts(), family(), tmp_path, quantized=True)


# --- whole models, as they are published ------------------------------------------------------------------------------


def write(folder: Path, name: str, flavor: str = "debugmodel", **changes: object) -> dict[str, Tensor]:
    """Write a tiny model, and give its tensors, to be written again in the form of the releases."""
    family = load_family(name)
    model = family.Model(tiny_config(family.FLAVORS[flavor], vocab_size=64, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    to_hf(model, folder)
    return load_file(folder / "model.safetensors")


def test_a_small_deepseek_in_fp8_with_its_prediction_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write(tmp_path / "hf", "deepseek_v3", ffn_dim=150)
    stored, expected = {"model.layers.3.enorm.weight": torch.ones(4)}, {}
    for name, x in plain.items():
        if not name.endswith("proj.weight") or x.dim() != 2:  # embedding, output, gate, norms: as they are
            stored[name] = expected[name] = x
            continue
        small = x.to(torch.float8_e4m3fn)
        scales = torch.rand(-(-x.shape[0] // 128), -(-x.shape[1] // 128)) + 0.5
        stored |= {name: small, f"{name}_scale_inv": scales}
        blocks = scales.repeat_interleave(128, 0)[: x.shape[0]].repeat_interleave(128, 1)[:, : x.shape[1]]
        expected[name] = small.float() * blocks
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    with caplog.at_level("INFO"):
        to_hf(from_hf(tmp_path / "hf", quantized=True), tmp_path / "again")
    assert "1 tensors are no part of this model, such as model.layers.3.enorm.weight" in caplog.text
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), expected)


def test_a_small_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    plain = write(tmp_path / "hf", "gpt_oss", ffn_dim=64)
    stored, expected = {}, {}
    for name, x in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = expected[name] = x
            continue
        shape = (x.shape[0], x.shape[2], x.shape[1] // 32)
        stored[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8)
        expected[name] = dequantize_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"]).contiguous()
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    to_hf(from_hf(tmp_path / "hf", quantized=True), tmp_path / "again")
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), expected)


def test_a_small_llama4_beside_its_vision_tower(tmp_path: Path) -> None:
    plain = write(tmp_path / "hf", "llama4")
    stored = {f"language_model.{name}": x for name, x in plain.items()}
    stored |= {
        "vision_model.layernorm_pre.weight": torch.ones(4),
        "multi_modal_projector.linear_1.weight": torch.ones(4),
    }
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    to_hf(from_hf(tmp_path / "hf"), tmp_path / "again")
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), plain)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
