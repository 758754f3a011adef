"""Adapters in PEFT's files: PEFT loads ours and computes the same, and we load PEFT's."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import (
    allocate,
    check_adapter,
    check_exportable,
    load_adapter,
    load_weights,
    save_adapter,
    save_weights,
)
from torchtitan_graph.models.hf.peft import adapter_places
from torchtitan_graph.models.layers.adapt import add_adapters
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.layers.lora import adapter_parameters, adapters_of, num_elements
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.ops.packed import pack, unpack

TOKENS = torch.arange(24).view(2, 12) % 64


def with_adapters(name: str, flavor: str = "debugmodel", **options: object) -> tuple[ModuleType, Decoder]:
    """Return a tiny model whose adapters do something."""
    family = load_family(name)
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS[flavor], vocab_size=64, ffn_dim=96), "sdpa")
    add_adapters(model, family, job.Lora(**{"rank": 4, "alpha": 6.0, **options}))  # type: ignore[arg-type]
    allocate(model, torch.float32)
    initialize(model, 0)
    set_adapters(model, 0.1)
    return family, model


def set_adapters(model: nn.Module, std: float) -> None:
    torch.manual_seed(0)
    for name in sorted(adapter_parameters(model)):
        nn.init.normal_(model.get_parameter(name), std=std)


def base_of(family: ModuleType, model: Decoder, path: Path) -> Path:
    """Write the model without what its adapters do."""
    kept = {name: model.get_parameter(name).detach().clone() for name in adapter_parameters(model)}
    set_adapters(model, 0.0)
    save_weights(model, family, path)
    with torch.no_grad():
        for name, value in kept.items():
            model.get_parameter(name).copy_(value)
    return path


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    logits.logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def are_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {"rslora": True, "targets": ["*.wq", "layers.[01].feed_forward"]}),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("transformers", {}),
    ],
)
def test_peft_computes_the_same_with_our_files(name: str, options: dict[str, object], tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    family, model = with_adapters(name, **options)
    save_adapter(model, family, tmp_path / "adapter")
    base = base_of(family, model, tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", is_trainable=True
    )
    ours, found = model(TOKENS), theirs(TOKENS).logits
    assert are_close(ours, found)
    mine, of_peft = gradients(model, ours), gradients(theirs, found)
    assert len(mine) == len(of_peft) == 2 * len(adapters_of(model))
    for place in adapter_places(model, family):
        assert are_close(mine[place.ours], of_peft[place.stored.name.replace(".weight", ".default.weight")]), place.ours
    save_weights(model, family, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert are_close(merged(TOKENS).logits, ours) and not are_close(merged(TOKENS + 1).logits, ours)

    # And back: what PEFT writes, into a model with other adapters.
    theirs.save_pretrained(tmp_path / "of_peft")
    set_adapters(model, 0.3)
    assert not are_close(model(TOKENS), ours)
    check_adapter(model, family, tmp_path / "of_peft")
    load_adapter(model, family, tmp_path / "of_peft")
    assert torch.equal(model(TOKENS), ours)


@pytest.mark.parametrize(("name", "flavor"), [("qwen3", "debugmodel_moe"), ("deepseek_v3", "debugmodel")])
def test_experts_are_a_module_each_and_come_back(name: str, flavor: str, tmp_path: Path) -> None:
    family, model = with_adapters(name, flavor)
    save_adapter(model, family, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    stack = next(name for name in adapter_parameters(model) if name.endswith("experts.w2_lora_B"))
    layer = stack.split(".")[1]
    one = tensors[f"base_model.model.model.layers.{layer}.mlp.experts.3.down_proj.lora_B.weight"]
    assert torch.equal(one, model.get_parameter(stack)[3])
    before = model(TOKENS)
    set_adapters(model, 0.3)
    load_adapter(model, family, tmp_path / "adapter")
    assert torch.equal(model(TOKENS), before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")  # PEFT's and transformers' own
@pytest.mark.parametrize("targets", [["*.attention", "*.experts"], ["*"]])
def test_adapters_that_peft_ignores_are_warned_of(
    targets: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts are one tensor in transformers 5; deepseek_v3's shared experts have layers of the same names."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers", "5")
    family, model = with_adapters("deepseek_v3", targets=targets)
    check_exportable(model, family)
    warnings = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
    is_warned = any("layers.0.feed_forward.w1, " in x and "PEFT with transformers 5" in x for x in warnings)
    assert is_warned == bool(warnings) == (targets == ["*"])
    save_adapter(model, family, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        base_of(family, model, tmp_path / "base"), experts_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert are_close(model(TOKENS), theirs(TOKENS).logits) != is_warned


def test_base_weights_load_as_without_adapters_and_merged_ones_compute_the_same(tmp_path: Path) -> None:
    for name, flavor in (("llama3", "debugmodel"), ("gpt_oss", "debugmodel"), ("llama4", "debugmodel")):
        family, model = with_adapters(name, flavor)
        before = {n: p.clone() for n, p in model.named_parameters()}
        base = base_of(family, model, tmp_path / name)
        load_weights(model, family, base)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        logits = model(TOKENS)
        save_weights(model, family, tmp_path / f"{name} merged")
        set_adapters(model, 0.0)
        load_weights(model, family, tmp_path / f"{name} merged")
        assert are_close(model(TOKENS), logits), name


def test_what_is_no_linear_layer_there_is_refused_by_name() -> None:
    family, model = with_adapters("gpt_oss")
    with pytest.raises(UserError, match=r"experts.w1 has an adapter, but is a part of .*gate_up_proj"):
        check_exportable(model, family)
    check_exportable(*reversed(with_adapters("gpt_oss", targets=["*.attention"])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True: not done here"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]: not done here"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"a_new_key": 3}, "a_new_key = 3"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"r": 8}, r"r = 8, but model.lora.rank = 4; set \[model.lora\] as the adapter has it"),
        ({"lora_alpha": 4}, "lora_alpha = 4, but model.lora.alpha = 6.0"),
        ({"use_rslora": True}, "use_rslora = True, but model.lora.rslora = False"),
    ],
)
def test_another_adapter_is_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    family, model = with_adapters("llama3", targets=["layers.0.attention.wq"])
    save_adapter(model, family, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    check_adapter(model, family, tmp_path / "a")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        check_adapter(model, family, tmp_path / "a")


def test_other_layers_and_shapes_are_listed_and_pickles_refused(tmp_path: Path) -> None:
    family, model = with_adapters("llama3", targets=["layers.0.attention.wq"])
    save_adapter(model, family, tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(weights)
    wq, wk = (f"base_model.model.model.layers.0.self_attn.{x}_proj.lora_A.weight" for x in "qk")
    save_file({**tensors, wk: tensors[wq], wq: torch.ones(4, 3)}, weights)
    with pytest.raises(UserError, match=rf"unknown: {wk}\n.*{wq}: shape \[4, 3\], but here \[4, 64\]"):
        check_adapter(model, family, tmp_path / "a")
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        check_adapter(model, family, tmp_path / "a")


@pytest.mark.parametrize("packing", ["nf4", "float8"])
@pytest.mark.parametrize(("name", "flavor"), [("llama3", "debugmodel"), ("qwen3", "debugmodel_moe")])
def test_packed_weights_compute_what_they_stand_for(name: str, flavor: str, packing: str, tmp_path: Path) -> None:
    family = load_family(name)
    sizes = {"vocab_size": 64, "dim": 128, "ffn_dim": 128, "moe_ffn_dim": 64, "head_dim": 32}
    fields = family.FLAVORS[flavor].__dataclass_fields__
    models = []
    for base in ("", packing):
        with torch.device("meta"):
            config = tiny_config(family.FLAVORS[flavor], **{k: v for k, v in sizes.items() if k in fields})
            model = family.Model(config, "sdpa")
        add_adapters(model, family, job.Lora(rank=4, alpha=6.0, base=base))
        allocate(model, torch.float32)
        initialize(model, 0)
        set_adapters(model, 0.1)
        models.append(model)
    plain, packed = models
    save_weights(packed, family, tmp_path / "merged")  # with the adapters
    for weight, adapter in adapters_of(packed).items():
        numbers = unpack(packed.get_parameter(weight), packing, torch.float32)
        assert not torch.equal(numbers, plain.get_parameter(weight))
        plain.get_parameter(weight).data.copy_(numbers)
        assert torch.equal(packed.get_parameter(weight), pack(numbers, packing)) and adapter.packing == packing
    ours, theirs = packed(TOKENS), plain(TOKENS)
    assert torch.equal(ours, theirs)
    mine, expected = gradients(packed, ours), gradients(plain, theirs)
    assert mine.keys() == expected.keys() == adapter_parameters(packed)
    assert all(torch.equal(x, expected[n]) for n, x in mine.items())

    set_adapters(plain, 0.0)
    save_weights(plain, family, tmp_path / "base")
    with torch.no_grad():
        for weight in adapters_of(packed):
            packed.get_parameter(weight).zero_()
    load_weights(packed, family, tmp_path / "base")
    assert torch.equal(packed(TOKENS), ours)
    load_weights(plain, family, tmp_path / "merged")
    assert are_close(plain(TOKENS), ours)
    assert num_elements(packed) == num_elements(plain)
