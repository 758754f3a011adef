"""torch's pipeline schedules, as lists."""

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class PipelineAction(NamedTuple):
    """An action of a pipeline's rank: `kind`, as torch writes it, of a stage and a microbatch. F is forward, B
    backward, I and W its halves (for the input, for the weights); the others are messages."""

    kind: str
    stage: int
    microbatch: int


Pairs = Mapping[PipelineAction, PipelineAction]  # a forward -> the backward right behind it, which runs alongside it

_KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # torch's, without all-gathers


def pipeline_order(
    schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> tuple[list[list[PipelineAction]], Pairs]:
    """Return the actions of each rank of a pipeline, in order, by torch's schedule of that name, and its pairs.

    Only the lists are torch's: there is no process group and no stage. `PipelineStage` itself, public, runs modules
    under autograd, and can't run a graph's parts.

    Raises:
        ValueError: the schedule can't be made of these numbers.
    """
    from torch.distributed.pipelining import schedules  # imports Dynamo, which takes a second

    stubs = _stub_stages(num_ranks, stages_per_rank * num_ranks)
    make = schedules.get_schedule_class(schedule)
    made: Any = make(stubs if stages_per_rank > 1 else stubs[0], num_microbatches)  # type: ignore[arg-type]
    orders = [made.pipeline_order[rank] for rank in range(num_ranks)]
    pairs = [_flat([each]) for order in orders for each in order if each is not None and each.sub_actions]
    return [_flat(order) for order in orders], {forward: backward for forward, backward in pairs}


def with_messages(
    orders: Sequence[Sequence[PipelineAction]], num_stages: int, num_microbatches: int, pairs: Pairs
) -> tuple[list[list[PipelineAction]], list[int]]:
    """Return the ranks' actions with sends and receives inserted, in an order without deadlock, and the rank of each
    stage. A pair's messages are received before it and sent behind it.

    Raises:
        AssertionError: a rank would wait for ever, or an action is missing, twice or in two places.
    """
    from torch.distributed.pipelining import schedules

    def of_torch(action: PipelineAction) -> Any:
        made = schedules._Action(action.stage, schedules._ComputationType(action.kind), action.microbatch)
        if action not in pairs:
            return made
        together = schedules._ComputationType.OVERLAP_F_B
        return schedules._Action(-1, together, None, (made, of_torch(pairs[action])))

    seconds = {*pairs.values()}
    compute = {rank: [of_torch(a) for a in order if a not in seconds] for rank, order in enumerate(orders)}
    runtime: Any = schedules._PipelineScheduleRuntime(_stub_stages(len(orders), num_stages), num_microbatches)
    runtime._prepare_schedule_with_comms(compute)
    order = [_flat(runtime.pipeline_order_with_comms[rank]) for rank in range(len(orders))]
    return order, [runtime.stage_index_to_group_rank[stage] for stage in range(num_stages)]


def _stub_stages(num_ranks: int, num_stages: int) -> list[Any]:
    return [
        types.SimpleNamespace(stage_index=i, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None)
        for i in range(max(1, num_stages // num_ranks))
    ]


def _flat(actions: Iterable[Any]) -> list[PipelineAction]:
    """Return torch's actions as `PipelineAction`s; combined ones one after the other."""
    parts = [part for action in actions if action is not None for part in action.sub_actions or [action]]
    return [
        PipelineAction(part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type.value in _KINDS
    ]
