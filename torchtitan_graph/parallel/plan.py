"""The compute layout: a family declares it as data, module-name pattern -> role.

| role       | under tensor parallelism |
|---|---|
| embedding  | each rank holds rows of the table; the output is sharded over the sequence |
| sequence   | works on its rank's part of the sequence; weights are replicated |
| gather     | the module's first argument is gathered over the sequence, once for all projections inside |
| colwise    | each rank holds output features (a linear layer's rows) |
| rowwise    | each rank holds input features; the partial outputs are reduced and sharded over the sequence |
| vocabulary | each rank holds rows of the output table; the logits stay sharded over the vocabulary for the loss |
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

SEQUENCE_DIM = 1

# The dim of the weight that a role splits.
SPLIT_DIM = {"embedding": 0, "colwise": 0, "rowwise": 1, "vocabulary": 0}


def style(role: str, loss_parallel: bool) -> ParallelStyle:
    """Give torch's parallel style for a role.

    Raises:
        ValueError: the plan uses a word that is not in the table above.
    """
    sequence = Shard(SEQUENCE_DIM)
    match role:
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
        case "sequence":
            return SequenceParallel(sequence_dim=SEQUENCE_DIM)
        case "gather":
            return PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),))
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel(output_layouts=sequence)
        case "vocabulary" if loss_parallel:
            return ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
        case "vocabulary":
            return ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
    legal = ", ".join(["sequence", "gather", *SPLIT_DIM])
    raise ValueError(f"a plan gives the role {role!r}: legal are {legal}")
