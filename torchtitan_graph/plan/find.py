"""`--search`: forecasts of a job's candidates with few layers, and the best of them as a TOML file."""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
from collections.abc import Sequence

from torch import nn

from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import JobConfig
from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.device import GIB, Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import STEP
from torchtitan_graph.graph import meta
from torchtitan_graph.log import logger
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.parallel.layout import PP
from torchtitan_graph.parallel.parallelize import parameter_roles
from torchtitan_graph.parallel.plan import Plan
from torchtitan_graph.plan.depth import depths, keep_layers
from torchtitan_graph.plan.on_cpu import ThisCpu
from torchtitan_graph.plan.ranks import build
from torchtitan_graph.plan.search import EXPOSED, VARIED, Figures, Found, JobCandidate, Search
from torchtitan_graph.plan.simulate import JobForecast, by_rates, simulate
from torchtitan_graph.rates import Rates
from torchtitan_graph.steps.budget import EARLIER

_SHOWN = 10  # losing candidates listed for each reason


def check_varied(words: str) -> tuple[str, ...]:
    """Return what a search may vary, from words such as `tp,rows`; from none: all.

    Raises:
        UserError: a word is none of those.
    """
    varied = tuple(word for word in words.split(",") if word)
    if unknown := [word for word in varied if word not in VARIED]:
        raise UserError(
            f"--search {words}: {unknown[0]} is none of {', '.join(VARIED)}, joined by commas; nothing: all of them"
            f"{did_you_mean(unknown[0], VARIED)}"
        )
    return varied or VARIED


def figures(plan: JobForecast) -> Figures:
    """Return the figures of a forecast by which a search compares."""
    step = plan.step
    parts = {
        "arithmetic": sum(step.computed.values()),
        **{f"{EXPOSED}{axis} communication": s for axis, s in step.exposed.items() if axis != PP},
        "messages between stages": step.exposed.get(PP, 0.0),
        "bubble": step.bubble,
        "the host": step.host,
        "sums of gradients": step.sums,
        "the sum over replicas": step.replicas,
        "replicas' meetings": step.meeting,
        "the optimizer": step.optimizer,
    }
    return Figures(step.seconds, max(plan.needs), {name: s for name, s in parts.items() if s}, _places(plan))


def _places(plan: JobForecast) -> dict[str, float]:
    """Return the most bytes of a rank by the module that runs in forward: they grow evenly with the layers. Collectives
    of backward start as early as the peak of the whole step allows. None of a pipeline, which is built whole."""
    train, forecast = plan.rank.graphs.train, plan.rank.forecast
    if not isinstance(train, TracedResult) or (EARLIER not in forecast.held and plan.job.options.num_microbatches > 1):
        return {}  # the peak is evaluation's
    rest, last = max(plan.needs) - forecast.held[STEP], len(plan.rank.visible) - 1
    found: dict[str, float] = {}
    for node, held in held_memory(train.gm, size_of).items():
        name, number, *_ = f"{meta.module(node)}..".split(".")
        in_forward = name and not meta.role(node) and meta.phase(node) == "forward"
        if in_forward and (name != "layers" or number in ("0", str(last))):
            place = "last layer" if (name, number) == ("layers", str(last)) else f"{name} {number}"
            found[place] = max(found.get(place, 0.0), rest + held)
    return found


def _num_experts(model: nn.Module, plan: Plan) -> int:
    """Return the least number of experts of a layer that has some, 0 without."""
    roles = parameter_roles(model, plan)
    return min(
        (p.shape[0] for name, p in model.named_parameters() if "expert" in roles.get(name, {}).values()), default=0
    )


def search(
    config: JobConfig,
    world_size: int,
    rates: Rates,
    cpu: ThisCpu | None,
    varied: Sequence[str] = VARIED,
    headroom: float = 0.0,
) -> tuple[Search, Found]:
    """Return the search for a job's fastest configuration and its result, with progress on stderr. Ctrl-C and SIGTERM
    end it with the best so far.

    Args:
        cpu: replay operators on it instead of using `rates`.
        headroom: the part of the memory that candidates leave free, 0 to 1.

    Raises:
        UserError: the job itself can't be built, nothing is legal, or nothing fits.
    """
    first = Blueprint(config, world_size)
    plan = plan_of(first.family, first.model)

    def forecast(config: JobConfig, layers: int | None) -> Figures:
        make = Blueprint if layers is None else functools.partial(_shallow, layers)
        job = build(config, world_size, rates, make)
        if cpu is not None:
            cpu.learn(job)
        return figures(simulate(job, by_rates(job, rates) if cpu is None else cpu.prices(rates), rates))

    by_layer = first.options.float8 is not None or first.options.budget_gib is not None
    of = Search(
        config,
        world_size,
        num_near=rates.num_near,
        num_experts=_num_experts(first.model, plan),
        rows=first.rows_per_step,
        memory=rates.memory_gib * GIB * (1 - headroom),
        forecast=forecast,
        depths=None if by_layer else depths(first.model, first.options),
        varied=varied,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    level = logger.level
    logger.setLevel("WARNING")  # each candidate is traced and passed: that would be too much to log
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return of, of.run()
    finally:
        logger.setLevel(level)
        signal.signal(signal.SIGTERM, before)


def _shallow(layers: int, config: JobConfig, world_size: int, target: Target) -> Blueprint:
    blueprint = Blueprint(config, world_size, target)
    keep_layers(blueprint.model, layers)
    return blueprint


def best_toml(of: Search, best: JobCandidate) -> str:
    """Return the best configuration as a TOML file that trains unchanged: the differences from the defaults, below
    where they come from."""
    config = of.configured(best.settings)
    config.comm = dataclasses.replace(of.config.comm, mode="default")
    assert best.figures is not None
    return (
        f"# Found by python -m torchtitan_graph.plan --search for {of.world_size} ranks: {best}.\n"
        f"# By the forecast {best.figures.step_s:.4g} s a step, {best.figures.peak / GIB:.4g} GiB.\n"
        f"{dump_changes(config)}"
    )


def lines(of: Search, found: Found) -> list[str]:
    """Return the winner, and the reasons against the others, as lines."""
    best = found.best
    assert best.figures is not None
    by_reason: dict[str, list[JobCandidate]] = {"slower": [*found.fitting[1:]], "does not fit": [], "illegal": []}
    for each in found.others:
        by_reason["does not fit" if each.why.startswith("does not fit") else "illegal"].append(each)
    stopped = f"stopped early, of at most {of.num_at_most}: " if of.is_stopped else ""
    text = [
        f"{stopped}{of.num_built} candidates built; {len(found.fitting)} fit. Best:",
        f"  {best}: {best.figures.step_s:.4g} s a step, {best.figures.peak / GIB:.4g} GiB of {of.memory / GIB:.4g}",
    ]
    for reason, candidates in by_reason.items():
        text += [f"{reason}: {len(candidates)}"] * bool(candidates)
        text += [f"  {each}: {each.why}" for each in candidates[:_SHOWN]]
        text += [f"  and {len(candidates) - _SHOWN} more"] * (len(candidates) > _SHOWN)
    return text
