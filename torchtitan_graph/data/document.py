"""Documents: what a corpus consists of."""

from typing import NamedTuple

import numpy as np

from torchtitan_graph.data.bad_rows import Skipped


class Tokens(NamedTuple):
    """A document as it is packed: nothing is added at its ends.

    ids        token ids, int64 (n,)
    is_target  whether the model learns to predict each token, bool (n,); the first is never predicted
    """

    ids: np.ndarray
    is_target: np.ndarray


class Pair(NamedTuple):
    """Two answers to a prompt, each with it: two documents, packed into one row."""

    chosen: Tokens
    rejected: Tokens


class Contexts(NamedTuple):
    """A conversation as several contexts, one for each turn that is learned: each is packed as a document of its own,
    and need not be in the same row."""

    contexts: tuple[Tokens, ...]


# A text; or its token ids, without bos and eos, which packing adds; or all its tokens; or those of a pair, or of the
# contexts of a conversation; or Skipped, for a bad row that is left out.
Document = str | np.ndarray | Tokens | Pair | Contexts | Skipped
