"""The compute layout: a family declares it as data, a pattern of module or parameter names -> its role on each axis.

    "layers.*.attention.wq.weight": {"tp": "shard 0"}

An axis without a role does not change a rank's computation there.

| role of a module | under tensor parallelism |
|---|---|
| embedding  | each rank holds rows of the table; the output is sharded over the sequence |
| partial    | each rank's result is its term of a sum, see below |
| vocabulary | each rank holds rows of the output table; the logits stay sharded over the vocabulary for the loss |
| gather     | inside a partial one: its result, of which each rank computes a part of the last dim, is gathered |
| own part   | inside a partial one: it takes a rank's part of the last dim of its argument, which each rank has whole |

| role of a module | under context parallelism |
|---|---|
| context    | gathers its arguments over the row, from the ranks that have its parts |

| role of a parameter | under tensor parallelism |
|---|---|
| shard 0, shard 1, shard 2 | each rank holds a part of that dim |
| replicate  | each rank holds all of it, and its gradient is the sum of the ranks' |
| share      | as replicate, but each rank computes with 1 / degree of the value: it is added once to a sum |

| role of a module | under expert parallelism |
|---|---|
| route    | sends tokens to their experts' ranks and results back, by its attribute `route`, see ops/route.py |
| dispatch | sends each row of its first argument to the rank that holds the row's expert, and the results back |
| apart    | see below |
| partial  | see below |

| role of a parameter | under expert parallelism |
|---|---|
| expert | each rank holds the weights of some experts, along dim 0 |

Where `ep` spans `tp` (each expert whole on one rank) a role on `ep` takes the place of the pattern's role on `tp`. A
module that is `apart` then works on this rank's part of the sequence, and a `partial` one inside it as under `tp`.

Between modules a rank has plain tensors, sharded over the sequence; inside a `partial` module, plain tensors of the
whole sequence: its first argument is gathered, once for all that is inside, and its result is reduced and sharded over
the sequence again. So a layer's code has nothing about parallelism: only its weights are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torchtitan_graph.parallel.layout import CP, EP, TP, ParallelDims

Plan = Mapping[str, Mapping[str, str]]  # pattern -> axis -> role

SEQUENCE_DIM = 1

# Roles that shard a parameter, and the dim; the first two are of modules, and shard their weight.
SPLIT_DIM = {"embedding": 0, "vocabulary": 0, "shard 0": 0, "shard 1": 1, "shard 2": 2}
MODULE_ROLES = ("embedding", "partial", "vocabulary", "gather", "own part")
PARAMETER_ROLES = ("shard 0", "shard 1", "shard 2", "replicate", "share")
EXPERT_ROLES = ("route", "dispatch", "expert")
ROLES = {TP: MODULE_ROLES + PARAMETER_ROLES, CP: ("context",), EP: (*EXPERT_ROLES, "apart", "partial")}


def tensor_roles(plan: Plan, dims: ParallelDims) -> dict[str, str]:
    """Return the roles on tp by pattern, given the degrees of the other axes."""
    if not dims.ep_spans_tp:
        return {pattern: roles[TP] for pattern, roles in plan.items() if TP in roles}
    both = {pattern: roles.get(EP, roles.get(TP)) for pattern, roles in plan.items()}
    return {pattern: role for pattern, role in both.items() if role and role not in EXPERT_ROLES}


def context_roles(plan: Plan) -> dict[str, str]:
    """Return the roles on cp by pattern."""
    return {pattern: roles[CP] for pattern, roles in plan.items() if CP in roles}


def expert_roles(plan: Plan) -> dict[str, str]:
    """Return the roles on ep by pattern, except those that only replace a role on tp."""
    return {pattern: roles[EP] for pattern, roles in plan.items() if roles.get(EP) in EXPERT_ROLES}


def table_style(role: str, loss_parallel: bool) -> ParallelStyle:
    """Return torch's parallel style for a table of the vocabulary: the embedding, or the output."""
    sequence = Shard(SEQUENCE_DIM)
    if role not in ("embedding", "vocabulary"):
        raise ValueError(f"the role {role!r} of a module on {TP}: must be partial, apart, embedding or vocabulary")
    if role == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
    if loss_parallel:
        return ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
    return ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
