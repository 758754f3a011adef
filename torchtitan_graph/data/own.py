"""Documents of a user's class, by number."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtitan_graph.config.own import find_own
from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.forms import RowFormat, form_of
from torchtitan_graph.data.row_forms import Form, Preference
from torchtitan_graph.errors import UserError

_LOOKED_AT = 64  # documents whose content identifies the data
_FEW = 4096  # the most documents that are checked when they are opened


def is_own(dataset: str) -> bool:
    """Return whether the name of a corpus is that of a class, with its module."""
    return "." in dataset and all(part.isidentifier() for part in dataset.split("."))


class OwnSource:
    """A `Source` of a class of the user's, which is called without arguments.

    It has a length, and documents by number: a text; a row, such as {"messages": [...]}, read as rows of files are;
    token ids, to which bos and eos are added; or a pair of token ids and whether each is learned, packed as it is. It
    must be one that can be pickled, for worker processes, and give the same documents in every process. Data with the
    same name, length and documents (64 are compared) count as the same when a run resumes.

    Raises UserError if there is no such class, it has no length, or its first document, or of few any one, is none of
    these.
    """

    def __init__(self, option: str, dotted_name: str, reading: RowFormat) -> None:
        self._name, self._reading = f"{option} = {dotted_name!r}", reading
        made = find_own(option, dotted_name)
        if not isinstance(made, type) or not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
            raise UserError(f"{self._name}: must be a class with a length and documents by number")
        self._documents = made()
        self._length = len(self._documents)
        if not self._length:
            raise UserError(f"{self._name}: has no documents")
        self._bad_rows = reading.bad_rows(self._name)
        first = self._documents[0]
        self.form: Form | None = None
        if isinstance(first, Mapping):
            self.form = form_of(reading, self._row, self._length, self._name)
            self._kind = _kind_of(self.form)
        else:
            reading.refuse_for_text(self._name, f"has documents that are {type(first).__name__}")
            self._kind = _kind(self._document(0))
        self.is_whole = self._kind is not None
        if self._length <= _FEW:
            self._bad_rows.read_all(self._read, self._length)
        else:
            self[0]  # raises for an invalid document
        total = hashlib.sha256(f"{dotted_name} {self._length} {self.form and self.form.digest}".encode())
        for number in range(0, self._length, -(-self._length // _LOOKED_AT)):
            total.update(repr(self[number]).encode(errors="surrogatepass"))
        self.digest = total.hexdigest()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    def _read(self, index: int) -> Document:
        document = self._document(index)
        if _kind(document) is not self._kind:
            raise UserError(f"{self._name}, document {index}: is of another kind than document 0")
        return document

    def _row(self, index: int) -> Mapping[str, Any]:
        row = self._documents[index]
        if not isinstance(row, Mapping):
            raise BadRow("no_value", f"{self._name}, document {index}: is no row, but {type(row).__name__}")
        return row

    def _document(self, index: int) -> Document:
        found, where = self._documents[index], f"{self._name}, document {index}"
        if isinstance(found, Mapping) and self.form is not None:
            self._reading.name_unread_columns(found, self.form, where)
            return self.form.document(found, where)
        elif isinstance(found, str):
            return found
        elif isinstance(found, tuple) and len(found) == 2:
            is_target = np.asarray(found[1])
            ids = self._ids(found[0], where)
            if is_target.ndim != 1 or len(is_target) != len(ids):
                raise UserError(f"{where}: has {len(ids)} token ids, and {is_target.size} truth values for them")
            return Tokens(ids, is_target.astype(bool))
        return self._ids(found, where)

    def identity(self, index: int) -> str:
        return f"{self._name}:{index}"

    def _ids(self, found: Any, where: str) -> np.ndarray:
        try:
            ids = np.asarray(found)
        except ValueError as error:  # lists of different lengths
            raise UserError(f"{where}: is no list of token ids: {error}") from error
        if ids.ndim != 1 or len(ids) and ids.dtype.kind not in "iu":
            raise UserError(
                f"{where}: is {type(found).__name__}; it must be a text, a row, token ids, or a pair of token ids and"
                " whether each is learned"
            )
        limit = self._reading.tokenizer.vocab_size if self._reading.tokenizer else 0
        if len(ids) and (ids.min() < 0 or ids.max() >= limit):
            raise UserError(f"{where}: its token ids are not all from 0 to {limit - 1}, those of the tokenizer")
        return ids.astype(np.int64)


def _kind(document: Document) -> type | None:
    """Return the kind of a document that is packed whole, None of another; several contexts are of the kind of one."""
    if isinstance(document, (Tokens, Contexts)):
        return Tokens
    return Pair if isinstance(document, Pair) else None


def _kind_of(form: Form) -> type | None:
    """Return the kind of a form's documents."""
    if not form.is_whole:
        return None
    return Pair if isinstance(form, Preference) else Tokens
