"""The model that is evaluated: its weights loaded in the job's layout, bound to a graph that scores rows."""

from __future__ import annotations

import dataclasses
from functools import partial

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.checkpoint import load_model
from torchtitan_graph.config import check, ranks_started
from torchtitan_graph.evaluate.source import Source
from torchtitan_graph.log import logger
from torchtitan_graph.models.hf import load_weights
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.parallel.agree import files_group
from torchtitan_graph.patience import retry_io
from torchtitan_graph.steps import Scoring, build_scoring
from torchtitan_graph.train import start_process


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A model with its weights, on all ranks of a job; the process group exists."""

    blueprint: Blueprint
    scoring: Scoring


def open_model(source: Source) -> Evaluated:
    """Join the job's ranks, build the model in its layout, and load its weights; all ranks together.

    Raises:
        UserError: the layout is not one of the processes that were started, or the weights are not the model's.
    """
    config, world_size = source.config, ranks_started()
    check(config, world_size)
    blueprint = retry_io(partial(Blueprint, config, world_size))
    start_process(config, world_size)
    scoring = build_scoring(blueprint.assembly)
    initialize(blueprint.model, blueprint.seed, blueprint.target.device)  # buffers that no file holds
    if source.is_hugging_face:
        quantized = config.checkpoint.initial_load_in_hf_quantized
        load_weights(blueprint.model, blueprint.family, source.weights, quantized=quantized)
    else:
        load_model(source.weights, blueprint.model, files_group())
    logger.info(f"{source.weights}: mesh {blueprint.assembly.layout}, {config.training.mixed_precision_param}")
    return Evaluated(blueprint, scoring)
