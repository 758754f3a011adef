"""A profile's events say of which node they are, and the seconds of each are read back."""

import gzip
import json
import operator
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.profiler import profile

from torchtitan_graph.analysis.measured import find_trace, measured
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.passes.compile_regions import compile_regions
from torchtitan_graph.runtime.observe import Watchable

SLOW_S = 0.02


def rest(x: Tensor) -> Tensor:
    """What runs a graph of its own is one node, as a compiled region is."""
    time.sleep(SLOW_S)
    return x.clone()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


def traced(call_hierarchy: bool = True) -> tuple[GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 4)

    def step(x: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(model(x).sum(), list(model.parameters()))]

    gm = minimal_fx_tracer(step, module=model, call_hierarchy=call_hierarchy)(x).gm
    last = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[-1]
    with gm.graph.inserting_after(last):
        added = gm.graph.call_function(rest, (last,))
    last.replace_all_uses_with(added, lambda user: user is not added)
    meta.inherit(added, last)
    gm.recompile()
    gm.meta["name"] = "training step"
    return gm, [*(p.detach() for p in model.parameters()), x]


def recorded(gm: GraphModule, inputs: list[Tensor], path: Path, num_runs: int = 1) -> Path:
    run = Watchable(gm)
    with profile(record_shapes=True) as profiler:
        for _ in range(num_runs):
            run(list(inputs))
    profiler.export_chrome_trace(str(path))
    return path


def words(trace: Path, node: str) -> dict[str, Any]:
    events = json.loads(trace.read_text())["traceEvents"]
    return next(event["args"] for event in events if event.get("args", {}).get("node") == node)


def test_every_node_is_measured(tmp_path: Path) -> None:
    gm, inputs = traced()
    trace = recorded(gm, inputs, tmp_path / "trace.json", num_runs=3)
    found = measured(trace)["training step"]
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert found.keys() == {node.name for node in calls}
    events = json.loads(trace.read_text())["traceEvents"]
    took = [event["dur"] for event in events if event.get("args", {}).get("node") == "rest"]
    assert len(took) == 3 and min(took) / 1e6 >= SLOW_S
    assert found["rest"] == pytest.approx(sum(took) / 3 / 1e6)
    assert sum(found.values()) > found["rest"]


def test_a_profile_of_another_graph_is_refused(tmp_path: Path) -> None:
    gm, inputs = traced()
    trace = recorded(gm, inputs, tmp_path / "trace.json")
    assert measured(trace, [gm]) == measured(trace)
    node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[0]
    node.meta["val"] = torch.empty(3, 4)
    with pytest.raises(UserError, match=r"tanh of training step is float32\[2, 4\], and would be float32"):
        measured(trace, [gm])
    with gm.graph.inserting_before(node):
        gm.graph.call_function(torch.ops.aten.sin.default, node.args)
    with pytest.raises(UserError, match="has nothing of 1 of the .* nodes of training step, such as sin_default"):
        measured(trace, [gm])


def test_an_event_says_where_its_node_was_made(tmp_path: Path) -> None:
    gm, inputs = traced()
    trace = recorded(gm, inputs, tmp_path / "trace.json")
    (addmm, _) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    said = {key: words(trace, addmm.name)[key] for key in ("graph", "phase", "origin", "module", "scope")}
    assert list(said.values()) == [
        "training step",
        "forward",
        "forward",
        "first",
        "step() > :Twice > first:Linear",
    ]


def test_a_region_is_one_node_with_the_places_of_all(tmp_path: Path) -> None:
    gm, inputs = traced()
    plain = gm(*inputs)
    gm = compile_regions(gm, {"whole": None})
    trace = recorded(gm, inputs, tmp_path / "trace.json")
    calls = {node.name for node in gm.graph.nodes if meta.region(node) and node.target is not operator.getitem}
    assert calls and calls <= measured(trace)["training step"].keys()
    scopes = [words(trace, name)["scope"].split(" | ") for name in calls]
    assert any({"step() > :Twice > first:Linear", "step() > :Twice"} <= set(each) for each in scopes)
    assert all(map(torch.equal, Watchable(gm)(list(inputs)), plain))


def test_without_a_call_hierarchy_it_says_the_module(tmp_path: Path) -> None:
    gm, inputs = traced(call_hierarchy=False)
    trace = recorded(gm, inputs, tmp_path / "trace.json")
    (addmm, _) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert words(trace, addmm.name)["module"] == "first" and "scope" not in words(trace, addmm.name)


def test_a_name_may_be_anything(tmp_path: Path) -> None:
    """Kineto escapes nothing: a quote would break the file."""
    gm, inputs = traced()
    (added,) = gm.graph.find_nodes(op="call_function", target=rest)
    meta.write(added, module='a"b\\c\n\td</script>é')
    trace = recorded(gm, inputs, tmp_path / "trace.json")
    assert words(trace, "rest")["module"] == "a?b?c??d</script>é"


# --- a GPU's, as Kineto writes it: launches on the host's threads, and kernels on streams, joined by a number ---------

HOST, GPU = {"pid": 77, "tid": 77}, {"pid": 0, "tid": 7}


def event(cat: str, name: str, ts: float, dur: float, where: dict[str, int], **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, **where, "ts": ts, "dur": dur, "args": args}


def node(name: str, ts: float, dur: float, graph: str = "training step") -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, HOST, **{"External id": 1, "node": name, "graph": graph})


def launch(ts: float, number: int, where: dict[str, int] = HOST, cat: str = "cuda_runtime") -> dict[str, Any]:
    return event(cat, "cudaLaunchKernel", ts, 3.0, where, **{"External id": 2, "cbid": 211, "correlation": number})


def kernel(ts: float, dur: float, number: int, cat: str = "kernel") -> dict[str, Any]:
    more = {"queued": 0, "device": 0, "context": 1, "stream": 7, "grid": [1, 1, 1], "block": [128, 1, 1]}
    return event(cat, "sm90_gemm", ts, dur, GPU, **{"External id": 2, "correlation": number, **more})


def gpu_trace(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "rank0.json.gz"
    others = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        {"ph": "s", "id": 5, "pid": 77, "tid": 77, "ts": 10.0, "cat": "ac2g", "name": "ac2g"},
        event("cuda_runtime", "cudaDeviceSynchronize", 900.0, 50.0, HOST, cbid=165, correlation=99),
        event("user_annotation", "forward layers.0", 0.0, 99.0, HOST, **{"External id": 0}),
        event("gpu_user_annotation", "forward layers.0", 500.0, 99.0, GPU, **{"External id": 0}),
    ]
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": [*others, *events]}).encode()))
    return path


def test_on_a_gpu_a_node_takes_what_it_launched(tmp_path: Path) -> None:
    """Kernels and copies, whenever they ran; those of another thread, and of no node, are nobody's."""
    other = HOST | {"tid": 78}
    trace = gpu_trace(
        tmp_path,
        node("mm", 10.0, 20.0),
        launch(12.0, 1),
        launch(25.0, 2, cat="cuda_driver"),
        kernel(500.0, 40.0, 1),
        kernel(540.0, 5.0, 2, cat="gpu_memset"),
        node("view", 31.0, 2.0),
        launch(35.0, 3),
        kernel(600.0, 7.0, 3),
        node("offload", 40.0, 9.0),
        launch(41.0, 4),
        kernel(700.0, 11.0, 4, cat="gpu_memcpy"),
        launch(42.0, 5, where=other),
        kernel(800.0, 13.0, 5),
    )
    assert measured(trace) == {"training step": {"mm": 45e-6, "view": 0.0, "offload": 11e-6}}


def test_a_node_takes_the_mean_of_its_runs_in_its_graph(tmp_path: Path) -> None:
    trace = gpu_trace(
        tmp_path,
        node("mm", 10.0, 8.0, "stage 0, forward"),
        node("mm", 20.0, 4.0, "stage 0, forward"),
        node("mm", 30.0, 1.0, "stage 0, backward"),
    )
    assert measured(trace) == {"stage 0, forward": {"mm": 6e-6}, "stage 0, backward": {"mm": 1e-6}}


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    trace = gpu_trace(tmp_path, node("mm", 10.0, 8.0))
    with pytest.raises(UserError, match="no event names its node.* compile.cuda_graphs = false"):
        measured(gpu_trace(tmp_path, kernel(10.0, 8.0, 1)))
    whole = trace.read_bytes()
    torn = whole[:20] + b"\xff" * 20 + whole[40:]
    for content in (whole[:-9], b"{", gzip.compress(b"[1]"), gzip.compress(b'{"traceEvents": [7]}'), torn):
        trace.write_bytes(content)
        with pytest.raises(UserError, match="is not a trace of torch's profiler"):
            measured(trace)
    with pytest.raises(UserError, match="is not there"):
        measured(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("dur", "x"), ("dur", float("nan")), ("dur", -1.0), ("ts", 10**200), ("ts", None), ("args", None), ("tid", [1])]
    + [("node", ["mm"]), ("graph", None), ("correlation", {})],
)  # fmt: skip
def test_an_event_of_another_form_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    strange = [node("mm", 10.0, 8.0), launch(12.0, 1), kernel(13.0, 1.0, 1)]
    for each in strange:
        where = each["args"] if key in ("node", "graph", "correlation") else each
        if key in where:
            where[key] = value
    with pytest.raises(UserError, match="is not a trace of torch's profiler .*an event is"):
        measured(gpu_trace(tmp_path, *strange))


def test_a_damaged_or_bottomless_file_is_refused(tmp_path: Path) -> None:
    trace = gpu_trace(tmp_path, node("mm", 10.0, 8.0))
    whole = bytearray(trace.read_bytes())
    whole[20:60] = bytes(40)
    deep = gzip.compress(b'{"traceEvents": ' + b"[" * 100_000)
    zeros = gzip.compress(bytes(2**28 + 1), compresslevel=1)
    lists = gzip.compress(b'{"traceEvents": [' + b"[]," * 7_000_000 + b"[]]}", compresslevel=1)
    for content in (bytes(whole), deep, zeros, lists):
        trace.write_bytes(content)
        with pytest.raises(UserError, match="is not a trace of torch's profiler"):
            measured(trace)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.json.gz")
    with pytest.raises(UserError, match="is not a regular file, but a FIFO"):
        measured(tmp_path / "rank0.json.gz")
    with pytest.raises(UserError, match="is not a trace, and no run's folder"):
        find_trace(tmp_path / ("x" * 300), 0, 1)


def test_the_newest_trace_of_a_rank_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 8, "12.copy"):
        folder = tmp_path / "traces" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "rank1.json.gz").touch()
    (tmp_path / "traces" / "step-9.old").mkdir()
    (tmp_path / "traces" / "step-9.old" / "rank1.json.gz").touch()
    assert find_trace(tmp_path, 1, 1).parent.name == "step-10"
    assert find_trace(tmp_path / "traces/step-8/rank1.json.gz", 0, 2).parent.name == "step-8"
    assert find_trace(tmp_path.parent, 1, 1).parent.name == "step-10", "the folder of traces may lie deeper"
    with pytest.raises(UserError, match="the run had 1 ranks, not 2; put NGPU=1 in front"):
        find_trace(tmp_path, 1, 2)
    with pytest.raises(UserError, match="no run's folder with one of rank 0; .*profiling.enable_profiling = true"):
        find_trace(tmp_path, 0, 1)
