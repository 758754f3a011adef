"""A forecast as text, and as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_graph.analysis.cost import ATTENTION, OTHER, PRODUCT
from torchtitan_graph.config import dump_toml
from torchtitan_graph.device import GIB
from torchtitan_graph.forecast import STEP
from torchtitan_graph.parallel.layout import CP, DP_REPLICATE, EP, EP_FAR, EP_NEAR, EXPERT_FSDP, EXPERT_TP, FSDP, PP, TP
from torchtitan_graph.plan.published import nearest_published
from torchtitan_graph.plan.ranks import CPU
from torchtitan_graph.plan.simulate import JobForecast
from torchtitan_graph.rates import RATES, Rates

_ROUNDING = 1e-9  # seconds
_SPARE = 0.05  # share of the memory: a smaller rest may not suffice
_MUCH = 1 / 3  # of a step

# The remedy for each cause of waiting in a step, and what --search then varies.
_HOST, _STAGES = "the host", "other stages"
_TO_HOST, _FROM_HOST = "to the host", "from the host"
_FEWER_GATHERS = "a larger training.local_batch_size, so that weights are gathered for fewer microbatches"
# The keys of the device's file that each part of a step depends on; none was measured in a run of this program.
_OF_A_COLLECTIVE = "network_share"
_RESTS_ON = {
    PRODUCT: "product_share, fp8_share, message_share",
    ATTENTION: "attention_share, message_share",
    OTHER: "memory_share, fusion_share",
    f"waits for {_HOST}": "launch",
    f"waits for {_TO_HOST}": "host",
    f"waits for {_FROM_HOST}": "host",
    f"waits for {_STAGES}": "all of these",
    "sums of gradients": "memory_share",
    "clipping and optimizer": "memory_share",
}
_OVER_REPLICAS, _MEETING = "sum over {} replicas", "quorum, exchange and vote"
_INSTEAD = {
    _HOST: ("a larger training.local_batch_size, or compile.cuda_graphs", "rows"),
    **dict.fromkeys(
        (_TO_HOST, _FROM_HOST),
        ("fewer blocks in activation_checkpoint.offload, or training.enable_cpu_offload = false", "rows,recompute"),
    ),
    _STAGES: ("more microbatches, or another parallelism.pipeline_parallel_schedule", "pp,schedule,rows"),
    PP: ("a lower parallelism.pipeline_parallel_degree", "pp,schedule,rows"),
    FSDP: (f"{_FEWER_GATHERS}, or a higher parallelism.data_parallel_replicate_degree", "dp_replicate,rows,reshard"),
    EXPERT_FSDP: (
        "parallelism.fsdp_once_a_step, if a step has several microbatches and no pipeline, or a higher"
        " parallelism.expert_parallel_degree",
        "ep,tp,rows,reshard,once",
    ),
    DP_REPLICATE: ("a larger training.global_batch_size, so that gradients are summed for more rows", DP_REPLICATE),
    TP: ("a lower parallelism.tensor_parallel_degree", "tp,rows"),
    CP: ("a lower parallelism.context_parallel_degree", "cp,rows"),
    EP: (
        'parallelism.expert_exchange = "by_machine", parallelism.overlap_microbatches, or a lower'
        " parallelism.expert_parallel_degree, at best within a machine",
        "ep,rows,pairs,exchange",
    ),
    EP_FAR: (
        'parallelism.exchange_sums = "by_machine" and exchange_dtype = "float8", or parallelism.overlap_microbatches',
        "ep,rows,pairs",
    ),
    EP_NEAR: ("a lower parallelism.expert_parallel_degree", "ep,rows,pairs"),
    EXPERT_TP: ("a lower parallelism.expert_tensor_parallel_degree", "ep,rows"),
}


def lines(plan: JobForecast) -> list[str]:
    """Return a forecast as lines of text."""
    return [*_memory(plan), *_traffic(plan), *_time(plan), *_stages(plan), *(f"note: {each}" for each in notes(plan))]


def notes(plan: JobForecast) -> list[str]:
    """Return notes on a forecast: its uncertainties, and changes to try."""
    found, rates, step = [], plan.rates, plan.step
    if rates.name != CPU:
        found.append(
            f"no time was measured: kernels reach the shares of {rates.name}'s peaks that its file says, fitted or"
            " assumed, and those of this package have not been timed on a GPU"
        )
    spare = 1 - max(plan.needs) / (rates.memory_gib * GIB)
    if 0 <= spare < _SPARE:
        found.append(
            f"{spare:.1%} of the memory are spare: what kernels need while they run, and what the allocator can't use,"
            f" is not counted beyond {rates.reserved_gib:g} GiB; leave {_SPARE:.0%}"
        )
    waits = _waits(plan)
    if sum(waits.values()) > _MUCH * step.seconds:
        most = max(waits, key=waits.__getitem__)
        change, varied = next(_INSTEAD[what] for what in most.split("/") if what in _INSTEAD)
        found.append(
            f"{sum(waits.values()) / step.seconds:.0%} of the step waits, most of it for {most}"
            f" ({waits[most] / step.seconds:.0%}): try {change}; --search {varied} looks for the best"
        )
    return found


def _waits(plan: JobForecast) -> dict[str, float]:
    """Return the seconds of a step in which the device waits, by cause."""
    return {**plan.step.exposed, _HOST: plan.step.host, _STAGES: plan.step.bubble}


def _memory(plan: JobForecast) -> list[str]:
    forecast, rates = plan.rank.forecast, plan.rates
    parts = {name: size for name, size in forecast.held.items() if name != STEP} | forecast.at_peak
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return [
        f"memory of rank {plan.rank.rank}"
        + (", which of its pipeline needs most" if len(plan.job.ranks) > 1 else "")
        + f", at the step's peak in {forecast.where}:",
        *(f"  {name:34}{size / GIB:10.3f} GiB" for name, size in parts.items()),
        f"  {'reserved, no tensors':34}{rates.reserved_gib:10.3f} GiB",
        f"  {'in all':34}{max(plan.needs) / GIB:10.3f} GiB of {rates.memory_gib:.4g}: {verdict}{forecast.unknown}",
        *(f"  {name:34}{size / GIB:10.3f} GiB, in the host's memory" for name, size in forecast.on_host.items()),
    ]


def _traffic(plan: JobForecast) -> list[str]:
    forecast, number = plan.rank.forecast, plan.job.num_microbatches
    found = [(axis, kind, each, number) for (axis, kind), each in forecast.sent.items()]
    found += [(axis, kind, each, 1) for (axis, kind), each in forecast.sent_once.items()]
    if not found:
        return []
    return [
        "received in a step:",
        *(
            f"  {f'{axis} {kind}':34}{each.num_bytes * times / GIB:10.3f} GiB in {each.number * times}"
            for axis, kind, each, times in found
        ),
    ]


def _time(plan: JobForecast) -> list[str]:
    step, job = plan.step, plan.job
    operations, each = plan.rank.forecast.operations * job.num_microbatches, plan.tokens_per_second
    groups = job.options.num_replicas
    parts = {
        **step.computed,
        **{f"waits for {what}": seconds for what, seconds in _waits(plan).items()},
        "sums of gradients": step.sums,
        _OVER_REPLICAS.format(groups): step.replicas,
        _MEETING: step.meeting,
        "clipping and optimizer": step.optimizer,
    }
    microbatches = f"{job.num_microbatches} x {job.options.rows[0]} rows of {job.options.rows[1]} tokens"
    if groups > 1:
        each_has = f"{job.dims.num_ranks} rank{'s' * (job.dims.num_ranks > 1)}"
        microbatches += f" in each of {groups} replica groups of {each_has}"
    is_measured = plan.rates.name == CPU

    def source(name: str) -> str:
        if name == _MEETING:
            return "   as measured on a CPU's loopback"
        return "" if is_measured else f"   not measured: {_RESTS_ON.get(name, _OF_A_COLLECTIVE)}"

    return [
        f"a step of {microbatches} on {plan.rates.name}, {_board(plan.rates)}:",
        *(
            f"  {name:34}{seconds * 1e3:10.2f} ms {seconds / step.seconds:7.1%}{source(name)}"
            for name, seconds in parts.items()
            if seconds > _ROUNDING
        ),
        f"  {'in all':34}{step.seconds * 1e3:10.2f} ms",
        f"  {each / job.num_ranks:.1f} tokens/s a rank, {each:.0f} in all; {plan.mfu:.1%} MFU,"
        f" {operations / 1e12:.3f} TFLOP of this rank",
        *_published(plan),
        *(
            f"  communication over {axis}: {seconds * 1e3:.2f} ms, {step.exposed.get(axis, 0.0) * 1e3:.2f} exposed"
            for axis, seconds in step.sent.items()
        ),
    ]


def _board(rates: Rates) -> str:
    """Return the peaks that tell a device's boards apart, and the names of other boards of the same device."""
    peaks = f"{rates.half / 1e12:.0f} TFLOP/s in bf16, {rates.memory / 1e12:.3g} TB/s of memory"
    others = [name for name in RATES if name != rates.name and name.split("_")[0] == rates.name.split("_")[0]]
    return peaks + (f" (another board: {', '.join(others)})" if others and rates.name != CPU else "")


def _published(plan: JobForecast) -> list[str]:
    if (found := nearest_published(plan.job.config, plan.job.num_ranks, plan.rates.name)) is None:
        return []
    return [f"  published by others of a run like it: {found.tokens:,.0f} tokens/s a rank ({found.name})"]


def _stages(plan: JobForecast) -> list[str]:
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


def as_data(plan: JobForecast) -> dict[str, Any]:
    """Return a forecast as plain data: bytes, seconds and FLOPs."""
    forecast, job, step = plan.rank.forecast, plan.job, plan.step
    number = job.num_microbatches

    def sent(times: int, traffic: Any) -> list[dict[str, Any]]:
        return [
            {"axis": axis, "kind": kind, "number": each.number * times, "bytes": each.num_bytes * times}
            for (axis, kind), each in traffic.items()
        ]

    return {
        "config": dump_toml(job.config),
        "world_size": job.num_ranks,
        "num_replicas": job.options.num_replicas,
        "degrees": dataclasses.asdict(job.dims),
        "rates": plan.rates._asdict(),
        "memory": {
            "rank": plan.rank.rank,
            "held": forecast.held,
            "at_peak": forecast.at_peak,
            "on_host": forecast.on_host,
            "where": forecast.where,
            "needs": list(plan.needs),
            "fits": plan.fits,
            "not_counted": forecast.unknown.removeprefix(", and "),
        },
        "received": [*sent(number, forecast.sent), *sent(1, forecast.sent_once)],
        "flops": forecast.operations * number,
        "step": dataclasses.asdict(step),
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_of_a_rank": plan.tokens_per_second / job.num_ranks,
        "mfu": plan.mfu,
        "notes": notes(plan),
    }
