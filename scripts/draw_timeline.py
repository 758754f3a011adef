"""Draw when a step computes and when it communicates, by the forecast, as an SVG.

    python scripts/draw_timeline.py --job.config_file train_configs/qwen3_30b_a3b.toml --world 16 --device h100 \\
        --part pair --begin_ms 20 --end_ms 40 --out pair.svg

A part is one of the graphs of a step: of a step whose microbatches share work its parts (`first`, `pair`, `last`), of a
pipeline's stage `forward` and `backward`, else `step`. The job's options are those of
`python -m torchtitan_graph.train --help`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import ATTENTION, OTHER, PRODUCT, Costs
from torchtitan_graph.analysis.scopes import charges
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.config import read_beside
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.plan.ranks import Rank, build, configuration
from torchtitan_graph.plan.simulate import by_rates
from torchtitan_graph.rates import find_rates

COLORS = {PRODUCT: "#3b6ea5", ATTENTION: "#7a4f9a", OTHER: "#9aa5b1", "message": "#d08a2e"}
DIRECTIONS = {"forward": 1.0, "backward": 0.6}  # how opaque
WIDTH, LEFT, ROW, GAP = 1000, 110, 26, 10


class Bar(NamedTuple):
    """What runs in a lane, from `begin` to `end`, in nanoseconds."""

    lane: str
    kind: str
    phase: str
    begin: int
    end: int


def graphs_of(rank: Rank) -> dict[str, GraphModule]:
    """Return the graphs of a rank's step by name."""
    train = rank.graphs.train
    if isinstance(train, TracedResult):
        return {"step": train.gm}
    if isinstance(train, StageGraph):
        return {name: part.gm for name, part in train.all_parts.items()}
    return {f"{stage} {name}": part.gm for stage, graph in train.items() for name, part in graph.all_parts.items()}


def bars_of(gm: GraphModule, costs: Costs) -> list[Bar]:
    """Return a graph's kernels and collectives, each collective in the lane of its axis."""
    found = []
    for each in charges(gm, costs):
        link, works = costs.link(each.node), costs.works(each.node)
        if link is not None:
            found.append(Bar(link.axis, "message", meta.phase(each.node), each.begin, each.end))
        elif works:
            begin = each.end - round(costs.computing(each.node) * 1e9)
            found.append(Bar("kernels", max(works, key=costs.kernel).kind, meta.phase(each.node), begin, each.end))
    return found


def svg(title: str, bars: Sequence[Bar], begin: int, end: int) -> str:
    """Return a drawing of what runs from `begin` to `end`, a lane below the other."""
    lanes = list(dict.fromkeys(["kernels", *(bar.lane for bar in bars)]))
    height = 60 + len(lanes) * (ROW + GAP) + 30
    scale = (WIDTH - LEFT - 10) / (end - begin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="10" y="20">{escape(title)}</text>',
    ]
    for i, (name, color) in enumerate(COLORS.items()):
        x = LEFT + i * 130
        parts.append(
            f'<rect x="{x}" y="30" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="41">{name}</text>'
        )
    parts.append(f'<text x="{LEFT + 560}" y="41">pale: backward</text>')
    for i, lane in enumerate(lanes):
        y = 56 + i * (ROW + GAP)
        parts.append(f'<text x="10" y="{y + 18}">{escape(lane)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#f2f3f5"/>')
        for bar in bars:
            if bar.lane == lane and bar.end > begin and bar.begin < end:
                start, until = (LEFT + (min(max(t, begin), end) - begin) * scale for t in (bar.begin, bar.end))
                parts.append(
                    f'<rect x="{start:.2f}" y="{y}" width="{max(until - start, 0.3):.2f}" height="{ROW}"'
                    f' fill="{COLORS[bar.kind]}" opacity="{DIRECTIONS.get(bar.phase, 1.0)}"/>'
                )
    bottom = 56 + len(lanes) * (ROW + GAP)
    parts += [
        f'<text x="{LEFT}" y="{bottom + 14}">{begin / 1e6:.1f} ms</text>',
        f'<text x="{WIDTH - 10}" y="{bottom + 14}" text-anchor="end">{end / 1e6:.1f} ms</text></svg>',
    ]
    return "\n".join(parts) + "\n"


@command
def main(argv: Sequence[str]) -> int:
    """Draw the part that the arguments name. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--world", type=int, required=True, help="the number of devices")
    parser.add_argument("--device", required=True, help="as of python -m torchtitan_graph.plan")
    parser.add_argument("--part", help="the graph; default: the first")
    parser.add_argument("--begin_ms", type=float, default=0.0, help="where the drawing begins (default 0)")
    parser.add_argument("--end_ms", type=float, help="where it ends (default: with the part)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the SVG")
    options, of_training = read_beside(parser, argv)
    check_result("--out", options.out)
    rates = find_rates(options.device)
    job = build(configuration(of_training, options.world), options.world, rates)
    rank = job.ranks[0]
    graphs = graphs_of(rank)
    name = options.part or next(iter(graphs))
    if name not in graphs:
        legal = f"; legal are {', '.join(graphs)}"
        raise UserError(f"--part {name}: no such graph of this step{did_you_mean(name, graphs, legal)}")
    bars = bars_of(graphs[name], by_rates(job, rates)(rank))
    last = max(bar.end for bar in bars)
    begin, end = round(options.begin_ms * 1e6), round((options.end_ms or last / 1e6) * 1e6)
    if not 0 <= begin < end:
        ends = f"--end_ms {options.end_ms:g}" if options.end_ms else f"{end / 1e6:g} ms, the end of {name}"
        raise UserError(f"--begin_ms {options.begin_ms:g}: must be at least 0, and before {ends}")
    inside = [bar for bar in bars if bar.end > begin and bar.begin < end]
    config = job.config
    title = (
        f"{config.model.name} {config.model.flavor}, {options.world} x {rates.name}: {name}, {last / 1e6:.1f} ms in all"
    )
    write_result("--out", options.out, svg(title, inside, begin, end))
    print(
        f"{name}: {len(inside)} of {len(bars)} kernels and messages drawn in {options.out}; graphs: {', '.join(graphs)}"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
