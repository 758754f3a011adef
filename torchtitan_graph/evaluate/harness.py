"""Tasks of lm-evaluation-harness, scored by our own model."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.evaluate.requests import Request, Scorer
from torchtitan_graph.generate.generation import Options
from torchtitan_graph.generate.sampling import Sampling

_LABELS = ("alias", "name")  # entries of a task's results that are no metrics


def open_tasks(names: str, include_path: Path | None) -> dict[str, Any]:
    """Return the tasks of these names, with commas between them; `include_path` holds more, as YAML files.

    Raises:
        UserError: lm-evaluation-harness is not installed, or has no such task.
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
        manager.load(wanted)
    except OSError as error:  # datasets' errors of the network, and of files that are not there, are such
        raise UserError(
            f"--lm_eval {names}: its data can't be read: {error}. Fetch it once where there is a network, or name"
            " tasks whose data are local files by --include_path"
        ) from error
    return {"names": wanted, "manager": manager}


class Chats(NamedTuple):
    """How texts become chats, as the harness' options of the same names do it."""

    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None


def evaluate_tasks(scorer: Scorer, tasks: dict[str, Any], chats: Chats) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task by name; called by rank 0 alone.

    Raises:
        UserError: a template is to be applied and there is none, or a task generates text in a way that is not ours.
    """
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model_class()(scorer),
        tasks=tasks["names"],
        task_manager=tasks["manager"],
        log_samples=False,
        **chats._asdict(),
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
            together: dict[Options, list[int]] = {}
            prompts: list[list[int]] = []
            for number, (context, asked) in enumerate(request.args for request in requests):
                options = _options(asked, self._scorer.ends())
                if (room := self.max_length - options.max_new_tokens) < 1:
                    raise UserError(
                        f"validation.seq_len = {self.max_length}: a task asks for {options.max_new_tokens:,} new tokens"
                        " and a prompt before them; make rows longer"
                    )
                prompts.append(self.tok_encode(context)[-room:])
                together.setdefault(options, []).append(number)
            texts: dict[int, str] = {}
            for options, numbers in together.items():
                found = self._scorer.write([prompts[number] for number in numbers], options)
                texts |= zip(numbers, found, strict=True)
            return [texts[number] for number in range(len(requests))]

        @property
        def tokenizer_name(self) -> str:
            return str(self._scorer.reading.tokenizer)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return self._scorer.reading.template.templates["default"] if chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """Return a conversation's text, which asks for the next answer, or ends within the last one."""
            last = [] if add_generation_prompt else [chat_history[-1]["content"]]
            messages = chat_history if add_generation_prompt else chat_history[:-1]
            return "".join([self._scorer.reading.template.render(messages, prompt=True)[0], *last])

    return ScoredLM


def _options(asked: Mapping[str, Any], ends: frozenset[int]) -> Options:
    """Return the options of generation that a task's generation_kwargs mean, with the harness' own defaults.

    Raises:
        UserError: one is of a way to generate that is not ours.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    found = dict(normalize_gen_kwargs(dict(asked)))
    is_drawn, stops = found.pop("do_sample"), found.pop("until")
    sampling = Sampling(
        found.pop("temperature", 1.0) if is_drawn else 0.0, found.pop("top_k", 0) or 0, found.pop("top_p", 1.0) or 1.0
    )
    number = found.pop("max_gen_toks")
    if others := sorted(found):
        raise UserError(
            f"--lm_eval: a task's generation_kwargs have {listed(others)}; texts are generated by until, max_gen_toks,"
            " do_sample, temperature, top_k and top_p. Export the model, and run lm_eval --model hf on it"
        )
    return Options(sampling, number, ends, tuple(stop for stop in stops if stop))
