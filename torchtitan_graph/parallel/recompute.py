"""Which activations are recomputed in backward: the one decision, read by the graph's policy and by the eager path."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_graph.graph.blocks import number_of
from torchtitan_graph.graph.flops import ATTENTION, GROUPED_MM
from torchtitan_graph.graph.torch_private.tracing import ignore_profiler_in_recomputation

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, GROUPED_MM)

# What tells the host how many rows go to which rank: kept under any policy, so that it waits for a GPU once a layer.
HOST_READS = (torch.ops._c10d_functional.all_to_all_single.default, torch.ops.torchtitan_graph.row_splits.default)

# Costly to compute again for the memory they free: what `selective` with "op" keeps, beside every second matmul.
SAVED_OPS = (
    *ATTENTION,
    *HOST_READS,
    torch.ops.torchtitan_graph.exchange.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a step may hold at its peak, beside what lies there from step to step.

    fraction   0: the least that can be had; 1: what mode none holds; between them, that part of the difference
    num_bytes  in place of the fraction, where it is given
    in_flight  microbatches of which a pipeline's stage keeps values at once
    """

    fraction: float = 0.5
    num_bytes: int | None = None
    in_flight: int = 1


@dataclasses.dataclass(frozen=True)
class Recompute:
    """every: each `every`-th block is recomputed whole (0: none); by_op: within every block, all but `SAVED_OPS` and
    every second matmul; in the graph alone: budget, as much as it asks for, and saved and again, modules of blocks by
    their names, whatever the others say."""

    every: int = 0
    by_op: bool = False
    budget: Budget | None = None
    saved: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()

    @classmethod
    def from_option(cls, mode: str, selective: str) -> Recompute:
        """Read `activation_checkpoint.mode` and `.selective_ac_option`."""
        if mode == "full":
            return cls(every=1)
        if mode == "selective":
            return cls(by_op=True) if selective == "op" else cls(every=int(selective))
        return cls()

    def whole_block(self, index: int) -> bool:
        """Tell whether block `index` (from 0) is recomputed whole: with every = 2, the second, the fourth, ..."""
        return self.every > 0 and (index + 1) % self.every == 0

    def named(self, module: str) -> bool | None:
        """Tell whether what a module computes is named to be computed again (True) or saved (False), the module itself
        or the innermost one around it that is named."""
        while module:
            if module in self.saved or module in self.again:
                return module not in self.saved
            module = module.rpartition(".")[0]
        return None


class KeptOps:
    """Decides, operator by operator through one block's forward, what `by_op` keeps."""

    def __init__(self) -> None:
        self.num_matmuls = 0

    def keeps(self, op: object) -> bool:
        if op in MATMULS:
            self.num_matmuls += 1
            return self.num_matmuls % 2 == 1
        return op in SAVED_OPS


def recompute_eager(blocks: Mapping[str, nn.Module], recompute: Recompute) -> None:
    """Checkpoint the blocks of an eager model in place, their names unchanged."""
    if recompute.by_op:
        ignore_profiler_in_recomputation()
    for name, block in blocks.items():
        if recompute.whole_block(number_of(name)):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        elif recompute.by_op:
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=_selective_context
            )


def _selective_context():  # type: ignore[no-untyped-def]
    passes = {False: KeptOps(), True: KeptOps()}  # the forward, and its recomputation

    def policy(context, op, *args, **kwargs):  # type: ignore[no-untyped-def]
        keeps = passes[context.is_recompute].keeps(op)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
