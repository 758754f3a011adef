"""Functions of tensors whose sizes differ, their arguments, and their capture in every way that this torch has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic

from torchtitan_graph.capture.dynamo import CAPTURES as ALL_CAPTURES
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.passes.cleanup import cleanup

# Dynamo captures steps from torch 2.13 on.
CAPTURES = {name: capture for name, capture in ALL_CAPTURES.items() if name == "make_fx" or torch.__version__ >= "2.13"}


def rows(size: int, *rest: int) -> Tensor:
    return torch.randn(size, *rest or (4,), generator=torch.Generator().manual_seed(size))


def marked(x: Tensor, mark: Callable = mark_dynamic, **how: Any) -> Tensor:
    mark(x, 0, **how)
    return x


def double(x: Tensor, y: Tensor) -> Tensor:
    return (torch.cat([x, x]) + y) * x.shape[0]


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 5 else x


def captured(
    fn: Callable, *arguments: Any, shapes: Any = None, module: nn.Module | None = None
) -> list[Callable[..., Any]]:
    """Capture in every way, see that the graphs are the same, and give what runs each."""
    module = module or nn.Module()
    found = [capture(fn, module, dynamic_shapes=shapes)(*arguments) for capture in CAPTURES.values()]
    first, *others = (described(cleanup(traced.gm)) for traced in found)
    assert all(each == first for each in others)
    return [run_traced(traced, module) for traced in found]
