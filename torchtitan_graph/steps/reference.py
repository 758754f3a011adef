"""The reference model: frozen, alongside the trained one, run forward only. A user's step reads its logits.

It is no part of the trained model: no checkpoint, export, optimizer or count has it. Its weights are read from its
folder whenever the run starts. In a graph its state is named after the trained model's, as `reference.layers.0...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.own_step import REFERENCE
from torchtitan_graph.models.hf import check_weights, load_weights, new_model
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initialize_buffers
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.parallel.plan import Plan


class Reference(NamedTuple):
    """A frozen model, its family, and the Hugging Face folder of its weights; on meta until steps are built."""

    model: Decoder
    family: ModuleType
    path: Path

    @property
    def plan(self) -> Plan:
        """Its roles in the compute layout."""
        return plan_of(self.family, self.model)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Its blocks, by their names alongside the trained model's."""
        return {f"{REFERENCE}.{name}": block for name, block in self.model.blocks.items()}

    def check_weights(self) -> None:
        """Raise a UserError if the folder has not the weights of this model."""
        check_weights(self.model, self.family, self.path)

    def load(self) -> None:
        """Fill the model, which is allocated, with the weights of its folder."""
        initialize_buffers(self.model)
        load_weights(self.model, self.family, self.path)


def new_reference(path: Path, attn: str) -> Reference:
    """Return the frozen model of a Hugging Face folder, on meta.

    Raises:
        UserError: as `new_model`.
    """
    family, model = new_model(path, attn)
    model.requires_grad_(False)
    return Reference(model, family, path)


def shares_masks(model: Decoder, other: Decoder) -> bool:
    """Return whether both have the masks of every decoder, causal within documents, in one form: then they are built
    once."""
    own = [getattr(type(each), name) for each in (model, other) for name in ("mask_rules", "segments")]
    return model.attn == other.attn and all(each in (Decoder.mask_rules, Decoder.segments) for each in own)


def masks_beside(
    model: Decoder,
    reference: Decoder | None,
    documents_BL: Tensor,
    positions_BL: Tensor,
    places_L: Tensor | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the masks of the reference model under their names alongside those of the trained one; none if they are
    the same."""
    if reference is None or shares_masks(model, reference):
        return {}
    masks = reference.masks(documents_BL, positions_BL, places_L, device)
    return {f"{REFERENCE}.{name}": mask for name, mask in masks.items()}


def beside(of_model: Mapping[str, float], of_reference: Mapping[str, float] | None) -> dict[str, float]:
    """Return numbers by block of both models."""
    return {**of_model, **{f"{REFERENCE}.{name}": x for name, x in (of_reference or {}).items()}}
