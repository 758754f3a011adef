"""What was saved in one layout is read exactly in any other: uneven rows, empty ranks, rows that two axes cut."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pool import mesh, run_on
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer

# 25 rows divide by no degree, 1 row leaves ranks empty. On FSDP 3 x TP 2 torch's own bookkeeping of 25 rows is wrong.
VOCAB, WIDTH, HIDDEN = 25, 4, 6
LAYOUTS = {
    "one rank": (1, 1, 1),
    "FSDP 2": (1, 2, 1),
    "TP 2": (1, 1, 2),
    "FSDP 4": (1, 4, 1),
    "HSDP 2x2": (2, 2, 1),
    "FSDP 2 x TP 2": (1, 2, 2),
    "DDP 2 x TP 2": (2, 1, 2),
    "FSDP 3 x TP 2": (1, 3, 2),
}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.empty(1))
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("load", torch.empty(3))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in a layout, built by torch's own FSDP2 and tensor parallel, and its optimizer."""
    replicate, shard, tp = LAYOUTS[layout]
    axes = mesh((replicate, shard, tp), ("dp_replicate", "dp_shard", "tp"))
    model = TinyModel()
    if tp > 1:
        rowwise, colwise = RowwiseParallel(), ColwiseParallel()
        parallelize_module(model, axes["tp"], {"embedding": rowwise, "up": colwise, "down": rowwise, "output": colwise})
        model.embedding.weight = model.output.weight  # both were sharded by rows
    fully_shard(model, mesh=axes["dp_replicate", "dp_shard"] if replicate > 1 else axes["dp_shard"])
    return model, build_optimizer(model, job.Optimizer())


def checkpointer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpointer:
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(), total_steps=100)
    return Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, scheduler)


def all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters()) | {"load": model.load}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return found


def whole_numbers(name: str, shape: torch.Size) -> torch.Tensor:
    """Return numbers that differ between all tensors and all their elements."""
    start = 1000.0 * (1 + sorted(NAMES).index(name))
    return start + torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)


NAMES = [
    *(f"{name}{key}" for name in ("embedding.weight", "up.weight", "down.weight", "scale")
      for key in ("", ".step", ".exp_avg", ".exp_avg_sq")),
    "load",
]  # fmt: skip


def fill(tensors: dict[str, torch.Tensor]) -> None:
    """Give every tensor its whole numbers, sliced by torch's own scatter and not by what is under test."""
    for name, tensor in tensors.items():
        whole = whole_numbers(name, tensor.shape)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(fsdp_slice(whole, tensor))
            else:
                tensor.copy_(whole)


def fsdp_slice(whole: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Slice as fully_shard over parallelize_module does: the TP axis first, then dp_shard; by torch.chunk."""
    names, coordinate = tensor.device_mesh.mesh_dim_names, tensor.device_mesh.get_coordinate()
    for axis in sorted(range(len(names)), key=lambda axis: names[axis] != "tp"):
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            pieces = whole.chunk(tensor.device_mesh.size(axis), dim=placement.dim)
            whole = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


def save_from(layout: str, folder: Path, flip_a_bit: bool = False) -> None:
    model, optimizer = build(layout)
    fill(all_tensors(model, optimizer))
    if flip_a_bit and torch.distributed.get_rank() == 0:
        with torch.no_grad():
            model.up.weight.to_local().view(torch.int32)[0, 0] ^= 1
    checkpointer(folder, model, optimizer).save(7, {"step": 7})


def load_into(layout: str, folder: Path) -> list[str]:
    """Load, and return the names of the tensors of which any element on this rank is wrong."""
    model, optimizer = build(layout)
    tensors = all_tensors(model, optimizer)
    assert sorted(tensors) == sorted(NAMES)
    for tensor in tensors.values():
        with torch.no_grad():
            tensor.fill_(-1.0)
    assert checkpointer(folder, model, optimizer).load() == {"step": 7}
    wrong = []
    for name, tensor in tensors.items():
        expected, local = whole_numbers(name, tensor.shape), tensor
        if isinstance(tensor, DTensor):
            expected, local = fsdp_slice(expected, tensor), tensor.to_local()
        if not torch.equal(local, expected):
            wrong.append(name)
    return wrong


def world_size(layout: str) -> int:
    replicate, shard, tp = LAYOUTS[layout]
    return replicate * shard * tp


SLOW = {*LAYOUTS} - {"one rank", "FSDP 2", "TP 2"}


@pytest.mark.parametrize(
    "saved", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS]
)
def test_any_layout_reads_what_any_other_saved(saved: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_on(world_size(saved), save_from, saved, tmp_path)
    for loaded in LAYOUTS:
        if loaded not in SLOW or request.config.getoption("--slow"):
            assert run_on(world_size(loaded), load_into, loaded, tmp_path) == [[]] * world_size(loaded), loaded


def test_one_bit_flipped_in_one_tensor_of_one_rank_is_seen(tmp_path: Path) -> None:
    run_on(2, save_from, "TP 2", tmp_path, flip_a_bit=True)
    assert run_on(1, load_into, "one rank", tmp_path) == [["up.weight"]]


def error_of_a_missing_step(folder: Path) -> str:
    model, optimizer = build("FSDP 2")
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), total_steps=100)
    config = job.Checkpoint(enable=True, load_step=8)
    try:
        Checkpointer(folder, config, model, optimizer, scheduler).load()
    except UserError as error:
        return str(error)
    return "no error"


def test_what_rank_0_finds_wrong_is_raised_on_every_rank(tmp_path: Path) -> None:
    run_on(2, save_from, "FSDP 2", tmp_path)
    errors = run_on(2, error_of_a_missing_step, tmp_path)
    assert errors[0] == errors[1]
    assert "checkpoint.load_step = 8" in errors[0]
