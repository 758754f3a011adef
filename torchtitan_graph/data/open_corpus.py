"""Open a corpus by the names in a job's configuration."""

import dataclasses
import difflib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.config.addresses import is_address, is_web, path_of
from torchtitan_graph.config.job import source_name
from torchtitan_graph.data.addresses import Listing, list_files
from torchtitan_graph.data.bad_rows import AllBad
from torchtitan_graph.data.corpus import Corpus, ShuffledCorpus, option_of
from torchtitan_graph.data.describe import log_corpus
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.hugging_face import is_saved_dataset, open_hub, open_saved
from torchtitan_graph.data.lines import JSON_SUFFIXES, JsonLines
from torchtitan_graph.data.mixture import Mixture
from torchtitan_graph.data.own import OwnSource, is_own
from torchtitan_graph.data.parquet import open_parquet
from torchtitan_graph.data.places import Place, find_place, local_path, same_place
from torchtitan_graph.data.remote_file import packed_together
from torchtitan_graph.data.row_forms import Text
from torchtitan_graph.data.shards import Shards, is_shards
from torchtitan_graph.data.sources import Chain, Source
from torchtitan_graph.data.special_tokens import warn_of_special_tokens
from torchtitan_graph.data.tables import TABLE_SUFFIXES, Table, is_table
from torchtitan_graph.data.texts import TextFiles, TextPieces, refuse_rows
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable

# Sources by path, format and columns; all else that says how rows are read is one for a job.
Opened = dict[tuple[str, str | None, tuple[tuple[str, str], ...]], Source]
TEXT = RowFormat()  # rows with a column of text, for tools without a tokenizer
_NAMES = ("stdlib", "c4", "c4_validation", "c4_test")
# fmt: off
TEXT_SUFFIXES = {
    ".txt", ".text", ".md", ".rst", ".tex", ".org", ".html", ".htm", ".xml", ".py", ".pyi", ".c", ".h", ".cc",
    ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb",
    ".php", ".swift", ".m", ".cs", ".r", ".jl", ".lua", ".pl", ".sh", ".sql", ".hs", ".ml", ".clj", ".ex", ".erl",
}
# fmt: on
_ROW_SUFFIXES = tuple(suffix for suffix in JSON_SUFFIXES if suffix != ".json")  # of a folder, which may have others
_ROWS = (*_ROW_SUFFIXES, *TABLE_SUFFIXES, ".parquet")
_KNOWN = f"Known are {', '.join(_ROWS)}, and as text {' '.join(sorted(TEXT_SUFFIXES))}"


def validation_corpus(config: JobConfig, of: job.ValidationSet | None = None) -> dict[str, Any]:
    """Return a job's validation corpus, or that of one of its validation.sets: dataset, dataset_path, sources and
    split, as arguments of `build_dataloader`.

    By default it is the held-out documents of the training corpus. A path of its own is used as a whole.
    """
    training, validation = config.training, of or config.validation
    if validation.dataset is None and validation.dataset_path is None:
        sources = training.sources
        return dict(dataset=training.dataset, dataset_path=training.dataset_path, sources=sources, split="validation")
    trained_on = [training.dataset_path, *(source.dataset_path for source in training.sources)]
    of_its_own = False
    if validation.dataset_path:
        own = same_place("validation.dataset_path", validation.dataset_path)
        of_its_own = own not in [same_place("training.dataset_path", path) for path in trained_on if path]
    return dict(
        dataset=validation.dataset or "",
        dataset_path=validation.dataset_path,
        sources=(),
        split="all" if of_its_own else "validation",
    )


def open_mixture(
    sources: Sequence[job.DataSource], split: str, seed: int, reading: RowFormat, opened: Opened | None = None
) -> Mixture:
    """Open a split of every entry of `training.sources`; raise UserError with the entry as `open_corpus` would."""
    corpora: dict[str, Corpus] = {}
    for number, source in enumerate(sources, 1):
        dataset, path = source.dataset or "", source.dataset_path
        try:
            corpus = open_corpus(dataset, path, split, seed, reading.of_source(source), opened)
        except UserError as error:
            raise UserError(f"training.sources, entry {number}: {error}") from error
        if reading.tokenizer and split != "validation":  # validation documents are like training's
            warn_of_special_tokens(corpus, reading.tokenizer, f"training.sources, entry {number}")
        corpora[source_name(source)] = corpus
    mixture = Mixture(corpora, [source.weight for source in sources])
    for name, weight, source in zip(mixture.names, mixture.weights, sources, strict=True):
        what = f"source {name}, {100 * weight:.2f} % of the rows"
        of = source.dataset or "", source.dataset_path, split, reading.of_source(source)
        log_corpus(what, corpora[name], *of)
    return mixture


def open_corpus(
    dataset: str,
    dataset_path: str | None,
    split: str,
    seed: int,
    reading: RowFormat = TEXT,
    opened: Opened | None = None,
) -> Corpus:
    """Open a split of the corpus at `dataset_path`, or else of the one named `dataset`.

    split: "train" and "validation" have no document in common; "all" is the whole corpus.
    reading: how its rows are read as documents.
    opened: what the job has opened already, which is opened once for several splits; this corpus is added.

    Raises UserError if there is no such corpus, it can't be read, or the split has no documents.
    """
    assert split in ("train", "validation", "all"), split
    option = option_of(split)
    if dataset_path:
        _refuse_page(f"{option}_path", dataset_path)
        place = find_place(f"{option}_path", dataset_path, reading.cache, reading.listed.get(dataset_path))
        with refuse_unreadable(f"{option}_path = {dataset_path!r}"):
            if is_saved_dataset(place.names):
                if place.is_remote:
                    raise UserError(
                        f"{option}_path = {dataset_path!r}: a dataset that `datasets` saved is read on this node alone:"
                        " copy the folder, or write the dataset as Parquet (to_parquet), which is read where it is"
                    )
                return open_saved(local_path(option, place.path), reading, split, seed)
            if is_shards(place.names):
                return _open_shards(place, split, seed, reading)
            key = place.path, reading.format, tuple(sorted(reading.columns.items()))
            source = (opened or {}).get(key) or _open_place(place, reading)
            if opened is not None:
                opened[key] = source
            if not len(source):
                raise UserError(f"{option}_path = {dataset_path!r}: holds no documents: it is empty. Name another")
            return ShuffledCorpus(source, split, seed)
    if is_own(dataset):
        return ShuffledCorpus(OwnSource(option, dataset, reading), split, seed)
    if dataset in ("stdlib", "c4_test"):
        if dataset == "c4_test":
            logger.info("%s = 'c4_test': the embedded corpus `stdlib` takes its place", option)
        reading.refuse_for_text(f"{option} = {dataset!r}", "is text")
        return ShuffledCorpus(_open_stdlib(), split, seed)
    _check_name(dataset, split)
    name = "allenai/c4:en" if dataset in ("c4", "c4_validation") else dataset
    return open_hub(name, reading, split, seed)


def list_corpora(config: JobConfig, to_validate: bool = False, is_new: bool = True) -> dict[str, Listing]:
    """Return the files at each address that a job names, so that all its ranks read the same, and one asks for them.

    to_validate: only those that validation reads.
    is_new: as in `retry_io`.

    Raises UserError, with the option, if there is none at one of them.
    """
    training, validation = config.training, config.validation
    found: dict[str, Listing] = {}

    def add(option: str, path: str | None) -> None:
        if path and is_address(path) and not path.startswith("file://") and path not in found:
            _refuse_page(option, path)
            has_answered = _bucket(path) in map(_bucket, found)
            found[path] = list_files(option, path, is_new and not has_answered)

    corpora: Sequence[job.Validation | job.ValidationSet] = validation.sets or [validation]
    if to_validate and all(each.dataset or each.dataset_path for each in corpora):
        training = job.Training()
    if not training.sources:
        add("training.dataset_path", training.dataset_path)
    for number, source in enumerate(training.sources, 1):
        add(f"training.sources, entry {number}: training.dataset_path", source.dataset_path)
    if validation.enable:
        add("validation.dataset_path", validation.dataset_path)
        for number, each in enumerate(validation.sets, 1):
            add(f"validation.sets, entry {number}: validation.dataset_path", each.dataset_path)
    return found


def _refuse_page(option: str, path: str) -> None:
    """Raise UserError for the address of a web server that may be that of a folder: it answers with a list as HTML."""
    name = path_of(path).lower()
    if is_web(path) and not name.endswith((*JSON_SUFFIXES, *_ROWS)) and not _is_known_text(name):
        raise UserError(
            f"{option} = {path!r}: is no file by its ending, and a web server has no folders that can be listed: name"
            f" its files one by one in training.sources, or copy them to this node or to an object store. {_KNOWN}"
        )


def _is_known_text(name: str) -> bool:
    return PurePath(name.lower()).suffix in TEXT_SUFFIXES


def _bucket(address: str) -> list[str]:
    return address.split("/")[:3]


def check_names(config: JobConfig) -> None:
    """Raise UserError if a corpus of the job has no path and an unknown name; nothing is opened."""
    training, validation = config.training, config.validation
    if not training.sources and not training.dataset_path:
        _check_name(training.dataset, "train")
    for number, source in enumerate(training.sources, 1):
        if not source.dataset_path:
            try:
                _check_name(source.dataset or "", "train")
            except UserError as error:
                raise UserError(f"training.sources, entry {number}: {error}") from error
    corpora: Sequence[job.Validation | job.ValidationSet] = validation.sets or [validation]
    for number, each in enumerate(corpora if validation.enable else ()):
        if each.dataset is not None and not each.dataset_path:
            with naming_set(number if validation.sets else None):
                _check_name(each.dataset, "validation")


@contextmanager
def naming_set(number: int | None) -> Iterator[None]:
    """Name an entry of validation.sets in the UserErrors raised inside; nothing for None."""
    try:
        yield
    except UserError as error:
        if number is None:
            raise
        raise UserError(f"validation.sets, entry {number + 1}: {error}") from error


def _check_name(dataset: str, split: str) -> None:
    option = option_of(split)
    if dataset == "c4_validation" and split == "train":
        raise UserError(f"{option} = 'c4_validation': these documents are for validation. Train on 'c4'.")
    if dataset in _NAMES or "/" in dataset or is_own(dataset):
        return
    nearest = difflib.get_close_matches(dataset, _NAMES, n=1)
    raise UserError(
        f"{option} = {dataset!r} is not a corpus{f'; did you mean {nearest[0]!r}?' if nearest else '.'} Legal are"
        f" {', '.join(_NAMES)}, a dataset of the Hugging Face hub as 'owner/name' or 'owner/name:config', a class of"
        f" your own as 'my_package.MyData', and any name together with {option}_path."
    )


def _open_shards(place: Place, split: str, seed: int, reading: RowFormat) -> Corpus:
    shards, path = Shards(place, reading.tokenizer), place.path
    reading.refuse_for_text(path, "holds token ids")
    if split == "all" or split in shards.splits:
        return ShuffledCorpus(shards, split if len(shards.splits) > 1 else "all", seed)
    raise UserError(
        f"{path}: holds only documents for {shards.splits[0]}, as they have splits of their own. Run"
        f" python -m torchtitan_graph.pretokenize --split {split} as well, and name that folder for {split}"
    )


def _open_stdlib() -> Source:
    """Open the running Python's own standard library: its .py files, without tests and fixtures."""
    root = Path(sysconfig.get_path("stdlib"))
    # pydoc_data is one generated table, larger than any module; config-* differs between machines.
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    readable = [file for file in sorted(files) if _is_text(file)]
    if not readable:
        raise UserError(
            f"training.dataset = 'stdlib': this Python has no sources in {root}. Set training.dataset_path to text."
        )
    return TextFiles(str(root), [DataFile(file, str(file.relative_to(root))) for file in readable])


def _open_place(place: Place, reading: RowFormat) -> Source:
    if place.is_folder:
        return _open_folder(place, reading)
    return _open_file(place.open(place.names[0]), reading)


def _open_file(file: DataFile, reading: RowFormat) -> Source:
    """Open one text, JSON lines, table or Parquet file."""
    name = file.name.lower()
    if name.endswith(JSON_SUFFIXES):
        return JsonLines(file, reading)
    if name.endswith(".parquet"):
        return open_parquet(file, reading)
    if is_table(name):
        return Table(file, reading)
    reading.refuse_for_text(file.path, "is a file of text")
    if reading.format != "text":
        refuse_rows([file], reading.option("format"))
    return TextPieces(file, reading.bad_rows(file.path))


def _open_folder(place: Place, reading: RowFormat) -> Source:
    """Open all files of a folder or a pattern that are text, JSON lines, tables or Parquet, by name."""
    root, names = place.path, place.names
    texts = [place.open(name) for name in names if _is_known_text(name)]
    texts = packed_together([file for file in texts if file.size], reading.cache)
    tables = [place.open(name) for name in names if name.lower().endswith(_ROWS)]
    if texts:
        with_rows = f", and {tables[0].name} with rows" if tables else ""
        reading.refuse_for_text(root, f"holds files of text ({texts[0].name}{with_rows})")
        if reading.format != "text":
            plain = [file for file in texts if file.name.lower().endswith((".txt", ".text"))]
            refuse_rows(plain[:100], reading.option("format"))  # each is opened, which takes long on a file server
    reading = dataclasses.replace(reading, folder_bytes=sum(file.size for file in (*texts, *tables)))
    parts: list[Callable[[RowFormat], Source]] = [partial(_open_file, file) for file in tables]
    if texts:
        parts.insert(0, lambda reading: TextFiles(root, texts, reading.bad_rows(root)))
    sources = _open_parts(parts, reading)
    if not sources:
        none = f"none of the {len(names)} files in it can be read as documents" if names else "the folder is empty"
        raise UserError(f"{root}: {none}. {_KNOWN}.")
    read = {file.name for file in (*texts, *tables)}
    if left_out := Counter(PurePath(name).suffix for name in names if name not in read):
        named = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in left_out.most_common(8))
        logger.info(f"{root}: {len(texts) + len(tables):,} files are read, {left_out.total():,} left out: {named}")
    files = [*texts[:1], *tables]
    return sources[0] if len(sources) == 1 else Chain(sources, [file.path for file in files])


def names_trained_on(place: Place) -> Sequence[str]:
    """Return the names of the files of a corpus that training reads."""
    if is_saved_dataset(place.names):
        part = "train/" if "dataset_dict.json" in place.names else ""
        return [name for name in place.names if name.startswith(part) and name.endswith(".arrow")]
    if is_shards(place.names) or not place.is_folder:
        return place.names
    return [name for name in place.names if _is_known_text(name) or name.lower().endswith(_ROWS)]


def _open_parts(parts: Sequence[Callable[[RowFormat], Source]], reading: RowFormat) -> list[Source]:
    """Open the parts of a folder; one without a row that can be read is read in the form of the first that has some.

    Raises AllBad if no part has any.
    """
    opened: dict[int, Source] = {}
    refused: list[AllBad] = []
    for number, part in enumerate(parts):
        try:
            opened[number] = part(reading)
        except AllBad as error:
            refused.append(error)
    form = next((getattr(source, "form", Text("text")) for source in opened.values() if len(source)), None)
    if form is None and refused:
        raise refused[0]
    if form is not None:
        reading = dataclasses.replace(reading, of_others=form)
        opened |= {number: part(reading) for number, part in enumerate(parts) if not len(opened.get(number, ()))}
    return [opened[number] for number in range(len(parts))]


def _is_text(file: Path) -> bool:
    try:
        return bool(file.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False
