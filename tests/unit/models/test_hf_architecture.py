"""config.json: what it says is trained where no flavour is set, and must agree with the flavour that is."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchtitan_graph import device as devices
from torchtitan_graph.config import JobConfig, dump_toml, load, target_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import deepseek_v3, gpt_oss, llama3, llama4, qwen3
from torchtitan_graph.models.hf import choose_model, from_hf, load_weights, to_hf
from torchtitan_graph.models.layers.rope import Llama3Scaling

HERE = devices.Target.here()
# As the releases write it.
RELEASED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def assets(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | changes))
    return tmp_path


def job(*argv: str) -> JobConfig:
    return load([f"--model.{word}" for word in argv])


def test_without_a_flavour_config_json_is_the_architecture(tmp_path: Path) -> None:
    config = job()
    family, model, table = choose_model(config, assets(tmp_path, num_hidden_layers=3), 128256, HERE)
    assert (family, len(model.layers), table.name, table.flavor) == (llama3, 3, "llama3", None)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_resolved_configuration_gives_the_same_model_again(tmp_path: Path) -> None:
    config = job()
    table = choose_model(config, assets(tmp_path, num_hidden_layers=3), 128256, HERE).options
    (tmp_path / "again.toml").write_text(dump_toml(dataclasses.replace(config, model=table)))
    again = load(["--job.config_file", str(tmp_path / "again.toml")])
    assert len(choose_model(again, tmp_path, 128256, HERE)[1].layers) == 3


def test_a_flavour_that_agrees_is_that_flavour(tmp_path: Path) -> None:
    _, model, _ = choose_model(job("flavor=8B"), assets(tmp_path), 128256, HERE)
    assert model.config == llama3.FLAVORS["8B"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 10000.0}, "rope_theta is 500000.0 here, 10000.0 there"),
        ({"num_hidden_layers": 31, "tie_word_embeddings": True}, "num_layers is 32 here, 31 there; tied is False here"),
        ({"rope_scaling": None}, "rope_scaling is {'factor': 8.0"),
    ],
)
def test_a_flavour_that_contradicts_is_refused_naming_what_differs(changes: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        choose_model(job("flavor=8B"), assets(tmp_path, **changes), 128256, HERE)
    assert str(caught.value).startswith("model.flavor = '8B' of llama3 contradicts ")
    assert said in str(caught.value) and "name the file tokenizer.json itself" in str(caught.value)


@pytest.mark.parametrize("argv", [("name=llama3",), ("flavor=8B",)])
def test_a_family_that_contradicts_is_refused(argv: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.name = 'llama3': .*'GPT2LMHeadModel'\], not of LlamaForCausalLM"):
        choose_model(job(*argv), assets(tmp_path, architectures=["GPT2LMHeadModel"]), 100, HERE)


@pytest.mark.parametrize("architectures", [["MyModel"], [], None, "LlamaForCausalLM"])
def test_an_unknown_architecture_of_no_known_type_is_refused(architectures: object, tmp_path: Path) -> None:
    folder = assets(tmp_path, architectures=architectures, model_type="my_model")
    with pytest.raises(UserError, match=r"config.json: model_type = 'my_model' is none that transformers"):
        choose_model(job(), folder, 100, HERE)
    with pytest.raises(UserError, match="is none that transformers"):
        from_hf(folder)


def test_without_transformers_the_architectures_of_this_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan_graph.models.transformers", None)
    folder = assets(tmp_path, architectures=["MistralForCausalLM"])
    with pytest.raises(UserError, match=r"is none of this package's own, .*LlamaForCausalLM.*, and others need transf"):
        choose_model(job(), folder, 100, HERE)


def test_without_config_json_the_flavour_is_the_architecture(tmp_path: Path) -> None:
    config = job()
    _, model, table = choose_model(config, tmp_path, 99, HERE)
    assert model.tok_embeddings.num_embeddings == 99 and table.flavor == "debugmodel"
    assert choose_model(job(), None, 99, HERE)[1].config == choose_model(job(), tmp_path, 99, HERE)[1].config


def test_a_module_of_the_users_own_needs_nothing_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "plain.py").write_text(
        "from torchtitan_graph.models.llama3 import FLAVORS, HF_KEYS, PLAN, Model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, model, _ = choose_model(job("name=of_mine.plain"), assets(tmp_path), 50, HERE)
    assert model.config == dataclasses.replace(llama3.FLAVORS["debugmodel"], vocab_size=50)
    config = load(["--model.name=of_mine.plain", "--checkpoint.last_save_in_hf"])
    with pytest.raises(UserError, match="last_save_in_hf = true: of_mine.plain defines no HF_ARCHITECTURES, from_hf"):
        choose_model(config, None, 50, HERE)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json has 128256 rows in its vocabulary, .* 128257 tokens"):
        choose_model(job(), assets(tmp_path), 128257, HERE)


def test_all_that_can_not_be_expressed_is_listed(tmp_path: Path) -> None:
    folder = assets(tmp_path, hidden_act="gelu", attention_bias=True, head_dim=64, hidden_size=None)
    with pytest.raises(UserError) as caught:
        choose_model(job(), folder, 100, HERE)
    for part in ("config.json: ", "hidden_size is null", "hidden_act = 'gelu'", "attention_bias = True", "head_dim"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su"])
def test_a_scaling_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"rope_type = '{kind}' can't be expressed; legal is 'default' or 'linear'"):
        choose_model(job(), assets(tmp_path, rope_scaling={"type": kind, "factor": 2.0}), 100, HERE)


def test_the_form_of_transformers_5_is_read_too() -> None:
    rope = {"rope_theta": 500000.0, **RELEASED["rope_scaling"]}  # type: ignore[dict-item]
    raw = {key: value for key, value in RELEASED.items() if not key.startswith("rope_")}
    assert llama3.from_hf_config(raw | {"rope_parameters": rope}) == llama3.FLAVORS["8B"]
    plain = llama3.from_hf_config(raw | {"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}})
    assert (plain.rope_theta, plain.rope_scaling) == (3.0, None)


def small(**changes: object) -> llama3.Model:
    return llama3.Model(llama3.Config(16, 1, 2, 2, 8, vocab_size=8, **changes))


def test_weights_of_a_model_that_computes_otherwise_are_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to_hf(small(rope_scaling=None), tmp_path / "hf")
    load_weights(small(rope_scaling=Llama3Scaling(8.0)), llama3, tmp_path / "hf")
    assert "were trained as another model: rope_scaling is {'factor': 8.0" in caplog.text


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    """Mistral's tensors have the names and shapes of Llama's."""
    to_hf(small(), tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    with pytest.raises(UserError, match=r"'MistralForCausalLM'\], but the model here is of LlamaForCausalLM"):
        load_weights(small(), llama3, tmp_path / "hf")


def test_llama4_is_read_from_the_config_of_all_its_parts() -> None:
    scout = llama4.FLAVORS["17Bx16E"]
    text = {**llama4.to_hf_config(scout), "no_rope_layers": [], "attn_temperature_tuning": 4, "moe_layers": None}
    del text["no_rope_layer_interval"], text["architectures"]
    raw = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    assert llama4.from_hf_config(raw) == scout


def test_gpt_oss_says_that_positions_are_not_scaled_since_silence_means_the_releases_scaling() -> None:
    released = gpt_oss.FLAVORS["20b"]
    plain = dataclasses.replace(released, rope_scaling=None)
    assert gpt_oss.from_hf_config(gpt_oss.to_hf_config(plain)) == plain
    assert gpt_oss.from_hf_config({**gpt_oss.to_hf_config(released), "rope_scaling": None}) == released


@pytest.mark.parametrize(
    ("family", "flavor", "changes", "said"),
    [
        (llama4, "17Bx16E", {"no_rope_layers": [1] * 48}, "no_rope_layers = "),
        (llama4, "17Bx128E", {"attn_temperature_tuning": False}, "attn_temperature_tuning = False"),
        (qwen3, "8B", {"use_sliding_window": True}, "use_sliding_window = True"),
        (qwen3, "30B-A3B", {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
        (deepseek_v3, "671B", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (deepseek_v3, "16B", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (gpt_oss, "20b", {"layer_types": ["full_attention"] * 24}, "layer_types = "),
        (gpt_oss, "20b", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
    ],
)
def test_what_a_family_computes_otherwise_is_refused(family: ModuleType, flavor: str, changes: dict, said: str) -> None:
    raw = family.to_hf_config(family.FLAVORS[flavor])
    with pytest.raises(UserError, match=f"^{said}.* can't be expressed; legal is"):
        family.from_hf_config(raw | changes)


def test_a_stored_output_must_be_what_the_embedding_is_tied_to(tmp_path: Path) -> None:
    to_hf(small(), tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="lm_head.weight is not what output.weight is tied to"):
        from_hf(tmp_path / "hf")
    model = small()
    with torch.no_grad():
        model.output.weight.copy_(model.tok_embeddings.weight)
    to_hf(model, tmp_path / "equal")
    (tmp_path / "equal" / "config.json").write_text(file.read_text())
    assert torch.equal(from_hf(tmp_path / "equal").output.weight, model.output.weight)


DRY = ["--comm.mode", "fake_backend"]


@pytest.mark.parametrize(
    ("machine", "words", "chosen"),
    [
        ("cpu", [], "varlen"),
        ("cuda", [], "flex"),
        ("cpu", DRY, "flex"),  # a dry run stands for an H100
        ("cpu", [*DRY, "--comm.fake_device", "CPU"], "varlen"),
        ("cuda", [*DRY, "--comm.fake_device", "CPU"], "flex"),  # as graphs are made before a run
        ("cuda", ["--training.dynamic_seq_len", "--training.seq_len", "64"], "sdpa"),
        ("cuda", ["--compile.disable_passes", "compile_regions"], "sdpa"),
        ("cuda", ["--model.attn", "sdpa"], "sdpa"),
        ("cpu", ["--model.attn", "flex"], "flex"),
    ],
)
def test_attention_is_chosen_by_the_device_of_the_job(
    machine: str, words: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_type", lambda: machine)
    monkeypatch.setattr(devices, "rates", lambda: HERE.rates)
    config = load(words)
    _, model, resolved = choose_model(config, None, 300, target_of(config))
    assert (model.attn, resolved.attn) == (chosen, chosen)
    again = dataclasses.replace(config, model=resolved)
    assert choose_model(again, None, 300, HERE).model.attn == chosen, "what is resolved stays as it is"
