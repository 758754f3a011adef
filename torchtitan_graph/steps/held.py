"""What a rank of a pipeline holds while its schedule runs, read from its stages' graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchtitan_graph.graph.edit import value
from torchtitan_graph.graph.liveness import GATHERED, input_memory, output_memory, peak_memory
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.schedule import Schedule


class StagesPeak(NamedTuple):
    """The most bytes that a rank of a pipeline holds in a step beside what lies there from step to step, by what for,
    and what runs then; `part` is the stage and the name of that part, None while weights are gathered."""

    by: Mapping[str, int]
    where: str
    part: tuple[int, str] | None

    @property
    def num_bytes(self) -> int:
        return sum(self.by.values())


KEPT, SUMS, TAKEN, RUNS = "kept for backward", "sums of gradients", "batches and messages", "what runs"


def peak_of_stages(graphs: Mapping[int, StageGraph], schedule: Schedule, rank: int) -> StagesPeak:
    """Go through what this rank of a pipeline does in a step: weights that are gathered once, sums of gradients, what
    each microbatch keeps for backward, and what runs."""
    parts = {number: graph.parts.by_name for number, graph in graphs.items()}
    gives = {(number, name): output_memory(part.gm) for number in parts for name, part in parts[number].items()}
    needs = {(number, name): peak_memory(part.gm).num_bytes for number in parts for name, part in parts[number].items()}
    inputs = {number: input_memory(graph.train.gm) for number, graph in graphs.items()}
    held = {GATHERED: sum(gives[number, "gather"] for number in parts), TAKEN: 0, KEPT: 0, SUMS: 0}
    peak, has_sums = StagesPeak(dict(held), GATHERED, None), set()
    for action in schedule.actions[rank]:
        stage = action.stage
        received = (graphs[stage].passed.nbytes if stage else 0) + inputs[stage]
        backward = ("backward",) if "backward" in parts[stage] else ("input", "weight")
        runs = {"F": ("forward",), "B": backward, "I": ("input",), "W": ("weight",)}.get(action.kind, ())
        for name in runs:
            held[TAKEN] += received if name == "forward" else 0
            if sum(held.values()) + needs[stage, name] > peak.num_bytes:
                where = f"{name} of microbatch {action.microbatch} in stage {stage}"
                peak = StagesPeak(held | {RUNS: needs[stage, name]}, where, (stage, name))
            if name in ("forward", "input"):
                held[KEPT] += gives[stage, name]
                continue
            # What the microbatch kept is let go of; of its gradients the sums stay.
            held[TAKEN] -= received
            held[KEPT] -= sum(gives[stage, each] for each in ("forward", "input")[: 1 + (name == "weight")])
            if stage not in has_sums:
                has_sums.add(stage)
                held[SUMS] += _bytes_of_sums(graphs[stage])
    return peak


def in_flight(schedule: Schedule, stage: int) -> int:
    """Give the most microbatches of which a stage keeps values at once."""
    held = most = 0
    for action in schedule.actions[schedule.rank_of[stage]]:
        if action.stage == stage:
            held += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, held)
    return max(most, 1)


def _bytes_of_sums(graph: StageGraph) -> int:
    """Give the bytes of a stage's summed gradients, which have the dtype of their reduction."""
    sums = [node for node in graph.train.gm.graph.nodes if node.name in graph.parts.sums]
    return sum(value(node).numel() for node in sums) * graph.reduce_dtype.itemsize
