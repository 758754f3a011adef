"""Checks of what a run begins with: data that somebody named, and weights for what is trained next to frozen ones."""

from collections.abc import Iterator

from torchtitan_graph.config.job import JobConfig, Problem, is_set, lines
from torchtitan_graph.config.resolve import problem_list
from torchtitan_graph.errors import UserError

_CORPUS = ("training.dataset", "training.dataset_path", "training.sources")
_LOADED = (
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf",
    "checkpoint.initial_load_adapter",
    "reference.path",
)


def check_beginning(config: JobConfig, is_new: bool) -> None:
    """Check that a run that fine-tunes has its data named, and weights to begin with.

    is_new: whether the run has no checkpoint of its own to resume from.

    Raises:
        UserError: it would be trained on the embedded corpus, or on random weights, and nobody asked for that.
    """
    problems = [*_unnamed_data(config), *(_random_weights(config) if is_new else ())]
    if problems:
        raise UserError(problem_list(lines(config, problems)))


def is_data_named(config: JobConfig) -> bool:
    """Return whether somebody named the training data, also by the default's name."""
    return any(key in config.sources or is_set(config, key) for key in _CORPUS)


def builds_on_weights(config: JobConfig) -> list[str]:
    """Return the options that are set and that make sense only with trained weights."""
    preferences = ["training.format"] if config.training.format == "preference" else []
    return [key for key in ("model.lora.rank", "model.freeze") if is_set(config, key)] + preferences


def loads_weights(config: JobConfig) -> bool:
    """Return whether a new run begins with the weights of a folder or a checkpoint."""
    return bool(config.checkpoint.initial_load_path) or config.checkpoint.initial_load_in_hf


def _unnamed_data(config: JobConfig) -> Iterator[Problem]:
    keys = [key for key in _LOADED if is_set(config, key)] + builds_on_weights(config)
    if keys and not is_data_named(config):
        yield Problem(
            keys[0],
            "no training data is named, and the embedded corpus, this Python's own sources, is for trying out: set"
            " training.dataset_path, training.dataset or training.sources; training.dataset = 'stdlib' asks for it",
        )


def _random_weights(config: JobConfig) -> Iterator[Problem]:
    keys = builds_on_weights(config)
    if not keys or loads_weights(config) or config.model.random_base:
        return
    what = {
        "model.lora.rank": "adapters would be trained next to random weights",
        "model.freeze": "random weights would be frozen",
        "training.format": "random weights would be trained on preferences",
    }[keys[0]]
    assets = config.model.hf_assets_path
    folder = (
        f" loads those in model.hf_assets_path = {assets!r}" if assets else " and model.hf_assets_path load a folder"
    )
    yield Problem(
        keys[0],
        f"{what}, for none are loaded: checkpoint.initial_load_in_hf = true{folder}, and checkpoint.initial_load_path a"
        " checkpoint; model.random_base = true asks for random ones",
    )
