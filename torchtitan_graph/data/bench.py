"""What a node can feed: a job's training data, read by as many processes as it has ranks, without a model."""

import dataclasses
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

from torchtitan_graph.config import job
from torchtitan_graph.data.addresses import Listing
from torchtitan_graph.data.loader import training_loader
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.open_corpus import list_corpora, names_trained_on
from torchtitan_graph.data.places import find_place
from torchtitan_graph.data.remote_file import unkept_chunks
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging


class _Rank(NamedTuple):
    """What a process is to read: as one of the node's ranks."""

    config: job.JobConfig
    listed: dict[str, Listing]
    number: int
    num_ranks: int
    seconds: float


class Fed(NamedTuple):
    """What one rank read: seconds until its corpus was open and until its first batch, then what it read in `seconds`
    after that."""

    open_s: float
    first_s: float
    seconds: float
    rows: int
    tokens: int
    documents: int
    bytes_read: int


def bench(config: job.JobConfig, num_ranks: int, seconds: float) -> list[str]:
    """Return a report of what a node's ranks read within some seconds, all at the same time.

    Raises UserError if the data can't be read.
    """
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(num_ranks)
    listed = list_corpora(dataclasses.replace(config, validation=job.Validation()))
    ranks: dict[Connection, SpawnProcess] = {}
    for rank in range(num_ranks):
        here, there = spawn.Pipe(duplex=False)
        reader = _Rank(config, listed, rank, num_ranks, seconds)
        ranks[here] = spawn.Process(target=_feed, args=(reader, together, there), name=f"rank {rank}")
        ranks[here].start()
        there.close()
    try:
        found = _receive(ranks)
    finally:
        for process in ranks.values():
            process.kill()
            process.join()
    if errors := [each for each in found if isinstance(each, str)]:
        raise UserError(max(errors, key=len))  # others say nothing
    fed = [each for each in found if isinstance(each, Fed)]
    return _in_words(fed, config, _files_alone(config, listed, seconds))


def _receive(ranks: dict[Connection, SpawnProcess]) -> list["Fed | str"]:
    """Return what each process sends; raise UserError as soon as one of them died: the others would wait for it."""
    found, waiting = [], [*ranks]
    while waiting:
        for here in wait(waiting):
            assert isinstance(here, Connection)
            waiting.remove(here)
            try:
                found.append(here.recv())
            except EOFError as error:
                ranks[here].join()
                code, why = ranks[here].exitcode or 0, "; its error is above"
                if code < 0:
                    why = f", killed by {signal.Signals(-code).name}"
                if code == -signal.SIGKILL:
                    why += ": if this machine was out of memory, set fewer --ranks or training.dataloader.num_workers"
                raise UserError(f"--bench: the process of {ranks[here].name} died{why}") from error
    return found


def _files_alone(config: job.JobConfig, listed: dict[str, Listing], seconds: float) -> float:
    """Return the bytes a second at which the files that training reads come, read one after another for some seconds
    and not kept; 0 where none is named."""
    sources = config.training.sources
    paths = [each.dataset_path for each in sources if each.weight] if sources else [config.training.dataset_path]
    places = [find_place("training.dataset_path", path, NodeCache(), listed.get(path)) for path in paths if path]
    files = (place.open(name) for place in places for name in names_trained_on(place))
    chunks = (chunk for file in files for chunk in unkept_chunks(file))
    began, taken, num_bytes = time.perf_counter(), 0.0, 0
    for chunk in chunks:
        num_bytes, taken = num_bytes + len(chunk), time.perf_counter() - began
        if taken > seconds:
            break
    return num_bytes / taken if num_bytes else 0.0


def _in_words(found: list[Fed], config: job.JobConfig, alone: float) -> list[str]:
    workers, ranks = config.training.dataloader.num_workers, len(found)
    taken = max(each.seconds for each in found)
    rows, tokens, documents, bytes_read = (sum(each[i] for each in found) / taken for i in (3, 4, 5, 6))
    limit = f", enough for {tokens * alone / bytes_read:,.0f} tokens/s" if bytes_read else ""
    by = f"{ranks} rank{'s' * (ranks > 1)}" + (f" with {workers} worker{'s' * (workers > 1)} each" if workers else "")
    return [
        f"opened after {max(each.open_s for each in found):.2f} s, first batch after"
        f" {max(each.first_s for each in found):.2f} s",
        f"then {by} read in {taken:.1f} s: {documents:,.0f} documents/s, {rows:,.0f} rows/s, {tokens:,.0f} tokens/s,"
        f" {bytes_read / 1e6:,.2f} MB/s",
        *([f"the files alone, read one after another: {alone / 1e6:,.0f} MB/s{limit}"] if alone else []),
    ]


def _feed(rank: _Rank, together: Barrier, there: Connection) -> None:
    """Read as one rank, and send a `Fed`, or the message of a UserError."""
    if rank.number == 0:
        init_logging()
    try:
        there.send(_read(rank, together))
    except UserError as error:
        together.abort()
        there.send(str(error))
    except BaseException:
        together.abort()
        raise


def _read(rank: _Rank, together: Barrier) -> Fed:
    training = rank.config.training
    tokenizer = load_tokenizer(rank.config.model.hf_assets_path)
    began = time.perf_counter()
    data = training_loader(
        rank.config,
        tokenizer,
        rank.listed,
        local_batch_size=training.local_batch_size,
        dp_rank=rank.number,
        dp_degree=rank.num_ranks,
        num_workers=training.dataloader.num_workers,
    )
    opened = time.perf_counter()
    next(data)
    first = time.perf_counter()
    try:
        together.wait()
    except Exception as error:  # another rank failed first, and reports its own error
        raise UserError("") from error
    before = data.documents, data.bytes_read
    begin, rows, tokens = time.perf_counter(), 0, 0
    while (taken := time.perf_counter() - begin) < rank.seconds:
        batch = next(data)
        rows, tokens = rows + len(batch.tokens_BL), tokens + batch.tokens_BL.numel()
    documents, bytes_read = data.documents - before[0], data.bytes_read - before[1]
    return Fed(opened - began, first - began, taken, rows, tokens, documents, bytes_read)
