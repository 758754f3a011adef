"""A split of a corpus as lanes: streams of documents whose order depends on the corpus and a seed only."""

import functools
import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import Reading
from torchtitan_graph.data.sources import Source, is_remote
from torchtitan_graph.errors import UserError

# Note [Lanes]
# The first document of a row of the global sequence depends on the number of tokens of every document before it. So
# that no rank has to tokenise everything to find a row, the documents are distributed over `num_lanes` lanes, each
# packed by itself, and the rows are taken from the lanes in turn: row r is row r // num_lanes of lane r % num_lanes. A
# rank tokenises the lanes of its own rows. num_lanes is a power of two, so that the rows of a rank are in few lanes
# where the batch is one too. It depends on the corpus alone, and a lane starts its next epoch by itself, with documents
# of a new shuffle: nothing has to be communicated. Where epochs end, Note [Lengths] says how lanes do.
MAX_LANES = 256
_DOCUMENTS_PER_LANE = 32  # with fewer, lanes differ much in length
# The rows that whole documents are put into together are best full where there are many, also of short documents.
_WHOLE_DOCUMENTS_PER_LANE = 1024
VALIDATION_FRACTION = 0.05
_FEW_DOCUMENTS = 4096
_PREPARED = 8  # documents of a lane that are read ahead from addresses


class Resume(NamedTuple):
    """Where the stream of a lane can be begun again, in any epoch: before a document, with a state of `datasets`.

    release: of `datasets`; another reads such a state in another way, perhaps.
    """

    document: int
    release: str
    state: dict[str, Any]


class Corpus(Protocol):
    """Documents of one split in the order of training.

    `documents` yields a lane's documents in an epoch as (index, document), from `start` on; indices ascend, with gaps,
    and are the same whenever lane and epoch are. Those of a lane that `is_whole` are `Tokens`, and packed whole. An
    instance can be pickled.
    """

    num_lanes: int
    digest: str

    def is_whole(self, lane: int) -> bool: ...

    def documents(self, lane: int, epoch: int, start: int) -> Iterator[tuple[int, Document]]: ...


class ShuffledCorpus:
    """A split of a source with random access: every epoch distributes all documents over the lanes in a new shuffle.

    split: "train", "validation" (5 % of the documents, by hash of their identity), or "all". Raises UserError if it has
    no documents.
    """

    def __init__(self, source: Source, split: str, seed: int) -> None:
        self.source, self.split, self._seed = source, split, seed
        if not len(source):
            raise UserError(f"{option_of(split)}: the corpus has no documents.")
        self._threshold = _validation_threshold(source)
        if split == "validation" and self._threshold == 0:
            raise UserError(
                "validation.dataset: one document can't be split into training and validation. Add documents, or name"
                " another corpus for validation."
            )
        per_lane = _WHOLE_DOCUMENTS_PER_LANE if source.is_whole else _DOCUMENTS_PER_LANE
        self.num_lanes = num_lanes(len(source) * split_fraction(split) / per_lane)
        self.digest = f"{split} of {source.digest}"

    def is_whole(self, lane: int) -> bool:
        """Return whether the lane's documents are packed whole: those of all are, or of none."""
        return self.source.is_whole

    @property
    def is_exact(self) -> bool:
        """Whether `num_documents` is exact: of many documents the split is random."""
        return self.split == "all" or len(self.source) <= _FEW_DOCUMENTS

    def num_documents(self) -> int:
        """Return the number of documents in the split, of many about how many."""
        total = len(self.source)
        held_out = 0 if total == 1 else max(1, round(VALIDATION_FRACTION * total))
        return {"train": total - held_out, "validation": held_out, "all": total}[self.split]

    def documents(self, lane: int, epoch: int, start: int) -> Iterator[tuple[int, Document]]:
        source, total, key = self.source, len(self.source), (self._seed, epoch)
        num_ahead = _PREPARED if is_remote(source) else 0
        ahead: deque[tuple[int, int]] = deque()
        for index in range(start, (total - lane - 1) // self.num_lanes + 1):
            document = shuffled(index * self.num_lanes + lane, total, key)
            if in_split(self.split, source.identity(document), self._threshold):
                if num_ahead:
                    source.prepare(document)  # type: ignore[attr-defined]
                ahead.append((index, document))
                if len(ahead) > num_ahead:
                    yield self._take(ahead)
        while ahead:
            yield self._take(ahead)

    def _take(self, ahead: deque[tuple[int, int]]) -> tuple[int, Document]:
        index, document = ahead.popleft()
        Reading.documents += 1
        return index, self.source[document]


def num_lanes(wanted: float) -> int:
    """Return the largest power of two that is at most `wanted`, between 1 and MAX_LANES."""
    return 1 << int(min(max(wanted, 1), MAX_LANES)).bit_length() - 1


def option_of(split: str) -> str:
    """Return the option that names the corpus of a split, for messages."""
    return "training.dataset" if split == "train" else "validation.dataset"


def split_fraction(split: str) -> float:
    return {"train": 1 - VALIDATION_FRACTION, "validation": VALIDATION_FRACTION, "all": 1.0}[split]


def in_split(split: str, identity: str | int, threshold: int = int(VALIDATION_FRACTION * 2**64)) -> bool:
    """Return whether a document belongs to a split: those whose hash is below the threshold are for validation."""
    return split == "all" or (document_key(identity) < threshold) == (split == "validation")


def _validation_threshold(source: Source) -> int:
    total = len(source)
    if total > _FEW_DOCUMENTS:
        return int(VALIDATION_FRACTION * 2**64)
    # A random fraction could leave a split of a small corpus empty: use the exact fraction, at least one document.
    hashes = sorted(document_key(source.identity(index)) for index in range(total))
    return hashes[max(1, round(VALIDATION_FRACTION * total))] if total > 1 else 0


def document_key(identity: str | int) -> int:
    """Return the 64 bits that decide a document's split: a hash of its identity, or the identity if it is the hash."""
    if isinstance(identity, int):
        return identity
    return int.from_bytes(hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def shuffled(index: int, total: int, key: tuple[int, int]) -> int:
    """Return the place of `index` in a shuffle of range(total): a permutation for each key, without memory, in any
    order.

    A Feistel network permutes the smallest power of four that is at least `total`; results outside are permuted again
    until they are inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = _rounds(key)
    while True:
        left, right = index >> half, index & mask
        for round_key in rounds:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        index = left << half | right
        if index < total:
            return index


@functools.lru_cache(1024)  # lanes may be in several epochs
def _rounds(key: tuple[int, int]) -> list[int]:
    """Return the keys of the rounds of a shuffle."""
    base = _mix(_mix(key[0]) ^ key[1])
    return [_mix(base + number) for number in range(4)]


def _mix(value: int) -> int:
    """Scramble 64 bits: the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ value >> 31
