"""A forecast in words, and as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_graph.config import dump_toml
from torchtitan_graph.device import GIB
from torchtitan_graph.forecast import STEP
from torchtitan_graph.plan.simulate import Plan

_SHOWN = 0.0005  # of a step: what takes less is not told


def lines(plan: Plan) -> list[str]:
    """Tell a forecast in lines."""
    return [*_memory(plan), *_traffic(plan), *_time(plan), *_stages(plan)]


def _memory(plan: Plan) -> list[str]:
    told, rates = plan.rank.told, plan.rates
    parts = {name: size for name, size in told.held.items() if name != STEP} | told.at_peak
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return [
        f"memory of rank {plan.rank.rank}"
        + (", which of its pipeline needs most" if len(plan.job.ranks) > 1 else "")
        + f", at the step's peak in {told.where}:",
        *(f"  {name:34}{size / GIB:10.3f} GiB" for name, size in parts.items()),
        f"  {'reserved, no tensors':34}{rates.reserved_gib:10.3f} GiB",
        f"  {'in all':34}{max(plan.needs) / GIB:10.3f} GiB of {rates.memory_gib:.4g}: {verdict}{told.untold}",
        *(f"  {name:34}{size / GIB:10.3f} GiB, in the host's memory" for name, size in told.on_host.items()),
    ]


def _traffic(plan: Plan) -> list[str]:
    told, number = plan.rank.told, plan.job.options.num_microbatches
    found = [(axis, kind, each, number) for (axis, kind), each in told.sent.items()]
    found += [(axis, kind, each, 1) for (axis, kind), each in told.sent_once.items()]
    if not found:
        return []
    return [
        "received in a step:",
        *(
            f"  {f'{axis} {kind}':34}{each.num_bytes * times / GIB:10.3f} GiB in {each.number * times}"
            for axis, kind, each, times in found
        ),
    ]


def _time(plan: Plan) -> list[str]:
    step, job = plan.step, plan.job
    operations, each = plan.rank.told.operations * job.options.num_microbatches, plan.tokens_per_second
    parts = {
        **step.computed,
        **{f"waits for {axis}": seconds for axis, seconds in step.exposed.items()},
        "waits for the host": step.host,
        "waits for other stages": step.bubble,
        "clipping and optimizer": step.optimizer,
    }
    rest = step.seconds - sum(parts.values())
    parts["sums of gradients, other ranks"] = rest
    microbatches = f"{job.options.num_microbatches} x {job.options.rows[0]} rows of {job.options.rows[1]} tokens"
    return [
        f"a step of {microbatches} on {plan.rates.name}:",
        *(
            f"  {name:34}{seconds * 1e3:10.2f} ms {seconds / step.seconds:7.1%}"
            for name, seconds in parts.items()
            if seconds > _SHOWN * step.seconds
        ),
        f"  {'in all':34}{step.seconds * 1e3:10.2f} ms",
        f"  {each / job.dims.num_ranks:.1f} tokens/s a rank, {each:.0f} in all; {plan.mfu:.1%} MFU,"
        f" {operations / 1e12:.3f} TFLOP of this rank",
        *(
            f"  communication over {axis}: {seconds * 1e3:.2f} ms, {step.exposed.get(axis, 0.0) * 1e3:.2f} exposed"
            for axis, seconds in step.sent.items()
        ),
    ]


def _stages(plan: Plan) -> list[str]:
    if plan.job.options.pipeline is None:
        return []
    schedule = plan.job.options.pipeline
    return [
        f"pipeline, {len(schedule.stages)} stages:",
        *(
            f"  rank {rank.rank}: {needs / GIB:.1f} GiB, "
            + "; ".join(f"{schedule.stages[n][0]} to {schedule.stages[n][-1]}" for n in schedule.stages_of(place))
            for place, (rank, needs) in enumerate(zip(plan.job.ranks, plan.needs, strict=True))
        ),
    ]


def as_data(plan: Plan) -> dict[str, Any]:
    """Give a forecast as plain data: bytes, seconds and FLOPs."""
    told, job, step = plan.rank.told, plan.job, plan.step
    number = job.options.num_microbatches

    def sent(times: int, traffic: Any) -> list[dict[str, Any]]:
        return [
            {"axis": axis, "kind": kind, "number": each.number * times, "bytes": each.num_bytes * times}
            for (axis, kind), each in traffic.items()
        ]

    return {
        "config": dump_toml(job.config),
        "world_size": job.dims.num_ranks,
        "degrees": dataclasses.asdict(job.dims),
        "rates": plan.rates._asdict(),
        "memory": {
            "rank": plan.rank.rank,
            "held": told.held,
            "at_peak": told.at_peak,
            "on_host": told.on_host,
            "where": told.where,
            "needs": list(plan.needs),
            "fits": plan.fits,
        },
        "received": [*sent(number, told.sent), *sent(1, told.sent_once)],
        "flops": told.operations * number,
        "step": dataclasses.asdict(step),
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_of_a_rank": plan.tokens_per_second / job.dims.num_ranks,
        "mfu": plan.mfu,
    }
