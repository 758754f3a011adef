"""The place and form of a tensor in Hugging Face's files."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stored:
    """The file tensor that holds one of our parameters or buffers; a family's `HF_KEYS` is a table of these.

    name         of the file tensor: "*" is the layer, "#" the expert: one file tensor each, stacked on dim 0 of ours
    transpose    the last two dims are swapped in the file
    part         (i, n): ours is the i-th of n equal parts of the file tensor's last dim (before transposing)
    interleaved  the parts alternate: ours are the columns i, i + n, i + 2n, ...
    """

    name: str
    transpose: bool = False
    part: tuple[int, int] | None = None
    interleaved: bool = False

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one file tensor, from that of ours."""
        dims = list(shape[1:] if "#" in self.name else shape)
        if self.transpose:
            dims[-2:] = reversed(dims[-2:])
        if self.part is not None:
            dims[-1] *= self.part[1]
        return tuple(dims)
