"""What is trained: `model.freeze` and `[model.lora]`."""

import math
from pathlib import Path

import pytest
import torch

from torchtitan_graph.checkpoint import load_model, save_model
from torchtitan_graph.config import check, job, load, target_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import allocate, choose_model
from torchtitan_graph.models.layers.adapt import add_adapters, check_packed, freeze
from torchtitan_graph.models.layers.decoder import LOAD, Decoder
from torchtitan_graph.models.layers.init import initial_weight, initialize
from torchtitan_graph.models.layers.lora import adapter_parameters, adapters_of
from torchtitan_graph.models.spec import load_family, plan_of, tiny_config
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan, parameter_roles

EXPERT = {"ep": "expert"}


def tiny(name: str = "llama3", flavor: str = "debugmodel", **changes: object) -> Decoder:
    family = load_family(name)
    with torch.device("meta"):
        return family.Model(tiny_config(family.FLAVORS[flavor], **{"vocab_size": 64, **changes}), "sdpa")  # type: ignore[no-any-return]


def with_adapters(name: str, flavor: str = "debugmodel", **options: object) -> Decoder:
    model = tiny(name, flavor)
    add_adapters(model, load_family(name), job.Lora(**{"rank": 4, **options}))  # type: ignore[arg-type]
    return model


def frozen(model: Decoder) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("norm.weight", {"norm.weight"}),
        ("tok_embeddings", {"tok_embeddings.weight"}),
        ("layers.[02].attention.w[qk]", {f"layers.{i}.attention.w{x}.weight" for i in (0, 2) for x in "qk"}),
        ("*_norm.weight", {f"layers.{i}.{x}_norm.weight" for i in range(3) for x in ("attention", "ffn")}),
    ],
)
def test_a_pattern_matches_parameters_or_modules(pattern: str, names: set[str]) -> None:
    freeze(model := tiny(), [pattern])
    assert frozen(model) == names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["tok_embedding"], "'tok_embedding': matches no parameter or module; the nearest name is tok_embeddings;"),
        (["norm", "layers.9.*"], r"'layers.9.\*': matches no parameter or module; the nearest name is layers"),
        (["*"], "matches every parameter, so there is nothing to train"),
        (["output"], "output.weight is tied to tok_embeddings.weight, and both are one parameter; name both, or"),
    ],
)
def test_what_can_not_be_frozen_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"model.freeze.*{message}"):
        freeze(tiny(tied=True), patterns)


def test_a_tied_weight_is_frozen_by_both_names() -> None:
    freeze(model := tiny(tied=True), ["output", "tok_embeddings.*"])
    assert frozen(model) == {"tok_embeddings.weight"} and not model.output.weight.requires_grad


def test_a_configuration_freezes_and_adapts() -> None:
    config = load(["--model.freeze", "tok_embeddings,output"])
    model = choose_model(config, None, 300, target_of(config)).model
    assert frozen(model) == {"tok_embeddings.weight", "output.weight"}
    config = load(["--model.lora.rank", "2", "--model.lora.targets", "*.wq"])
    model = choose_model(config, None, 300, target_of(config)).model
    assert {n for n, p in model.named_parameters() if p.requires_grad} == adapter_parameters(model)
    assert len(adapter_parameters(model)) == 2 * len(model.layers) and model.lora == config.model.lora


def test_by_default_all_linear_layers_and_experts_of_blocks_have_adapters() -> None:
    model = with_adapters("deepseek_v3")
    inside = {name.removeprefix("layers.1.") for name in adapters_of(model) if name.startswith("layers.1.")}
    experts = {f"moe.experts.w{i}" for i in (1, 2, 3)} | {f"moe.shared_experts.w{i}.weight" for i in (1, 2, 3)}
    assert inside == experts | {f"attention.{x}.weight" for x in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")} or (
        inside == experts | {f"attention.{x}.weight" for x in ("wq", "wkv_a", "wkv_b", "wo")}
    )
    assert all(name.startswith("layers.") for name in adapters_of(model)), "neither embedding nor output"
    mixtral = with_adapters("transformers", "mixtral")
    assert {n.rpartition(".")[2] for n in adapters_of(mixtral)} == {"weight", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["output"]}, r"'output': matches no linear layer of a block \(wq, wk, .*\); the nearest name is"),
        ({"targets": ["*.wqq"]}, r"targets = '\*.wqq': matches no linear layer of a block"),
        ({"targets": ["*.attention_norm"]}, "targets = .* matches no linear layer of a block"),
        ({"rank": 65}, "rank = 65: layers.0.attention.wq is 64 x 64, .* which has no such rank; lower it"),
        ({"base": "nf4"}, "base = 'nf4': rows of layers.0.feed_forward.w2 have .* no multiple of 64; leave it out of"),
    ],
)
def test_what_can_not_have_an_adapter_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"model.lora..*{message}"):
        with_adapters("llama3", **options)


def test_packed_rows_are_cut_between_blocks() -> None:
    model = with_adapters("llama3", targets=["*.wo"], base="nf4")  # 64 numbers, a block
    check_packed(model, plan_of(llama3, model), ParallelDims(dp_shard=2))
    with pytest.raises(
        UserError, match=r"tensor_parallel_degree = 2: cuts the rows of 64 numbers of layers.0.*divides 1"
    ):
        check_packed(model, plan_of(llama3, model), ParallelDims(tp=2))
    rows = with_adapters("llama3", targets=["*.wq"], base="nf4")
    check_packed(rows, plan_of(llama3, rows), ParallelDims(tp=2))


def test_stacks_of_another_library_are_not_packed() -> None:
    with pytest.raises(UserError, match="model.lora.base = 'float8': .* is a stack of experts of another library"):
        with_adapters("transformers", "mixtral", base="float8", targets=["*.experts"])


def test_neither_routers_nor_layers_of_another_class_have_adapters() -> None:
    with pytest.raises(UserError, match="matches no linear layer"):
        with_adapters("gpt_oss", targets=["*.gate"])
    with pytest.raises(UserError, match="model.lora.rank = 4: the blocks of this model have no linear layer"):
        with_adapters("transformers", "gpt2")


@pytest.mark.parametrize(
    ("name", "flavor", "weight", "of_A", "of_B"),
    [
        ("llama3", "debugmodel", "layers.0.attention.wq.", {"tp": "replicate"}, {"tp": "shard 0"}),
        ("llama3", "debugmodel", "layers.0.feed_forward.w2.", {"tp": "shard 1"}, {"tp": "replicate"}),
        ("deepseek_v3", "debugmodel", "layers.1.attention.wkv_a.", {"tp": "replicate"}, {"tp": "replicate"}),
        (
            "qwen3",
            "debugmodel_moe",
            "layers.1.moe.experts.w1_",
            EXPERT | {"tp": "replicate"},
            EXPERT | {"tp": "shard 1"},
        ),
        ("gpt_oss", "debugmodel", "layers.1.moe.experts.w2_", EXPERT | {"tp": "shard 2"}, EXPERT | {"tp": "replicate"}),
        ("transformers", "debugmodel", "model.layers.0.self_attn.o_proj.", {"tp": "shard 1"}, {"tp": "replicate"}),
    ],
)
def test_roles_follow_from_the_weights(
    name: str, flavor: str, weight: str, of_A: dict[str, str], of_B: dict[str, str]
) -> None:
    model = with_adapters(name, flavor)
    roles = parameter_roles(model, model.PLAN)  # type: ignore[arg-type]
    end = ".weight" if weight.endswith(".") else ""
    assert (roles[f"{weight}lora_A{end}"], roles[f"{weight}lora_B{end}"]) == (of_A, of_B)
    check_plan(model, model.PLAN, ParallelDims(tp=2))  # type: ignore[arg-type]


def test_initial_values_are_those_of_peft_and_depend_on_the_name() -> None:
    model = with_adapters("llama3")
    draws = []
    for name in ("layers.0.attention.wq.lora_A.weight", "layers.1.attention.wq.lora_A.weight"):
        shape = torch.Size((256, 64))
        draws.append(initial_weight(name, shape, model.initial_std(name), 0, torch.device("cpu"), torch.float32))
    bound = math.sqrt(6 / ((1 + 5) * 64))  # torch.nn.init.kaiming_uniform_(a=sqrt(5)) of 64 inputs
    assert 0.99 * bound < draws[0].abs().max() <= bound and abs(draws[0].std() / (bound / 3**0.5) - 1) < 0.02
    assert not torch.equal(*draws)
    assert model.initial_std("layers.0.attention.wq.lora_B.weight") == 0.0
    assert model.initial_std("layers.0.attention.wq.weight") == tiny().initial_std("layers.0.attention.wq.weight")


@pytest.mark.parametrize(("patterns", "moves"), [(["norm"], True), (["*.router.*"], False)])
def test_the_correction_bias_of_a_frozen_router_stays(patterns: list[str], moves: bool) -> None:
    model = tiny("deepseek_v3")
    freeze(model, patterns)
    router = model.get_submodule("layers.1.moe.router")
    router.bias_E = torch.zeros(6)
    model.after_step({f"layers.1.moe{LOAD}": torch.arange(6)})
    assert bool(router.bias_E.any()) == moves


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.freeze", "norm"], "model.freeze = .*with model.lora.rank all but the adapters is frozen; remove it"),
        (["--model.converters", "float8"], "model.converters = .*layers with adapters are not quantised"),
        (["--model.lora.targets", ""], r"model.lora.targets = .*names no layer; set it to \['\*'\] for all"),
        (["--checkpoint.last_save_adapter", "--parallelism.pipeline_parallel_degree", "2"], "last_save_adapter"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(load(["--model.lora.rank", "4", *words]), 2 if "2" in words else 1)


def test_options_of_adapters_are_refused_where_there_are_none() -> None:
    words = ["--model.lora.alpha", "4", "--checkpoint.initial_load_adapter", "a", "--checkpoint.last_save_adapter"]
    with pytest.raises(UserError) as error:
        check(load(words), 1)
    for key in ("model.lora.alpha", "checkpoint.initial_load_adapter", "checkpoint.last_save_adapter"):
        assert f"{key} = " in str(error.value)
    assert str(error.value).count("there are no adapters while model.lora.rank is 0: set that, or remove") == 3


def test_llama3_has_no_plan_of_its_own_without_adapters() -> None:
    assert not hasattr(tiny(), "PLAN") and with_adapters("llama3").PLAN != llama3.PLAN  # type: ignore[attr-defined]


def test_adapters_start_from_a_checkpoint_of_the_base_model_but_not_of_other_adapters(tmp_path: Path) -> None:
    base, model, other = tiny(), with_adapters("llama3"), with_adapters("llama3", targets=["*.wq"])
    for seed, each in enumerate((base, model, other)):
        allocate(each, torch.float32)
        initialize(each, seed)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    load_model(save_model(tmp_path / "base", base), model)
    for name, parameter in model.named_parameters():
        expected = before[name] if name in adapter_parameters(model) else base.get_parameter(name)
        assert torch.equal(parameter, expected), name
    with pytest.raises(UserError, match=r"missing: model.layers.0.attention.wk.lora_A.weight"):
        load_model(save_model(tmp_path / "other", other), model)
    with pytest.raises(UserError, match=r"unexpected: model.layers.0.attention.wq.lora_A.weight"):
        load_model(tmp_path / "other" / "step-0", base)
