"""How much a graph holds at once, against sums by hand and against torch's own profiler."""

import dataclasses
import itertools
import json
import operator
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from pool import run_on
from torchtitan_graph.analysis.liveness import held_memory, peak_memory, size_of
from torchtitan_graph.capture.step import trace_train_step
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.torch_private.fake import FakeTensorMode

KIB = 1024  # of 256 numbers
MIB = 2**20
c10d = torch.ops._c10d_functional


def graph_of(fn) -> GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(torch.empty(256))


@pytest.mark.parametrize(
    ("fn", "kib", "at"),
    [
        (lambda x: x + 1, 1, "add"),
        (lambda x: ((x + 1) * 2).sum(), 2, "mul"),
        (lambda x: x.expand(4, 256).t(), 0, ""),  # nothing of its own
        (lambda x: (x + 1).view(16, 16).t() * 2, 2, "mul"),  # a view keeps its source alive
        (lambda x: torch.stack([x + 1, x + 2]), 4, "stack"),
        (lambda x: (x + 1).split(64)[3] * torch.cat([x[:32], x[64:96]]), 1.5, "mul"),
        (lambda x: (x + 1).add_(2).mul_(3), 1, "add"),  # in place
        (lambda x: ((a := x + 1), a * 2)[1].exp() + a, 3, "exp"),
        (lambda x: (x + 1).sort().values.sum(), 4, "sort"),  # its indices too, which nobody reads
        (lambda x: (s := (x + 1).sort()).values.neg() * s.indices, 4, "sort"),  # from when it runs
        (lambda x: torch.var_mean(x)[0] + x.view(16, 16).unbind()[1], 0.0625 + 4 / KIB, "add"),  # a mean is let go of
    ],
)
def test_by_hand(fn, kib: float, at: str) -> None:
    found = peak_memory(graph_of(fn))
    assert found.num_bytes == kib * KIB
    assert at in found.node.name


def test_an_operators_results_are_all_there_until_the_last_is_picked() -> None:
    gm = graph_of(lambda x: ((s := x.sort()).values.neg().exp().sum(), s.indices))
    (neg,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    first, last = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    assert held_memory(gm, size_of)[neg.next] == 4 * KIB  # exp: indices, neg and its own
    neg.next.append(last)  # behind exp
    assert first.args[1] == 0 and held_memory(gm, size_of)[neg.next] == 5 * KIB


def test_what_is_picked_twice_is_one_memory() -> None:
    gm = graph_of(lambda x: (s := x.sort()).values.neg() + s.values.cos())
    assert peak_memory(gm).num_bytes == 3 * KIB


@pytest.mark.parametrize(("shape", "kib"), [((1, 32, 2, 4), 3), ((1, 2, 32, 4), 4)])
def test_attentions_backward_on_a_cpu_copies_a_gradient_whose_heads_lie_apart(shape: tuple, kib: int) -> None:
    """Beside three gradients of 1 KiB, as the profiler shows them; its small buffers do not count."""
    apart = shape == (1, 2, 32, 4)

    def backward(x):
        q = x.view(1, 32, 2, 4).transpose(1, 2)
        dout = x.view(shape) if apart else q
        dq, _, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, q, q, q, x[:64].view(1, 2, 32), 0.0, False
        )
        return dq.sum()

    assert peak_memory(graph_of(backward)).num_bytes == kib * KIB


STARTS = {
    "gather": lambda x, group: c10d.all_gather_into_tensor(x, 2, group),
    "scatter": lambda x, group: c10d.reduce_scatter_tensor(x, "sum", 2, group),
    "sum": lambda x, group: c10d.all_reduce(x, "sum", group),
    "exchange": lambda x, group: c10d.all_to_all_single(x, [x.numel() // 2] * 2, [x.numel() // 2] * 2, group),
}


def foretold_and_measured(kind: str, repeats: int) -> tuple[float, float]:
    """Send 4 MiB, and make a value `repeats` times as large meanwhile: the peak in MiB."""
    group = dist.group.WORLD.group_name

    def fn(x: Tensor) -> Tensor:
        started = STARTS[kind](x + 1, group)
        # The group's one thread is done with the first when it is with the second.
        done = c10d.wait_tensor(c10d.all_reduce(x[:1], "sum", group))
        beside = (x * done).repeat(repeats).sum()
        return c10d.wait_tensor(started).sum() + beside

    x = torch.ones(MIB)
    with FakeTensorMode():
        gm = make_fx(fn)(torch.empty(MIB))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured, torch.no_grad():
        gm(x)
    with tempfile.TemporaryDirectory() as folder:
        measured.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return peak_memory(gm).num_bytes / MIB, max(itertools.accumulate(size for _, size in changes)) / MIB


@pytest.mark.parametrize(
    ("kind", "repeats", "mib"),
    [
        ("gather", 0, 4 + 8 + 8),  # what is sent, the result, and gloo's copy of it, which is gone soon
        ("gather", 4, 4 + 8 + 4 + 16),  # what is sent stays
        ("scatter", 4, 4 + 2 + 4 + 16),  # gloo's copy of it stays
        ("exchange", 4, 4 + 4 + 4 + 16),
        ("sum", 4, 4 + 4 + 16),  # in its result
    ],
)
def test_what_collectives_hold_is_what_gloo_holds(kind: str, repeats: int, mib: int) -> None:
    for foretold, measured in run_on(2, foretold_and_measured, kind, repeats):
        assert foretold == pytest.approx(mib, rel=1e-4)
        assert measured == pytest.approx(mib, rel=1e-4)


def traced_step(family: str, rows: int, seq_len: int, vocab_size: int = 512) -> tuple[Decoder, tuple, TracedResult]:
    module = load_family(family)
    torch.manual_seed(0)
    model = module.Model(tiny_config(module.FLAVORS["debugmodel"], vocab_size=vocab_size), "sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens, positions = torch.randint(vocab_size, (rows, seq_len)), torch.arange(seq_len).expand(rows, -1).contiguous()
    batch = Batch(tokens, tokens, positions, torch.zeros_like(tokens))
    inputs = batch, model.masks(batch.documents_BL, batch.positions_BL), torch.tensor(tokens.numel())
    return model, inputs, trace_train_step(model, cross_entropy, *inputs, device="cpu")


def measured_peak(traced: TracedResult, model: Decoder, inputs: tuple, file: Path) -> int:
    run = run_traced(traced, module=model)
    run(*inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run(*inputs)
    measured.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda e: e["ts"])
    held = [event["args"]["Total Allocated"] for event in events]
    return max(held) - (held[0] - events[0]["args"]["Bytes"])


@pytest.mark.parametrize("family", ["llama3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_as_the_profiler_measures(family: str, tmp_path: Path) -> None:
    model, inputs, traced = traced_step(family, 2, 128)
    peak = measured_peak(traced, model, inputs, tmp_path / "trace.json")
    assert peak_memory(traced.gm).num_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_attentions_gradients_are_all_there_at_once(family: str, tmp_path: Path) -> None:
    """With all of a block computed again, the step holds most in attention's backward."""
    model, inputs, traced = traced_step(family, 2, 512, vocab_size=64)
    gm = tag_recomputation(cleanup(traced.gm), model.blocks, Recompute(every=1))
    gm = rematerialize(gm)
    peak = measured_peak(dataclasses.replace(traced, gm=gm), model, inputs, tmp_path / "trace.json")
    assert peak_memory(gm).num_bytes == pytest.approx(peak, rel=0.0005)


def test_passes_that_save_memory_save_it_as_foretold(tmp_path: Path) -> None:
    model, inputs, traced = traced_step("llama3", 8, 256)
    gm = cleanup(traced.gm)
    peaks = [peak_memory(gm).num_bytes]
    for run in (partial(tag_elementwise, blocks=model.blocks), rematerialize):
        gm = run(gm)
        peaks.append(peak_memory(gm).num_bytes)
    untouched, tagged, without_elementwise = peaks
    assert untouched == tagged > 1.2 * without_elementwise
    peak = measured_peak(dataclasses.replace(traced, gm=gm), model, inputs, tmp_path / "trace.json")
    assert peaks[-1] == pytest.approx(peak, rel=0.02)
