"""The choice of activations to recompute in backward, for both the graph's policy and the eager path."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_graph.graph.blocks import number_of
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.torch_private.tracing import ignore_profiler_in_recomputation


@dataclasses.dataclass(frozen=True)
class Budget:
    """The limit of a step's peak memory, above the memory held from step to step.

    fraction   0: the lowest peak possible; 1: the peak of mode none; between them, that part of the difference
    num_bytes  replaces the fraction, if given
    in_flight  microbatches whose activations a pipeline stage keeps at once
    """

    fraction: float = 0.5
    num_bytes: int | None = None
    in_flight: int = 1


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The recomputation of a model. every: each `every`-th block is recomputed whole (0: none); by_op: within every
    block, all but costly operators and every second matmul (see `ops.operator.Operator`); in the graph alone: budget,
    as much as it needs, and saved and again, modules of blocks by their names, which override the others."""

    every: int = 0
    by_op: bool = False
    budget: Budget | None = None
    saved: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()

    @classmethod
    def from_option(cls, mode: str, selective: str) -> Recompute:
        """Return the recomputation of `activation_checkpoint.mode`, other than "memory_budget", and
        `.selective_ac_option`."""
        if mode == "selective" and selective.isdigit():
            return cls(every=int(selective))
        options = {"mode": mode, "selective_ac_option": selective} if mode == "selective" else {"mode": mode}
        return next(policy.recompute for policy in fixed_policies() if policy.options == options)

    def whole_block(self, index: int) -> bool:
        """Return whether block `index` (from 0) is recomputed whole: with every = 2, the second, the fourth, ..."""
        return self.every > 0 and (index + 1) % self.every == 0

    def named(self, module: str) -> bool | None:
        """Return whether a module's results are to be recomputed (True) or saved (False) by its own name or the
        innermost named module around it; None if none is named."""
        while module:
            if module in self.saved or module in self.again:
                return module not in self.saved
            module = module.rpartition(".")[0]
        return None


class Policy(NamedTuple):
    """A recomputation, and the options of `[activation_checkpoint]` that ask for it."""

    options: Mapping[str, str | float]
    recompute: Recompute

    def __str__(self) -> str:
        return ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.options.items())

    @property
    def name(self) -> str:
        return str(self.options.get("selective_ac_option", self.options["mode"]))


# What a search tries, an error about memory proposes, and a family is checked with: from the least time and most
# memory to the contrary.
POLICIES = (
    Policy({"mode": "none"}, Recompute()),
    Policy({"mode": "selective", "selective_ac_option": "op"}, Recompute(by_op=True)),
    Policy({"mode": "full"}, Recompute(every=1)),
    Policy({"mode": "memory_budget", "memory_budget": 0}, Recompute(budget=Budget(0.0))),
)


def fixed_policies() -> list[Policy]:
    """Return the policies that recompute the same in every block, whatever the memory."""
    return [policy for policy in POLICIES if policy.recompute.budget is None]


class KeptOps:
    """The decision of `by_op`, operator by operator through one block's forward."""

    def __init__(self) -> None:
        self.num_matmuls = 0

    def keeps(self, op: object) -> bool:
        recompute = operator_of(op).recompute
        if recompute == "alternate":
            self.num_matmuls += 1
            return self.num_matmuls % 2 == 1
        return recompute != "any"


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
