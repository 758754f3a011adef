"""A small model whose step the tests of passes trace, and what they ask of graphs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchtitan_graph.capture.step import SideOutputs, trace_train_step
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.loss import cross_entropy

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

GATHER, REDUCE_SCATTER, ALL_REDUCE, WAIT = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    c10d.wait_tensor.default,
)
COLLECTIVES = (GATHER, REDUCE_SCATTER, ALL_REDUCE)

V, D, F = 10, 6, 7  # no number of rows that four ranks divide


class Batch(NamedTuple):
    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.up = nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Toy(nn.Module):
    def __init__(self, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, D)
        self.layers = nn.ModuleList([ToyBlock() for _ in range(num_layers)])
        self.output = nn.Linear(D, V, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: None, *, side_outputs: bool = False) -> Any:
        x = self.tok_embeddings(tokens_BL)
        for layer in self.layers:
            x = layer(x)
        return (self.output(x), SideOutputs({}, {})) if side_outputs else self.output(x)


def batch(seed: int = 0, rows: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(V, (rows, 3), generator=generator) for _ in range(2))
    return Batch(tokens, labels, torch.arange(3).expand(rows, 3))


def blocks(num_layers: int = 2) -> list[str]:
    """Name the blocks of a toy."""
    return [f"layers.{i}" for i in range(num_layers)]


def toy(num_layers: int = 2, tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        return Toy(num_layers, tied)


def trace_toy(model: nn.Module, dtype: torch.dtype = torch.float32, rows: int = 2) -> GraphModule:
    return trace_train_step(model.to(dtype), cross_entropy, batch(rows=rows), None, torch.tensor(6.0), device="cpu").gm


def run_toy(gm: GraphModule, rows: int = 2) -> list[Tensor]:
    """Run a graph in the compute layout on parameters and tokens of a seed."""
    generator = torch.Generator().manual_seed(1)
    placeholders = gm.graph.find_nodes(op="placeholder")
    slots = signature_of(gm).inputs
    values = iter([*batch(2, rows), torch.tensor(6.0)])
    flat = [
        torch.randn(node.meta["val"].shape, generator=generator) if slot.kind == "param" else next(values)
        for slot, node in zip(slots, placeholders, strict=True)
    ]
    with torch.no_grad():
        return gm(*flat)


def bitwise(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def text(gm: GraphModule) -> list[str]:
    return [node.format_node() for node in gm.graph.nodes]


def place(gm: GraphModule) -> dict[Node, int]:
    return {node: i for i, node in enumerate(gm.graph.nodes)}


def phase_of(phase: str) -> Callable[[Node], bool]:
    return lambda node: meta.phase(node) == phase
