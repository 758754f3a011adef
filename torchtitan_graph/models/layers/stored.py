"""How a tensor lies in Hugging Face's files where it is not simply ours under another name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where in a file one of our tensors is.

    name         "*" the layer, "#" the expert: one tensor per expert in the file, which ours stacks on dim 0
    transpose    the file has the last two dims the other way round
    part         (i, n): ours is the i-th of n equal parts of the file tensor's last dim, before it is transposed
    interleaved  the parts alternate: columns i, i + n, i + 2n, ...
    """

    name: str
    transpose: bool = False
    part: tuple[int, int] | None = None
    interleaved: bool = False
