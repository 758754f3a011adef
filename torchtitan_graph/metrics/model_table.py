"""The model as a table: every parameter with its shape, size, role in the plan and dtype."""

import math
import re
from collections.abc import Mapping

import torch
from torch import nn

from torchtitan_graph.ops.packed import wide_shape
from torchtitan_graph.parallel.parallelize import parameter_roles
from torchtitan_graph.parallel.plan import Plan


def model_table(model: nn.Module, plan: Plan, dtype: torch.dtype, packings: Mapping[str, str]) -> str:
    """Return a Markdown table of a model's parameters before sharding; rows that differ only in a layer's number are
    merged. `packings` has how packed weights are packed, by name."""
    roles, total, trained = parameter_roles(model, plan), 0, 0
    rows: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for name, parameter in model.named_parameters():
        packing = packings.get(name)
        shape = wide_shape(parameter.shape, packing) if packing else parameter.shape
        total += shape.numel()
        trained += shape.numel() * parameter.requires_grad
        words = [f"{axis}: {role}" for axis, role in roles.get(name, {}).items()]
        role = ", ".join(words if parameter.requires_grad else [*words, "frozen"])
        alike = re.sub(r"\.\d+\.", ".*.", name), tuple(shape), role, packing or str(dtype)[6:]
        rows.setdefault(alike, []).append(name)
    lines = ["| module | parameter | shape | number | elements | role | dtype |", "|---|---|---|---|---|---|---|"]
    for (pattern, sizes, role, held), names in rows.items():
        module, _, leaf = (pattern if len(names) > 1 else names[0]).rpartition(".")
        number = len(names) * math.prod(sizes)
        cells = [module, leaf, " x ".join(map(str, sizes)), str(len(names)), f"{number:,}", role, held]
        lines.append(f"| {' | '.join(cells)} |")
    counted = f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
    return "\n".join([counted, "", *lines]).replace("*", r"\*")
