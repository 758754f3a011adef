"""Tasks of lm-evaluation-harness, scored by our own model."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate.requests import Request, Scorer

_LABELS = ("alias", "name")  # entries of a task's results that are no metrics


def open_tasks(names: str, include_path: Path | None) -> dict[str, Any]:
    """Return the tasks of these names, with commas between them; `include_path` holds more, as YAML files.

    Raises:
        UserError: lm-evaluation-harness is not installed, has no such task, or one asks the model to generate text.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--lm_eval {names}: the package lm-eval is not installed; pip install 'lm-eval>=0.4.13'")
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include_path {include_path}: there is no such folder")
    from lm_eval.tasks import TaskManager

    wanted = [name for name in names.split(",") if name]
    manager = None
    if include_path is not None:  # the index of the harness' own thousands takes most of a minute
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if manager is None or any(name not in manager.all_tasks for name in wanted):
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in wanted if name not in manager.all_tasks]:
        known = did_you_mean(unknown[0], manager.all_tasks)
        raise UserError(f"--lm_eval {names}: there is no task {unknown[0]}{known}; --include_path DIR adds your own")
    try:
        tasks = manager.load(wanted)["tasks"]
    except OSError as error:  # datasets' errors of the network, and of files that are not there, are such
        raise UserError(
            f"--lm_eval {names}: its data can't be read: {error}. Fetch it once where there is a network, or name"
            " tasks whose data are local files by --include_path"
        ) from error
    if writing := sorted(name for name, task in tasks.items() if task.OUTPUT_TYPE == "generate_until"):
        raise UserError(
            f"--lm_eval {','.join(writing)}: asks the model to generate text, and only tasks of likelihoods can be "
            "evaluated; export the model by python -m torchtitan_graph.convert_to_hf, and run lm_eval --model hf on"
            " that folder"
        )
    return {"names": wanted, "manager": manager}


def evaluate_tasks(scorer: Scorer, tasks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task by name; called by rank 0 alone."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model_class()(scorer), tasks=tasks["names"], task_manager=tasks["manager"], log_samples=False
    )
    assert found is not None, "this is rank 0"
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if name not in _LABELS}
        for task, metrics in found["results"].items()
    }


@functools.cache
def model_class() -> type:
    """Return the class of models that lm-evaluation-harness evaluates; made when the package is there."""
    from lm_eval.api.model import TemplateLM

    class ScoredLM(TemplateLM):
        """A model of ours behind the interface of lm-evaluation-harness. Texts are tokenized as by its class for models
        of transformers: special tokens in a text are read, and those around it are what tokenizer.json says."""

        def __init__(self, scorer: Scorer) -> None:
            super().__init__()
            self._scorer = scorer
            self._tokenizer = scorer.tokenizer_of_prompts()

        @property
        def eot_token_id(self) -> int:
            return self._tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return self._tokenizer.eos_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

        @property
        def max_length(self) -> int:
            """The most tokens that the model reads at once: those of a row."""
            return self._scorer.longest

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is not None:
                return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)
            found = self._tokenizer.encode(string)
            begins = found[:1] == [self.prefix_token_id]  # written in the text
            return found if begins else self._tokenizer.encode(string, add_special_tokens=True)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            found = self._scorer.score([self._request(context, scored) for _, context, scored in requests])
            return [(score.log_likelihood, score.is_greedy) for score in found]

        def _request(self, context: Sequence[int], scored: Sequence[int]) -> Request:
            if len(scored) > self.max_length:
                raise UserError(
                    f"validation.seq_len = {self.max_length}: a text of {len(scored):,} tokens is to be scored at once;"
                    " make rows as long"
                )
            return Request([*context, *scored][-(self.max_length + 1) :], len(scored))

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            of_request: list[int] = []
            windows: list[Request] = []
            for number, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                    windows.append(self._request(*make_disjoint_window(pair)))
                    of_request.append(number)
            totals = [0.0] * len(requests)
            for number, score in zip(of_request, self._scorer.score(windows), strict=True):
                totals[number] += score.log_likelihood
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError("`open_tasks` refuses such tasks")

    return ScoredLM
