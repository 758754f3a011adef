"""Models of the library transformers as a family: what is built, what is refused, their masks, numbers and files."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_graph.check.matrix import Cell, global_rows
from torchtitan_graph.config import load
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import transformers as family
from torchtitan_graph.models.hf import asset_files, check_weights, choose_model, load_weights, save_weights
from torchtitan_graph.models.layers.init import Constant, Drawn, allocate
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, ExpertTraining, set_up_experts
from torchtitan_graph.models.spec import build_model, tiny_config
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps.check import check_steps
from torchtitan_graph.steps.options import step_options

VOCAB = 97
CPU = Target(torch.device("cpu"), RATES["CPU"], False)


def on_meta(kind: str, attn: str = "sdpa", **changes: Any) -> Any:
    with torch.device("meta"):
        return family.Model(tiny_config(family.FLAVORS[kind], **{"vocab_size": VOCAB, **changes}), attn)


@cache
def stock(kind: str) -> Any:
    return stock_of(tiny_config(family.FLAVORS[kind], vocab_size=VOCAB))


def stock_of(config: family.Config) -> Any:
    """Return transformers' own model, with random numbers that fp32 holds."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config.of_transformers(), dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model.double().eval()


def read(folder: Path, attn: str = "sdpa") -> Any:
    with torch.device("meta"):
        model = family.Model(family.from_hf_config(json.loads((folder / "config.json").read_text())), attn)
    check_weights(model, family, folder)
    allocate(model, torch.float64)
    load_weights(model, family, folder)
    return model


def largest_gap(theirs: Any, model: Any) -> float:
    """Return the largest difference from transformers' logits, of each document alone."""
    rows, gap = global_rows(VOCAB, step=1), 0.0
    with torch.no_grad():
        masks = model.masks(rows.documents_BL, rows.positions_BL)
        logits_BLV = model(rows.tokens_BL, rows.positions_BL, masks)
        for tokens_L, documents_L, logits_LV in zip(rows.tokens_BL, rows.documents_BL, logits_BLV, strict=True):
            for document in documents_L.unique():
                is_its_L = documents_L == document
                alone_LV = theirs(input_ids=tokens_L[is_its_L].unsqueeze(0), use_cache=False).logits[0]
                gap = max(gap, float((alone_LV - logits_LV[is_its_L]).abs().max() / alone_LV.abs().max()))
    return gap


# What each has of its own: biases and a tied output; windows and a cap of logits; experts, apart in the files; sinks,
# and experts whose gates and values alternate; latent attention.
TYPES = ["qwen2", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("kind", TYPES)
def test_packed_documents_get_transformers_logits_and_its_files_are_written_again(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    stock(kind).save_pretrained(first)
    model = read(first, "flex" if kind == "gemma2" else "sdpa")
    assert largest_gap(stock(kind), model) < 1e-6
    save_weights(model, family, second)
    files, again = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert files.keys() == again.keys()
    assert [name for name, x in files.items() if not torch.equal(x.double(), again[name].double())] == []
    read_again = type(stock(kind)).from_pretrained(second, dtype=torch.float64).state_dict()
    assert [n for n, x in stock(kind).state_dict().items() if not torch.equal(x, read_again[n].double())] == []


def test_a_mask_that_lets_another_document_be_seen_is_found() -> None:
    """The comparison above can fail."""
    model = on_meta("qwen2")
    allocate(model, torch.float64)
    model.load_state_dict(stock("qwen2").state_dict())
    assert largest_gap(stock("qwen2"), model) < 1e-6
    own = model.masks
    model.masks = lambda documents_BL, positions_BL: own(torch.zeros_like(documents_BL), positions_BL)
    assert largest_gap(stock("qwen2"), model) > 1e-3


def test_rules_are_those_of_each_layer() -> None:
    model = on_meta("gemma2")
    assert [block.mask for block in model.blocks.values()] == ["window 7", "causal", "window 7"]
    nothing = torch.zeros(1, 16, dtype=torch.int64)
    positions = torch.arange(16)[None]
    assert model.num_visible(positions)["window 7"][0].tolist() == [*range(1, 8), *[7] * 9]
    rules = model.mask_rules(nothing, positions)
    b = h = torch.zeros(1, dtype=torch.int64)
    assert rules["window 7"](b, h, torch.tensor([9]), torch.arange(16)).nonzero().flatten().tolist() == [*range(3, 10)]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"model_type": "lama"}, "model_type = 'lama' is none that transformers"),
        ({"model_type": "t5"}, "no causal language model|reads an encoder's result"),
        ({"model_type": "gpt2"}, r"attn_pdrop = 0.1.*dropout draws random numbers.*set it to 0 in config.json"),
        ({"model_type": "llama", "hidden_size": "wide"}, "can't read this configuration of llama"),
        ({}, "model_type = None"),
    ],
    ids=str,
)
def test_a_configuration_is_refused_by_name(raw: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        family.from_hf_config(raw)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("falcon", "FalconForCausalLM has attention of its own"),
        ("bert", "its masks are made of bidirectional_mask_function"),
        ("doge", "DogeAttention attends without a mask, or with one of its own"),
        ("inkling2_text", "its attention is given position_bias, sinks"),
    ],
)
def test_a_model_is_refused_by_name(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        on_meta(kind)


def test_a_failing_line_of_a_model_is_named() -> None:
    with pytest.raises(UserError, match=r"JetMoeForCausalLM can't be traced: .*modeling_jetmoe.py, line \d+: expert"):
        on_meta("jetmoe")


def test_transformers_is_found_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from torchtitan_graph.models import spec

    def missing(path: str) -> Any:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"model.name = 'transformers': .*pip install 'transformers>=5.23'"):
        spec.load_family("transformers")


@pytest.mark.parametrize(
    ("architecture", "raw", "options", "name"),
    [
        ("MistralForCausalLM", {"model_type": "mistral"}, [], "transformers"),
        ("LlamaForCausalLM", {"model_type": "llama", "vocab_size": 300}, [], "llama3"),
        ("LlamaForCausalLM", {"model_type": "llama"}, ["--model.name=transformers"], "transformers"),
    ],
)
def test_a_folder_chooses_the_family(
    architecture: str, raw: dict[str, Any], options: list[str], name: str, tmp_path: Path
) -> None:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=300)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [architecture], "num_key_value_heads": 4, "rms_norm_eps": 1e-5, **sizes, **raw})
    )
    chosen = choose_model(load([f"--model.hf_assets_path={tmp_path}", *options]), tmp_path, 257, CPU)
    assert chosen.options.name == name


def test_what_a_family_cannot_express_names_the_other_way(tmp_path: Path) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="attention_bias.*model.name = 'transformers' takes transformers' own model"):
        choose_model(load([f"--model.hf_assets_path={tmp_path}"]), tmp_path, 257, CPU)


def test_a_language_model_is_read_out_of_a_folder_with_other_parts(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": x.clone() for name, x in stock("qwen2").state_dict().items()}
    tensors["vision_tower.weight"] = torch.zeros(3)
    model = on_meta("qwen2")
    write_folder(tmp_path, tensors)
    allocate(model, torch.float64)
    load_weights(model, family, tmp_path)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in stock("qwen2").state_dict().items())


def test_files_of_another_model_are_refused_by_their_names(tmp_path: Path) -> None:
    tensors = {name: x.clone() for name, x in stock("qwen2").state_dict().items()}
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.extra"] = torch.zeros(3)
    write_folder(tmp_path, tensors)
    with pytest.raises(UserError) as error:
        check_weights(on_meta("qwen2"), family, tmp_path)
    for line in ("missing: model.norm.weight", "unknown: model.extra", r"up_proj.weight: files make the shape [3, 4]"):
        assert line in str(error.value)


def write_folder(folder: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_parameters_start_as_transformers_draws_them() -> None:
    model = on_meta("gpt2", num_layers=2)
    assert model.initial_std("transformer.h.0.ln_1.weight") is None
    assert model.initial_std("transformer.h.0.ln_1.bias") == 0.0
    assert model.initial_std("transformer.wte.weight") == pytest.approx(0.02, rel=0.1)
    # Products that are added to the residual stream, by the model's own rule for the whole of it.
    assert model.initial_std("transformer.h.1.mlp.c_proj.weight") == pytest.approx(0.02 / 4**0.5, rel=0.1)
    decays = on_meta("mamba2", rest=MAMBA2)
    assert isinstance(decays.initial_std("backbone.layers.0.mixer.A_log"), Drawn)
    drawn = decays.initial_std("backbone.layers.0.mixer.A_log").draw(torch.Size([8]), 0)
    assert torch.allclose(drawn, torch.arange(1.0, 9).log())
    assert not isinstance(decays.initial_std("backbone.layers.0.mixer.D"), Constant)


MAMBA2 = json.dumps(
    json.loads(family.FLAVORS["mamba2"].rest)
    | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8}
)


def test_a_deviation_that_depends_on_the_sizes_is_that_of_the_whole_parameter() -> None:
    from transformers import AutoModelForCausalLM

    rest = json.dumps(json.loads(MAMBA2) | {"hidden_size": 256, "num_heads": 32})
    model, name = on_meta("mamba2", rest=rest, dim=256), "backbone.layers.0.mixer.out_proj.weight"
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(model.config.of_transformers()).get_parameter(name)
    assert stock.shape == (256, 512)
    assert model.initial_std(name) == pytest.approx(stock.detach().std().item(), rel=0.03)


def test_the_whole_model_is_set_to_evaluation() -> None:
    model = on_meta("qwen2")
    assert not model.eval()._theirs[0].training and not model.model.training
    assert model.train()._theirs[0].training


def test_a_state_along_the_row_needs_one_document_a_row() -> None:
    model = on_meta("mamba2", rest=MAMBA2)
    assert model.mixes_documents is not None
    cell = Cell(family="transformers", flavor="debugmodel")
    for options, why in (([], "set training.one_document_per_row = true"), (["--training.one_document_per_row"], None)):
        config = load(["--model.name=transformers", *options])
        if why is None:
            check_steps(config, model, family, ParallelDims(), cell.options("graph"))
            with pytest.raises(UserError, match=r"context_parallel_degree = 2 a rank has a part of it"):
                check_steps(config, model, family, ParallelDims(cp=2), cell.options("graph"))
        else:
            with pytest.raises(UserError, match=why):
                check_steps(config, model, family, ParallelDims(), cell.options("graph"))


def test_tensor_parallelism_of_a_style_without_a_role_is_refused_by_the_parameter() -> None:
    model = on_meta("deepseek_v3", vocab_size=98)
    with pytest.raises(UserError, match="the plan gives no role to model.layers.0.self_attn"):
        check_plan(model, model.PLAN, ParallelDims(tp=2))
    # Fused projections, norms over all heads, latent attention, a shared expert, and sinks.
    for kind in ("phi3", "olmo2", "glm4_moe_lite", "qwen2_moe", "granite_swa", "mixtral"):
        check_plan(on_meta(kind, vocab_size=98), on_meta(kind).PLAN, ParallelDims(tp=2))


def test_a_mixture_with_the_name_of_a_feed_forward_is_no_sum_of_ranks() -> None:
    model = on_meta("glm4_moe")
    sums = [name for name, roles in model.PLAN.items() if roles.get("tp") == "partial"]
    assert sorted(sums) == ["model.layers.*.mlp.shared_experts", "model.layers.*.self_attn", "model.layers.0.mlp"]


def test_a_block_traced_by_itself_computes_in_double() -> None:
    """As one is in backward, outside of the model's forward."""
    model = on_meta("mistral", num_layers=1)
    allocate(model, torch.float64)
    rows, dtypes = global_rows(VOCAB, step=1), set()
    given: dict[str, Any] = {}
    model.blocks["model.layers.0"].register_forward_pre_hook(
        lambda m, a, k: given.update(args=a, **k), with_kwargs=True
    )
    model(rows.tokens_BL, rows.positions_BL, model.masks(rows.documents_BL, rows.positions_BL))

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            dtypes.update(x.dtype for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
            return result

    with Seen(), torch.no_grad():
        model.blocks["model.layers.0"].forward(*given.pop("args"), **given)
    assert dtypes == {torch.float64}


# --- lengths ---

TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
FACTORS = dict(short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[4.0, 5.0, 6.0, 7.0], rope_theta=10000.0)
ORIGINAL = {"original_max_position_embeddings": 64}
SHORT: list[dict[str, Any]] = [
    {"model_type": "phi3", "pad_token_id": 0, **ORIGINAL, "rope_scaling": {"rope_type": "longrope", **FACTORS}},
    {"model_type": "llama", "rope_scaling": {"rope_type": "longrope", "factor": 4.0, **FACTORS, **ORIGINAL}},
    {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
]


def check_length(model: Any, length: int, *options: str) -> None:
    cell = Cell(family="transformers", flavor="debugmodel")
    config = load(["--model.name=transformers", f"--training.seq_len={length}", *options])
    check_steps(config, model, family, ParallelDims(), cell.options("graph"))


@pytest.mark.parametrize("raw", SHORT)
def test_a_rotation_that_depends_on_the_length_is_that_of_short_documents(raw: dict[str, Any], tmp_path: Path) -> None:
    most = 256 if raw["rope_scaling"]["rope_type"] == "dynamic" else 64
    theirs = stock_of(family.from_hf_config(TINY | {"vocab_size": VOCAB, "max_position_embeddings": 256} | raw))
    theirs.save_pretrained(tmp_path)
    model = read(tmp_path)
    assert largest_gap(theirs, model) < 1e-6
    tokens_BL = torch.randint(VOCAB, (1, 4 * most), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # beyond, transformers' rotation is another
        gaps = [
            float((theirs(x_BL, use_cache=False).logits - model(x_BL)).abs().max())
            for x_BL in (tokens_BL[:, :most], tokens_BL)
        ]
    assert 100 * gaps[0] < 1e-5 < gaps[1]
    check_length(model, most)
    with pytest.raises(
        UserError, match=f"seq_len = {most + 1}: at most {most} for this model: beyond, the frequencies"
    ):
        check_length(model, most + 1)
    with pytest.raises(UserError, match=f"validation.seq_len = {most + 1}: at most {most} for this model"):
        check_length(model, most, "--validation.enable", f"--validation.seq_len={most + 1}")


def test_capture_by_dynamo_is_refused() -> None:
    cell = Cell(family="transformers", flavor="debugmodel")
    config = load(["--model.name=transformers", "--compile.capture=dynamo"])
    with pytest.raises(UserError, match="compile.capture = 'dynamo': Dynamo can't trace model.name = 'transformers'"):
        check_steps(config, on_meta("mistral"), family, ParallelDims(), cell.options("graph"))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rows_longer_than_a_table_of_positions_are_refused(kind: str) -> None:
    model = on_meta(kind)
    most = model.trained_length
    check_length(model, most)
    with pytest.raises(UserError, match=rf"seq_len = {most + 1}: at most {most} for this model: .* has a row for each"):
        check_length(model, most + 1)


def test_rows_longer_than_a_model_was_made_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta("gpt_neox")
    check_length(model, model.trained_length)
    assert "longer than" not in caplog.text
    check_length(model, model.trained_length + 1)
    assert "training.seq_len = 2049: rows are longer than the 2048 positions (max_position_embeddings)" in caplog.text


# --- routers ----------------------------------------------------------------------------------------------------------


def routed(kind: str, **options: Any) -> tuple[Any, Any]:
    """Return a model with one layer of experts, and its results for a batch."""
    model = on_meta(kind, num_layers=2 if kind == "glm4_moe" else 1)
    allocate(model, torch.float64)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.init_buffers()
    set_up_experts(model, ExpertTraining(**options))
    return model, model(torch.randint(VOCAB, (2, 12)), side_outputs=True)[1]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe"])
def test_the_balance_loss_of_one_layer_is_transformers_over_the_chosen(kind: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, side = routed(kind, auxiliary=AuxiliaryLoss(load_balance=0.5))
    kept = []
    router = next(m for m in model.modules() if type(m).__name__.endswith("Router"))
    router.register_forward_hook(lambda module, args, results: kept.append(results[0]))
    again = model(torch.randint(VOCAB, (2, 12)), side_outputs=True)[1]
    E, A = router.weight.shape[0], model.config.top_k
    wanted = 0.5 * load_balancing_loss_func((kept[0],), E, A) / A
    assert again.experts[0].item() == pytest.approx(wanted.item(), rel=1e-6)
    assert again.experts[0].requires_grad and len(side.experts) == 1
    with torch.no_grad():
        assert model(torch.randint(VOCAB, (1, 5)), side_outputs=True)[1].experts == []


def test_a_router_without_a_loss_in_transformers_has_none_here() -> None:
    config = load(["--model.name=transformers", "--moe.load_balance_loss=0.1", "--model.elementwise=torch"])
    with pytest.raises(UserError, match="moe.load_balance_loss = 0.1, .*transformers has no loss of them"):
        step_options(config, on_meta("glm4_moe"), 1, CPU)
    assert step_options(config, on_meta("mixtral"), 1, CPU).experts.auxiliary is not None


def test_loads_are_counted_forced_and_move_the_correction_bias() -> None:
    model, side = routed("glm4_moe", bias_update_speed=0.25)
    ((name, load_E),) = side.state.items()
    assert name == "model.layers.1.mlp.experts.load" and int(load_E.sum()) == 2 * 12 * model.config.top_k
    model.after_step(side.state)
    bias_E = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(bias_E.double(), 0.25 * torch.sign(load_E.double().mean() - load_E))
    assert model.notes == [
        "mixtures of experts: 1; [moe] losses can be added to 0, and moe.bias_update_speed moves the correction biases"
        " of 1"
    ]
    _, side = routed("glm4_moe", forced_balance=True)
    assert len({*next(iter(side.state.values())).tolist()}) == 1


def test_a_correction_bias_that_is_a_parameter_moves_too(tmp_path: Path) -> None:
    theirs = stock("ernie4_5_moe")
    theirs.save_pretrained(tmp_path)
    model, name = read(tmp_path), "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    assert largest_gap(theirs, model) < 1e-6
    before = model.get_buffer(name).clone()
    assert torch.equal(before, theirs.get_parameter(name)) and before.any()
    set_up_experts(model, ExpertTraining(bias_update_speed=0.25))
    side = model(torch.randint(VOCAB, (2, 12)), side_outputs=True)[1]
    model.after_step(side.state)
    load_E = side.state["model.layers.1.mlp.experts.load"].float()
    assert torch.equal(model.get_buffer(name), before + 0.25 * torch.sign(load_E.mean() - load_E))


def test_an_untested_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_meta("mistral").notes == []
    monkeypatch.setattr("torchtitan_graph.transformers_private.TESTED", ("5.1",))
    (note,) = on_meta("mistral").notes
    assert note.endswith("is not tested with this package: 5.1 is")


# --- a folder's own code ----------------------------------------------------------------------------------------------

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from torch import nn

class Configuration(LlamaConfig):
    model_type = "not_of_transformers"

class Model(LlamaForCausalLM):
    config_class = Configuration

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.Tanh()
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that only its own code defines."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(CODE)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB)
    auto_map = {"AutoConfig": "modeling_own.Configuration", "AutoModelForCausalLM": "modeling_own.Model"}
    content = {"model_type": "not_of_transformers", "architectures": ["Model"], "auto_map": auto_map, **sizes}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def chosen(folder: Path, *options: str) -> Any:
    config = load([f"--model.hf_assets_path={folder}", *options])
    return choose_model(config, folder, VOCAB, CPU)


def test_a_folders_code_runs_if_the_user_says_so(own_code: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(UserError, match="not_of_transformers.*model.trust_remote_code = true runs the Python code"):
        chosen(own_code)
    assert not (tmp_path / "modules").exists()
    _, model, options = chosen(own_code, "--model.trust_remote_code")
    assert options.name == "transformers" and "Tanh" in str(model)
    allocate(model, torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    save_weights(model, family, tmp_path / "saved", files=asset_files(own_code))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True, dtype=torch.float32)
    tokens_BL = torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        assert torch.allclose(stock(tokens_BL).logits, model(tokens_BL), atol=1e-5)
    load_weights(chosen(own_code, "--model.trust_remote_code").model.to_empty(device="cpu"), family, tmp_path / "saved")


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, ["--model.name=llama3"], "model.trust_remote_code = true: with model.name = 'transformers'"),
        ({"auto_map": None}, [], "its auto_map has no AutoConfig"),
        ({"auto_map": {"AutoConfig": "a--b.C"}}, [], "is code of another repository"),
        ({"auto_map": {"AutoConfig": "missing.C"}}, [], "the code of missing.C in .* can't be run"),
    ],
)
def test_code_that_is_not_there_is_refused(own_code: Path, changes: Any, options: list[str], why: str) -> None:
    file = own_code / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=why):
        chosen(own_code, "--model.trust_remote_code", *options)


def test_another_number_of_layers_has_as_many_of_each_list() -> None:
    config = tiny_config(family.FLAVORS["gemma2"], num_layers=5)
    assert len(config.of_transformers().layer_types) == 5


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 512, "head_dim": 96},
        {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16},
        {"model_type": "granitemoehybrid", "num_local_experts": 0},
        {"model_type": "deepseek_v4"},
        {"model_type": "gemma3n_text"},
    ],
    ids=str,
)
def test_every_key_of_a_configuration_is_kept(raw: dict[str, Any]) -> None:
    from torchtitan_graph.transformers_private import keys_of, text_config

    given = {"output_router_logits": False, "use_cache": False, "pad_token_id": None, **raw}
    assert keys_of(family.from_hf_config(raw).of_transformers()) == keys_of(text_config(given))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("olmo", "model.norm run after its layers, in another order than it has them or without parameters"),
        ("opt", "run before its layers"),
        ("gpt2", "transformer.wpe run before its layers"),
        ("mpt", "return more than one tensor"),
    ],
)
def test_a_pipeline_of_a_model_that_cannot_be_cut_is_refused(kind: str, why: str) -> None:
    options = Cell(family="transformers", flavor="debugmodel").options("graph")
    config = load(["--model.name=transformers", "--training.one_document_per_row"])
    with pytest.raises(UserError, match=f"pipeline_parallel_degree = 2: not of this model: .*{why}"):
        check_steps(config, on_meta(kind), family, ParallelDims(pp=2), options)


@pytest.mark.parametrize("kind", ["llama", "gemma", "mixtral", "gpt_oss", "granite", "ctrl"])
def test_two_stages_compute_what_the_whole_model_does(kind: str) -> None:
    """Of models that scale their embeddings, too, and of one that does so in place."""
    model = on_meta(kind)
    assert model.no_pipeline is None
    allocate(model, torch.float64)
    torch.manual_seed(0)
    tokens_BL, positions_BL = torch.randint(VOCAB, (3, 11)), torch.arange(11).expand(3, -1)
    names = model.modules_in_order
    cut = names.index(list(model.blocks)[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
        masks = model.masks(torch.zeros_like(tokens_BL), positions_BL)
        sent_BLD = model(tokens_BL, positions_BL, masks, only=names[:cut])
        logits_BLV = model(sent_BLD, positions_BL, masks, only=names[cut:])
        assert torch.equal(logits_BLV, model(tokens_BL, positions_BL, masks))


@pytest.mark.parametrize("kind", ["llama", "minicpm3", "mixtral", "ctrl"])
def test_stages_of_one_module_each_compute_what_the_whole_model_does(kind: str) -> None:
    """Of models that scale what their output layer takes, too."""
    whole = on_meta(kind)
    tokens_BL, positions_BL = torch.arange(22).reshape(2, 11), torch.arange(11).expand(2, -1)
    models = {name: on_meta(kind) for name in whole.modules_in_order}
    for name, stage in models.items():
        stage.keep([name])
    torch.manual_seed(0)
    with torch.no_grad():
        for model in (whole, *models.values()):
            allocate(model, torch.float64)
            model.init_buffers()
        values = {name: parameter.normal_(0, 0.1) for name, parameter in whole.named_parameters()}
        masks, x = whole.masks(torch.zeros_like(tokens_BL), positions_BL), tokens_BL
        for name, stage in models.items():
            for n, parameter in stage.named_parameters():
                parameter.copy_(values[n])
            x = stage(x, positions_BL, masks, only=[name])
        assert torch.equal(x, whole(tokens_BL, positions_BL, masks))


def test_a_parameter_that_takes_no_gradient_still_takes_none() -> None:
    model = on_meta("qwen2")
    model.model.norm.weight.requires_grad_(False)
    allocate(model, torch.float32)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]


def test_what_a_file_says_and_is_not_done_is_refused() -> None:
    with pytest.raises(UserError, match="output_router_logits = true"):
        family.from_hf_config({"model_type": "mixtral", "output_router_logits": True})
    with pytest.raises(UserError, match="layerdrop = 0.1"):
        family.from_hf_config({"model_type": "opt", "layerdrop": 0.1, "dropout": 0.0})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be a whole number from 1 to 10,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be"),
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0: must be above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta = 0: must be above 0"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 4},
            "num_experts_per_tok = 9: .* 4",
        ),
        ({"architectures": ["MistralForSequenceClassification"]}, "model of 'mistral' is MistralForCausalLM"),
        ({"model_type": "mistrall"}, "did you mean mistral"),
        ({"attention_dropout": -0.1}, "attention_dropout = -0.1: dropout"),
        ({"model_type": "xglm"}, "model_type = 'xglm': its table of positions is in fp32"),
    ],
)
def test_a_value_that_would_fail_late_is_refused_by_its_key(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        family.from_hf_config({"model_type": "mistral", **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sliding_window": 0}, "window 0: a token would see nothing"),
        ({"hidden_act": "sillu"}, "hidden_act = 'sillu' is none that it knows"),
        ({"rope_parameters": {"rope_type": 1, "rope_theta": 1e4}}, "KeyError: 1"),
    ],
)
def test_a_value_that_the_model_cannot_use_is_refused(changes: dict[str, Any], why: str) -> None:
    config = family.from_hf_config({"model_type": "mistral", "num_hidden_layers": 1, **changes})
    with pytest.raises(UserError, match=why), torch.device("meta"):
        family.Model(config)


def test_a_model_larger_than_memory_is_built_on_meta() -> None:
    """Of an expert's stack of 2 TB in fp32."""
    raw = {"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 16384, "intermediate_size": 65536}
    with torch.device("meta"):
        model = family.Model(family.from_hf_config({**raw, "num_local_experts": 256}))
    assert model.get_parameter("model.layers.0.mlp.experts.down_proj").numel() * 4 >= 2**40


def test_a_mistyped_model_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"model.flavor = 'mistrall': legal for transformers are .* more; did you mean mi"
    ):
        build_model("transformers", "mistrall", "sdpa", 100)


def test_a_tied_weight_is_found_by_its_second_name(tmp_path: Path) -> None:
    tensors = {name: x.clone() for name, x in stock("gemma2").state_dict().items()}
    table = tensors.pop("model.embed_tokens.weight")
    write_folder(tmp_path, tensors)
    model = on_meta("gemma2")
    allocate(model, torch.float64)
    load_weights(model, family, tmp_path)
    assert torch.equal(model.tok_embeddings.weight, table)


def test_files_with_two_spellings_of_a_name_are_refused(tmp_path: Path) -> None:
    tensors = {name: x.clone() for name, x in stock("qwen2").state_dict().items()}
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    write_folder(tmp_path, tensors)
    with pytest.raises(UserError, match="the files hold model.norm.weight twice, as model.norm.weight and norm.weight"):
        check_weights(on_meta("qwen2"), family, tmp_path)
