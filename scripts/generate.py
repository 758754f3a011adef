"""Continue a text with a trained model: python scripts/generate.py RUN/checkpoint/step-N "def main("

The model is a run's checkpoint, or a Hugging Face folder. Every new token runs the model on the whole text so far:
enough to see what a model has learned, not a server.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan_graph import device as devices
from torchtitan_graph.checkpoint import load_model
from torchtitan_graph.config import load
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging
from torchtitan_graph.models.hf import allocate, choose_model, from_hf


def open_model(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """Load a model and its tokenizer.

    Raises:
        UserError: the folder holds neither a complete checkpoint nor a Hugging Face model; says which and why.
    """
    if (folder / "config.json").exists():
        model = from_hf(folder)
        # What was trained on bytes has no tokenizer.json to bring along.
        of_bytes = load_tokenizer(None)
        is_of_bytes = model.config.vocab_size == of_bytes.vocab_size and not (folder / "tokenizer.json").exists()
        return model, of_bytes if is_of_bytes else load_tokenizer(str(folder))
    config = load(["--job.config_file", str(folder.absolute().parents[1] / "config.toml")])
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    assets = find_assets(config.model.hf_assets_path) if config.model.hf_assets_path else None
    _, model = choose_model(config, assets, tokenizer.vocab_size)
    allocate(model, torch.float32)
    load_model(folder, model)
    return model, tokenizer


def choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw the next token among the `top_k` likeliest (0: all), or take the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_K, tokens_K = logits_V.float().cpu().topk(min(top_k or len(logits_V), len(logits_V)))
    return int(tokens_K[torch.multinomial((logits_K / temperature).softmax(0), 1, generator=generator)])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder `step-N` of a run, or a Hugging Face folder")
    parser.add_argument("prompt", nargs="?", default="", help="text to continue (default: none)")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="stop after so many (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="draw among the k likeliest; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    options = parser.parse_args()
    if options.temperature < 0 or options.top_k < 0 or options.max_new_tokens < 1:
        parser.error("--temperature and --top_k are at least 0, --max_new_tokens at least 1")
    init_logging()
    try:
        model, tokenizer = open_model(options.model)
    except UserError as error:
        parser.error(str(error))
    model.to(devices.device())
    generator = torch.Generator().manual_seed(options.seed)
    prompt = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(options.prompt)
    tokens = prompt or [tokenizer.eos_id]  # a text begins where another ends
    first, shown = len(tokens), options.prompt
    print(shown, end="", flush=True)
    while len(tokens) - first < options.max_new_tokens:
        logits_BLV = model(torch.tensor([tokens], device=devices.device()))
        token = choose(logits_BLV[0, -1], options.temperature, options.top_k, generator)
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
        # A token may be part of a character: what is decoded is shown once it no longer ends in one that is broken.
        text = options.prompt + tokenizer.decode(tokens[first:])
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()


if __name__ == "__main__":
    main()
