"""A model's logits and gradients, ours and those of transformers' own class for the family with the same weights."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan_graph.models.hf import from_hf, to_hf
from torchtitan_graph.models.hf.places import live_tensors
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.rope import rope_frequencies
from torchtitan_graph.models.spec import load_family, tiny_config

Results = dict[str, Tensor]


def build(name: str, flavor: str, attn: str = "sdpa", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """Build a tiny model with weights that let everything matter: near unit scale, and biases and sinks as large as
    what they are added to. They are the same numbers in every dtype."""
    family = load_family(name)
    model = family.Model(tiny_config(family.FLAVORS[flavor], **{"vocab_size": 64, **changes}), attn)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor_name, tensor in live_tensors(model).items():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn * _std(tensor_name, tensor) + ("norm" in tensor_name))
    return model.to(dtype)


def _std(name: str, tensor: Tensor) -> float:
    if "norm" in name or name.endswith("bias_E"):
        return 0.3
    if name.endswith(("b1", "b3")):
        return 4.0  # gpt_oss clamps at 7
    if tensor.dim() == 1 or name.endswith(("sinks", "bias", "b2", "tok_embeddings.weight")):
        return 1.0
    return tensor.shape[-1] ** -0.5


def tokens(B: int = 2, L: int = 24, V: int = 64) -> Tensor:
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor) -> Tensor:
    """Weigh every logit by a random number of its own."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (logits * weights.to(logits.dtype)).sum()


def results(model: nn.Module, logits: Callable[[nn.Module], Tensor] = lambda model: model(tokens())) -> Results:
    """Give the logits, and the gradient of every parameter by its name."""
    found = logits(model)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss_of(found), list(named.values()))
    return {"logits": found.detach(), **dict(zip(named, gradients, strict=True))}


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def largest_gap(found: Results, expected: Results) -> float:
    """Compare each tensor relative to its largest number."""
    assert found.keys() == expected.keys()
    return max(gap(found[name], expected[name]) for name in expected)


class _NothingNarrowed(TorchFunctionMode):
    """Leave in double precision what transformers computes in fp32 whatever the dtype; take cosines by the kernel that
    we take them by, which rounds fp32 otherwise than that of `torch.polar`."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.polar:
            radius, angle = args
            return torch.complex(radius * angle.cos(), radius * angle.sin())
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        return func(*args, **kwargs)


def rope_width(config: Any) -> int:
    """Give how many features of a head are rotated."""
    return config.rope_dim if hasattr(config, "rope_dim") else config.head_dim


def in_double(theirs: nn.Module, config: Any) -> Callable[..., Any]:
    """Let transformers compute in double precision but for rotary angles, which are fp32's, rounded as ours are."""
    scaling = getattr(config, "rope_scaling", None)
    frequencies_H = rope_frequencies(rope_width(config), config.rope_theta, scaling, torch.device("cpu"))
    theirs.double()  # transformers keeps some parameters in fp32 whatever its `dtype`
    theirs.model.rotary_emb.inv_freq = frequencies_H

    def call(**inputs: Tensor) -> Any:
        with _NothingNarrowed():
            return theirs(**inputs)

    return call


def _widen_what_stays_fp32(theirs: nn.Module, folder: Path) -> None:
    """Read the parameters again that transformers keeps in fp32 whatever its `dtype` (from 5.24 on DeepSeek's gates),
    as they were rounded."""
    saved = load_file(folder / "model.safetensors")
    for name, parameter in theirs.named_parameters():
        if parameter.dtype == torch.float32:
            parameter.data = saved[name]


def results_of_transformers(ours: Decoder, **inputs: Any) -> Results:
    """Give what transformers computes with our weights, the gradients by our names; from `tokens()` if without inputs.

    The gradients travel as the weights do, through the files: they are put in the weights' place and read back.
    """
    transformers = pytest.importorskip("transformers")
    dtype = ours.output.weight.dtype
    with tempfile.TemporaryDirectory() as folder:
        to_hf(ours, Path(folder) / "weights")
        theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "weights",
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",  # the others have no fp64
            output_loading_info=True,
        )
        assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        if dtype == torch.float64:
            _widen_what_stays_fp32(theirs, Path(folder) / "weights")
        call = in_double(theirs, ours.config) if dtype == torch.float64 else theirs
        logits = call(**(inputs or {"input_ids": tokens()})).logits
        loss_of(logits).backward()
        for parameter in theirs.parameters():
            parameter.data = parameter.grad
        theirs.save_pretrained(Path(folder) / "gradients")
        gradients = dict(from_hf(Path(folder) / "gradients", dtype).named_parameters())
    return {"logits": logits.detach(), **{name: p.detach() for name, p in gradients.items()}}
