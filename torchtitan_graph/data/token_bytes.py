"""The number of bytes of text that each token stands for."""

from __future__ import annotations

import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from torchtitan_graph.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from torchtitan_graph.log import logger

# Letters of one to four bytes, of no form that normalization changes, with spaces and lines of several kinds.
_PROBE = "The naïve café \u2014 x_1 = {'a': 0.5}\n\n\tdef f(): return \u6771\u4eac \U0001f642  \u0434\u0430\n"


def token_bytes(tokenizer: Tokenizer) -> Tensor | None:
    """Return the number of bytes of UTF-8 that each token stands for, as int64 (V,), 0 for special tokens; None, with
    a line in the log, for a tokenizer whose tokens don't add up to the bytes of a text.

    For byte-level BPE a token is a string of bytes, so the numbers add up exactly, also of a part of a document that
    begins or ends inside a character.
    """
    sizes_V = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    if isinstance(tokenizer, ByteTokenizer):
        sizes_V[:256] = 1
        return sizes_V
    if isinstance(tokenizer, FileTokenizer):
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # a letter for each byte
        for token, number in tokenizer.vocabulary().items():
            sizes_V[number] = len(token) if alphabet.issuperset(token) else len(token.encode())
        for number, added in tokenizer.added_tokens().items():
            sizes_V[number] = 0 if added.special else len(added.content.encode())
    probes = (_PROBE, _PROBE.strip(), f"  {_PROBE}")
    if any(int(sizes_V[tokenizer.encode(text)].sum()) != len(text.encode()) for text in probes):
        logger.info("the tokenizer's tokens are no strings of bytes, so there is no perplexity per byte")
        return None
    return sizes_V
