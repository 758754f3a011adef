"""Models sharded over ranks write the tokens of one rank."""

from pathlib import Path

import pytest
import torch

from pool import run_on
from torchtitan_graph.generate import Options, generate
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import family_names, load_family, tiny_config
from torchtitan_graph.open_model import open_model
from torchtitan_graph.parallel import gather
from torchtitan_graph.parallel.layout import ParallelDims

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"
PROMPTS = [[5, 17, 600, 3, 3, 41, 8, 22, 9, 11, 2], [7], [33, 2, 1500]]
FSDP, TP, BOTH = ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)


def tokens(folder: Path, dims: ParallelDims | None, spoil: bool = False) -> list[list[int]]:
    """Return the new tokens of each prompt, by this rank and its peers."""
    opened = open_model(folder, dtype=torch.float64, dims=dims)
    options = Options(max_new_tokens=8, multiple=dims.tp if dims else 1)
    model, cpu, whole = opened.model, torch.device("cpu"), gather.compute_tensor
    if spoil:
        gather.compute_tensor = lambda p, *how: whole(p, *how) * (1 + 0.5 * (p.dim() == 2))
    try:
        with gather.gathered_for_forward(model, model.blocks, torch.float64, cpu):
            *_, last = generate(model, opened.tokenizer, PROMPTS, options, cpu)
    finally:
        gather.compute_tensor = whole
    return [text.tokens for text, _ in last]


def published(name: str, folder: Path, **changes: object) -> Path:
    family = load_family(name)
    flavor = "debugmodel_moe" if "debugmodel_moe" in family.FLAVORS else "debugmodel"
    model = family.Model(tiny_config(family.FLAVORS[flavor], vocab_size=2048, **changes))
    initialize(model, 0)
    with torch.no_grad():  # more than the next token counts
        for parameter in model.layers.parameters() if hasattr(model, "layers") else model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    to_hf(model.double(), folder / "hf", assets=TOKENIZER)
    return folder / "hf"


CASES = [("qwen3", FSDP), ("gpt_oss", TP)]
CASES += [(name, dims) for name in family_names() for dims in (FSDP, TP, BOTH) if (name, dims) not in CASES]
MARKED = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in CASES[:2])) for case in CASES]


@pytest.mark.parametrize(("name", "dims"), MARKED, ids=[f"{name}, {dims.dp_shard} x {dims.tp}" for name, dims in CASES])
def test_the_tokens_are_those_of_one_rank(name: str, dims: ParallelDims, tmp_path: Path) -> None:
    folder = published(name, tmp_path)
    expected = tokens(folder, None)
    assert len({*map(tuple, expected)}) == len(PROMPTS)
    assert run_on(dims.num_ranks, tokens, folder, dims) == [expected] * dims.num_ranks


def test_the_comparison_finds_wrong_weights(tmp_path: Path) -> None:
    folder = published("qwen3", tmp_path, tied=True)
    expected = tokens(folder, None)
    assert run_on(2, tokens, folder, FSDP) == [expected] * 2
    assert run_on(2, tokens, folder, FSDP, spoil=True)[0] != expected
