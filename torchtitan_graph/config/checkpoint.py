"""Checks of [checkpoint]."""

import re
from collections.abc import Iterator

from torchtitan_graph.config.addresses import find_bad_address, is_address
from torchtitan_graph.config.job import JobConfig, Problem

EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state")


def problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the options for loading and saving."""
    checkpoint = config.checkpoint
    if checkpoint.remote_folder is not None and (problem := _find_bad_address(checkpoint.remote_folder)):
        yield Problem("checkpoint.remote_folder", problem)
    initial = checkpoint.initial_load_path or ""
    if "://" in initial and (problem := _find_bad_initial_address(initial, checkpoint.initial_load_in_hf)):
        yield Problem("checkpoint.initial_load_path", problem)
    excluded = "checkpoint.exclude_from_loading"
    if unknown := [part for part in checkpoint.exclude_from_loading if part not in EXCLUDABLE]:
        yield Problem(excluded, f"{', '.join(unknown)} can't be left out; legal are {', '.join(EXCLUDABLE)}")
    whole_initial = checkpoint.initial_load_path and not checkpoint.initial_load_model_only
    if checkpoint.exclude_from_loading and checkpoint.load_step < 0 and not whole_initial:
        yield Problem(
            excluded,
            "is about checkpoint.load_step, or checkpoint.initial_load_path with initial_load_model_only = false: set"
            " the one whose parts are to be left out. A run that goes on from its newest checkpoint takes all of it, or"
            " every restart would leave them out again",
        )
    if checkpoint.load_step >= 0 and not checkpoint.enable:
        yield Problem(
            "checkpoint.load_step",
            "needs checkpoint.enable = true; with checkpoint.load_only = true nothing is saved. The checkpoint of"
            " another run is named by checkpoint.initial_load_path",
        )
    if config.training.roll_back_after:
        if not config.training.skip_leaps:
            yield Problem("training.roll_back_after", "no step is skipped: set training.skip_leaps too, such as to 10")
        if not checkpoint.enable or checkpoint.load_only:
            why = "checkpoint.load_only = true" if checkpoint.enable else "checkpoint.enable = false"
            yield Problem(
                "training.roll_back_after",
                f"a run goes back to a checkpoint of its own, and {why} saves none: change that, or remove this",
            )
    in_hf = "checkpoint.initial_load_in_hf"
    if checkpoint.initial_load_in_hf and not (checkpoint.initial_load_path or config.model.hf_assets_path):
        yield Problem(
            in_hf, "there is no folder to load; name it in checkpoint.initial_load_path or model.hf_assets_path"
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield Problem(in_hf, "such a folder holds only the model; leave out initial_load_model_only = false")
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        yield Problem(f"{in_hf}_quantized", "needs initial_load_in_hf = true")
    for key in ("last_save_in_hf", "last_save_adapter"):
        if getattr(checkpoint, key) and config.parallelism.pipeline_parallel_degree > 1:
            yield Problem(
                f"checkpoint.{key}",
                "no rank of a pipeline can gather the whole model; convert the last checkpoint with"
                " python -m torchtitan_graph.convert_to_hf",
            )


def notices(config: JobConfig) -> Iterator[Problem]:
    """Yield each option for saving that is set and has no effect."""
    checkpoint = config.checkpoint
    of_model = checkpoint.enable and checkpoint.last_save_model_only
    exports = checkpoint.last_save_in_hf or checkpoint.last_save_adapter or of_model
    if checkpoint.export_dtype != "float32" and not exports:
        yield Problem(
            "checkpoint.export_dtype",
            "nothing is exported without checkpoint.last_save_in_hf, last_save_adapter or last_save_model_only",
        )
    if not checkpoint.enable and checkpoint.remote_folder is not None:
        yield Problem("checkpoint.remote_folder", "nothing is copied while checkpoint.enable is false")
    if not checkpoint.enable and checkpoint.keep_best:
        yield Problem("checkpoint.keep_best", "nothing is saved while checkpoint.enable is false")
    if config.training.most_roll_backs != 3 and not config.training.roll_back_after:
        yield Problem("training.most_roll_backs", "no run goes back while training.roll_back_after is 0")
    for key in ("last_save_in_hf", "last_save_adapter"):
        if not checkpoint.enable and getattr(checkpoint, key):
            yield Problem(f"checkpoint.{key}", "nothing is saved while checkpoint.enable is false")


def _find_bad_initial_address(address: str, in_hf: bool) -> str | None:
    if in_hf:
        return "with initial_load_in_hf it is a folder of the file system; copy it to one"
    if not re.search(r"/step-\d+/?$", address):
        return "an address must be that of one checkpoint, and end in step-N"
    return _find_bad_address(address)


def _find_bad_address(address: str) -> str | None:
    """Return why an address can't be that of a folder, None if nothing is wrong; it isn't opened."""
    if not is_address(address):
        return "must be an address such as s3://bucket/run; a plain folder is file:///path/of/the/folder"
    if set(address) & set("*?[]"):
        return "must not hold any of * ? [ ], which file systems take for patterns"
    return find_bad_address(address)
