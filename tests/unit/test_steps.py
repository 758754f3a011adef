"""What is refused before a step is built, and how ranks' counts are added."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from torchtitan_graph import device as devices
from torchtitan_graph.capture.step import StepOutput
from torchtitan_graph.config import JobConfig, load, target_of
from torchtitan_graph.config.check import MOST_TOKENS
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf.architecture import choose_attention, choose_elementwise, choose_model
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.feed_forward import SwiGLU
from torchtitan_graph.models.layers.rope import Rotation
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps import Assembly, StepOptions, Steps, check_steps, step_options
from torchtitan_graph.steps.inputs import example_inputs
from torchtitan_graph.steps.options import lengths_of_rows


def target(config: JobConfig, device: str = "cpu") -> Target:
    """Return what the graphs of a job in a process with this device are for."""
    found = target_of(config)
    return found if device == "cpu" else dataclasses.replace(found, device=torch.device(device), is_gpu=True)


def built(*options: str) -> tuple[JobConfig, Decoder]:
    config = load(options)
    with torch.device("meta"):
        return config, llama3.Model(llama3.FLAVORS["debugmodel"], choose_attention(config, target(config)))


def options_of(config: JobConfig, model: Decoder, num_microbatches: int = 1, device: str = "cpu") -> StepOptions:
    of = target(config, device)
    table = dataclasses.replace(config.model, elementwise=choose_elementwise(config, of, config.model.name))
    return step_options(dataclasses.replace(config, model=table), model, num_microbatches, of)


def check(config: JobConfig, model: Decoder, device: str = "cpu") -> None:
    options = options_of(config, model, 2, device)
    check_steps(config, model, llama3, ParallelDims(pp=config.parallelism.pipeline_parallel_degree), options)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_model_without_a_parameter_to_train_is_refused(mode: str) -> None:
    config, model = built("--compile.mode", mode)
    check(config, model)
    model.requires_grad_(False)
    with pytest.raises(UserError, match="model.name = 'llama3': none of its parameters takes gradients"):
        check(config, model)


def test_blocks_that_share_a_parameter_are_refused() -> None:
    """Inside a block, and outside of all, they may."""
    config, model = built()
    for block in model.blocks.values():
        block.ffn_norm = block.attention_norm
    check(config, model)
    model.blocks["layers.2"].feed_forward = model.blocks["layers.0"].feed_forward
    words = "'llama3': layers.2.feed_forward.w1.weight is layers.0.feed_forward.w1.weight, and a block can't share"
    with pytest.raises(UserError, match=words):
        check(config, model)


def test_a_scalar_is_refused() -> None:
    config, model = built()
    model.norm.factor = torch.nn.Parameter(torch.ones((), device="meta"))
    with pytest.raises(UserError, match="norm.factor is a scalar, which can't be sharded; give it one dimension"):
        check(config, model)


def test_a_stage_without_a_parameter_to_train_is_refused() -> None:
    config, model = built("--parallelism.pipeline_parallel_degree", "2")
    first, *others = model.modules_in_order
    config.parallelism.module_fqns_per_model_part = [[first], others]
    check(config, model)
    model.tok_embeddings.requires_grad_(False)
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2: no parameter of stage 0, tok_embeddings, takes"):
        check(config, model)


@pytest.mark.parametrize("table", ["training", "validation"])
def test_rows_whose_tokens_do_not_fit_are_refused(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 bytes a token, also where there is no dense mask: flex attention on a GPU."""
    monkeypatch.setattr(devices, "memory_total_gib", lambda: 1.0)
    rows = [f"--{table}.local_batch_size", "2", "--model.attn", "flex", "--validation.enable", f"--{table}.seq_len"]
    check(*built(*rows, str(2**24)), device="cuda")
    config, model = built(*rows, str(2**24 + 1))
    words = rf"{table}.seq_len = 16777217: the tokens of {table}.local_batch_size 2 rows would take about 1 GiB"
    with pytest.raises(UserError, match=words):
        check(config, model, device="cuda")


def test_activations_are_moved_on_a_gpu_and_in_a_dry_run_and_a_cpu_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)

    def moved(device: str, *options: str) -> list[str]:
        config, model = built("--activation_checkpoint.offload", "layers.*", *options)
        return list(options_of(config, model, 2, device).offload)

    assert moved("cuda") == moved("cpu", "--comm.mode", "fake_backend") == [f"layers.{i}" for i in range(5)]
    of_stages = moved("cuda", "--parallelism.pipeline_parallel_degree", "2")
    assert of_stages == ["layers.0", "layers.1", "layers.3", "layers.4"], "the last of each stage stays"
    with caplog.at_level(logging.INFO):
        assert moved("cpu") == []
    assert "activation_checkpoint.offload: a CPU's memory is the host's, so nothing is moved" in caplog.text


def test_cuda_graphs_are_recorded_on_a_gpu_alone_and_a_dry_run_needs_none() -> None:
    assert options_of(*built("--compile.cuda_graphs"), 1, "cuda").recorders is not None
    dry = built("--compile.cuda_graphs", "--comm.mode", "fake_backend")
    assert options_of(*dry).recorders is None


class OfLogits(llama3.Model):
    def forward(self, *args: Tensor, side_outputs: bool = False) -> Any:
        return super().forward(*args, side_outputs=side_outputs)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("", OfLogits, "OfLogits.forward returns logits of all rows; give it the argument `loss`"),
        ("--parallelism.tensor_parallel_degree 2 --parallelism.disable_loss_parallel", llama3.Model, "disable_loss_p"),
        ("--training.dynamic_seq_len --model.attn sdpa", llama3.Model, "not with training.dynamic_seq_len = true"),
    ],
)
def test_loss_chunks_are_refused_where_the_logits_of_all_rows_are_needed(words: str, kind: Any, said: str) -> None:
    config = load(["--training.loss_chunks", "2", *words.split()])
    with torch.device("meta"):
        model = kind(llama3.FLAVORS["debugmodel"], "sdpa")
    dims, options = ParallelDims(tp=config.parallelism.tensor_parallel_degree), options_of(config, model)
    with pytest.raises(UserError, match=f"training.loss_chunks = 2: .*{said}"):
        check_steps(config, model, llama3, dims, options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_losses.mean", "the loss depends on how rows are divided .* It is a mean over targets: return the sum"),
        ("own_losses.absent", "own_losses has no absent"),
        ("own_losses.of_logits", "can't be called with 3 arguments"),
    ],
)
def test_a_loss_of_the_users_own_is_checked_before_anything_is_built(name: str, said: str) -> None:
    config = load(["--loss.name", name])
    with torch.device("meta"):
        model = llama3.Model(llama3.FLAVORS["debugmodel"], "sdpa")
    with pytest.raises(UserError, match=f"loss.name = '{name}': .*{said}"):
        check_steps(config, model, llama3, ParallelDims(), options_of(config, model))


SDPA = "--model.attn sdpa --training.seq_len 1024 --training.local_batch_size 2"
FULL = "--training.mixed_precision_param float32"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{SDPA} {FULL}", ["1024 x 1024 positions take 0.00977 GiB, and", "; auto or flex would hold none"]),
        (SDPA, ["take 0.00586 GiB, and", "; auto or flex or varlen would hold none"]),
        (f"{SDPA} --compile.cuda_graphs", ["; auto or flex would hold none"]),
        (f"{SDPA} --model.name gpt_oss", ["take 0.0117 GiB", "; auto or flex would hold none"]),
        (f"{SDPA} --parallelism.context_parallel_degree 2", ["512 x 1024", "; auto or flex would"]),
        ("--training.dynamic_seq_len --training.seq_len 1024", ["; varlen would hold none"]),
        (f"--compile.disable_passes compile_regions {FULL}", ["; shorter rows would take less"]),
        ("--training.seq_len 1024", []),
        (f"{SDPA} --comm.fake_device CPU", []),
    ],
)
def test_masks_of_all_pairs_are_told_on_a_gpu(
    words: str, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte for what is seen, and a bias in the dtype of scores, for each mask; gpt_oss has two."""
    monkeypatch.setattr(logger, "propagate", True)
    config = load([*words.split(), "--comm.mode", "fake_backend"])
    family, model, table = choose_model(config, None, 256, target(config))
    config = dataclasses.replace(config, model=table)
    options = step_options(config, model, 1, target(config))
    with caplog.at_level(logging.INFO):
        check_steps(config, model, family, ParallelDims(cp=config.parallelism.context_parallel_degree), options)
    lines = [line for line in caplog.text.splitlines() if "model.attn = 'sdpa': on a GPU its masks" in line]
    assert len(lines) == bool(said) and all(each in lines[0] for each in said)


@pytest.mark.parametrize(
    ("device", "words", "fused"),
    [
        ("cpu", "", {Rotation}),
        ("cpu", "--compile.codegen blocks", set()),
        ("cpu", "--compile.fusions rope", set()),
        ("cuda", "", {SwiGLU, Rotation}),
        ("cpu", "--comm.mode fake_backend --comm.fake_device H100", {SwiGLU, Rotation}),
        ("cpu", "--comm.mode fake_backend --comm.fake_device CPU", {Rotation}),
        ("cuda", "--compile.fusions rms_norm,rope", {SwiGLU}),
        ("cuda", "--compile.fusions rope,swiglu", set()),
        ("cuda", "--compile.codegen blocks", {SwiGLU, Rotation}),
        ("cuda", "--compile.mode eager", {SwiGLU, Rotation}),
        ("cuda", "--model.elementwise torch", set()),
        ("cpu", "--model.elementwise fused", {SwiGLU, Rotation}),
        ("cpu", "--model.elementwise fused --compile.fusions rope", {SwiGLU}),
    ],
)
def test_elementwise_layers_are_the_devices_unless_named(device: str, words: str, fused: set[type]) -> None:
    config, of_model = built(*words.split())
    assert {*options_of(config, of_model, 1, device).fused} == fused
    assert config.model.elementwise in ("auto", *words.split()), "the configuration is left as it was"


def test_a_dry_run_compiles_nothing() -> None:
    assert options_of(*built("--compile.codegen", "blocks")).target.runs
    dry = built("--compile.codegen", "blocks", "--comm.mode", "fake_backend")
    assert not options_of(*dry).target.runs


def test_parameters_lie_in_the_hosts_memory_on_a_gpu_alone(caplog: pytest.LogCaptureFixture) -> None:
    def is_asked(device: str, *options: str) -> bool:
        config, model = built("--training.enable_cpu_offload", *options)
        return options_of(config, model, 2, device).cpu_offload

    assert is_asked("cuda") and is_asked("cpu", "--comm.mode", "fake_backend")
    with caplog.at_level(logging.INFO):
        assert not is_asked("cpu")
    assert "training.enable_cpu_offload: a CPU's memory is the host's, so nothing is moved" in caplog.text


def test_counts_of_several_dtypes_keep_them() -> None:
    """Beyond 2**24 a count in float32 would no longer be exact."""
    layout = SimpleNamespace(routing_groups=[])
    steps = Steps(None, layout, None, None)  # type: ignore[arg-type]
    state = {"a": torch.tensor([2**24 + 1]), "b": torch.tensor([[0.5]]), "c": torch.tensor(3)}
    summed = steps._sum_state(state)
    assert list(summed) == ["a", "b", "c"]
    assert all(torch.equal(summed[name], x) and summed[name].dtype == x.dtype for name, x in state.items())


def test_a_steps_loss_and_counts_are_summed_over_its_microbatches() -> None:
    _, model = built("--model.attn", "sdpa")
    alone = SimpleNamespace(routing_groups=[], degree=lambda axis: 1, sum_over_rows=lambda x: x)

    def step(batch: Batch, masks: Any, num_tokens: Tensor) -> StepOutput:
        return StepOutput(batch.labels_BL.sum() / num_tokens, {"count": batch.tokens_BL.sum()})

    microbatches = [Batch(*(torch.full((1, 4), i) for _ in Batch._fields)) for i in (1, 2, 4)]
    output = Steps(model, alone, step, None).train(microbatches, torch.tensor(16))  # type: ignore[arg-type]
    assert output.loss == 4 * (1 + 2 + 4) / 16 and output.state["count"] == 4 * (1 + 2 + 4)


def test_rows_of_several_lengths_need_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    asked = ["--training.dynamic_seq_len", "--training.seq_len", "48"]
    assert lengths_of_rows(load([*asked, "--compile.mode", "eager"]), "sdpa", Target.here()) == range(16, 49, 16)
    with pytest.raises(UserError, match="training.dynamic_seq_len = true: a graph .* needs torch 2.13 or newer"):
        lengths_of_rows(load(asked), "sdpa", Target.here())


def test_rows_of_several_lengths_refuse_flex_attention_where_it_is_compiled() -> None:
    config = load(["--training.dynamic_seq_len", "--training.seq_len", "48"])
    assert lengths_of_rows(config, "flex", target(config)) == range(16, 49, 16)
    with pytest.raises(UserError, match="model.attn = 'flex': not with training.dynamic_seq_len on cuda, where"):
        lengths_of_rows(config, "flex", target(config, "cuda"))


@pytest.mark.parametrize("attn", ["sdpa", "flex", "varlen"])
def test_what_is_traced_on_takes_no_memory_however_many_tokens(attn: str) -> None:
    config, model = built("--model.attn", attn)
    alone = SimpleNamespace(dims=ParallelDims(), degree=lambda axis: 1)
    assembly = Assembly(model, llama3, alone, options_of(config, model))  # type: ignore[arg-type]
    batch, masks, _ = example_inputs(assembly, (1, MOST_TOKENS))
    assert all(x.is_meta for x in batch) and {x.shape for x in batch[:4]} == {(1, MOST_TOKENS)}
    leaves = [x for x in torch.utils._pytree.tree_leaves(masks) if isinstance(x, torch.Tensor)]
    assert sum(x.numel() for x in leaves if not x.is_meta) < 10
    assert model.visible_in_one_document(2**22)["layers.0"] == (2**22 + 1) / 2**23
