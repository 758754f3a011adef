"""The model as a table."""

import torch
from torch import nn

from torchtitan_graph.metrics import model_table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"w": nn.Linear(4, 4, bias=False)}) for _ in range(3))
        self.norm = nn.LayerNorm(4, bias=False)


def test_layers_alike_are_one_row() -> None:
    plan = {"table": {"tp": "embedding"}, "layers.*": {"tp": "partial"}, "layers.*.w.weight": {"tp": "shard 0"}}
    assert model_table(Model(), plan, torch.bfloat16, {}).splitlines() == [
        "80 parameters",
        "",
        "| module | parameter | shape | number | elements | role | dtype |",
        "|---|---|---|---|---|---|---|",
        "| table | weight | 7 x 4 | 1 | 28 | tp: embedding | bfloat16 |",
        r"| layers.\*.w | weight | 4 x 4 | 3 | 48 | tp: shard 0 | bfloat16 |",
        "| norm | weight | 4 | 1 | 4 |  | bfloat16 |",
    ]
