"""A small graph on which a pass fails, as a file that runs."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.check.outcome import PassFailure, apply, difference, outcome_on_random
from torchtitan_graph.compiler import Pass
from torchtitan_graph.config import job
from torchtitan_graph.config.job import ExtraPass
from torchtitan_graph.formats.replay import join_ranks, read
from torchtitan_graph.formats.show import readable
from torchtitan_graph.steps.choices import find_extra

_FOOT = """
{changes}

if __name__ == "__main__":
    run_case(__file__, {name!r}, exact={exact})
"""


def find_pass(entry: ExtraPass) -> Pass:
    """Return a pass by its dotted name, imported.

    Raises:
        UserError: as `choices.plan_extra`, in the words of the command line.
    """
    return find_extra(entry, job.Compile(), "name", "--after").own


def case_file(own: Pass, gm: GraphModule, failure: PassFailure) -> str:
    """Return the content of a file with a graph on which a pass fails."""
    after = apply(own, gm)
    lines = difference(gm, after) if isinstance(after, GraphModule) else []
    changes = "\n# ".join(["", "What the pass changes:", *lines]) if lines else ""
    words = failure.said.replace("\\", "/").replace('"""', "'''").replace("\n", " ")
    title = f"{own.name} fails on this graph.\n\n{words}\n"
    text = readable(gm, title, _FOOT.format(changes=changes, name=own.name, exact=own.exact))
    runs = f"torchrun --nproc_per_node {dist.get_world_size()}" if dist.get_world_size() > 1 else "python"
    text = text.replace("Run it on random inputs: python THIS_FILE.", f"Run the pass on it: {runs} THIS_FILE.")
    own_import = "from torchtitan_graph.check.case import run_case\nfrom torchtitan_graph.formats.replay"
    return text.replace("from torchtitan_graph.formats.replay", own_import).replace(", run_file", "")


def run_case(path: str, name: str, exact: bool) -> None:
    """Run a pass on the graph of a file, print its failure, and exit: 1 if it fails."""
    own = find_pass(ExtraPass(name, after="cleanup", exact=exact))
    names = runpy.run_path(path)
    join_ranks(names)
    failure = outcome_on_random(own, read(Path(path)))
    if failure is None and names["NUM_RANKS"] > 1 and "WORLD_SIZE" not in os.environ:
        print(f"one rank alone: run it with torchrun --nproc_per_node {names['NUM_RANKS']} {path}")
    elif dist.get_rank() == names["RANK"]:
        print(f"{name}: {failure.said}" if failure else f"{name} does not fail on this graph")
    dist.destroy_process_group()
    sys.exit(failure is not None)
