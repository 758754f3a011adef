"""Initial weights: of the seed and the name alone."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import allocate
from torchtitan_graph.models.layers.init import RESIDUAL, Constant, Initial, initial_weight, initialize, said_initial
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import DP_SHARD, TP, ParallelDims
from torchtitan_graph.parallel.storage import Precision, Reshard, materialize, plan_storage, shard_eager
from torchtitan_graph.torch_private.distributed import fake_process_group

CPU = torch.device("cpu")
CONFIG = llama3.Config(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=40)


def weight(name: str, seed: int = 7, std: Initial = 0.02, shape: tuple[int, ...] = (8, 8)) -> Tensor:
    return initial_weight(name, torch.Size(shape), std, seed, CPU, torch.float32)


def test_the_same_seed_and_name_give_the_same_weights() -> None:
    assert torch.equal(weight("a"), weight("a"))
    assert not torch.equal(weight("a"), weight("b"))
    assert not torch.equal(weight("a"), weight("a", seed=8))


def test_neither_the_order_nor_the_global_generator_matters() -> None:
    names = ["a", "b", "c"]
    forwards = {name: weight(name) for name in names}
    torch.manual_seed(99)
    backwards = {name: weight(name) for name in reversed(names)}
    assert all(torch.equal(forwards[name], backwards[name]) for name in names)
    state = torch.get_rng_state()
    weight("a")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_deeper_model_shares_the_weights_of_its_first_layers_but_for_their_scale() -> None:
    shallow, deep = (llama3.Model(dataclasses.replace(CONFIG, num_layers=n)) for n in (2, 4))
    for model in (shallow, deep):
        fill(model, seed=1)
    found = dict(deep.named_parameters())
    for name, p in shallow.named_parameters():
        scale = shallow.initial_std(name) / deep.initial_std(name) if shallow.initial_std(name) else 1.0
        assert torch.allclose(p, found[name] * scale)


def fill(model: llama3.Model, seed: int) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_weight(name, p.shape, model.initial_std(name), seed, CPU, torch.float32))


def test_norms_are_ones_and_the_rest_normal_cut_at_three_deviations() -> None:
    assert torch.equal(weight("norm", std=None), torch.ones(8, 8))
    assert torch.equal(weight("zero", std=0.0), torch.zeros(8, 8))
    large = weight("large", std=0.5, shape=(200, 200))
    assert large.abs().max() <= 1.5
    assert large.mean().abs() < 0.01
    assert abs(large.std() / 0.5 - 0.9866) < 0.02  # a normal cut at three deviations is that much narrower


def test_the_first_loss_is_near_that_of_a_uniform_guess() -> None:
    model = llama3.Model(dataclasses.replace(CONFIG, vocab_size=500, dim=64))
    fill(model, seed=3)
    tokens = torch.randint(500, (4, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert math.log(500) - 0.1 < loss < math.log(500) + 1


def test_initialize_draws_every_parameter_of_a_sharded_model(one_rank: None) -> None:
    with torch.device("meta"):
        model = llama3.Model(CONFIG)
    materialize(model, plan_storage(model, ParallelDims().layout("cpu"), Precision()), CPU)
    initialize(model, seed=5)
    for name, p in model.named_parameters():
        expected = initial_weight(name, p.shape, model.initial_std(name), 5, CPU, torch.float32)
        assert torch.equal(p.to_local(), expected), name  # type: ignore[attr-defined]


def test_a_module_that_lies_twice_in_a_block_stays_one(one_rank: None) -> None:
    with torch.device("meta"):
        model = llama3.Model(CONFIG)
    model.layers[0].ffn_norm = model.layers[0].attention_norm
    materialize(model, plan_storage(model, ParallelDims().layout("cpu"), Precision()), CPU)
    assert not model.layers[0].ffn_norm.weight.is_meta
    assert model.layers[0].ffn_norm.weight is model.layers[0].attention_norm.weight


# --- buffers ----------------------------------------------------------------------------------------------------------


class Scaled(llama3.Model):
    """A family of somebody's own, with a constant table that its layers look up."""

    def __init__(self, config: llama3.Config, attn: str = "sdpa"):
        super().__init__(config, attn)
        self.layers[1].register_buffer("table", torch.arange(3.0) + 1, persistent=False)


class Filled(Scaled):
    def init_buffers(self) -> None:
        self.layers[1].table.copy_(torch.arange(3.0) + 1)


class HalfFilled(Filled):
    def __init__(self, config: llama3.Config, attn: str = "sdpa"):
        super().__init__(config, attn)
        self.register_buffer("scale", torch.ones(()))


def built(kind: type[llama3.Model], mode: str) -> llama3.Model:
    with torch.device("meta"):
        model = kind(CONFIG)
    layout = ParallelDims().layout("cpu")
    if mode == "file":
        allocate(model, torch.float32)
    elif mode == "graph":
        materialize(model, plan_storage(model, layout, Precision()), CPU)
    else:
        shard_eager(model, model.blocks, layout, Precision(), Reshard(), CPU)
    if mode != "file":
        initialize(model, seed=5)
    return model


@pytest.mark.parametrize("mode", ["graph", "eager", "file"])
def test_a_buffer_has_the_values_that_its_module_fills_it_with(one_rank: None, mode: str) -> None:
    assert built(Filled, mode).layers[1].table.tolist() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["graph", "eager", "file"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Scaled, r"the buffer layers.1.table has no values.* what __init__ computes is lost"),
        (HalfFilled, r"the buffer scale has no values: .* give its module a method init_buffers\(self\)"),
    ],
)
def test_a_buffer_that_nobody_fills_is_refused_by_name(
    one_rank: None, kind: type[llama3.Model], message: str, mode: str
) -> None:
    with pytest.raises(UserError, match=message):
        built(kind, mode)


class Gain(nn.Module):
    INITIAL = {"gain": Constant(3.0), "wo.weight": RESIDUAL, "scale.weight": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.empty(64)), nn.Parameter(torch.empty(64))
        self.wo, self.scale = nn.Linear(64, 64), nn.RMSNorm(64)


def test_initial_values_are_by_the_modules_class_not_by_its_name():
    """The outermost class that names a parameter decides; torch's classes start as torch's."""
    with torch.device("meta"):
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"]), "sdpa")
        block = model.layers[0] = nn.Module()
        block.norm_of_experts, block.w2, block.layer_norm, block.slope, block.inner = (
            *(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.PReLU(64), Gain()),
        )
    found = {name: model.initial_std(f"layers.0.{name}") for name, _ in block.named_parameters()}
    assert found["norm_of_experts.weight"] == found["w2.weight"] == 0.02 and found["norm_of_experts.bias"] == 0.0
    assert found["layer_norm.weight"] is None and found["layer_norm.bias"] == 0.0
    assert found["slope.weight"] == Constant(0.25) and weight("slope", std=found["slope.weight"]).eq(0.25).all()
    assert found["inner.gain"] == Constant(3.0) and found["inner.bias"] == 0.0 and found["inner.scale.weight"] == 0.5
    assert found["inner.wo.weight"] == 0.02 / (2 * model.config.num_layers) ** 0.5
    assert said_initial(model, "layers.0.inner.gain")[0] and not said_initial(model, "layers.0.inner.bias")[0]


def test_a_term_of_a_parameter_that_is_sharded_at_rest_is_refused() -> None:
    """Sharded by tensor parallelism it becomes a plain tensor."""
    with torch.device("meta"):
        model = llama3.Model(CONFIG)
    with fake_process_group(2):
        for axis in (TP, DP_SHARD):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
            term_BL = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
            if axis == TP:
                assert type(model.plain_term("z", term_BL)) is Tensor
                continue
            with pytest.raises(UserError, match=r"losses: z is a DTensor over \('dp_shard',\).*compile.mode = 'graph'"):
                model.plain_term("z", term_BL)
