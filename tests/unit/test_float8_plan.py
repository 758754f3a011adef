"""What of a model multiplies in float8, and what is refused by name."""

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torchtitan_graph.config import JobConfig, check, load
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.spec import build_model
from torchtitan_graph.quantize.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from torchtitan_graph.quantize.plan import check_cut, plan_float8
from torchtitan_graph.quantize.products import DELAYED, E4M3, E5M2, MX, MX_WIDE, ROWWISE, TENSORWISE, Recipe, linear
from torchtitan_graph.quantize.state import Float8, convert
from torchtitan_graph.rates import RATES

CPU = Target.here()
CUDA = Target(torch.device("cuda"), CPU.rates, is_gpu=True)
DRY = Target.of(RATES["H100"])
FLOAT8 = ("--model.converters", "float8")
RECIPE = Recipe()
PP = "parallelism.pipeline_parallel_degree"
GROUPED, GROUPED_MX = "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"


def configured(**options: str) -> JobConfig:
    return load([*FLOAT8, *(word for key, x in options.items() for word in (f"--quantize.linear.float8.{key}", x))])


def model(name: str = "llama3", flavor: str = "debugmodel") -> Decoder:
    return build_model(name, flavor, "sdpa", 256)


def test_every_linear_layer_but_those_filtered_and_gates_is_converted() -> None:
    found = plan_float8(configured(), model(), CPU)
    assert found is not None and len(found.layers) == 6 * 7 + 1 and "output" in found.layers
    found = plan_float8(configured(filter_fqns="output,attention.w"), model(), CPU)
    assert found is not None and [*found.layers][:2] == ["layers.0.feed_forward.w1", "layers.0.feed_forward.w2"]
    assert len(found.layers) == 6 * 3
    found = plan_float8(configured(filter_fqns="router.gate"), model("qwen3", "debugmodel_moe"), CPU)
    assert found is not None and not any("gate" in name for name in found.layers)
    assert plan_float8(load([]), model(), CPU) is None


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, Recipe(TENSORWISE, E5M2)),
        ({"recipe_name": "tensorwise_delayed"}, Recipe(DELAYED, E5M2)),
        ({"recipe_name": "rowwise"}, Recipe(ROWWISE, E4M3)),
        ({"recipe_name": "rowwise", "gradient_format": "e5m2"}, Recipe(ROWWISE, E5M2)),
        ({"gradient_format": "e4m3", "emulate": "true"}, Recipe(TENSORWISE, E4M3, True)),
    ],
)
def test_options_say_the_recipe(options: dict[str, str], recipe: Recipe) -> None:
    found = plan_float8(configured(**options), model(), CPU)
    assert found is not None and {*found.layers.values()} == {recipe}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_fqns": "outputs"}, r"filter_fqns = 'outputs': is in no linear layer's name; did you mean output\?"),
        (
            {"filter_fqns": "lm_head"},
            "'lm_head': is in no linear layer's name; they are such as layers.0.attention.wq",
        ),
        ({"filter_fqns": "w,output"}, "leaves no linear layer; remove model.converters"),
    ],
)
def test_filters_that_can_not_be_meant_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_float8(configured(**options), model(), CPU)


def test_sizes_that_the_kernels_can_not_take_are_refused() -> None:
    with pytest.raises(UserError, match="output is 250 x 256, and both sizes must be multiples of 16; name such"):
        plan_float8(configured(), build_model("llama3", "debugmodel", "sdpa", 250), CPU)


def test_delayed_scaling_of_an_output_that_is_called_again_is_refused() -> None:
    config = configured(recipe_name="tensorwise_delayed")
    config.model.num_mtp_layers = 1
    with pytest.raises(UserError, match="'tensorwise_delayed': with model.num_mtp_layers the layer output"):
        plan_float8(config, model(), CPU)


def test_a_layer_in_two_places_is_converted_in_both_and_has_no_history() -> None:
    shared = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ReLU()))
    shared[1].append(shared[0])
    found = plan_float8(configured(), shared, CPU)
    assert found is not None and [*found.layers] == ["0"]
    with pytest.raises(UserError, match="'tensorwise_delayed': 0 is 1.1 too, and one history can't follow both; name"):
        plan_float8(configured(recipe_name="tensorwise_delayed"), shared, CPU)
    convert(shared, found)
    assert isinstance(shared[0], Linear) and shared[1][1] is shared[0]
    own = nn.Sequential(Linear(nn.Linear(16, 16), Recipe(DELAYED)))
    own.append(own[0])
    with pytest.raises(UserError, match="tensorwise_delayed: 0 is 1 too, and one history .*; call a layer in one"):
        plan_float8(load([]), own, CPU)


def test_experts_in_two_places_have_no_history() -> None:
    config = load(["--model.converters", GROUPED, f"--{GROUPED}.fqns", "experts"])
    shared = model("qwen3", "debugmodel_moe")
    shared.layers[2].moe.experts = shared.layers[1].moe.experts
    assert plan_float8(config, shared, CPU) is not None
    config.quantize.grouped_mm.float8.recipe_name = DELAYED
    with pytest.raises(UserError, match=r"grouped_mm.float8.recipe_name = .*layers.2.moe.experts too, .*leave it out"):
        plan_float8(config, shared, CPU)


@pytest.mark.parametrize(("capability", "is_taken"), [((8, 0), False), ((8, 9), True)])
def test_a_gpu_without_float8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with contextlib.nullcontext() if is_taken else pytest.raises(UserError, match="A100 does not .*emulate = true"):
        plan_float8(configured(), model(), CUDA)
    assert plan_float8(configured(emulate="true"), model(), CUDA) is not None


@pytest.mark.parametrize(
    ("degree", "filtered", "message"),
    [
        (2, "wo", "not built for output, sharded over the vocabulary; name it in"),
        (32, "output,w2,wk", "of 16, 8 of 256 in layers.0.attention.wq, .*, 24 of 768 in .*w1 and 26 more; choose"),
        (8, "output", ""),
        (1, "wo", ""),
    ],
)
def test_parts_that_tensor_parallelism_leaves_are_checked(degree: int, filtered: str, message: str) -> None:
    found = plan_float8(configured(filter_fqns=filtered), model(), CPU)
    assert found is not None
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_cut(found, model(), llama3.PLAN, degree)


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        (["--training.enable_cpu_offload"], 1, "line: training.enable_cpu_offload = true: model.conv.* not built with"),
        (["--compile.codegen", "blocks"], 1, "compile.codegen = 'blocks': .* not built with"),
        (["--compile.fusions", "swiglu"], 1, "compile.fusions = .'swiglu'.: .* not built with"),
        (["--training.seq_len", "100", "--training.local_batch_size", "1"], 1, "computes 100 tokens at a time"),
        (["--training.seq_len", "24", "--parallelism.pipeline_parallel_degree", "2"], 2, "24 tokens .*microbatch_size"),
        (["--quantize.linear.float8.filter_fqns", "output,auto_filter_small_kn"], 1, "_kn stood for .*; name"),
        (["--model.converters", "float8,mx"], 1, "linear layers can't be converted by both float8 and mx"),
        (["--model.converters", f"{GROUPED},{GROUPED_MX}"], 1, f"experts can't be .* both {GROUPED} and {GROUPED_MX}"),
        (
            ["--model.converters", "grouped_mm.mx"],
            1,
            "grouped_mm.mx is unknown; .*; did you mean quantize.grouped_mm.mx",
        ),
        (["--model.converters", "fp8"], 1, f"fp8 is unknown; .* mx, {GROUPED} and {GROUPED_MX}; did you mean float8"),
        (
            ["--model.converters", "mx", "--training.seq_len", "80", "--training.local_batch_size", "1"],
            1,
            "80 tokens .* MXFP8 want a multiple of 32",
        ),
        (
            ["--model.converters", "mx", "--training.dynamic_seq_len", "--training.local_batch_size", "2"],
            1,
            "dynamic_seq_len = true: training.local_batch_size = 2 of the shortest rows have 32 tokens, .* 64 or more",
        ),
        (["--quantize.linear.mx.recipe_name", "mxfp4"], 1, "recipe_name = 'mxfp4': MXFP8 is the one format"),
    ],
)
def test_what_is_not_built_is_refused_by_name(words: list[str], world_size: int, message: str) -> None:
    converters = () if "--model.converters" in words else FLOAT8
    with pytest.raises(UserError, match=message):
        check(load([*converters, *words]), world_size)
    assert check(load([*FLOAT8]), 1) == []


def experts_of(config: JobConfig, target: Target = CPU) -> dict[str, Recipe]:
    found = plan_float8(config, model("qwen3", "debugmodel_moe"), target)
    return dict(found.layers) if found is not None else {}


def test_experts_are_converted_by_name() -> None:
    config = load(["--model.converters", GROUPED, f"--{GROUPED}.fqns", "layers.1.,layers.3.moe.experts"])
    assert experts_of(config) == dict.fromkeys(["layers.1.moe.experts", "layers.3.moe.experts"], Recipe(ROWWISE, E4M3))
    config.model.converters.append("float8")
    config.quantize.grouped_mm.float8.recipe_name = "tensorwise_delayed"
    found = experts_of(config)
    assert found.pop("layers.1.moe.experts") == found.pop("layers.3.moe.experts") == Recipe(DELAYED, E5M2)
    assert {*found.values()} == {Recipe(TENSORWISE, E5M2)} and not any("gate" in name for name in found)
    assert check(config, 1) == []


def test_experts_are_converted_to_mx(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model.converters", f"mx,{GROUPED_MX}", f"--{GROUPED_MX}.fqns", "layers.1."]
    assert experts_of(load(words))["layers.1.moe.experts"] == Recipe(MX, E4M3)
    words += [f"--{GROUPED_MX}.recipe_name", "mxfp8_wgrad_with_hp"]
    assert experts_of(load(words))["layers.1.moe.experts"] == Recipe(MX_WIDE, E4M3)
    assert "taken to multiply" not in caplog.text
    of_dry_run = Recipe(MX_WIDE, E4M3, is_traced_for_gpu=True)
    assert experts_of(load(words), DRY)["layers.1.moe.experts"] == of_dry_run
    assert "H100 is taken to multiply in MXFP8, as GPUs of compute capability 10 do" in caplog.text
    for capability, is_legal in (((9, 0), False), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, it=capability: it)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
        message = f"GPU has no products of experts in MXFP8, .* capability 10; .*, or set {GROUPED_MX}.emulate"
        with contextlib.nullcontext() if is_legal else pytest.raises(UserError, match=message):
            experts_of(load(words), CUDA)
        assert experts_of(load([*words, f"--{GROUPED_MX}.emulate"]), CUDA)["layers.1.moe.experts"].emulate
        of_float8 = ["--model.converters", GROUPED, f"--{GROUPED}.fqns", "layers.1."]
        message = "GPU has no products of experts in float8, which want compute capability 9 or 10; remove"
        with contextlib.nullcontext() if capability < (12, 0) else pytest.raises(UserError, match=message):
            experts_of(load(of_float8), CUDA)


@pytest.mark.parametrize("words", [(), (f"--{GROUPED_MX}.fqns", "expert_s")])
def test_experts_that_can_not_be_meant_in_mx_are_refused(words: Sequence[str]) -> None:
    message = f"{GROUPED_MX}.fqns = 'expert_s': is in no experts'" if words else f"{GROUPED_MX}.fqns names no experts"
    with pytest.raises(UserError, match=message):
        experts_of(load(["--model.converters", GROUPED_MX, *words]))


@pytest.mark.parametrize(
    ("fqns", "name", "message"),
    [
        ("", "qwen3", r"grouped_mm.float8.fqns names no experts; set it to \['experts'\]"),
        ("expert_s", "qwen3", r"fqns = 'expert_s': is in no experts' name; did you mean experts\?"),
        ("shared_experts", "qwen3", "'shared_experts': is in no experts' name"),
        ("experts", "llama3", "llama3 has no experts"),
    ],
)
def test_experts_that_can_not_be_meant_are_refused(fqns: str, name: str, message: str) -> None:
    config = load(["--model.converters", GROUPED, f"--{GROUPED}.fqns", fqns, "--model.name", name])
    with pytest.raises(UserError, match=message):
        plan_float8(config, model(name, "debugmodel_moe" if name == "qwen3" else "debugmodel"), CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "recipe_name tensorwise",
            "'tensorwise': a GPU's .* by rows; set it to 'rowwise', or set .*emulate",
        ),
        ("gradient_format e5m2", "gradient_format = 'e5m2': .* of e4m3; remove it, or set .*float8.emulate = true"),
    ],
)
def test_what_a_gpus_products_of_experts_do_not_take_is_refused_and_emulated(words: str, message: str) -> None:
    option, value = words.split()
    words = f"--model.converters {GROUPED} --{GROUPED}.fqns experts --{GROUPED}.{option} {value}"
    with pytest.raises(UserError, match=message):
        experts_of(load(words.split()), CUDA)
    with pytest.raises(UserError, match=message):
        experts_of(load(words.split()), DRY)
    assert experts_of(load([*words.split(), f"--{GROUPED}.emulate"]), CUDA)


def test_options_of_what_is_not_converted_are_noticed() -> None:
    (notice,) = check(load([*FLOAT8, f"--{GROUPED}.fqns", "experts"]), 1)
    assert "nothing of experts is quantised while model.converters does not name quantize.grouped_mm" in notice


def test_what_a_models_own_layers_are_not_built_with_is_refused() -> None:
    own = model()
    own.layers[0].feed_forward = LayerNormMLP(nn.RMSNorm(256), own.layers[0].feed_forward, Recipe())
    assert plan_float8(load([]), own, CPU) is None
    with pytest.raises(UserError, match="cpu_offload = true: the model's own float8 layer layers.0.feed_forward.w1 is"):
        plan_float8(load(["--training.enable_cpu_offload"]), own, CPU)


def with_own(recipe: Recipe = RECIPE, ffn_dim: int = 768) -> Decoder:
    """Give a model whose author wrote its first feed-forward layer, and its output, in float8."""
    own = model()
    own.layers[0].feed_forward = LayerNormMLP(nn.RMSNorm(256), FeedForward(256, ffn_dim), recipe)
    own.output = Linear(own.output, recipe)
    return own


@pytest.mark.parametrize(
    ("recipe", "ffn_dim", "words", "target", "message"),
    [
        (Recipe(), 760, (), CPU, "Linear: old is 760 x 256, and both sizes must be multiples of 16"),
        (Recipe(MX), 784, (), CPU, "Linear: old is 784 x 256, and both sizes must be multiples of 32"),
        (Recipe(), 768, ("--training.seq_len", "40"), CPU, "seq_len = 40: a rank computes 40 tokens at a time"),
        (Recipe(MX), 768, ("--training.seq_len", "48"), CPU, "48 tokens .* MXFP8 want a multiple of 32"),
        (Recipe(MX), 768, (), CUDA, "emulated alone, on a GPU too; give its recipe emulate=True"),
        (Recipe(MX), 768, (), DRY, "emulated alone, on a GPU too"),
        (Recipe(MX, emulate=True), 768, (), DRY, ""),
        (Recipe(DELAYED), 768, (), CPU, ""),
    ],
)
def test_a_models_own_layers_are_refused_what_converted_ones_are(
    recipe: Recipe, ffn_dim: int, words: Sequence[str], target: Target, message: str
) -> None:
    config = load(["--training.local_batch_size", "1", *words])
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        plan_float8(config, with_own(recipe, ffn_dim), target)


@pytest.mark.parametrize("device", ["H100", "CPU"])
def test_a_dry_run_has_the_products_of_the_device_that_it_is_for(device: str) -> None:
    own = with_own(Recipe())
    plan_float8(load([]), own, Target.of(RATES[device]))
    assert own.layers[0].feed_forward.w1.recipe.is_traced_for_gpu == (device == "H100")


def test_a_models_own_experts_are_refused_what_a_gpu_does_not_multiply() -> None:
    weight, gpu = nn.Parameter(torch.zeros(2, 16, 16)), CUDA
    own = nn.ModuleList([GroupedLinear(weight, Recipe(ROWWISE))])
    with pytest.raises(UserError, match="layer 0: a GPU's products of experts .* are of e4m3; give its recipe emulate"):
        plan_float8(load([]), own, gpu)
    own[0].recipe = Recipe(ROWWISE, E4M3, emulate=True)
    assert plan_float8(load([]), own, gpu) is None


def test_a_models_own_layer_in_two_places_has_no_history() -> None:
    own = with_own(Recipe(DELAYED))
    own.layers[1].feed_forward = own.layers[0].feed_forward
    with pytest.raises(UserError, match=r"layers.0.feed_forward.w1 is layers.1.feed_forward.w1 too, and one history"):
        plan_float8(load([]), own, CPU)


def test_parts_of_a_models_own_layers_are_checked() -> None:
    with pytest.raises(UserError, match="= 2: the model's own float8 is not built for output, sharded .*; let it be"):
        check_cut(None, with_own(), llama3.PLAN, 2)
    own = with_own(ffn_dim=784)
    own.output = nn.Linear(256, 256)
    with pytest.raises(UserError, match="the model's own float8: leaves .* 392 of 784 in layers.0.feed_forward.w1,"):
        check_cut(None, own, llama3.PLAN, 2)
    check_cut(None, own, llama3.PLAN, 1)


def test_a_layer_of_no_recipe_is_refused() -> None:
    linear = nn.Linear(32, 16)
    for make, message in (
        (lambda: Linear(linear, Recipe("rowise")), "scaling = 'rowise': must be one of .*; did you mean rowwise?"),
        (lambda: Linear(linear, Recipe("mxfp8_cublas")), "'mxfp8_cublas': must be one of .*, mxfp8"),
        (
            lambda: Linear(linear, Recipe(gradient=torch.bfloat16)),
            "gradient = torch.bfloat16: must be torch.float8_e5m2",
        ),
        (lambda: Linear(linear, "rowwise"), r"recipe = 'rowwise': must be a Recipe, such as Recipe\('tensorwise'\)"),
        (lambda: Linear(nn.Conv1d(16, 16, 1), Recipe()), "Linear: old is of class Conv1d: must be a Linear"),
        (
            lambda: LayerNormLinear(nn.RMSNorm(32), {}, Recipe()),
            r"layers = \{\}: must be a dict of linear layers by name",
        ),
        (lambda: Linear(nn.Linear(30, 64), Recipe(ROWWISE)), "Linear: old is 64 x 30, and both .* multiples of 16"),
        (
            lambda: LayerNormLinear(nn.BatchNorm1d(32), {"a": linear}, Recipe()),
            "LayerNormLinear: norm is of class BatchNorm1d: must be one over a token",
        ),
        (
            lambda: LayerNormMLP(nn.GroupNorm(2, 32), FeedForward(32, 32), Recipe()),
            "LayerNormMLP: norm is of class GroupNorm: must be one over a token",
        ),
        (lambda: LayerNormMLP(nn.RMSNorm(32), linear, Recipe()), "old is of class Linear: must be a FeedForward"),
        (
            lambda: GroupedLinear(linear.weight, Recipe()),
            r"weight_EFD has shape \[16, 32\]: must be experts x out x in",
        ),
    ):
        with pytest.raises(UserError, match=message):
            make()


def test_a_converted_layer_has_the_same_parameters_and_state() -> None:
    with torch.device("cpu"):
        old = nn.Sequential(nn.Linear(32, 16, bias=True), nn.Linear(16, 16, bias=False))
    for recipe, more in ((Recipe(), set()), (Recipe(DELAYED), {"0.amax_history", "1.amax_history"})):
        new = nn.Sequential(*old)
        plan = plan_float8(configured(), new, CPU)
        assert plan is not None
        before = dict(new.named_parameters())
        convert(new, Float8(dict.fromkeys(plan.layers, recipe)))
        assert isinstance(new[0], Linear) and dict(new.named_parameters()) == before
        assert new.state_dict().keys() - old.state_dict().keys() == more
        x = torch.randn(16, 32)
        past = torch.zeros(2) if more else None
        y = linear(x, old[0].weight, recipe, slot=new[0].amax, past=past)[0] + old[0].bias
        assert torch.equal(new[0](x), y) and not torch.equal(y, old[0](x))
        assert E4M3 not in {b.dtype for b in new.buffers()}


def with_mx(*words: str) -> JobConfig:
    return load(["--model.converters", "mx", *words])


def test_linear_layers_are_converted_to_mx() -> None:
    found = plan_float8(with_mx(), model(), CPU)
    assert found is not None and len(found.layers) == 6 * 7 and "output" not in found.layers  # as in torchtitan
    assert {*found.layers.values()} == {Recipe(MX, E4M3, emulate=True)}
    found = plan_float8(with_mx("--quantize.linear.mx.filter_fqns", "wq"), model(), CPU)
    assert found is not None and "output" in found.layers and "layers.0.attention.wq" not in found.layers
    assert plan_float8(with_mx(), nn.Sequential(nn.Linear(32, 64)), CPU) is not None  # has no output


@pytest.mark.parametrize(
    ("words", "target", "message"),
    [
        (("--quantize.linear.mx.filter_fqns", "outptu"), CPU, "mx.filter_fqns = 'outptu': .* did you mean output"),
        (("--quantize.linear.mx.filter_fqns", "w"), CPU, "output is 250 x 256, .* 32; name such layers in .*mx.filt"),
    ],
)
def test_mx_that_can_not_be_meant_is_refused(words: Sequence[str], target: Target, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_float8(with_mx(*words), build_model("llama3", "debugmodel", "sdpa", 250), target)


def test_mx_on_a_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for target in (CUDA, DRY):
        assert plan_float8(with_mx(), model(), target)
    assert caplog.text.count("emulated in fp32 on a GPU too") == 2


def test_parts_that_tensor_parallelism_leaves_of_mx_layers_are_checked() -> None:
    found = plan_float8(with_mx(), model(), CPU)
    assert found is not None
    check_cut(found, model(), llama3.PLAN, 8)
    with pytest.raises(
        UserError, match=r"\['mx'\]: leaves .* no multiples of 32, 16 of 256 .*in .*linear.mx.filter_fqns"
    ):
        check_cut(found, model(), llama3.PLAN, 16)
