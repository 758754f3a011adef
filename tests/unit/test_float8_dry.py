"""A dry run for a GPU has the GPU's products in float8; one for a CPU emulates them, as a run there does."""

import pytest
import torch

from torchtitan_graph.analysis.flops import matmul_flops
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import load
from torchtitan_graph.steps import build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group

aten = torch.ops.aten


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_products_are_those_of_the_device_that_is_estimated_for(recipe: str) -> None:
    words = ["--model.converters", "float8", "--quantize.linear.float8.recipe_name", recipe]
    words += ["--quantize.linear.float8.filter_fqns", "output", "--training.seq_len", "64"]
    words += ["--activation_checkpoint.mode", "none", "--comm.mode"]
    found = {}
    for device in ("H100", "CPU"):
        blueprint = Blueprint(load([*words, "fake_backend", "--comm.fake_device", device]), 1)
        init_fake_process_group(1)
        try:
            graphs = build_graphs(blueprint.assembly)
        finally:
            torch.distributed.destroy_process_group()
        nodes = graphs.train.gm.graph.nodes  # type: ignore[union-attr]
        found[device] = [n for n in nodes if n.target is aten._scaled_mm.default], sum(map(matmul_flops, nodes))
    narrow, operations = found["H100"]
    assert len(narrow) == 3 * 7 * 6 and not found["CPU"][0]  # thrice, seven in a block
    assert operations == found["CPU"][1]
