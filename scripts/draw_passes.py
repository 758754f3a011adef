"""Write docs/passes: a page for each pass, its docstring and what it did to a real graph.

The graph is the training step of a llama3 of one block, traced for one rank of two; what is drawn is the first change.
"""

import copy
import dataclasses
import difflib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule, Node

from torchtitan_graph.check.matrix import BF16, Cell, build_model
from torchtitan_graph.compiler import Pass, passes
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import shape_of
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Assembly, trace_steps
from torchtitan_graph.torch_private.distributed import init_fake_process_group

FSDP2 = Cell(ParallelDims(dp_shard=2), BF16, changes=(("num_layers", 1),))
# For passes that have nothing to do in that graph. Two blocks, so that one is gathered before the other.
CELLS = {
    "gather_each_call": dataclasses.replace(
        FSDP2, own_step="torchtitan_graph.goals.dpo", lora=(("rank", 4),), changes=(("num_layers", 2),)
    ),
    "overlap_context": dataclasses.replace(FSDP2, dims=ParallelDims(cp=2)),
    "overlap_collectives": dataclasses.replace(FSDP2, changes=(("num_layers", 2),)),
    "overlap_products": dataclasses.replace(FSDP2, dims=ParallelDims(tp=2), async_tp=True),
    "fill_waits": dataclasses.replace(FSDP2, dims=ParallelDims(tp=2), changes=(("num_layers", 2),)),
    "recompute_ahead": dataclasses.replace(
        FSDP2, dims=ParallelDims(tp=2), changes=(("num_layers", 3),), recompute=Recompute(every=1)
    ),
    "tag_recomputation": dataclasses.replace(FSDP2, recompute=Recompute(every=1)),
}
MOST = 8  # changed nodes in a drawing
AROUND = 4  # their inputs and users

Shown = dict[str, tuple[Node, str]]  # a node's name -> the node, and its line


def pages() -> dict[str, str]:
    """Return the pages by file name, with an index of all."""
    drawn: dict[str, tuple[Pass, str]] = {}  # in the order of the list, which the first cell runs
    for cell in (FSDP2, *CELLS.values()):
        for each, before, after in replay(cell):
            if cell == CELLS.get(each.name, FSDP2):
                drawn[each.name] = each, drawing(before, after)
            drawn.setdefault(each.name, (each, ""))
    parts = [_in_the_list(each) for each, _ in drawn.values()]
    head = "# The passes\n\nIn the order in which they run. `python scripts/draw_passes.py` writes these pages.\n\n"
    return {"README.md": head + "\n".join(parts)} | {
        f"{name}.md": page(each, picture) for name, (each, picture) in drawn.items()
    }


def replay(cell: Cell) -> Iterable[tuple[Pass, Shown, Shown]]:
    """Trace a step, run the passes on it, and yield each with the graph before and after."""
    init_fake_process_group(cell.dims.num_ranks)
    family, layout = load_family(cell.family), cell.dims.layout("cpu")
    traced = trace_steps(Assembly(build_model(cell), family, layout, cell.options("graph")))
    gm = traced.train.gm
    for each in passes(traced.plan):
        before = shown(copy.deepcopy(gm))
        gm = each.run(gm)
        yield each, before, shown(gm)
    dist.destroy_process_group()


def shown(gm: GraphModule) -> Shown:
    return {
        n.name: (n, f"{n.format_node()} {meta.tag(n)}")
        for n in gm.graph.nodes
        if n.op in ("call_function", "placeholder")
    }


def page(each: Pass, picture: str) -> str:
    first, _, rest = _docstring(each).partition("\n")
    promise = "Bit for bit the same numbers" if each.exact else "The same numbers up to rounding"
    optional = "can't be left out" if each.required else f'left out by `compile.disable_passes = ["{each.name}"]`'
    note = _wrap(f"{promise}; {optional}. Source: `passes/{each.name}.py`.")
    return f"# {each.name}\n\n{first}\n{_spaced(rest)}\n\n{note}\n\n{picture}"


def _in_the_list(each: Pass) -> str:
    """Return a pass's entry in the index: its summary, and its before and after."""
    first, *others = _spaced(_docstring(each)).split("\n\n")
    example = next((text for text in others if text.startswith("    ")), "")
    shown = f"\n\n{textwrap.indent(example, '    ')}\n" if example else "\n"
    return _wrap(f"- [{each.name}]({each.name}.md): {' '.join(first.split())}") + shown


def _docstring(each: Pass) -> str:
    return inspect.getdoc(each.run.func if isinstance(each.run, partial) else each.run) or ""


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  " * text.startswith("- "), break_long_words=False)


def _spaced(text: str) -> str:
    """Insert an empty line before the indented lines of a docstring, which then become a block of code."""
    lines: list[str] = []
    for line in text.splitlines():
        is_code, was_code = line.startswith("    "), bool(lines) and lines[-1].startswith("    ")
        if is_code and not was_code and lines and lines[-1]:
            lines.append("")
        lines.append(line)
    return "\n".join(lines).rstrip()


def drawing(before: Shown, after: Shown) -> str:
    """Return a drawing of the first change: removed or changed nodes in orange, new ones in green, and their
    neighbours."""
    changed = _changed(before, after)
    if not changed:
        return "In the graph of this page's example there is nothing for it to do.\n"
    moved = sorted(text for _, text in before.values()) == sorted(text for _, text in after.values())
    chosen = _where_it_stood(changed[0], before, after) if moved else _near(changed, before, after)
    numbers = {name: i for i, name in enumerate((n for n in before | after if n in chosen), start=1)}
    pictures = [_mermaid(each, numbers, changed, new, moved) for each, new in ((before, False), (after, True))]
    words = "An example; a node has the same number in both drawings"
    words += ", and arrows with dots are the order." if moved else ", and dashed boxes are as they were."
    return f"{words}\n\nBefore\n\n{pictures[0]}\nAfter\n\n{pictures[1]}"


def _changed(before: Shown, after: Shown) -> list[str]:
    """Return the names of nodes whose lines are changed, removed, new or moved, in order."""
    old, new = ([text for _, text in each.values()] for each in (before, after))
    names: dict[str, None] = {}
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            names |= dict.fromkeys([*list(before)[a:b], *list(after)[c:d]])
    return list(names)


def _near(changed: list[str], before: Shown, after: Shown) -> set[str]:
    """Return the first changed node, changed nodes connected to it, and a few neighbours."""
    neighbours: dict[str, list[str]] = {}
    for each in (before, after):
        for name, (node, _) in each.items():
            around = [n.name for n in (*node.all_input_nodes, *node.users) if n.op != "output"]
            neighbours.setdefault(name, []).extend(around)
    chosen, waiting = list[str](), [changed[0]]
    while waiting and len(chosen) < MOST:
        name = waiting.pop(0)
        if name not in chosen:
            chosen.append(name)
            waiting += [n for n in neighbours[name] if n in set(changed)]
    around = dict.fromkeys(n for name in chosen for n in neighbours[name] if n not in chosen)
    return {*chosen, *list(around)[:AROUND]}


def _where_it_stood(name: str, before: Shown, after: Shown) -> set[str]:
    """Return a node that moved, and those alongside it in both orders."""
    found: set[str] = set()
    for each in (before, after):
        names = list(each)
        place = names.index(name)
        found.update(names[max(0, place - MOST // 4) : place + MOST // 2])
    return found


def _mermaid(each: Shown, numbers: dict[str, int], changed: list[str], new: bool, moved: bool) -> str:
    lines = ["```mermaid", "flowchart TD"]
    names = [n for n in each if n in numbers]
    for name in names:
        node, kind = each[name][0], ("new" if new else "old") if name in changed else "kept"
        words = [f"{numbers[name]} {_called(node)}", _value(node), meta.tag(node) or ""]
        lines.append(f'    n{numbers[name]}["{"<br/>".join(word for word in words if word)}"]:::{kind}')
    arrows = [(n.name, name, "-->") for name in names for n in each[name][0].all_input_nodes if n.name in numbers]
    if moved:
        read = [(a, b) for a, b, _ in arrows]
        arrows += [(a, b, "-.->") for a, b in itertools.pairwise(names) if (a, b) not in read]
    lines += [f"    n{numbers[a]} {arrow} n{numbers[b]}" for a, b, arrow in arrows]
    lines += ["    classDef old fill:#fdd0a2,stroke:#e6550d", "    classDef new fill:#c7e9c0,stroke:#31a354"]
    return "\n".join([*lines, "    classDef kept fill:#fff,stroke:#999,stroke-dasharray:4", "```", ""])


def _value(node: Node) -> str:
    val = node.meta.get("val")
    return f"{len(val)} tensors" if isinstance(val, (tuple, list)) else shape_of(val)


def _called(node: Node) -> str:
    if node.op == "placeholder":
        return node.name
    return str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target))).rpartition(".")[2]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    main(Path(__file__).parents[1] / "docs" / "passes")
