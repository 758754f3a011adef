"""Evaluate a run or a Hugging Face folder: python -m torchtitan_graph.evaluate RUN --set NAME=PATH

Options of a job may follow, such as --validation.seq_len 4096 or --training.mixed_precision_param float32; under
torchrun also those of its layout, such as --parallelism.tensor_parallel_degree 2.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_graph.command import command, make_parser, parse_path, run_command
from torchtitan_graph.config.load import read_beside
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate import harness
from torchtitan_graph.evaluate.choices import evaluate_choices, read_questions
from torchtitan_graph.evaluate.corpora import evaluate_corpora
from torchtitan_graph.evaluate.model import Evaluated, open_model
from torchtitan_graph.evaluate.requests import Scorer
from torchtitan_graph.evaluate.source import name_sets, named_path, names_a_corpus, open_source
from torchtitan_graph.parallel.join import meet
from torchtitan_graph.small_files import to_json


@command
def main(argv: Sequence[str]) -> int:
    """Evaluate, and print the results on rank 0. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__, prog="python -m torchtitan_graph.evaluate")
    parser.add_argument("model", type=Path, help="a run's folder, one step-N of it, or a Hugging Face folder")
    parser.add_argument("--step", default="newest", help="checkpoint of the run: newest (default), best, or a number")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=PATH", help="loss on these documents")
    parser.add_argument(
        "--choices", action="append", default=[], metavar="NAME=PATH", help="multiple choice, as JSON lines"
    )
    parser.add_argument("--lm_eval", metavar="TASKS", help="tasks of lm-evaluation-harness, with commas between them")
    parser.add_argument("--include_path", type=Path, metavar="DIR", help="folder of task files of your own")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="of the tasks: ask in the chat template, as lm_eval does"
    )
    parser.add_argument("--system_instruction", metavar="TEXT", help="of the tasks: the system prompt, as lm_eval's")
    parser.add_argument(
        "--fewshot_as_multiturn",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of the tasks, with a chat template: examples are turns of the conversation (default), or one text",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options, words = read_beside(parser, argv)
    files = dict(named_path("--choices", each) for each in options.choices)
    questions = {name: read_questions(parse_path(path)) for name, path in files.items()}
    if len(questions) < len(options.choices):
        raise UserError("--choices: several have the same name; give each its own")
    source = open_source(options.model, options.step, options.set, words)
    has_requests = bool(options.choices or options.lm_eval)
    has_corpora = bool(options.set) or not has_requests
    if has_corpora and not names_a_corpus(source.config) and source.is_hugging_face:
        raise UserError(
            f"{options.model}: say what to evaluate it on: --set NAME=PATH, --choices NAME=PATH or --lm_eval"
        )
    chats = harness.Chats(options.apply_chat_template, options.fewshot_as_multiturn, options.system_instruction)
    if not options.lm_eval and (options.apply_chat_template or options.system_instruction):
        raise UserError("--apply_chat_template and --system_instruction are of the tasks that --lm_eval names")
    reading = RowFormat.of(source.config.training, load_tokenizer(source.config.model.hf_assets_path))
    if options.apply_chat_template and not reading.has_template:
        raise UserError(
            "--apply_chat_template: the tokenizer has no chat template; name a file with one in"
            " --training.chat_template"
        )
    tasks = None
    if options.lm_eval and os.environ.get("RANK", "0") == "0":  # the others score what rank 0 asks for
        tasks = harness.open_tasks(options.lm_eval, options.include_path)
    try:
        evaluated = open_model(source)
        results: dict[str, Any] = {"model": str(source.weights)}
        if has_corpora:
            try:
                results["sets"] = {name: found._asdict() for name, found in evaluate_corpora(evaluated).items()}
            except UserError as error:
                raise UserError(name_sets(str(error), options.set)) from error
        if has_requests:
            results |= _by_requests(evaluated, questions, tasks, chats)
        if dist.get_rank() == 0:
            print(to_json(results) if options.json else "\n\n".join(_tables(results)), flush=True)
        meet()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _by_requests(
    evaluated: Evaluated, questions: Mapping[str, Any], tasks: Any, chats: harness.Chats
) -> dict[str, Any]:
    """Return the results that rank 0 computes from scored texts."""
    scorer = Scorer(evaluated)
    if dist.get_rank():
        scorer.follow()
        return {}
    found: dict[str, Any] = {}
    try:
        if questions:
            found["choices"] = {name: evaluate_choices(scorer, each)._asdict() for name, each in questions.items()}
        if tasks:
            found["lm_eval"] = harness.evaluate_tasks(scorer, tasks, chats)
    finally:
        scorer.close()
    return found


def _tables(results: Mapping[str, Any]) -> list[str]:
    tables = [f"{results['model']}"]
    for title in ("sets", "choices"):
        if title in results:
            rows = [{title: name, **found} for name, found in results[title].items()]
            tables.append(table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    if "lm_eval" in results:
        metrics = [
            [task, name, _shown(value)] for task, found in results["lm_eval"].items() for name, value in found.items()
        ]
        tables.append(table(["task", "metric", "value"], metrics))
    return tables


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
