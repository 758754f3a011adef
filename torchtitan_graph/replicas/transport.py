"""State for a replica that heals: served over HTTP by a living one, as a safetensors file whose text is JSON.

Nothing that comes over the network is unpickled, and nothing is taken that this rank does not expect: names, dtypes,
shapes and so the number of bytes have to be those of its own state. Both sides prove that they know the job's token,
which is not sent. torchft's own transport unpickles what it receives, and listens on every address.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchft.checkpointing import CheckpointTransport

from torchtitan_graph.errors import printable
from torchtitan_graph.log import logger

_NAMES = {  # of dtypes in the safetensors format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MOST_TEXT = 64 * 2**20  # bytes of the header: names, and the state that is no tensor
_PIECE = 2**24  # bytes that are sent or received at a time
_SERVED_WITHIN_S = 10.0
_SILENT_S = 30.0  # a connection that moves no byte for so long is given up
_PROOF = "X-Proof"  # the header that proves who answers
_OPTIONAL = {"best"}  # parts of the state that a replica may not have yet


class State(NamedTuple):
    """A rank's state: tensors by name, in place where they are its own, and what can be written as JSON."""

    tensors: dict[str, Tensor]
    rest: dict[str, Any]


class HealError(RuntimeError):
    """The state of another replica could not be received; this rank's own is as it was."""


class Transport(CheckpointTransport[dict[str, Any]]):
    """Serves this rank's live state while `send_checkpoint` allows it, and receives that of another replica's."""

    def __init__(self, host: str, token: str, own: Callable[[], State], timeout: timedelta) -> None:
        """Listen on `host`, at a free port.

        Args:
            own: returns this rank's state; what is received has to have its names and layout.
            timeout: the most that receiving a state may take.
        """
        self._token, self._own, self._timeout = token.encode(), own, timeout
        self._connections: set[socket.socket] = set()  # that send
        self._served: tuple[int, State] | None = None
        self._changed, self._sending, self._awaited = threading.Condition(), 0, 0
        self.is_receiving = False
        self.seconds = self.last_seconds = 0.0  # that receiving has taken in all, and the last time
        self._server = _Server((host, 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="heal", daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return the address that others receive the state from."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Serve the state of `step`, whose tensors are not copied, until `disallow_checkpoint`."""
        with self._changed:
            self._served, self._awaited = (step, _flat(state_dict)), len(dst_ranks)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Serve nothing more; when this returns, the state may change. A transfer that runs is cut."""
        with self._changed:
            self._served = None
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its receiver may read slowly
            self._changed.wait_for(lambda: self._sending == 0)

    def finish(self) -> None:
        """Serve nothing more, once those that were to receive the state have it, or don't come for it."""
        until = time.monotonic() + _SERVED_WITHIN_S
        with self._changed:
            while self._served and self._awaited > 0 and (self._sending or time.monotonic() < until):
                self._changed.wait(0.1)
        self.disallow_checkpoint()

    @contextlib.contextmanager
    def serving(self, step: int, connection: socket.socket) -> Iterator[State | None]:
        """Yield the state of a step, to be sent over `connection`; None if it is not served soon. It does not change
        inside the context."""
        with self._changed:
            # The others may have learned of the quorum before this replica has.
            self._changed.wait_for(lambda: self._served is not None and self._served[0] >= step, _SERVED_WITHIN_S)
            served = self._served[1] if self._served is not None and self._served[0] == step else None
            self._sending += 1
            self._connections.add(connection)
        try:
            yield served
            self._awaited -= served is not None
        finally:
            with self._changed:
                self._sending -= 1
                self._connections.discard(connection)
                self._changed.notify_all()

    def is_served(self) -> bool:
        return self._served is not None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return the state of `step` from the address `metadata`, all of it in memory of its own.

        Raises HealError.
        """
        begin, self.is_receiving = time.monotonic(), True
        try:
            state = self._ask(metadata, step, self._timeout.total_seconds())
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            why = f"{metadata:.100} did not send the state of step {step}: {error!s:.500}"
            raise HealError(printable(why).replace("\n", " ")) from error
        finally:
            self.is_receiving = False
        self.last_seconds = time.monotonic() - begin
        self.seconds += self.last_seconds
        return _nested(state)

    def _ask(self, metadata: str, step: int, within_s: float) -> State:
        if (parts := re.fullmatch(r"http://([\w.-]+):([0-9]{1,5})", metadata, re.ASCII)) is None:
            raise ValueError("that is no address of a replica")
        connection = http.client.HTTPConnection(parts[1], int(parts[2]), timeout=min(_SILENT_S, within_s))
        with contextlib.closing(connection):
            connection.connect()
            line: socket.socket = connection.sock
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # however slowly bytes come

            clock = threading.Timer(within_s, end)
            clock.daemon = True
            clock.start()
            try:
                nonce = secrets.token_hex(16)
                asked = self.proof("asks", metadata, step, nonce)
                connection.request("GET", f"/{step}", headers={"Authorization": f"{nonce} {asked}"})
                response = connection.getresponse()
                if response.status != http.HTTPStatus.OK:
                    raise ValueError(f"it answers {response.status} {response.reason}")
                if not hmac.compare_digest(response.getheader(_PROOF, "").encode(), self.proof("has", nonce).encode()):
                    raise ValueError("it does not know the job's token")
                with response:
                    return receive(response, self._own())
            except (OSError, http.client.HTTPException) as error:
                if is_late.is_set():
                    raise TimeoutError("it takes longer than fault_tolerance.heal_timeout_seconds") from error
                raise
            finally:
                clock.cancel()

    def proof(self, *words: object) -> str:
        """Return what only one that knows the job's token can say of some words."""
        return hmac.digest(self._token, " ".join(map(str, words)).encode(), "sha256").hex()

    def is_asked_by_member(self, authorization: str, step: str) -> str | None:
        """Return the nonce of a request by one that knows the job's token, and means this address; else None."""
        nonce, _, proof = authorization.partition(" ")
        expected = self.proof("asks", self.metadata(), step, nonce)
        return nonce if hmac.compare_digest(proof.encode(), expected.encode()) else None

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: this outlives torchft's manager, which calls it."""

    def close(self) -> None:
        """Listen no longer."""
        self.disallow_checkpoint()
        self._server.shutdown()
        self._server.server_close()


def send(write: Callable[[bytes | memoryview], object], state: State, goes_on: Callable[[], bool]) -> None:
    """Write a state as a safetensors file, piece by piece; raise ConnectionAbortedError once it does not go on."""
    write(_header(state.tensors, json.dumps(state.rest)))
    for tensor in state.tensors.values():
        data = _bytes_of(tensor.cpu())
        for begin in range(0, len(data), _PIECE):
            if not goes_on():
                raise ConnectionAbortedError("the state changes")
            write(data[begin : begin + _PIECE])


def receive(response: http.client.HTTPResponse, own: State) -> State:
    """Read a state from a response: with the names and the layout of `own`, in the host's memory.

    Raises ValueError if it is not such a state, OSError.
    """
    mine = own.tensors
    (size,) = struct.unpack("<Q", _read(response, 8))
    if size > _MOST_TEXT:
        raise ValueError(f"its header has {size:,} bytes; at most {_MOST_TEXT:,} are read")
    header = json.loads(_read(response, size))
    try:
        rest = json.loads(header.pop("__metadata__")["state"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of a replica's state: {error!r}") from error
    counters = {"step": 0, "batches_committed": 0}
    _expect_kinds("its state", rest, {"rest": {}, "torchft": {}})
    _expect_kinds("the manager's state", rest["torchft"], counters)
    _expect_kinds("the state of training", rest["rest"], json.loads(json.dumps(own.rest)))
    if min(rest["torchft"].values()) < 0:
        raise ValueError("the manager's state has a negative number of steps")
    expected = _entries(mine)
    if header != expected:
        every = {**expected, **header}
        name = next((n for n in every if _kind(header.get(n)) != _kind(expected.get(n))), next(iter(every), "none"))
        raise ValueError(
            f"its tensors are not those of this rank: {name} is {_kind(header.get(name))}, here"
            f" {_kind(expected.get(name))}; all replicas need the same configuration"
        )
    tensors = {}
    for name, tensor in mine.items():
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        data = _bytes_of(tensors[name])
        for begin in range(0, len(data), _PIECE):
            _read_into(response, data[begin : begin + _PIECE])
    return State(tensors, rest)


def _expect_kinds(what: str, found: Any, own: dict[str, Any]) -> None:
    """Raise ValueError unless a part of a state has the keys of this rank's own, with values of their kinds."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a {type(found).__name__}, not an object")
    if differ := (found.keys() ^ own.keys()) - _OPTIONAL:
        raise ValueError(f"{what}: {min(differ)} is not in both; all replicas need the same configuration")
    for key in found.keys() & own.keys():
        if type(found[key]) is not type(own[key]):
            raise ValueError(f"{what}: {key} is a {type(found[key]).__name__}, here a {type(own[key]).__name__}")


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries of a safetensors header."""
    entries, end = {}, 0
    for name, x in tensors.items():
        begin, end = end, end + x.numel() * x.element_size()
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    return entries


def _kind(entry: Any) -> Any:
    """Return an entry without its place in the file."""
    return {key: entry[key] for key in entry if key != "data_offsets"} if isinstance(entry, dict) else entry


def _header(tensors: Mapping[str, Tensor], text: str) -> bytes:
    header = json.dumps({"__metadata__": {"state": text}, **_entries(tensors)}).encode()
    return struct.pack("<Q", len(header)) + header


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor in the host's memory, for reading, and for writing where it is contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _read(response: http.client.HTTPResponse, size: int) -> bytes:
    data = bytearray(size)
    _read_into(response, memoryview(data))
    return bytes(data)


def _read_into(response: http.client.HTTPResponse, data: memoryview) -> None:
    while data:
        if not (number := response.readinto(data)):
            raise ConnectionError("the connection ended early")
        data = data[number:]


def _flat(state: dict[str, Any]) -> State:
    """Return a state that torchft's manager gives: its own counters, and what this package's function returned."""
    user: State = state["user"]["default"]
    return State(user.tensors, {"rest": user.rest, "torchft": state["torchft"]})


def _nested(state: State) -> dict[str, Any]:
    """Return a state in the form that torchft's manager takes."""
    return {"user": {"default": State(state.tensors, state.rest["rest"])}, "torchft": state.rest["torchft"]}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the receiver reports what failed."""


def _handler(transport: Transport) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _SILENT_S  # of the connection

        def do_GET(self) -> None:
            step = self.path[1:]
            nonce = transport.is_asked_by_member(self.headers.get("Authorization", ""), step)
            if nonce is None:
                logger.warning(
                    f"a request for this replica's state from {self.client_address[0]} lacks the job's token"
                )
                self.send_error(403)
                return
            number = int(step) if step.isdecimal() and len(step) < 20 else -1
            with transport.serving(number, self.connection) as state:
                if state is None:
                    self.send_error(404, "this step's state is not served")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header(_PROOF, transport.proof("has", nonce))
                self.end_headers()
                send(self.wfile.write, state, transport.is_served)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing of a request that is served."""

    return Handler
