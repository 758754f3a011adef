"""The model as a table: every parameter with its shape, size, role in the plan and dtype."""

import math
import re

import torch
from torch import nn

from torchtitan_graph.parallel.parallelize import parameter_roles
from torchtitan_graph.parallel.plan import Plan


def model_table(model: nn.Module, plan: Plan, dtype: torch.dtype) -> str:
    """Return a Markdown table of a model's parameters before sharding; rows that differ only in a layer's number are
    merged."""
    roles = parameter_roles(model, plan)
    rows: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, parameter in model.named_parameters():
        words = [f"{axis}: {role}" for axis, role in roles.get(name, {}).items()]
        role = ", ".join(words if parameter.requires_grad else [*words, "frozen"])
        alike = re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), role
        rows.setdefault(alike, []).append(name)
    lines = ["| module | parameter | shape | number | elements | role | dtype |", "|---|---|---|---|---|---|---|"]
    for (pattern, shape, role), names in rows.items():
        module, _, leaf = (pattern if len(names) > 1 else names[0]).rpartition(".")
        num_elements = len(names) * math.prod(shape)
        cells = [module, leaf, " x ".join(map(str, shape)), str(len(names)), f"{num_elements:,}", role, str(dtype)[6:]]
        lines.append(f"| {' | '.join(cells)} |")
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    counted = f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
    return "\n".join([counted, "", *lines]).replace("*", r"\*")
