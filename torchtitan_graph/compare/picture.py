"""The curves of several runs as one SVG file: a chart for each metric, a colour for each run."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from torchtitan_graph.compare.report import shown
from torchtitan_graph.compare.runs import Run

WIDTH, HEIGHT, COLUMNS = 480, 260, 2  # of a chart in pixels; charts in a row
LEFT, RIGHT, TOP, BOTTOM = 70, 15, 30, 35  # margins of a chart
LINE = 20  # height of a line of the legend
MAX_POINTS = 1000  # of a curve
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def picture(runs: Sequence[Run]) -> str:
    """Return the SVG of all metrics of which a run has a number. It needs nothing from a network."""
    keys = shown(runs)
    legend = 10 + LINE * len(runs)
    parts = []
    for place, run in enumerate(runs):
        y, colour = 10 + LINE * place, COLOURS[place % len(COLOURS)]
        parts.append(f'<rect x="{LEFT}" y="{y}" width="20" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 28}" y="{y + 10}">{html.escape(run.name)}, {html.escape(run.state)}</text>')
    for place, key in enumerate(keys):
        row, column = divmod(place, COLUMNS)
        chart = _chart(key, [run.curve(key) for run in runs])
        parts.append(f'<g transform="translate({column * WIDTH} {legend + row * HEIGHT})">{chart}</g>')
    width, height = COLUMNS * WIDTH, legend + HEIGHT * math.ceil(len(keys) / COLUMNS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _chart(key: str, curves: Sequence[dict[int, float]]) -> str:
    curves = [{step: x for step, x in curve.items() if math.isfinite(x)} for curve in curves]
    values = [x for curve in curves for x in curve.values()]
    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-weight="bold">{html.escape(key)}</text>']
    if not values:
        return "".join([*parts, f'<text x="{LEFT}" y="{TOP + 20}">no finite number</text>'])
    steps = [step for curve in curves for step in curve]
    x_ticks, y_ticks = _ticks(min(steps), max(steps)), _ticks(min(values), max(values))
    x0, x1 = _range(min(steps), max(steps))
    y0, y1 = _range(min(values), max(values))

    def x_of(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.5g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:.6g}</text>')
    for place, curve in enumerate(curves):
        points = list(curve.items())
        points = points[: -1 : max(1, len(points) // MAX_POINTS)] + points[-1:]
        path = "L".join(f"{x_of(step):.1f} {y_of(x):.1f}" for step, x in points)
        colour = COLOURS[place % len(COLOURS)]
        if len(points) == 1:  # a line of one point is not drawn
            path += f"L{x_of(points[0][0]) + 2:.1f} {y_of(points[0][1]):.1f}"
        if points:
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-opacity="0.8"/>')
    return "".join(parts)


def _range(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis: a little more than the values, and never one point."""
    margin = (high - low) * 0.03 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Return some four round numbers between two; the one number where both are equal."""
    if not high > low:
        return [low]
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    unit *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * unit) <= 5)
    return [n * unit for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
