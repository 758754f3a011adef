"""Checks of [checkpoint]."""

import re

from fsspec import available_protocols, get_filesystem_class

from torchtitan_graph.config.job import JobConfig
from torchtitan_graph.config.job import named as _name

EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state")


def find_problems(config: JobConfig, world_size: int) -> list[str]:
    """Return the problems of the options for loading and saving, a line each."""
    return [*_check_hugging_face(config), *_check_checkpoint(config, world_size)]


def _check_checkpoint(config: JobConfig, world_size: int) -> list[str]:
    checkpoint, problems = config.checkpoint, []
    if "://" in checkpoint.folder:
        problems.append(
            f"{_name(config, 'checkpoint.folder')}: is a folder in job.dump_folder; name the address in"
            " checkpoint.remote_folder, which each checkpoint is copied to"
        )
    if checkpoint.remote_folder is not None and (problem := _find_bad_address(checkpoint.remote_folder)):
        problems.append(f"{_name(config, 'checkpoint.remote_folder')}: {problem}")
    initial = checkpoint.initial_load_path or ""
    if "://" in initial and (problem := _find_bad_initial_address(initial, checkpoint.initial_load_in_hf)):
        problems.append(f"{_name(config, 'checkpoint.initial_load_path')}: {problem}")
    excluded = _name(config, "checkpoint.exclude_from_loading")
    if unknown := [part for part in checkpoint.exclude_from_loading if part not in EXCLUDABLE]:
        problems.append(f"{excluded}: {', '.join(unknown)} can't be left out; legal are {', '.join(EXCLUDABLE)}")
    whole_initial = checkpoint.initial_load_path and not checkpoint.initial_load_model_only
    if checkpoint.exclude_from_loading and checkpoint.load_step < 0 and not whole_initial:
        problems.append(
            f"{excluded}: is about checkpoint.load_step, or checkpoint.initial_load_path with initial_load_model_only ="
            " false: set the one whose parts are to be left out. A run that goes on from its newest checkpoint takes"
            " all of it, or every restart would leave them out again"
        )
    if checkpoint.load_step >= 0 and not checkpoint.enable:
        problems.append(
            f"{_name(config, 'checkpoint.load_step')}: needs checkpoint.enable = true; with checkpoint.load_only = true"
            " nothing is saved. The checkpoint of another run is named by checkpoint.initial_load_path"
        )
    if checkpoint.create_seed_checkpoint and "." in config.optimizer.name:
        problems.append(
            f"{_name(config, 'checkpoint.create_seed_checkpoint')}: an optimizer of your own has its state from the"
            " first step on; use enable_first_step_checkpoint"
        )
    if checkpoint.create_seed_checkpoint and (world_size > 1 or not checkpoint.enable or checkpoint.load_only):
        problems.append(
            f"{_name(config, 'checkpoint.create_seed_checkpoint')}: needs one process (here {world_size}),"
            " checkpoint.enable = true and load_only = false; the seed then loads on any number of processes"
        )
    return problems


def _find_bad_initial_address(address: str, in_hf: bool) -> str | None:
    if in_hf:
        return "with initial_load_in_hf it is a folder of the file system; copy it to one"
    if not re.search(r"/step-\d+/?$", address):
        return "an address must be that of one checkpoint, and end in step-N"
    return _find_bad_address(address)


def _find_bad_address(address: str) -> str | None:
    """Return why fsspec can't open an address, None if nothing is wrong; it isn't opened."""
    protocol, separator, path = address.partition("://")
    if not separator or not path.strip("/"):
        return "must be an address such as s3://bucket/run; a plain folder is file:///path/of/the/folder"
    if set(path) & set("*?[]"):
        return "must not hold any of * ? [ ], which file systems take for patterns"
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        return f"the package that opens {protocol}:// is not installed; pip install it ({error})"
    except ValueError:
        return f"unknown protocol {protocol!r}; known are {', '.join(sorted(available_protocols()))}"
    return None


def _check_hugging_face(config: JobConfig) -> list[str]:
    checkpoint, problems = config.checkpoint, []
    in_hf = _name(config, "checkpoint.initial_load_in_hf")
    if checkpoint.initial_load_in_hf and not (checkpoint.initial_load_path or config.model.hf_assets_path):
        where = "checkpoint.initial_load_path or model.hf_assets_path"
        problems.append(f"{in_hf}: there is no folder to load; name it in {where}")
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        problems.append(f"{in_hf}: such a folder holds only the model; leave out initial_load_model_only = false")
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        problems.append(f"{_name(config, 'checkpoint.initial_load_in_hf_quantized')}: needs initial_load_in_hf = true")
    return problems
