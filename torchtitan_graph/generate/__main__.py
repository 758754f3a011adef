"""Continue texts with a trained model, or talk with it.

    python -m torchtitan_graph.generate RUN "def main("
    python -m torchtitan_graph.generate HF_FOLDER --chat
    python -m torchtitan_graph.generate HF_FOLDER --prompts questions.jsonl --json --temperature 0.7 --top_p 0.9
    torchrun --nproc_per_node 2 -m torchtitan_graph.generate RUN "def main("

The model is a run's newest checkpoint, the one that is named (RUN/checkpoint/step-N), or a Hugging Face folder. Under
torchrun it is sharded over all ranks, as FSDP does, or by --tensor_parallel_degree; rank 0 reads and prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config.load import add_option
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.generate.chat import HELP, Chat
from torchtitan_graph.generate.decoding import why_no_cache
from torchtitan_graph.generate.generation import Options, check_length, generate, to_tokens
from torchtitan_graph.generate.sampling import Sampling
from torchtitan_graph.generate.texts import Text
from torchtitan_graph.log import logger
from torchtitan_graph.open_model import Opened, open_model
from torchtitan_graph.parallel.agree import on_rank_0
from torchtitan_graph.parallel.gather import gathered_for_forward
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.small_files import parse_json, read_text

MOST_BYTES = 256 * 2**20  # of a file of prompts
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Prompt(NamedTuple):
    """A text to continue, and its tokens."""

    text: str
    tokens: list[int]


def parser() -> argparse.ArgumentParser:
    made = make_parser(__doc__, prog="python -m torchtitan_graph.generate", allow_abbrev=False)
    add = made.add_argument
    add("model", type=Path, help="a run's folder, one `step-N` of it, or a Hugging Face folder")
    add("prompt", nargs="?", help="text to continue (default: none, the beginning of a text)")
    config = "the run's configuration, if it is not where a run leaves it"
    add("--job.config_file", dest="config", type=Path, metavar="FILE", help=config)
    lines = "a prompt per line; of a .jsonl file per object, under the key `prompt`; - is standard input"
    add("--prompts", type=Path, metavar="FILE", help=lines)
    add("--chat", action="store_true", help=f"talk with the model, by its tokenizer's chat template: {HELP}")
    add("--system", default="", metavar="TEXT", help="with --chat: the system prompt")
    add_option(made, "training.chat_template_kwargs")
    most = "stop after so many (default 100; with --chat 1000)"
    add("--max_new_tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default 0)")
    add("--top_k", type=int, default=0, metavar="K", help="draw among the K likeliest; 0: all (default 0)")
    least = "draw among the fewest likeliest tokens whose probabilities sum to P; 1: all (default 1)"
    add("--top_p", type=float, default=1.0, metavar="P", help=least)
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--num_samples", type=int, default=1, metavar="N", help="texts for each prompt (default 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore_eos", action="store_true", help="go on after tokens that end a text")
    add("--batch_size", type=int, default=8, metavar="N", help="texts that are continued together (default 8)")
    add("--json", action="store_true", help="print a JSON object per text: prompt, text, tokens, sample, ended")
    add("--no_cache", action="store_true", help="run the model on the whole text for each token: to compare")
    add("--dtype", choices=DTYPES, default="float32", help="of parameters and arithmetic (default float32)")
    add("--tensor_parallel_degree", type=int, default=1, metavar="N", help="under torchrun (default 1)")
    return made


def check(options: argparse.Namespace) -> None:
    """Fill in defaults; raise a UserError for an option out of bounds, or options that exclude each other."""
    if options.max_new_tokens is None:
        options.max_new_tokens = 1000 if options.chat else 100
    least = {"max_new_tokens": 1, "temperature": 0, "top_k": 0, "num_samples": 1, "batch_size": 1}
    for name, bound in (least | {"tensor_parallel_degree": 1}).items():
        if not getattr(options, name) >= bound:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least {bound}")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top_p {options.top_p}: must be above 0 and at most 1")
    if options.temperature == 0 and (options.top_k or options.top_p < 1 or options.num_samples > 1):
        raise UserError("--temperature 0 takes the likeliest token, so --top_k, --top_p and --num_samples need another")
    if options.prompt is not None and options.prompts is not None:
        raise UserError("--prompts and a prompt: give one of them")
    if options.chat:
        is_given = {"prompt": options.prompt, "--prompts": options.prompts, "--json": options.json}
        is_given["--num_samples"] = options.num_samples > 1
        if others := [name for name, x in is_given.items() if x]:
            raise UserError(f"--chat reads what is said from the terminal: leave out {', '.join(others)}")
    elif options.chat_template_kwargs:
        raise UserError("--chat_template_kwargs: are arguments of the template of --chat; add that")
    elif options.system:
        raise UserError("--system: is the system prompt of --chat; add that, or write it into the prompt")
    if "" in options.stop:
        raise UserError("--stop '': must be a text")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % options.tensor_parallel_degree:
        raise UserError(f"--tensor_parallel_degree {options.tensor_parallel_degree}: does not divide {world} processes")


@command
def main(argv: Sequence[str]) -> int:
    """Print the texts. Return the exit code: 0 done, 2 something to change."""
    options = parser().parse_args(argv)
    check(options)
    with ExitStack() as stack:
        dims = _join(options, stack)
        opened = open_model(options.model, options.config, getattr(torch, options.dtype), devices.device(), dims)
        if dims is not None:
            dtype = getattr(torch, options.dtype)
            stack.enter_context(gathered_for_forward(opened.model, opened.model.blocks, dtype, devices.device()))
        how = _how(options, opened)
        if options.chat:
            given = {**opened.reading.chat_template_kwargs, **options.chat_template_kwargs}
            reading = dataclasses.replace(opened.reading, chat_template_kwargs=given)
            Chat(opened.model, reading, how, devices.device()).run(options.system)
            return 0
        prompts = on_rank_0(partial(_prompts, options, opened.tokenizer))
        check_length(opened.model, [prompt.tokens for prompt in prompts], options.max_new_tokens)
        _print_texts(options, opened, how, prompts)
    return 0


def _join(options: argparse.Namespace, stack: ExitStack) -> ParallelDims | None:
    """Join the other processes of torchrun, if any, and return the layout over all."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    if devices.device_type() == "cuda":
        torch.cuda.set_device(devices.device())
    join("nccl" if devices.device_type() == "cuda" else "gloo", datetime.timedelta(minutes=30))
    stack.callback(dist.destroy_process_group)
    tp = options.tensor_parallel_degree
    return ParallelDims(dp_shard=world // tp, tp=tp)


def _how(options: argparse.Namespace, opened: Opened) -> Options:
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    ends = frozenset() if options.ignore_eos else frozenset(opened.ends())
    why = None if options.no_cache else why_no_cache(opened.model)
    if why is not None:
        logger.warning(f"no cache of keys and values: {why}; each token runs the model on the whole text")
    cache, stops, tp = not options.no_cache, tuple(options.stop), options.tensor_parallel_degree
    return Options(sampling, options.max_new_tokens, ends, stops, cache, tp)


def _prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    texts = [options.prompt or ""] if options.prompts is None else list(_texts_of(options.prompts))
    if not texts:
        raise UserError(f"--prompts {options.prompts}: holds no prompt")
    return [Prompt(text, to_tokens(tokenizer, text)) for text in texts]


def _texts_of(path: Path) -> Iterator[str]:
    try:
        content = sys.stdin.read(MOST_BYTES) if path == Path("-") else read_text(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: can't be read: {error}") from error
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        where = f"{path}, line {number}"
        text = parse_json(line, dict[str, Any], where).get("prompt")
        if not isinstance(text, str):
            raise UserError(f"{where}: the key `prompt` must hold a text")
        yield text


def _print_texts(options: argparse.Namespace, opened: Opened, how: Options, prompts: list[Prompt]) -> None:
    each = [(prompt, sample) for prompt in prompts for sample in range(options.num_samples)]
    size = options.batch_size if opened.model.mixes_documents is None else 1
    is_streamed, is_shown = len(each) == 1 and not options.json, not dist.is_initialized() or dist.get_rank() == 0
    for begin in range(0, len(each), size):
        batch = each[begin : begin + size]
        tokens, samples = [prompt.tokens for prompt, _ in batch], [sample for _, sample in batch]
        texts: list[Text] = []
        if is_streamed and is_shown:
            print(batch[0][0].text, end="", flush=True)
        for step in generate(opened.model, opened.tokenizer, tokens, how, devices.device(), samples):
            texts = [text for text, _ in step]
            if is_streamed and is_shown:
                print(step[0][1], end="", flush=True)
        if is_streamed and is_shown:
            print()
        elif is_shown:
            for (prompt, sample), text in zip(batch, texts, strict=True):
                _print_text(options.json, prompt, sample, text)


def _print_text(as_json: bool, prompt: Prompt, sample: int, text: Text) -> None:
    if as_json:
        found = {"prompt": prompt.text, "text": text.text, "tokens": text.tokens, "sample": sample, "ended": text.ended}
        print(json.dumps(found, ensure_ascii=False), flush=True)
    else:
        print(f"{prompt.text}{text.text}\n", flush=True)


if __name__ == "__main__":
    run_command(main)
