"""Compare the step in eager mode (FSDP2), eager with `torch.compile`, as a graph, and as a compiled graph.

    python scripts/benchmark.py --ranks 1,2 --dtypes float32,bfloat16 --json benchmark.jsonl
    python scripts/benchmark.py --family gpt_oss --attn flex --ranks 1 --dtypes float32
    python scripts/benchmark.py --trace_layers 4,8,16,32,64

Each number of ranks is a group of gloo (or, with GPUs, NCCL) processes. The modes take turns, step by step, in the
same processes, so that whatever else the machine does meets all of them; figures are medians, and ratios are medians
of the ratios of neighbouring steps. Memory is the most that one step holds above what it started with: on a CPU from
the profiler's record of every allocation, on a GPU from the allocator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_graph import device as devices
from torchtitan_graph.compiler import Inspection, check_disabled, needed_regions, passes, run_passes
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.torch_private import init_fake_process_group
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.storage import Precision
from torchtitan_graph.passes.compile_regions import compile_regions
from torchtitan_graph.steps import StepOptions, Steps, bind_graphs, build_graphs, build_steps, trace_steps

# What makes a debug flavour mid-size; llama3's debug flavour has very narrow heads.
MID_SIZE: dict[str, Any] = {"dim": 512, "num_layers": 8, "vocab_size": 8192}
MID_SIZE_OF = {"llama3": {"num_heads": 8, "num_kv_heads": 8, "ffn_dim": 1536}}
MODES = ("eager", "compile", "graph", "regional", "whole")
# What is compiled of the graph; "whole": all.
REGIONS = {"regional": ("layers.*.feed_forward", "layers.*.moe"), "blocks": ("layers.*",)}


def config_of(args: argparse.Namespace) -> Any:
    flavors = load_family(args.family).FLAVORS
    if args.flavor in flavors:
        return flavors[args.flavor]
    if args.flavor != "mid":
        raise UserError(f"--flavor {args.flavor}: legal for {args.family} are mid, {', '.join(flavors)}")
    return dataclasses.replace(flavors["debugmodel"], **MID_SIZE, **MID_SIZE_OF.get(args.family, {}))


def make_model(config: Any, args: argparse.Namespace) -> Decoder:
    with torch.device("meta"):
        return load_family(args.family).Model(config, args.attn)


def make_batch(rows: int, seq_len: int, vocab_size: int, device: torch.device) -> Batch:
    """Random tokens, four documents a row."""
    tokens, labels = torch.randint(vocab_size, (2, rows, seq_len), device=device)
    positions = torch.arange(seq_len, device=device).expand(rows, seq_len)
    documents = positions * 4 // seq_len
    return Batch(tokens, labels, (positions % -(-seq_len // 4)).contiguous(), documents.contiguous())


def options_of(mode: str, precision: Precision, args: argparse.Namespace, device: torch.device) -> StepOptions:
    """Give what `build_steps` is told of a mode."""
    regions = {**needed_regions(device), **{pattern: {} for pattern in REGIONS.get(mode, ())}}
    return StepOptions(
        device=device,
        rows=(args.rows, args.seq_len),
        mode="eager" if mode in ("eager", "compile") else "graph",
        precision=precision,
        loss=torch.compile(cross_entropy) if mode == "compile" else cross_entropy,
        regions=regions,
        # Inductor can't take a loss that writes into the logits.
        disabled=[*args.disable, *["reuse_logits"] * (mode == "whole")],
    )


def build(mode: str, precision: Precision, args: argparse.Namespace, layout: Layout, device: torch.device) -> Steps:
    family, model = load_family(args.family), make_model(config_of(args), args)
    options = options_of(mode, precision, args, device)
    if mode == "whole":
        graphs = build_graphs(model, family, layout, options)
        for node in graphs.train.gm.graph.nodes:
            meta.write(node, region=mode)
        compile_regions(graphs.train.gm, {mode: {}})
        steps = bind_graphs(graphs, model, layout, options)
    else:
        steps = build_steps(model, family, layout, options)
    if mode == "compile":
        for block in model.blocks.values():
            block.compile()
    initialize(model, 0)
    return steps


def peak_bytes(run: Callable[[], None]) -> int:
    """Give the most bytes that `run` allocates and holds at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = peak = 0
    blocks: dict[int, int] = {}  # by address, in bytes
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        # What gloo's thread frees is not recorded: an address that is given out again was free.
        held -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            held += size
        peak = max(peak, held)
    return peak


def measure(rank: int, world_size: int, args: argparse.Namespace, dtype: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.manual_seed(rank)
    device = devices.device()
    join("nccl" if device.type == "cuda" else "gloo")
    layout = ParallelDims(dp_shard=world_size).layout(device.type)
    precision = Precision(compute=getattr(torch, dtype))
    batch = make_batch(args.rows, args.seq_len, config_of(args).vocab_size, device)
    num_tokens = torch.tensor(batch.labels_BL.numel() * world_size, device=device)
    steps, memory = {}, {}
    graph: Steps | None = None  # a mode that counts operations
    times: dict[str, list[float]] = {mode: [] for mode in args.modes}
    for mode in args.modes:
        built = build(mode, precision, args, layout, device)
        optimizer = torch.optim.AdamW(built.model.parameters(), fused=True)
        graph = built if built.flops else graph

        def whole_step(built: Steps = built, optimizer: torch.optim.Optimizer = optimizer) -> None:
            built.train([batch], num_tokens)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            whole_step()
        steps[mode] = whole_step
        memory[mode] = statistics.median(peak_bytes(whole_step) for _ in range(3))
    for _ in range(args.steps):
        for mode in args.modes:
            dist.barrier()
            begin = time.perf_counter()
            steps[mode]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[mode].append(time.perf_counter() - begin)
    if rank == 0:
        tokens = batch.labels_BL.numel() * world_size
        flops = graph.count_flops([batch]) if graph is not None and devices.peak_flops() else None
        for mode in args.modes:
            ratio = statistics.median(a / b for a, b in zip(times[mode], times[args.modes[0]], strict=True))
            results.append(
                {
                    "model": f"{args.family} {args.flavor} {args.attn}",
                    "ranks": world_size,
                    "dtype": dtype,
                    "mode": mode,
                    "step_s": round(step_s := statistics.median(times[mode]), 4),
                    "tokens_per_s": round(tokens / step_s),
                    **({"mfu": round(flops / step_s / (devices.peak_flops() or 1.0), 3)} if flops else {}),
                    f"time_to_{args.modes[0]}": round(ratio, 3),
                    "peak_mib": round(memory[mode] / 2**20, 1),
                    f"memory_to_{args.modes[0]}": round(memory[mode] / memory[args.modes[0]], 3),
                }
            )
    dist.barrier()
    dist.destroy_process_group()


def measure_tracing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time tracing and the passes as the model grows, for a rank of a fake group of 8."""
    init_fake_process_group(8)
    layout, device = ParallelDims(dp_shard=8).layout("cpu"), torch.device("cpu")
    options = dataclasses.replace(options_of("graph", Precision(compute=torch.bfloat16), args, device), rows=(1, 128))
    family, rows = load_family(args.family), []
    for num_layers in args.trace_layers:
        trials = []
        for _ in range(3):
            model = make_model(dataclasses.replace(config_of(args), num_layers=num_layers), args)
            begin = time.perf_counter()
            traced = trace_steps(model, family, layout, options)
            middle = time.perf_counter()
            gm = run_passes(traced.train.gm, passes(traced.plan), args.disable, device, Inspection())
            trials.append((middle - begin, time.perf_counter() - middle))
        rows.append(
            {
                "layers": num_layers,
                "nodes": len(gm.graph.nodes),
                "trace_s": round(statistics.median(t[0] for t in trials), 2),
                "passes_s": round(statistics.median(t[1] for t in trials), 2),
            }
        )
    return rows


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def check_numbers(args: argparse.Namespace, *names: str) -> None:
    """Raise a UserError for a number, or one of a list, that is below 1."""
    for name in names:
        given = getattr(args, name)
        numbers = given if isinstance(given, list) else [] if given is None else [given]
        if wrong := [number for number in numbers if number < 1]:
            raise UserError(f"--{name} {wrong[0]}: must be at least 1")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise a UserError for what would only be found in every process, or would measure nothing."""
    check_numbers(args, "ranks", "rows", "seq_len", "steps", "trace_layers")
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder for it")
    for name, legal in (
        ("dtypes", ("float32", "bfloat16")),
        ("modes", ("eager", "compile", "graph", *REGIONS, "whole")),
    ):
        if wrong := [word for word in getattr(args, name) if word not in legal]:
            raise UserError(f"--{name} {wrong[0]}: legal are {', '.join(legal)}")
    check_disabled(args.disable)
    config_of(args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=integers, default=[1, 2], help="numbers of processes (default 1,2)")
    parser.add_argument("--dtypes", type=lambda s: s.split(","), default=["float32", "bfloat16"], help="compute dtypes")
    modes = "eager, compile, graph; graphs that Inductor compiles: regional (feed-forwards), blocks, whole"
    parser.add_argument(
        "--modes", type=lambda s: s.split(","), default=list(MODES), help=f"{modes}; the first is the reference"
    )
    parser.add_argument("--family", default="llama3", help="model family (default llama3)")
    parser.add_argument("--flavor", default="mid", help="a flavour, or mid (default): debug at dim 512, 8 layers")
    parser.add_argument("--attn", default="sdpa", choices=("sdpa", "flex"), help="attention (default sdpa)")
    parser.add_argument("--rows", type=int, default=1, help="rows per rank (default 1)")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens per row (default 1024)")
    parser.add_argument("--steps", type=int, default=9, help="measured steps per mode (default 9)")
    parser.add_argument("--disable", type=lambda s: s.split(","), default=[], help="passes to leave out of the graph")
    parser.add_argument("--trace_layers", type=integers, help="measure only tracing, at these numbers of layers")
    parser.add_argument("--json", type=Path, help="append a JSON object per row to this file")
    args = parser.parse_args()
    try:
        check_arguments(args)
    except UserError as error:
        parser.error(str(error))
    if args.trace_layers:
        rows = measure_tracing(args)
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29541"))
        with mp.Manager() as manager:
            results = manager.list()
            for world_size in args.ranks:
                for dtype in args.dtypes:
                    mp.spawn(measure, (world_size, args, dtype, results), nprocs=world_size)
            rows = list(results)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps({"torch": torch.__version__, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
