"""Checks of a family, each a function that raises on failure, on tiny models of it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.check.matrix import (
    BF16,
    FP32,
    FP64,
    NUM_ROWS,
    NUM_STEPS,
    SEQ_LEN,
    Cell,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    build_model,
    build_plain,
    far_apart,
    gathered,
    global_rows,
    optimizing,
    train,
)
from torchtitan_graph.check.pool import run_on
from torchtitan_graph.check.runner import Check, Failed, Skipped
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf import allocate, load_weights, save_weights
from torchtitan_graph.models.hf.architecture import config_of, differences
from torchtitan_graph.models.hf.files import read_json
from torchtitan_graph.models.hf.places import live_tensors, places
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import generator_for, said_initial
from torchtitan_graph.models.spec import HF_CONTRACT, load_family, plan_of
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan
from torchtitan_graph.parallel.recompute import Recompute, fixed_policies
from torchtitan_graph.steps.cuts import check_terms

TOLERANCE = 1e-12  # between layouts, in fp64, of each tensor's largest value
TIMEOUT_S = 900.0

MODULE = "the module defines FLAVORS, Model, PLAN and HF_KEYS, and the model can be built"
PLAN = "PLAN has a role for every parameter, and its sizes can be halved"
KEYS = "HF_KEYS has a name for every parameter"
CUTS = "SideOutputs: a token's losses and metrics don't depend on the other rows of a microbatch"
FSDP2 = "what the same ranks compute with FSDP2 and autograd"

LAYOUTS = {
    "one rank": ParallelDims(),
    "FSDP 2": ParallelDims(dp_shard=2),
    "TP 2": ParallelDims(tp=2),
    "CP 2": ParallelDims(cp=2),
    "EP 2": ParallelDims(dp_shard=2, ep=2),
    "PP 2": ParallelDims(pp=2),
}
MORE_LAYOUTS = {"DDP 2": ParallelDims(dp_replicate=2), "FSDP 2 x TP 2": ParallelDims(dp_shard=2, tp=2)}


def checks(name: str, flavor: str, attns: list[str], full: bool) -> Iterator[Check]:
    """Yield the checks of a family, in order: the first failure is nearest to the cause."""
    cell = partial(Cell, family=name, flavor=flavor)
    yield Check(MODULE, partial(check_module, name, flavor, attns), ends=True)
    yield Check(PLAN, partial(check_plan_of, cell(ParallelDims(tp=2), attn=attns[0])), MODULE)
    yield Check(KEYS, partial(check_keys, cell(attn=attns[0])), MODULE)
    yield Check(CUTS, partial(check_cuts, cell(attn=attns[0])), MODULE)
    for attn in attns:
        here = partial(cell, attn=attn)
        yield Check(f"{attn}: no token sees a later one or another document", partial(check_visibility, here()), MODULE)
        of_plain = partial(check_bits, here(), _plain, "what the module computes when it is called")
        yield Check(f"{attn}, one rank, fp32: the graph is plain autograd", of_plain, MODULE)
        for layout, dims in (LAYOUTS | MORE_LAYOUTS if full else LAYOUTS).items():
            needs = PLAN if dims.tp > 1 else MODULE
            if dims.num_ranks > 1:
                title = f"{attn}, {layout}, fp64: the numbers of one rank, to {TOLERANCE:g}"
                yield Check(title, partial(check_layout, here(dims, FP64, num_microbatches=dims.pp)), needs)
                needs = title if dims.cp * dims.ep > 1 else needs  # it explains why a family can't be laid out so
            for precision, word in ((FP32, "fp32"), (BF16, "bf16")) if dims.pp == 1 else ():
                title = f"{attn}, {layout}, {word}: the graph is eager FSDP2"
                yield Check(title, partial(check_bits, here(dims, precision), _eager, FSDP2), needs)
        for policy in fixed_policies():
            if policy.recompute != Recompute():
                title = f"{attn}, FSDP 2, bf16: recomputation ({policy.name})"
                recomputed = here(LAYOUTS["FSDP 2"], BF16, recompute=policy.recompute)
                yield Check(title, partial(check_bits, recomputed, _kept, "what it does when all is kept"), MODULE)
    saved = "FSDP 2 x TP 2" if full else "FSDP 2"
    yield Check(
        f"a checkpoint of {saved} is read on one rank",
        partial(check_checkpoint, cell((LAYOUTS | MORE_LAYOUTS)[saved], attn=attns[0])),
        PLAN if full else MODULE,
    )
    yield Check("to Hugging Face's files, back, and to them again", partial(check_files, cell(attn=attns[0])), KEYS)


# --- without training -----------------------------------------------------------------------------------------------


def check_module(name: str, flavor: str, attns: list[str]) -> str | None:
    family = load_family(name)
    if flavor not in family.FLAVORS:
        near = difflib.get_close_matches(flavor, family.FLAVORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Failed(f"--flavor {flavor}: FLAVORS of {name} has {', '.join(family.FLAVORS)}{hint}")
    if not dataclasses.is_dataclass(family.FLAVORS[flavor]):
        raise Failed(f"FLAVORS[{flavor!r}] is not a dataclass: the check makes it small with dataclasses.replace")
    for attn in attns:
        model = build_model(Cell(family=name, flavor=flavor, attn=attn))
        if not isinstance(model, Decoder):
            raise Failed(f"Model is no {Decoder.__module__}.Decoder: the trainer calls it as one")
        model.check_attention()
    if model.conversion is not None:  # its library says how its parameters start
        return None
    unsaid = [name for name, _ in model.named_parameters() if not said_initial(model, name)[0]]
    starts = [f"{name} {'ones' if (std := model.initial_std(name)) is None else std}" for name in unsaid[:5]]
    return f"no INITIAL has these, which start with the default deviation: {', '.join(starts)}" if starts else None


def check_plan_of(cell: Cell) -> None:
    model = build_model(cell)
    try:
        check_plan(model, plan_of(load_family(cell.family), model), cell.dims)
    except UserError as reason:
        if model.conversion is None:
            raise
        raise Skipped(str(reason)) from None  # the plan is another library's


def check_keys(cell: Cell) -> None:
    family, model = load_family(cell.family), build_model(cell)
    if model.conversion is not None:  # its tensors have the names of its files
        return
    if not family.HF_KEYS:
        raise Skipped("HF_KEYS is empty: it is needed for Hugging Face's files alone")
    places(family, model)


def check_cuts(cell: Cell) -> str | None:
    family = load_family(cell.family)
    return check_terms(cell.family, family, family.FLAVORS[cell.flavor])


@torch.no_grad()
def check_visibility(cell: Cell) -> None:
    """Check that changing one token of every row changes logits only where it is visible."""
    model = build_plain(dataclasses.replace(cell, precision=FP64)).model
    if model.mixes_documents is not None:
        raise Skipped(f"{model.mixes_documents} mixes all tokens of a row: it needs training.one_document_per_row")
    batch = global_rows(cell.vocab_size, step=1)
    rows_B, places_B = torch.arange(NUM_ROWS), torch.arange(NUM_ROWS) * SEQ_LEN // NUM_ROWS + 2
    changed_BL = batch.tokens_BL.clone()
    changed_BL[rows_B, places_B] = (changed_BL[rows_B, places_B] + 1) % cell.vocab_size
    masks = model.masks(batch.documents_BL, batch.positions_BL)
    before_BLV, after_BLV = (model(tokens_BL, batch.positions_BL, masks) for tokens_BL in (batch.tokens_BL, changed_BL))
    seen_BL = (after_BLV - before_BLV).abs().amax(-1) > TOLERANCE * before_BLV.abs().max()
    may_BL = batch.documents_BL == batch.documents_BL[rows_B, places_B].unsqueeze(1)
    may_BL &= torch.arange(SEQ_LEN) >= places_B.unsqueeze(1)
    if wrong := (seen_BL & ~may_BL).nonzero().tolist():
        row, place = wrong[0]
        raise Failed(
            f"the token at position {places_B[row]} changes the logits at position {place} of its row, which is "
            "earlier or in another document: build every rule of `mask_rules` on the rule 'causal' with `all_of`"
        )
    if not seen_BL[rows_B, places_B].all():
        raise Failed("a token does not change its own logits: is its embedding used?")


# --- training -------------------------------------------------------------------------------------------------------


def _everywhere(work: Callable[..., Any], cell: Cell, *args: Any) -> list[Any]:
    return run_on(cell.dims.num_ranks, work, cell, *args, timeout=TIMEOUT_S)


def _refuse(differing: list[str], what: str) -> None:
    if differing:
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise Failed(f"{what}. First to differ: {', '.join(differing[:3])}{more}")


def check_bits(cell: Cell, expected: Callable[[Cell], Seen], what: str) -> None:
    """Check that the graph gives the bits of another way to train, on all ranks."""
    for differing in _everywhere(_differ_from, cell, expected):
        _refuse(differing, f"the graph does not compute {what}")


def _differ_from(cell: Cell, expected: Callable[[Cell], Seen]) -> list[str]:
    found = _by_graph(cell)
    if expected is _plain:  # without DTensors
        found = {name: local_part(x) for name, x in found.items()}
    return bits_that_differ(expected(cell), found)


def _eager(cell: Cell) -> Seen:
    return train(cell, build_eager(cell))


def _kept(cell: Cell) -> Seen:
    return _by_graph(dataclasses.replace(cell, recompute=Recompute()))


@functools.lru_cache(maxsize=4)
def _by_graph(cell: Cell) -> Seen:
    """Train on the graph. A process trains each cell once."""
    return train(cell, build_graph(cell))


def check_layout(cell: Cell) -> None:
    if cell.dims.cp * cell.dims.ep * cell.dims.pp > 1:
        skip_unless_planned(cell)
    (expected,) = _everywhere(_plain, dataclasses.replace(cell, dims=ParallelDims()))
    what = f"these ranks compute other numbers than one: look at {_cause(cell.dims)}"
    for found in _everywhere(_whole, cell):
        _refuse(far_apart(expected, found, TOLERANCE), what)


def skip_unless_planned(cell: Cell) -> None:
    """Raise `Skipped` for a family that can't be laid out so."""
    model = build_model(cell)
    try:
        check_plan(model, plan_of(load_family(cell.family), model), cell.dims)
        model.check_attention()
        if cell.dims.pp > 1 and model.no_pipeline is not None:
            raise UserError(model.no_pipeline)
        if cell.dims.cp > 1 and model.mixes_documents is not None:
            raise UserError(f"{model.mixes_documents} mixes all tokens of a row, of which a rank has a part")
    except UserError as reason:
        raise Skipped(str(reason)) from None


def _cause(dims: ParallelDims) -> str:
    """Return a hint where to look when these ranks differ from one."""
    if dims.cp > 1:
        return "attention: every key and value must go through `seen`, after its position is applied"
    if dims.pp > 1:
        return "what forward does except calling its modules one after the other"
    return "PLAN's roles of the module that is named" if dims.tp > 1 else "what in forward depends on the rows"


@functools.lru_cache(maxsize=4)
def _plain(cell: Cell) -> Seen:
    return train(cell, build_plain(cell))


def _whole(cell: Cell) -> Seen:
    return gathered(cell, train(cell, build_graph(cell)))


# --- files ----------------------------------------------------------------------------------------------------------


def check_checkpoint(cell: Cell) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = _everywhere(_saved_state, cell, Path(folder))[0]
        (loaded,) = _everywhere(_loaded_state, dataclasses.replace(cell, dims=ParallelDims()), Path(folder))
    _refuse(bits_that_differ(saved, loaded), "what is loaded is not what was saved")


def _saved_state(cell: Cell, folder: Path) -> Seen:
    steps = build_graph(cell)
    model = steps.model
    optimizer, schedule = optimizing(model)
    train(cell, steps, using=(optimizer, schedule))
    Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, schedule).save(NUM_STEPS, {})
    return _state(cell, model, optimizer)


def _loaded_state(cell: Cell, folder: Path) -> Seen:
    model = build_graph(cell).model
    optimizer, schedule = optimizing(model)
    Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, schedule).load()
    return _state(cell, model, optimizer)


def _state(cell: Cell, model: Decoder, optimizer: torch.optim.Optimizer) -> Seen:
    state: dict[str, Tensor] = {name: tensor.detach() for name, tensor in live_tensors(model).items()}
    for name, parameter in model.named_parameters():
        state |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return gathered(cell, state)


@torch.no_grad()
def check_files(cell: Cell) -> None:
    family = load_family(cell.family)
    if lacking := [attribute for attribute in HF_CONTRACT if not hasattr(family, attribute)]:
        raise Skipped(f"to read and write Hugging Face's folders, define {', '.join(lacking)} as models/llama3.py does")
    model = build_model(cell, "cpu")
    for name, tensor in live_tensors(model).items():  # initial norms and biases are all equal
        tensor.copy_(torch.randn(tensor.shape, generator=generator_for(0, name, tensor.device)))
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        save_weights(model, family, first)
        config = config_of(family, read_json(first / "config.json"), first / "config.json")
        if different := differences(model.config, config):
            raise Failed(f"from_hf_config does not read what to_hf_config writes: {'; '.join(different)}")
        with torch.device("meta"):
            again = family.Model(config, cell.attn)
        allocate(again, torch.float32)
        load_weights(again, family, first)
        kept, found = ({name: x.detach() for name, x in live_tensors(m).items()} for m in (model, again))
        _refuse(bits_that_differ(kept, found), "what is read is not what was written: look at HF_KEYS")
        save_weights(again, family, second)
        files, others = ({path.name: path.read_bytes() for path in sorted(x.iterdir())} for x in (first, second))
        _refuse([name for name in files | others if files.get(name) != others.get(name)], "the files are not the same")
