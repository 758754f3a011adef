"""Warn of text that contains a tokenizer's special tokens, such as conversations that are rendered already."""

import itertools
import re
from collections import Counter

import torch.distributed as dist

from torchtitan_graph.data.bad_rows import Skipped
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.log import logger

_DOCUMENTS = 256
_CHARACTERS = 2**22
_MOST_NAMED = 8


def warn_of_special_tokens(corpus: Corpus, tokenizer: Tokenizer, place: str) -> None:
    """Warn if the first documents of a corpus contain special tokens' text, which is never read as tokens.

    Up to 256 documents are searched, and none after 4 million characters.
    """
    if not tokenizer.special_tokens or (dist.is_initialized() and dist.get_rank()):  # one rank warns
        return
    longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
    any_of_them = re.compile("|".join(map(re.escape, longest_first)))
    spelt, looked_at, with_some, characters = Counter[str](), 0, 0, 0
    lanes = [corpus.documents(lane, 0, 0) for lane in range(corpus.num_lanes)]
    in_turn = (found for found in itertools.chain.from_iterable(itertools.zip_longest(*lanes)) if found is not None)
    for _, document in itertools.islice(in_turn, _DOCUMENTS):
        if isinstance(document, Skipped):
            continue
        if not isinstance(document, str):  # token ids
            return
        found = set(any_of_them.findall(document))
        spelt.update(found)
        with_some += bool(found)
        looked_at, characters = looked_at + 1, characters + len(document)
        if characters > _CHARACTERS:
            break
    if not spelt:
        return
    named = [f"{token!r} in {count}" for token, count in spelt.most_common(_MOST_NAMED)]
    more = f" and {len(spelt) - _MOST_NAMED} more" if len(spelt) > _MOST_NAMED else ""
    logger.warning(
        f"{place}: {with_some} of the {looked_at} documents looked at spell out special tokens of the tokenizer"
        f" ({', '.join(named)}{more}). They are cut into characters, as all text is. If they are meant as tokens, run"
        " python -m torchtitan_graph.pretokenize --special_tokens, and train on its shards; else take them out. A"
        " document gets bos and eos by itself"
    )
