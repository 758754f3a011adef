"""Tiny models whose every weight matters, and a tokenizer of letters."""

from typing import Any

import torch

from torchtitan_graph.generate import Options, generate
from torchtitan_graph.models.hf.places import live_tensors
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.spec import family_names, load_family, tiny_config

VOCAB = 64
CPU = torch.device("cpu")
KINDS = [(n, f) for n in family_names() for f in load_family(n).FLAVORS if f.startswith("debugmodel")]
PROMPTS = [[5, 17, 60, 3, 3, 41, 8, 22, 9, 11, 2], [7], [33, 2, 50]]  # longer than the tiny window and chunk, too


def build(name: str, flavor: str = "debugmodel", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    family = load_family(name)
    model = family.Model(tiny_config(family.FLAVORS[flavor], vocab_size=VOCAB, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in live_tensors(model).items():
            std = 0.3 if "norm" in key else 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + ("norm" in key))
    return model.to(dtype)


class Letters:
    """A letter per token."""

    vocab_size, bos_id, eos_id, special_tokens, digest = VOCAB, None, VOCAB - 1, (), ""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + i) for i in ids)


def continuations(model: Decoder, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the new tokens of each prompt."""
    *_, last = generate(model, Letters(), prompts, Options(**{"max_new_tokens": 12, **options}), CPU)
    return [text.tokens for text, _ in last]
