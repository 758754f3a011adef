"""Cost of checkpoints and failures: the best interval between checkpoints, and the goodput.

Note [Failures]
Failures come at random, with a mean time M between them (of all nodes: one node's over their number). A run trains for
T, saves for C, and so on; a failure takes it back to the last whole checkpoint, and it trains again R later. R ends
well only if nothing fails meanwhile. The mean time of a stretch of T is then, exactly,

    M exp(R / M) (exp((T + C) / M) - 1)                      J. T. Daly, FGCS 22 (2006), equation 20

Its share of T is the goodput. It is largest where T / M = 1 - exp(-(T + C) / M), close to sqrt(2 C M) where C is small
relative to M (J. W. Young, CACM 17 (1974)).

A save in a thread stops training for the copy alone, C, but is whole only after W. A failure before that falls back one
checkpoint further, which costs W more on average: R + W takes R's place, to first order in W / M.

Note [Failures with replicas]
Groups of nodes each hold the whole state, and the others train on when one fails. A group fails at the rate r = its
nodes over a node's mean time, and is back after A on average: it is away for the share a = r A / (1 + r A) of the
time. Groups fail and come back independently, so that k of G are away for a share of

    P(k) = C(G, k) a^k (1 - a)^(G - k)

whatever the distribution of A (a birth-death chain for exponential A). A step's rows stay the same: its M microbatches
are dealt to the groups that live, so that with k away training runs at the speed

    v(k) = ceil(M / G) / ceil(M / (G - k))

With k away, groups fail at (G - k) r, and as often one comes back to that k. A failure costs a step, repeated, and D,
until the others go on: D v(k + 1) of work. A group that comes back copies its state from another, while all wait:
H v(k) of work. That is to first order in these times over the time between two failures. When the last group fails, at
the rate P(G - 1) r, the run goes back to a checkpoint, as in Note [Failures], once the first group is back, A / G
later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SAVE_WITHIN_S = 86400.0  # however seldom all groups fail: a fault of the program may need an older state, too


@dataclass(frozen=True)
class Saving:
    """The cost of a checkpoint, in seconds: `waits` while training stands still, and `written` until it is complete."""

    num_bytes: float
    waits: float
    written: float


@dataclass(frozen=True)
class Failures:
    """Expectations of a run with random failures.

    mtbf_s      mean time between failures of all nodes
    interval_s  the best time of training between two saves, and `interval_steps` the same in steps
    goodput     share of the time in which the run makes progress
    saving, redone, restarting   shares of the time that saves, work done again, and restarts take
    """

    mtbf_s: float
    interval_s: float
    interval_steps: int
    goodput: float
    saving: float
    redone: float
    restarting: float


@dataclass(frozen=True)
class Replicas:
    """Expectations of a run in replica groups, each of which can fail alone.

    groups, group_nodes  their number, and the nodes of each
    heal_s               for a returning group to copy its state from another
    interval_steps       the best number of steps between two saves, for when all groups fail; those of a day at most
    goodput              share of the time in which the run makes progress, at the speed of all groups
    fewer, stops         shares of the time that it loses by slower steps of fewer groups; and by stops at failures and
                         returns, steps repeated among them
    """

    groups: int
    group_nodes: int
    heal_s: float
    interval_steps: int
    goodput: float
    fewer: float
    stops: float


def saving(num_bytes: float, largest_of_rank: float, bytes_per_s: float, copied_per_s: float | None) -> Saving:
    """Return the cost of a checkpoint.

    Args:
        num_bytes: bytes that all ranks write together, and `largest_of_rank` those of the one that writes most.
        bytes_per_s: rate of the storage for all ranks together.
        copied_per_s: rate of a rank's device-to-host copy, from which a thread writes; None: training waits.
    """
    written = num_bytes / bytes_per_s
    if copied_per_s is None:
        return Saving(num_bytes, written, written)
    copied = largest_of_rank / copied_per_s
    return Saving(num_bytes, copied, copied + written)


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the interval between saves, of `cost_s` each, with the highest goodput. See Note [Failures]."""
    low, high = 0.0, 1.0  # bounds of T / M: the two sides are equal once between
    for _ in range(80):
        middle = (low + high) / 2
        if middle < -math.expm1(-(middle + cost_s / mtbf_s)):
            low = middle
        else:
            high = middle
    return high * mtbf_s


def goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the goodput: the share of time in which a run makes progress. See Note [Failures]."""
    if (interval_s + cost_s + restart_s) / mtbf_s > 700:
        return 0.0  # it never completes an interval
    lost = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    return interval_s / (mtbf_s * lost)


def expect(saved: Saving, step_s: float, node_mtbf_s: float, num_nodes: int, restart_s: float) -> Failures:
    """Return the expectations of a run of `num_nodes` that saves at the best interval: whole steps, and no save before
    the last one is written.

    Args:
        restart_s: from a failure until the run trains again.
    """
    mtbf_s, further_back = node_mtbf_s / num_nodes, saved.written - saved.waits
    steps = max(1, round(best_interval(saved.waits, mtbf_s) / step_s), math.ceil(further_back / step_s))
    interval = steps * step_s
    found = goodput(interval, saved.waits, restart_s + further_back, mtbf_s)
    saves = found * saved.waits / interval
    restarts = min(1 - found - saves, restart_s / mtbf_s)  # to first order: one for each failure
    return Failures(mtbf_s, interval, steps, found, saves, 1 - found - saves - restarts, restarts)


def expect_replicas(
    saved: Saving,
    step_s: float,
    node_mtbf_s: float,
    num_nodes: int,
    restart_s: float,
    *,
    groups: int,
    num_microbatches: int,
    detect_s: float,
    heal_s: float,
) -> Replicas:
    """Return the expectations of a run of `num_nodes` in replica groups. See Note [Failures with replicas].

    Args:
        restart_s: from a group's failure until its processes run again.
        groups: at least two, of equal numbers of nodes.
        num_microbatches: of a step, which the groups that live share.
        detect_s: from a group's failure until the others train on.
        heal_s: for a returning group to copy its state from another.
    """
    rate = num_nodes / groups / node_mtbf_s
    odds = rate * restart_s  # of being away
    log_chances = [-math.lgamma(k + 1) - math.lgamma(groups - k + 1) + k * math.log(odds) for k in range(groups + 1)]
    log_all = math.lgamma(groups + 1) - groups * math.log1p(odds)
    chances = [math.exp(log_all + log_chance) for log_chance in log_chances]
    each = [-(-num_microbatches // (groups - k)) for k in range(groups)]
    speeds = [each[0] / of_fewer for of_fewer in each]
    running = sum(chances[:groups])
    fewer = sum(chance * (1 - speed) for chance, speed in zip(chances, speeds, strict=False))
    stops = sum(
        chances[k] * (groups - k) * rate * (step_s + detect_s * speeds[k + 1] + heal_s * speeds[k])
        for k in range(groups - 1)
    )
    all_fail_s = running / max(chances[groups - 1] * rate, 1e-300)
    further_back = saved.written - saved.waits
    steps = max(
        1,
        round(min(best_interval(saved.waits, all_fail_s), SAVE_WITHIN_S) / step_s),
        math.ceil(further_back / step_s),
    )
    speed = max(0.0, 1 - (fewer + stops) / running) if running else 0.0
    found = speed * goodput(steps * step_s, saved.waits, restart_s / groups + further_back, all_fail_s)
    return Replicas(groups, num_nodes // groups, heal_s, steps, found, fewer, stops)
