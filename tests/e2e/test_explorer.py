"""The explorer's page in a real browser: it shows what Python computes, asks nothing of a network, and shows any name
as text."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from browser import browser, complaints
from torch import nn
from torch.fx import Graph, GraphModule

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.liveness import at_node, peak_memory
from torchtitan_graph.analysis.scopes import PARTS, Cost, Scope, charges, tree
from torchtitan_graph.capture.trace import make_fx_capture, minimal_fx_tracer
from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.compiler import Inspection, Pass, run_passes
from torchtitan_graph.explorer import PassWatch, Strings, graph_data, page
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call
from torchtitan_graph.graph.hierarchy import Entry
from torchtitan_graph.graph.signature import Signature
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group
from torchtitan_graph.torch_private.fake import FakeTensorMode

REST = {"parameters": 3 * 2**20, "optimizer state": 6 * 2**20}
EVIL = "</script><img src=x onerror=document.title='broken'>"
STEP, HOSTILE = 0, 1
RUN = {
    "folder": EVIL,
    "facts": [["state", "finished"], [EVIL, EVIL]],
    "curves": {EVIL: [[1, 2.0]], "loss": [[1, 4.0], [2, 3.0], [11, 1.0]]},
    "files": [[EVIL, "../run/javascript%3Aalert%281%29", 2048]],
    "config": EVIL,
}
ROWS = """return [...document.querySelectorAll(`#${arguments[0]} .body .row`)].map((row) =>
    [...row.querySelectorAll(".cell")].map((cell) => cell.dataset.value ?? cell.textContent))"""


@dataclasses.dataclass
class Shown:
    """A page in a browser, and what Python knows of its graphs."""

    driver: Any
    path: Path
    gm: GraphModule
    roots: list[Scope]
    watches: list[PassWatch]

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def rows(self, table: str) -> list[list[str]]:
        """Give the rows of a table that are drawn: of numbers the exact one, else the text."""
        return self.run(ROWS, table)

    def keys(self, selector: str, *keys: str) -> None:
        self.one(selector).send_keys(*keys)

    def all_rows(self, table: str, number: int) -> list[list[str]]:
        """Give all rows of a table, while it is as high as they are; rows are drawn where they are seen."""
        height = "document.getElementById(arguments[0]).style.maxHeight = arguments[1]"
        self.run(height, table, "none")
        self.wait(lambda: len(self.rows(table)) == number)
        rows = self.rows(table)
        self.run(height, table, "")
        return rows

    def pick(self, select: str, option: int) -> None:
        self.run(
            "const s = document.getElementById(arguments[0]); s.selectedIndex = arguments[1];"
            " s.dispatchEvent(new Event('change'))",
            select,
            option,
        )

    def text(self, element: str) -> str:
        return self.one(f"#{element}").text

    def wait(self, is_there: Callable[[], bool]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: is_there())

    def open(self, path: Path) -> None:
        self.driver.get(path.as_uri())
        self.wait(lambda: not self.driver.find_elements("css selector", "#loading"))

    def graph(self, number: int, view: str) -> None:
        self.pick("graph", number)
        self.click(f"#tab-{view}")


def step_data(strings: Strings) -> tuple[dict[str, Any], Scope, PassWatch, GraphModule]:
    """A step on four ranks, sharded twice, with activations that are computed again."""
    cell = Cell(ParallelDims(dp_shard=2, tp=2), recompute=Recompute.from_option("full", "op"))
    watch = PassWatch()
    init_fake_process_group(cell.dims.num_ranks)
    try:
        layout, options = cell.dims.layout("cpu"), dataclasses.replace(cell.options("graph"), look=watch.look)
        capture = functools.partial(make_fx_capture, call_hierarchy=True)
        gm = build_graphs(Assembly(build_model(cell), load_family(cell.family), layout, options, capture)).train.gm
        costs = Assembly(build_model(cell), load_family(cell.family), layout, options).costs
        measured = {node.name: 1e-6 for node in gm.graph.nodes if node.op == "call_function"}
        charged = charges(gm, costs, measured=measured)
        (watched,) = watch.graphs.values()
        data = graph_data("a step", [gm], charged, costs, watched, strings, rest=REST)
    finally:
        dist.destroy_process_group()
    return data, tree(charged), watch, gm


def hostile_data(strings: Strings) -> tuple[dict[str, Any], Scope, PassWatch, GraphModule]:
    """A graph whose every name is an attack, on one rank, without passes that change it."""
    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), type(EVIL, (nn.Linear,), {})(4, 4))
    gm = minimal_fx_tracer(lambda x: model(x).relu(), model, call_hierarchy=True)(torch.ones(2, 4)).gm
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = f'File "{EVIL}", line 1, in f'
    watch = PassWatch()
    gm = run_passes(gm, [Pass(EVIL, lambda g: g)], (), torch.device("cpu"), Inspection(EVIL, look=watch.look))
    charged = charges(gm, Costs())
    return graph_data(EVIL, [gm], charged, Costs(), watch.graphs[EVIL], strings), tree(charged), watch, gm


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    path, strings = tmp_path_factory.mktemp("explorer") / "page.html", Strings()
    with browser() as driver:
        made = [step_data(strings), hostile_data(strings)]
        title = "{{SCRIPT}} " + EVIL
        graphs = [data for data, *_ in made]
        data = {
            "title": title,
            "facts": [EVIL],
            "needs": [EVIL],
            "strings": strings.table,
            "graphs": graphs,
            "run": RUN,
        }
        path.write_text(page(data), encoding="utf-8")
        complaints(driver)
        found = Shown(driver, path, made[STEP][3], [root for _, root, *_ in made], [each[2] for each in made])
        found.open(path)
        yield found


@pytest.fixture(autouse=True)
def nothing_is_wrong(shown: Shown) -> Iterator[None]:
    yield
    assert complaints(shown.driver) == []


def test_the_tree_shows_what_python_computes(shown: Shown) -> None:
    shown.graph(STEP, "costs")
    shown.pick("split", 2)
    shown.run("document.querySelectorAll('#measures input:not(:checked):not(:disabled)').forEach((x) => x.click())")
    root = shown.roots[STEP]
    expected = [
        [str(getattr(scope.parts.get(part, Cost()), key)) for key in Cost._fields for part in PARTS]
        for scope in root.walk()
    ]
    shown.click("#unfold-all")
    assert [row[1:] for row in shown.all_rows("tree", len(expected))] == expected
    assert all(getattr(root.cost, key) for key in Cost._fields)
    # Folded again there is the root alone; and sorted, the costliest child comes first.
    shown.click("#fold-all")
    shown.pick("split", 1)
    assert len(shown.rows("tree")) == 1 + len(root.children)
    model = max(root.children, key=lambda scope: scope.cost.calls)
    shown.keys("#tree", "\ue011")
    shown.run(
        "[...document.querySelectorAll('#tree .head button')].find((x) => x.textContent.includes('FLOPs')).click()"
    )
    shown.keys("#tree", "\ue015", "\ue014")  # down to the model, unfolded
    flops = [int(row[2]) for row in shown.rows("tree")[2 : 2 + len(model.children)]]
    assert flops == sorted((scope.cost.flops for scope in model.children), reverse=True)


def test_blocks_of_a_kind_are_summed(shown: Shown) -> None:
    shown.graph(STEP, "costs")
    shown.pick("split", 1)
    shown.click("#kinds")
    try:
        (blocks,) = [row for row in shown.rows("tree") if "Block × 3" in row[0]]
        model = max(shown.roots[STEP].children, key=lambda scope: scope.cost.calls)
        of_blocks = [scope.cost.calls for scope in model.children if scope.place[-1].qualname.endswith(".Block")]
        assert int(blocks[1]) == sum(of_blocks) and len(of_blocks) == 3
    finally:
        shown.click("#kinds")


def test_a_name_is_found_and_its_operations_are_shown(shown: Shown) -> None:
    shown.graph(STEP, "costs")
    shown.keys("body", "/")
    shown.keys("#search", "layers.1.feed_forward.w2")
    shown.wait(lambda: shown.one("#found").is_displayed())
    assert [row[:2] for row in shown.rows("found-table")] == [["module", "layers.1.feed_forward.w2"]]
    shown.keys("#search", "\ue007")  # to the results
    shown.keys("#found-table", "\ue007")
    assert "layers.1" not in shown.text("ops-title") and "w2: Linear" in shown.text("ops-title")
    (scope,) = [s for s in shown.roots[STEP].walk() if s.place and s.place[-1].path == "layers.1.feed_forward.w2"]
    below = sorted(charge.node.name for each in scope.walk() for charge in each.charges)
    assert sorted(row[0] for row in shown.all_rows("ops", len(below))) == below
    shown.run("document.querySelector('#ops .row').click()")
    first = next(c for c in scope.charges if c.node.name == shown.rows("ops")[0][0])
    assert f"{first.cost.moved:,} bytes" in shown.text("op") or not first.cost.moved
    shown.keys("#search", "no such thing")
    shown.wait(lambda: "Nothing is called “no such thing”" in shown.text("found"))
    shown.keys("#search", "\ue00c")  # escape


def test_the_peak_says_what_holds_it(shown: Shown) -> None:
    shown.graph(STEP, "memory")
    by_module: Counter[str] = Counter()
    for scope in shown.roots[STEP].walk():
        modules = [entry.path for entry in scope.place if entry.type == "module"]
        name = (modules[-1] or "the model itself") if modules else "outside any module"
        by_module[name] += sum(charge.cost.held for charge in scope.charges)
    held = {row[0]: int(row[1]) for row in shown.rows("holders")}
    assert held.items() <= by_module.items() and len(held) > 5
    most, *_ = by_module.most_common(1)
    assert shown.rows("holders")[0][:2] == [most[0], str(most[1])]
    assert shown.one("#memory-words").get_attribute("data-value") == str(shown.roots[STEP].cost.held)
    # By what for it is what `plan` says, beside what lies there from step to step.
    by_purpose = REST | at_node(shown.gm, peak_memory(shown.gm).node)
    assert {row[0]: int(row[1]) for row in shown.rows("purposes")} == by_purpose and len(by_purpose) > 5
    shown.run("document.querySelector('#purposes .row:nth-child(3)').click()")
    assert 0 < sum(int(row[1]) for row in shown.rows("values")) <= int(shown.rows("purposes")[2][1])
    # Elsewhere less is held; a click on the curve, or the slider, shows it, and the button leads back.
    shown.click("#memory-chart")
    shown.keys("#memory-at", "\ue011")
    assert shown.rows("holders") != held and "operation 1 of" in shown.text("memory-now")
    shown.click("#to-peak")
    # How many rows are drawn below those that are seen may differ.
    again = {row[0]: int(row[1]) for row in shown.rows("holders")}
    assert (
        again.items() <= by_module.items()
        and len(again) > 5
        and shown.rows("holders")[0][:2] == [most[0], str(most[1])]
    )


def test_the_slider_stands_below_the_line_in_the_curve(shown: Shown) -> None:
    """The middle of its thumb, which is 16 pixels wide, and the line's pixels; also at both ends."""
    shown.graph(STEP, "memory")
    place = """const [slider, canvas] = ["memory-at", "memory-chart"].map((id) => document.getElementById(id));
        slider.value = arguments[0];
        slider.dispatchEvent(new Event("input"));
        const [box, chart] = [slider, canvas].map((each) => each.getBoundingClientRect());
        const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const row = context.getImageData(0, 18 * devicePixelRatio, canvas.width, 1).data;
        const red = [...Array(canvas.width).keys()].filter((x) => row[4 * x] > 150 && row[4 * x + 3] > 200);
        const line = chart.left + canvas.clientLeft + (red[0] + red[red.length - 1] + 1) / 2 / devicePixelRatio;
        return [box.left + 8 + (box.width - 16) * slider.value / slider.max, line, Number(slider.max)]"""
    most = shown.run(place, 0)[2]
    for at in (0, 1, most // 3, most - 1, most):
        thumb, line, _ = shown.run(place, at)
        assert abs(thumb - line) <= 1, at
    shown.click("#to-peak")


def test_collectives_are_summed_by_axis(shown: Shown) -> None:
    shown.graph(STEP, "sent")
    rows = shown.rows("sums")
    assert {row[0] for row in rows} == {"fsdp", "tp"}
    cost = shown.roots[STEP].cost
    assert [sum(int(row[k]) for row in rows) for k in (3, 4, 5)] == [cost.received, cost.sending, cost.exposed]
    shown.keys("#timeline", "+")
    shown.run("document.querySelector('#collectives .row').click()")
    assert "beside it" in shown.text("beside")


def test_a_run_is_where_the_page_begins(shown: Shown) -> None:
    shown.open(shown.path)
    assert shown.one("#tab-run").get_attribute("aria-selected") == "true"
    assert shown.text("run-facts").splitlines()[:4] == ["folder", EVIL, "state", "finished"]
    assert shown.rows("run-files") == [[EVIL, "2048"]]
    assert shown.one("#run-files a").get_attribute("href").endswith("/run/javascript%3Aalert%281%29")
    over = """const [curve, x] = [document.getElementById("curve"), arguments[0]];
        const box = curve.getBoundingClientRect();
        curve.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width, clientY: box.top + 9}));
        return document.getElementById("hint").textContent"""
    assert [shown.run(over, x) for x in (0.01, 0.2, 0.9)] == [
        "step 1: loss 4",
        "step 2: loss 3",
        "step 11: loss 1",
    ]
    shown.pick("curve-name", 0)
    assert shown.run(over, 0.5) == f"step 1: {EVIL} 2"


def test_passes_show_nodes_before_and_after(shown: Shown) -> None:
    shown.graph(STEP, "passes")
    (watched,) = shown.watches[STEP].graphs.values()
    shown.run("document.getElementById('pass-table').style.maxHeight = 'none'")
    shown.wait(lambda: len(shown.rows("pass-table")) == len(watched.passes))
    kinds = ("added", "removed", "changed", "moved")
    for row, each in zip(shown.rows("pass-table"), watched.passes, strict=True):
        numbers = Counter(change.kind for change in each.changes)
        assert [row[0], row[2], *row[6:10]] == [each.name, str(each.num_calls), *(str(numbers[k]) for k in kinds)]
        assert each.measured is not None, "what the log's table says"
        peak, received, exposed = each.measured
        assert row[3:6] == [str(peak), str(received), str(round(exposed * 1e9))]
    cost = shown.roots[STEP].cost
    assert row[3:5] == [str(cost.held), str(cost.received)] and int(row[5]) == pytest.approx(cost.exposed, abs=2)
    chosen = next(i for i, each in enumerate(watched.passes) if each.name == "shard_params")
    shown.run(f"document.getElementById('pass-table-{chosen}').click()")
    shown.pick("change-kind", 3)
    changed = [change for change in watched.passes[chosen].changes if change.kind == "changed"]
    assert [tuple(row) for row in shown.rows("changes")] == [
        ("changed", change.name, change.before, change.after) for change in changed[: len(shown.rows("changes"))]
    ]
    assert f"{len(changed):,} nodes" in shown.text("change-words")


def test_names_are_shown_as_text(shown: Shown) -> None:
    for view in ("run", "costs", "memory", "sent", "passes"):
        shown.graph(HOSTILE, view)
        assert not shown.driver.find_elements("css selector", "img")
        assert shown.driver.title == "{{SCRIPT}} " + EVIL
    assert "sends nothing" in shown.run("return document.getElementById('sent-words').textContent")
    shown.graph(HOSTILE, "costs")
    shown.keys("#search", "onerror")
    shown.wait(lambda: len(shown.rows("found-table")) > 1)
    assert EVIL.replace(".", "") in shown.rows("found-table")[0][1]
    shown.run("document.querySelector('#found-table .row').click()")
    assert EVIL.replace(".", "") in shown.text("ops-title")


def test_a_page_that_would_ask_a_network_is_found_out(shown: Shown, tmp_path: Path) -> None:
    """The control of `complaints`: by the page's own policy a request is refused, and said; without it, it is made."""
    text = shown.path.read_text(encoding="utf-8")
    ask = "<script>fetch('http://127.0.0.1:9/').catch(() => 0)</script></body>"
    changed = tmp_path / "changed.html"
    try:
        changed.write_text(text.replace("</body>", ask), encoding="utf-8")
        shown.open(changed)
        assert any("Content Security Policy" in each for each in complaints(shown.driver))
        changed.write_text(re.sub("<meta http-equiv.*?>", "", text).replace("</body>", ask), encoding="utf-8")
        shown.open(changed)
        assert "http://127.0.0.1:9/" in complaints(shown.driver)
    finally:
        shown.open(shown.path)
        complaints(shown.driver)


def chain(num_calls: int) -> GraphModule:
    """Make a graph of many calls: of blocks of a hundred, each in ten modules, forth and back."""
    graph = Graph()
    with FakeTensorMode():
        value = torch.empty(64, 64)
    node = graph.placeholder("x")
    node.meta["val"] = value
    blocks = num_calls // 200
    for block in [*range(blocks), *reversed(range(blocks))]:
        is_backward = len(graph.nodes) > num_calls // 2
        for i in range(100):
            name = f"layers.{block}.part_{i // 10}"
            place = (
                Entry("module", "", "my.Model", "", 0),
                Entry("module", str(block), "my.Block", f"layers.{block}", 0),
                Entry("module", f"part_{i // 10}", "my.Part", name, 0),
            )
            node = graph.call_function(torch.ops.aten.mm.default, (node, node))
            node.meta |= {"val": value, "call_hierarchy": (place,)}
            meta.write(node, phase="backward" if is_backward else "forward", module=name)
    graph.output((node,))
    gm = GraphModule(nn.Module(), graph)
    gm.meta["signature"] = Signature((), ())
    return gm


@pytest.mark.slow
def test_a_hundred_thousand_nodes(shown: Shown, tmp_path: Path) -> None:
    def doubled(gm: GraphModule) -> GraphModule:
        for node in list(gm.graph.nodes)[1:-1:2]:
            with gm.graph.inserting_after(node):
                new = call(gm.graph, node, torch.ops.aten.neg.default, node)
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        return gm

    watch, strings, gm = PassWatch(), Strings(), chain(100_000)
    watch.look("many", "traced", 0.0, gm)
    gm = doubled(gm)
    watch.look("many", "doubled", 1.0, gm)
    charged = charges(gm, Costs())
    data = graph_data("many", [gm], charged, Costs(), watch.graphs["many"], strings)
    path = tmp_path / "many.html"
    path.write_text(page({"title": "many", "facts": [], "needs": [], "strings": strings.table, "graphs": [data]}))
    try:
        shown.open(path)
        root = shown.rows("tree")[0]
        assert sum(map(int, root[1:3])) == len(charged) == 150_000
        shown.keys("#search", "part_7")
        shown.wait(lambda: len(shown.rows("found-table")) > 5)
        for view in ("memory", "sent", "passes"):
            shown.click(f"#tab-{view}")
        shown.wait(lambda: "100,000 nodes" in shown.text("change-words"))
        assert len(shown.run("return document.querySelectorAll('.row')")) < 400
    finally:
        shown.open(shown.path)
