"""Continue a text with a trained model: python scripts/generate.py RUN "def main("

The model is a run's newest checkpoint, the one that is named (RUN/checkpoint/step-N), or a Hugging Face folder. Every
new token runs the model on the whole text so far: enough to see what a model has learned, not a server.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_graph import device as devices
from torchtitan_graph.checkpoint import load_model, newest_below
from torchtitan_graph.command import make_parser
from torchtitan_graph.config import load, target_of
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging
from torchtitan_graph.models.hf import allocate, choose_model, from_hf, new_model


class Described(NamedTuple):
    """The description of a checkpoint: a model on meta, its tokenizer, and the folder of its assets, if any."""

    family: ModuleType
    model: nn.Module
    tokenizer: Tokenizer
    assets: Path | None


def open_model(folder: Path, config: Path | None = None) -> tuple[nn.Module, Tokenizer]:
    """Return a model and its tokenizer; a run's are those of its newest checkpoint.

    `config` is the run's configuration, if it is not to be searched.

    Raises:
        UserError: the folder has neither a complete checkpoint nor a Hugging Face model.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    checkpoint = newest_below(folder)
    if checkpoint == folder and (folder / "config.json").exists():
        model = from_hf(folder)
        return model, _tokenizer_of(folder, model)
    described = describe(checkpoint, config)
    allocate(described.model, torch.float32)
    load_model(checkpoint, described.model)
    return described.model, described.tokenizer


def describe(checkpoint: Path, config: Path | None = None) -> Described:
    """Return a checkpoint's description, by the configuration in it, or in one of the three folders above.

    That is a run's config.toml, or the config.json that convert_from_hf.py copies next to its result.
    """
    file = config or _find_config(checkpoint)
    if file.name == "config.json":
        family, model = new_model(file.parent)
        return Described(family, model, _tokenizer_of(file.parent, model), file.parent)
    job = load(["--job.config_file", str(file)])
    attn = "sdpa" if job.model.attn == "auto" else job.model.attn  # flex would be compiled for one length
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, attn=attn))
    path = job.model.hf_assets_path
    if path and not find_assets(path).exists():  # relative to where the run was started: perhaps a folder above
        above = (folder / path for folder in file.resolve().parents)
        path = job.model.hf_assets_path = str(next(filter(Path.exists, above), path))
    tokenizer, assets = load_tokenizer(path), find_assets(path) if path else None
    family, model, _ = choose_model(job, assets, tokenizer.vocab_size, target_of(job))
    return Described(family, model, tokenizer, assets)


def _find_config(checkpoint: Path) -> Path:
    folder = checkpoint.resolve()
    for place in [folder, *folder.parents][:4]:
        for file in (place / "config.toml", place / "config.json"):
            if file.is_file():
                return file
    raise UserError(
        f"{checkpoint}: neither it nor the three folders above hold a run's config.toml or a config.json; name it with"
        " --job.config_file"
    )


def _tokenizer_of(folder: Path, model: nn.Module) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; without a tokenizer.json, a model trained on bytes has the
    tokenizer of bytes."""
    of_bytes = load_tokenizer(None)
    is_of_bytes = model.config.vocab_size == of_bytes.vocab_size and not (folder / "tokenizer.json").exists()
    return of_bytes if is_of_bytes else load_tokenizer(str(folder))


def choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw the next token among the `top_k` likeliest (0: all), or return the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_K, tokens_K = logits_V.float().cpu().topk(min(top_k or len(logits_V), len(logits_V)))
    return int(tokens_K[torch.multinomial((logits_K / temperature).softmax(0), 1, generator=generator)])


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="a run's folder, one `step-N` of it, or a Hugging Face folder")
    parser.add_argument("prompt", nargs="?", default="", help="text to continue (default: none)")
    parser.add_argument(
        "--job.config_file",
        dest="config",
        type=Path,
        help="the run's configuration, if it is not where a run leaves it",
    )
    parser.add_argument("--max_new_tokens", type=int, default=100, help="stop after so many (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="draw among the k likeliest; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    options = parser.parse_args()
    if options.temperature < 0 or options.top_k < 0 or options.max_new_tokens < 1:
        parser.error("--temperature and --top_k are at least 0, --max_new_tokens at least 1")
    init_logging()
    try:
        model, tokenizer = open_model(options.model, options.config)
    except UserError as error:
        parser.exit(2, f"{error}\n")  # without the usage: the command was not wrong
    model.to(devices.device())
    generator = torch.Generator().manual_seed(options.seed)
    prompt = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(options.prompt)
    tokens = prompt or [tokenizer.eos_id]  # a text begins where another ends
    first, shown = len(tokens), options.prompt
    if model.longest_row is not None and first + options.max_new_tokens > model.longest_row[0]:
        most, why = model.longest_row
        parser.exit(2, f"--max_new_tokens {options.max_new_tokens}: with the prompt at most {most} tokens: {why}\n")
    print(shown, end="", flush=True)
    while len(tokens) - first < options.max_new_tokens:
        logits_BLV = model(torch.tensor([tokens], device=devices.device()))
        token = choose(logits_BLV[0, -1], options.temperature, options.top_k, generator)
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
        # A token may be part of a character: the text is shown once it no longer ends in an incomplete one.
        text = options.prompt + tokenizer.decode(tokens[first:])
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()


if __name__ == "__main__":
    main()
