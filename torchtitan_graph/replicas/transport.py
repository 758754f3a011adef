"""State for a replica that heals: served over HTTP by a living one, as a safetensors file whose text is JSON.

Nothing that comes over the network is unpickled, and nothing is taken that this rank does not expect: names, dtypes,
shapes and so the number of bytes have to be those of its own state. Each request carries the job's token. torchft's own
transport unpickles what it receives, and listens on every address.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchft.checkpointing import CheckpointTransport

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


class State(NamedTuple):
    """A rank's state: tensors by name, in place where they are its own, and what can be written as JSON."""

    tensors: dict[str, Tensor]
    rest: dict[str, Any]


class HealError(RuntimeError):
    """The state of another replica could not be received; this rank's own is as it was."""


class Transport(CheckpointTransport[dict[str, Any]]):
    """Serves this rank's live state while `send_checkpoint` allows it, and receives that of another replica's."""

    def __init__(self, host: str, token: str, tensors: Callable[[], dict[str, Tensor]], timeout: timedelta) -> None:
        """Listen on `host`, at a free port.

        Args:
            tensors: returns this rank's state, which is received in the same layout.
            timeout: the most that receiving a state may take.
        """
        self._token, self._tensors, self._timeout = token, tensors, timeout
        self._served: tuple[int, State] | None = None
        self._changed, self._sending = threading.Condition(), 0
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
            self._served = step, _flat(state_dict)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Serve nothing more; when this returns, the state may change. A transfer that runs is cut."""
        with self._changed:
            self._served = None
            self._changed.wait_for(lambda: self._sending == 0)

    @contextlib.contextmanager
    def serving(self, step: int) -> Iterator[State | None]:
        """Yield the state of a step, None if it is not served soon; it does not change inside the context."""
        with self._changed:
            # The others may have learned of the quorum before this replica has.
            self._changed.wait_for(lambda: self._served is not None and self._served[0] >= step, _SERVED_WITHIN_S)
            served = self._served[1] if self._served is not None and self._served[0] == step else None
            self._sending += 1
        try:
            yield served
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def is_served(self) -> bool:
        return self._served is not None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return the state of `step` from the address `metadata`, all of it in memory of its own.

        Raises HealError.
        """
        begin = time.monotonic()
        request = urllib.request.Request(f"{metadata}/{step}", headers={"Authorization": f"Bearer {self._token}"})
        open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # no proxy is between ranks
        try:
            with open_url(request, timeout=_SILENT_S) as response:
                state = receive(response, self._tensors(), begin + self._timeout.total_seconds())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HealError(f"{metadata} did not send the state of step {step}: {error}") from error
        self.last_seconds = time.monotonic() - begin
        self.seconds += self.last_seconds
        return _nested(state)

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: this outlives torchft's manager, which calls it."""

    def close(self) -> None:
        """Listen no longer."""
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


def receive(response: http.client.HTTPResponse, mine: Mapping[str, Tensor], until: float) -> State:
    """Read a state from a response: tensors as `mine`, in the host's memory, by the time `until` of the clock.

    Raises ValueError if it is not such a state, TimeoutError.
    """
    (size,) = struct.unpack("<Q", _read(response, 8, until))
    if size > _MOST_TEXT:
        raise ValueError(f"its header has {size:,} bytes; at most {_MOST_TEXT:,} are read")
    header = json.loads(_read(response, size, until))
    try:
        rest = json.loads(header.pop("__metadata__")["state"])
        rest = {"rest": dict(rest["rest"]), "torchft": dict(rest["torchft"])}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of a replica's state: {error!r}") from error
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
            _read_into(response, data[begin : begin + _PIECE], until)
    return State(tensors, rest)


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


def _read(response: http.client.HTTPResponse, size: int, until: float) -> bytes:
    data = bytearray(size)
    _read_into(response, memoryview(data), until)
    return bytes(data)


def _read_into(response: http.client.HTTPResponse, data: memoryview, until: float) -> None:
    while data:
        if time.monotonic() > until:
            raise TimeoutError("it takes longer than fault_tolerance.heal_timeout_seconds")
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
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {transport._token}".encode()):
                logger.warning(
                    f"a request for this replica's state from {self.client_address[0]} lacks the job's token"
                )
                self.send_error(403)
                return
            step = self.path[1:]
            with transport.serving(int(step) if step.isdecimal() and len(step) < 20 else -1) as state:
                if state is None:
                    self.send_error(404, "this step's state is not served")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.end_headers()
                send(self.wfile.write, state, transport.is_served)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing of a request that is served."""

    return Handler
