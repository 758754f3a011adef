"""Compare the step in eager mode (FSDP2), eager with `torch.compile`, as a graph, and as a compiled graph.

    python scripts/benchmark.py --layouts fsdp1,fsdp2 --dtypes float32,bfloat16 --json benchmark.jsonl
    python scripts/benchmark.py --models llama3:small,llama3:mid,qwen3:debugmodel_moe --layouts fsdp1,hsdp4,tp2
    python scripts/benchmark.py --models gpt_oss --attn flex --layouts fsdp1 --dtypes float32
    python scripts/benchmark.py --models llama3:DIR,transformers:DIR --modes eager,compile,graph
    python scripts/benchmark.py --models qwen3:27M --modes graph:sdpa,graph:varlen --rows 8 --seq_len 512 --document 60
    python scripts/benchmark.py --modes eager,graph,graph@selective,graph@full,graph@75,graph@50,graph@0,blocks@50
    python scripts/benchmark.py --trace_layers 4,8,16,32,64

Each layout is a group of gloo (or, with GPUs, NCCL) processes: hsdp4 has two copies of the weights, each on two ranks;
of ep2 each rank holds half of the experts.
The modes take turns, step by step, in the same processes, so that whatever else the machine does meets all of them;
figures are medians, and ratios are medians of the ratios of neighbouring steps, with the first and the third quartile
of the time's. `cpu_s` is the processor time of the rank's threads, which says more on a busy machine. Memory is the
most that one step holds above what it started with: on a CPU from the profiler's record of every allocation, on a GPU
from the allocator. `predicted_mib` is the forecast by the graph's liveness, with the batch's masks. MODE:ATTN has its
own implementation of attention. MODE@PERCENT has a memory budget of that part, MODE@full and MODE@selective are what
`activation_checkpoint.mode` calls so. `products_share` is how much of a step its matrix products would take at the rate
that one large product reaches here, with all processes at it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from torchtitan_graph import device as devices
from torchtitan_graph.analysis.liveness import input_memory, peak_memory
from torchtitan_graph.capture.step import make_eager_step
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.command import make_parser
from torchtitan_graph.compiler import Inspection, passes, run_passes
from torchtitan_graph.config import job
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.storage import Precision, shard_eager
from torchtitan_graph.passes.compile_regions import WHOLE
from torchtitan_graph.steps import Assembly, StepOptions, Steps, bind_graphs, build_graphs, build_steps, trace_steps
from torchtitan_graph.steps.choices import ELEMENTWISE, FUSIONS, check_disabled, plan_regions
from torchtitan_graph.torch_private.distributed import init_fake_process_group

# Three sizes of a debug flavour; llama3's debug flavour has very narrow heads.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"dim": 256, "num_layers": 4, "vocab_size": 4096},
    "mid": {"dim": 512, "num_layers": 8, "vocab_size": 8192},
    "large": {"dim": 1024, "num_layers": 12, "vocab_size": 16384},
}
# qwen3:27M has the proportions of Qwen3 0.6B.
QWEN3_27M = {"dim": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192}
ATTENTION = ("sdpa", "flex", "varlen")
MODES = ("eager", "compile", "compile_whole", "graph", "blocks", "whole")
EAGER = ("eager", "compile", "compile_whole")
# The compiled regions of a graph; blocks and whole as in compile.codegen.
REGIONS = {"regional": ("layers.*.feed_forward", "layers.*.moe"), "blocks": ("layers.*",), "whole": (WHOLE,)}


def config_of(args: argparse.Namespace) -> Any:
    flavors = load_family(args.family).FLAVORS
    file = Path(args.flavor) / "config.json"
    if file.is_file():
        return load_family(args.family).from_hf_config(json.loads(file.read_text(encoding="utf-8")))
    if args.flavor in flavors:
        return flavors[args.flavor]
    if (args.family, args.flavor) == ("qwen3", "27M"):
        return dataclasses.replace(flavors["0.6B"], **QWEN3_27M)
    if args.flavor not in SIZES:
        legal = ", ".join([*SIZES, *flavors])
        raise UserError(
            f"--models {args.family}:{args.flavor}: legal for {args.family} are {legal}, and folders with a config.json"
        )
    size = SIZES[args.flavor]
    heads = {"num_heads": size["dim"] // 64, "num_kv_heads": size["dim"] // 64, "ffn_dim": 3 * size["dim"]}
    return dataclasses.replace(flavors["debugmodel"], **size, **(heads if args.family == "llama3" else {}))


def dims_of(layout: str) -> ParallelDims:
    """Return the dimensions of a layout such as hsdp4: an axis, and a number of ranks."""
    match = re.fullmatch(r"(fsdp|hsdp|tp|ep)([1-9]\d*)", layout)
    if match is None or (match[1] == "hsdp" and (int(match[2]) < 4 or int(match[2]) % 2)):
        raise UserError(f"--layouts {layout}: legal are fsdp1, fsdp2, ..., so tp and ep; hsdp4, hsdp6, ...")
    ranks = int(match[2])
    of = {
        "fsdp": {"dp_shard": ranks},
        "tp": {"tp": ranks},
        "ep": {"dp_shard": ranks, "ep": ranks},
        "hsdp": {"dp_replicate": 2, "dp_shard": ranks // 2},
    }
    return ParallelDims(**of[match[1]])


def make_model(config: Any, args: argparse.Namespace) -> Decoder:
    with torch.device("meta"):
        return load_family(args.family).Model(config, args.attn)


def make_batch(rows: int, seq_len: int, vocab_size: int, device: torch.device, mean: float | None = None) -> Batch:
    """Return a batch of random tokens in documents of half to one and a half times `mean` tokens, or four a row."""
    mean = mean or -(-seq_len // 4)
    tokens, labels = torch.randint(vocab_size, (2, rows, seq_len), device=device)
    ends = (mean * (0.5 + torch.rand(rows, int(2 * seq_len / mean) + 1))).long().clamp(min=1).cumsum(1)
    documents = torch.searchsorted(ends, torch.arange(seq_len).expand(rows, -1).contiguous(), right=True)
    positions = torch.arange(seq_len) - F.pad(ends, (1, 0)).gather(1, documents)
    return Batch(tokens, labels, positions.to(device), documents.to(device))


def recompute_of(policy: str) -> Recompute:
    """Return the recomputation of a policy: a mode's name, a budget in percent, or none."""
    if policy.isdigit():
        return Recompute(budget=Budget(int(policy) / 100))
    return Recompute.from_option(policy or "none", "op")


def options_of(
    mode: str, precision: Precision, args: argparse.Namespace, model: Decoder, device: torch.device
) -> StepOptions:
    """Return a mode's options of steps."""
    mode, _, policy = mode.partition("@")
    fusions = [name for name in mode.split("+") if name in FUSIONS]
    regions = {
        **plan_regions(job.Compile(fusions=fusions), model, device),
        **{pattern: {} for pattern in REGIONS.get(mode, ())},
    }
    on_cpu = ("rope",) if mode in ("eager", "graph") else ()
    one_operator = tuple(ELEMENTWISE) if device.type == "cuda" and not mode.startswith("compile") else on_cpu
    return StepOptions(
        target=dataclasses.replace(Target.here(), device=device),
        rows=(args.rows, args.seq_len),
        mode="eager" if mode in EAGER else "graph",
        precision=precision,
        recompute=recompute_of(policy),
        fused=tuple(ELEMENTWISE[name] for name in one_operator if name not in fusions),
        regions=regions,
        disabled=args.disable,
    )


def build(
    mode: str, precision: Precision, args: argparse.Namespace, layout: Layout, device: torch.device
) -> tuple[Steps, int | None]:
    """Return a mode's steps, and the peak that the graph predicts."""
    base, _, attn = mode.partition(":")
    of_mode = argparse.Namespace(**{**vars(args), "attn": attn or args.attn})
    family, model = load_family(args.family), make_model(config_of(args), of_mode)
    options, predicted = options_of(base, precision, args, model, device), None
    if options.mode == "graph":
        assembly = Assembly(model, family, layout, options)
        graphs = build_graphs(assembly)
        assert isinstance(graphs.train, TracedResult), "no layout here has stages"
        predicted = peak_memory(graphs.train.gm).num_bytes + input_memory(graphs.train.gm)
        steps = bind_graphs(graphs, assembly)
    elif base == "compile_whole":
        steps = compile_whole(Assembly(model, family, layout, options))
    else:
        steps = build_steps(Assembly(model, family, layout, options))
    if base == "compile":
        for block in model.blocks.values():
            block.compile()
    initialize(model, 0)
    return steps, predicted


def compile_whole(assembly: Assembly) -> Steps:
    """Return eager steps with the model's forward compiled as one. Its dense weights are one group of FSDP2's: hooks on
    blocks would break the graph at each of them, and leave what `compile` measures. The loss stays outside: Dynamo
    traces no gradient that is written over the logits."""
    assembly.prepare()
    model, layout, options = assembly.model, assembly.layout, assembly.options
    shard_eager(model, {}, layout, options.precision, options.reshard, options.target.device)
    compiled = torch.compile(model.forward)
    model.forward = lambda *inputs, side_outputs=False: compiled(*inputs, side_outputs=side_outputs)  # type: ignore
    return Steps(model, layout, make_eager_step(model, assembly.loss), None)


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the peak of the bytes that `run` allocates."""
    if torch.cuda.is_available():
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        synchronize()
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
        # Frees by gloo's thread are not recorded: an address that is allocated again was free.
        held -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            held += size
        peak = max(peak, held)
    return peak


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product, measured now."""
    a, b = (torch.randn(2048, 2048, device=device, dtype=dtype) for _ in range(2))

    def seconds() -> float:
        begin = time.perf_counter()
        a @ b
        synchronize()
        return time.perf_counter() - begin

    return 2 * 2048**3 / statistics.median([seconds() for _ in range(7)][2:])


def measure(rank: int, where: str, args: argparse.Namespace, dtype: str, results: Any) -> None:
    """Measure all modes of a model in a layout, as one of its ranks."""
    dims = dims_of(where)
    world_size = dims.num_ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    device = devices.device()
    join("nccl" if device.type == "cuda" else "gloo")
    layout = dims.layout(device.type)
    torch.manual_seed(layout.data_rank)
    precision = Precision(compute=getattr(torch, dtype))
    shape = args.rows, args.seq_len, config_of(args).vocab_size, device, args.document
    tokens = args.rows * args.seq_len * dims.data
    num_tokens = torch.tensor(tokens, device=device)
    rate = product_rate(precision.compute, device)
    steps, memory, predicted, flops = {}, {}, {}, None
    times: dict[str, list[float]] = {mode: [] for mode in args.modes}
    cpu_times: dict[str, list[float]] = {mode: [] for mode in args.modes}
    for mode in args.modes:
        built, predicted[mode] = build(mode, precision, args, layout, device)
        optimizer = torch.optim.AdamW(built.model.parameters(), fused=True)
        batch = make_batch(*shape)
        flops = built.count_flops([batch]) if built.flops else flops

        def whole_step(batch: Batch, built: Steps = built, optimizer: torch.optim.Optimizer = optimizer) -> None:
            built.train([batch], num_tokens)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            whole_step(batch)
        steps[mode] = whole_step
        memory[mode] = statistics.median(peak_bytes(partial(whole_step, batch)) for _ in range(3))
    for _ in range(args.steps):
        batch = make_batch(*shape)
        for mode in args.modes:
            dist.barrier()
            begin, of_cpu = time.perf_counter(), time.process_time()
            steps[mode](batch)
            synchronize()
            times[mode].append(time.perf_counter() - begin)
            cpu_times[mode].append(time.process_time() - of_cpu)
    reference = args.modes[0]
    for mode in args.modes if rank == 0 else ():
        step_s = statistics.median(times[mode])
        ratios, of_cpu = (
            [a / b for a, b in zip(each[mode], each[reference], strict=True)] for each in (times, cpu_times)
        )
        peak_flops = devices.peak_flops()
        row = {
            "model": f"{args.family}:{args.flavor} {args.attn}",
            "layout": where,
            "dtype": dtype,
            "mode": mode,
            "step_s": round(step_s, 4),
            "tokens_per_s": round(tokens / step_s),
            **({"products_share": round(flops / rate / step_s, 3)} if flops else {}),
            **({"mfu": round(flops / step_s / peak_flops, 3)} if flops and peak_flops else {}),
            f"time_to_{reference}": round(statistics.median(ratios), 3),
            "quartiles": [round(x, 3) for x in statistics.quantiles(ratios, n=4)[::2]] if len(ratios) > 1 else None,
            "cpu_s": round(statistics.median(cpu_times[mode]), 4),
            f"cpu_to_{reference}": round(statistics.median(of_cpu), 3),
            "peak_mib": round(memory[mode] / 2**20, 1),
            f"memory_to_{reference}": round(memory[mode] / memory[reference], 3),
            **({"predicted_mib": round(known / 2**20, 1)} if (known := predicted[mode]) else {}),
            **({"predicted_to_peak": round(known / memory[mode], 3)} if known else {}),
        }
        results.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure_tracing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the time of tracing and of the passes as the model grows, for a rank of a fake group of 8."""
    init_fake_process_group(8)
    layout, device = ParallelDims(dp_shard=8).layout("cpu"), torch.device("cpu")
    precision, family, rows = Precision(compute=torch.bfloat16), load_family(args.family), []
    for num_layers in args.trace_layers:
        trials = []
        for _ in range(3):
            model = make_model(dataclasses.replace(config_of(args), num_layers=num_layers), args)
            options = dataclasses.replace(options_of("graph", precision, args, model, device), rows=(1, 128))
            begin = time.perf_counter()
            traced = trace_steps(Assembly(model, family, layout, options))
            middle = time.perf_counter()
            gm = run_passes(traced.train.gm, passes(traced.plan), args.disable, device, Inspection())
            trials.append((middle - begin, time.perf_counter() - middle))
        row = {
            "layers": num_layers,
            "nodes": len(gm.graph.nodes),
            "trace_s": round(statistics.median(t[0] for t in trials), 2),
            "passes_s": round(statistics.median(t[1] for t in trials), 2),
        }
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
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
    """Raise a UserError for an error that each process would find only later, or that would measure nothing."""
    check_numbers(args, "rows", "seq_len", "document", "steps", "trace_layers")
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder for it")
    graphs = ("graph", *REGIONS)
    policy, fusions = rf"({'|'.join(graphs)})@(\d\d?|100|selective|full)", rf"({'|'.join(FUSIONS)})"
    bases = [re.sub(f":({'|'.join(ATTENTION)})$", "", mode) for mode in args.modes]
    modes = [base for base in bases if not re.fullmatch(rf"{policy}|{fusions}(\+{fusions})*", base)]
    known = (*EAGER, *graphs, *FUSIONS)
    for name, given, legal in (
        ("dtypes", args.dtypes, ("float32", "bfloat16")),
        ("modes", modes, (*known, f"each of {', '.join(graphs)} with @0 to @100, @selective or @full")),
    ):
        if wrong := [word for word in given if word not in legal]:
            raise UserError(f"--{name} {wrong[0]}: legal are {', '.join(legal)}")
    check_disabled(args.disable)
    for layout in args.layouts:
        dims_of(layout)
    for model in args.models:
        config_of(of_model(args, model))


def of_model(args: argparse.Namespace, model: str) -> argparse.Namespace:
    """Return the arguments for one of the models: FAMILY, or FAMILY:FLAVOR."""
    family, _, flavor = model.partition(":")
    return argparse.Namespace(**{**vars(args), "family": family, "flavor": flavor or "mid"})


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models",
        type=words,
        default=["llama3"],
        help="each FAMILY, or FAMILY:SIZE: a flavour; small, mid (default), large: debug at dim 256, 512, 1024; or a"
        " folder with a config.json",
    )
    parser.add_argument("--layouts", type=words, default=["fsdp1", "fsdp2"], help="(default fsdp1,fsdp2)")
    parser.add_argument("--dtypes", type=words, default=["float32", "bfloat16"], help="compute dtypes")
    modes = (
        "eager; eager with torch.compile of each block (compile) or of the whole forward (compile_whole);"
        " graph; graphs that Inductor compiles: regional (feed-forwards), blocks, whole;"
        " fusions alone: rms_norm, swiglu+rope; a graph that computes more again: graph@selective, graph@full, with a"
        " memory budget graph@50, blocks@50; with its own attention graph:varlen"
    )
    parser.add_argument("--modes", type=words, default=list(MODES), help=f"{modes}; the first is the reference")
    parser.add_argument("--attn", default="sdpa", choices=ATTENTION, help="attention (default sdpa)")
    parser.add_argument("--rows", type=int, default=1, help="rows per rank (default 1)")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens per row (default 1024)")
    parser.add_argument("--document", type=int, help="tokens of a document in the mean (default: a quarter of a row)")
    parser.add_argument("--steps", type=int, default=9, help="measured steps per mode (default 9)")
    parser.add_argument("--disable", type=words, default=[], help="passes to leave out of the graph")
    parser.add_argument("--trace_layers", type=integers, help="measure only tracing, at these numbers of layers")
    parser.add_argument("--json", type=Path, help="append a JSON object per row to this file")
    args = parser.parse_args()
    try:
        check_arguments(args)
    except UserError as error:
        parser.error(str(error))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29541"))
    cells = list(itertools.product(args.models, args.layouts, args.dtypes))
    if args.trace_layers:
        write([row for model in args.models for row in measure_tracing(of_model(args, model))], args.json)
        return
    for number, (model, layout, dtype) in enumerate(cells, 1):
        of_this = of_model(args, model)
        print(f"{number} of {len(cells)}: {model} {layout} {dtype}", flush=True)
        with mp.Manager() as manager:
            results = manager.list()
            mp.spawn(measure, (layout, of_this, dtype, results), nprocs=dims_of(layout).num_ranks)
            rows = list(results)
        write(rows, args.json)


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    if path:
        with path.open("a") as file:
            file.writelines(json.dumps({"torch": torch.__version__, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
