"""The compute layout: a family declares it as data, a pattern of module or parameter names -> its role on each axis.

    "layers.*.attention.wq.weight": {"tp": "shard 0"}

An axis that is not named changes nothing of what a rank computes there.

| role of a module | under tensor parallelism |
|---|---|
| embedding  | each rank holds rows of the table; the output is sharded over the sequence |
| partial    | what each rank returns is its part of a sum, see below |
| vocabulary | each rank holds rows of the output table; the logits stay sharded over the vocabulary for the loss |

| role of a module | under context parallelism |
|---|---|
| context    | gives what it is given of the whole row, from the ranks that have its parts |

| role of a parameter | under tensor parallelism |
|---|---|
| shard 0, shard 1, shard 2 | each rank holds a part of that dim |
| replicate  | each rank holds all of it, and its gradient is the sum of the ranks' |
| share      | as replicate, but each rank works with its share of the value, 1 / degree: what is added once to a sum |

Between modules a rank has plain tensors, sharded over the sequence; inside a `partial` module, plain tensors of the
whole sequence: its first argument is gathered, once for all that is inside, and its result is reduced and sharded over
the sequence again. So a layer's code says nothing about parallelism: its weights are smaller, that is all.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

Plan = Mapping[str, Mapping[str, str]]  # pattern -> axis -> role

SEQUENCE_DIM = 1

# What splits a parameter, and on which dim; the first two are modules, whose weight is meant.
SPLIT_DIM = {"embedding": 0, "vocabulary": 0, "shard 0": 0, "shard 1": 1, "shard 2": 2}
MODULE_ROLES = ("embedding", "partial", "vocabulary")
CONTEXT_ROLES = ("context",)
PARAMETER_ROLES = ("shard 0", "shard 1", "shard 2", "replicate", "share")


def table_style(role: str, loss_parallel: bool) -> ParallelStyle:
    """Give torch's parallel style for a table of the vocabulary: the embedding, or the output."""
    sequence = Shard(SEQUENCE_DIM)
    if role == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
    if loss_parallel:
        return ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
    return ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
