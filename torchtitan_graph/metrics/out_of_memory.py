"""The out-of-memory report: the step, the largest tensors, and options that need less memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.config import JobConfig
from torchtitan_graph.device import GIB
from torchtitan_graph.graph import meta

NUM_SHOWN = 10


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error; torch raises a plain RuntimeError for a CPU's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def report(
    error: BaseException, doing: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: JobConfig
) -> str:
    """Return a report of the memory this process held when it ran out, with options that need less.

    Args:
        doing: the activity, as in "step 12".
    """
    sizes: dict[str, int] = {}  # kind -> bytes
    found: list[tuple[int, str]] = []
    seen: set[int] = set()  # addresses of storages
    for kind, name, tensor in [*_state(model, optimizer), *_values(error)]:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
            shape = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
            found.append((storage.nbytes(), f"{storage.nbytes() / GIB:9.3f} GiB  {kind}: {name}  {shape}"))
    found.sort(key=lambda each: -each[0])
    held = ", ".join(f"{kind} {size / GIB:.3f} GiB" for kind, size in sizes.items())
    return "\n".join(
        [
            f"{doing}: out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            f"held: {held}",
            "the largest tensors:",
            *(line for _, line in found[:NUM_SHOWN]),
            "what takes less memory:",
            *(f"  {line}" for line in _advice(sizes, config)),
        ]
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that persist from step to step: kind, name and this rank's shard."""
    for name, parameter in model.named_parameters():
        yield "parameters", name, local_part(parameter)
        if parameter.grad is not None:
            yield "gradients", name, local_part(parameter.grad)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                yield "optimizer", f"{name} {key}", local_part(value)


def _values(error: BaseException) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors in the frames of the error's traceback: of a graph, every value still alive."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_locals.get("self")
        nodes = {node.name: node for node in code.graph.nodes} if isinstance(code, GraphModule) else {}
        for name, value in frame.f_locals.items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    yield "values of the step", _described(name, nodes), local_part(tensor)


def _described(name: str, nodes: dict[str, Any]) -> str:
    node = nodes.get(name)
    return name if node is None else " ".join(filter(None, [meta.phase(node), meta.module(node), name]))


@torch.no_grad()
def _advice(sizes: dict[str, int], config: JobConfig) -> Iterator[str]:
    """Yield options that would save memory and are not used; first those for the larger part of the memory."""
    training, parallelism = config.training, config.parallelism
    of_values, of_state = [], []
    if config.activation_checkpoint.mode != "full":
        of_values.append(f'activation_checkpoint.mode = "full" (now "{config.activation_checkpoint.mode}")')
    if training.local_batch_size > 1:
        of_values.append(
            f"training.local_batch_size below {training.local_batch_size}; with training.global_batch_size set, the "
            "same training in more microbatches"
        )
    if training.mixed_precision_param == "float32":
        of_values.append('training.mixed_precision_param = "bfloat16"')
    of_values.append(f"training.seq_len below {training.seq_len}: another training")
    if parallelism.data_parallel_replicate_degree > 1:
        of_state.append("parallelism.data_parallel_replicate_degree = 1: shards instead of replicas")
    if parallelism.fsdp_reshard_after_forward != "always":
        of_state.append('parallelism.fsdp_reshard_after_forward = "always"')
    of_state.append("more processes, or a higher parallelism.tensor_parallel_degree: each then holds less of the model")
    values = sizes.get("values of the step", 0)
    yield from of_values + of_state if values > sum(sizes.values()) / 2 else of_state + of_values
