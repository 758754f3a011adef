"""An S3 server on loopback, moto's, and a proxy before it that fails, stalls, resets and throttles as planned.

    def test_it(store):                     # the fixture, from conftest.py: an empty bucket that fsspec finds
        store.put("run/config.toml", b"...")
        store.plan = at_first(["503", "stall"])
        fsspec.open(f"{store.address}/run/config.toml")         # in this process
        subprocess.run(..., env=os.environ | store.env())       # in another, which imports fsspec later
        run_on(2, work, store.env())        # in one that has imported fsspec, `with s3.found_by(env)`

Each request takes the next action of the plan:

    pass      is answered as the server answers
    503, 500, 429, 404 ...  is not passed on: that status, with S3's own code
    reset     is not passed on: the connection is reset
    stall     is not passed on: nothing is answered for STALL_S seconds
    half      is done, and half of the answer's body is sent
    lost      is done, and the connection is reset without an answer
    slow      is done, and the answer comes in pieces, with pauses, over about a second
"""

import contextlib
import functools
import http.client
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import fsspec
import pytest

BUCKET = "bucket"
STALL_S = 3.0
TIMEOUT_S = 1.0  # of the client, for one read
ACTIONS = ("503", "500", "429", "reset", "stall", "half", "lost", "slow")
_CODES = {404: "NoSuchBucket", 403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
_KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class Request(NamedTuple):
    """A request that came to the proxy: its method, its path with its query, and what was done with it."""

    method: str
    path: str
    action: str

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path


class Store:
    """A server and the proxy before it. `plan` and `requests` may be replaced at any time."""

    address = f"s3://{BUCKET}"

    def __init__(self, port: int) -> None:
        self.plan: Iterator[str] = itertools.repeat("pass")
        self.requests: list[Request] = []
        self._port, self._lock = port, threading.Lock()
        self._proxy = _Server(("127.0.0.1", 0), functools.partial(_Proxy, self, port))
        self.endpoint = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self._thread = threading.Thread(target=self._proxy.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.reset()

    def reset(self) -> None:
        """Empty the server, so that it has one empty bucket, and end the plan."""
        self.plan, self.requests = itertools.repeat("pass"), []
        self._send("POST", "/moto-api/reset")
        self.make_bucket()

    def put(self, key: str, data: bytes) -> None:
        """Write an object, past the proxy."""
        self._send("PUT", f"/{BUCKET}/{key}", data)

    def get(self, key: str) -> bytes:
        """Read an object, past the proxy."""
        return self._send("GET", f"/{BUCKET}/{key}")

    def make_bucket(self) -> None:
        self._send("PUT", f"/{BUCKET}")

    def delete_bucket(self) -> None:
        """Delete the bucket and its objects."""
        for key in self.list_keys():
            self._send("DELETE", f"/{BUCKET}/{key}")
        self._send("DELETE", f"/{BUCKET}")

    def list_keys(self) -> list[str]:
        """Return the keys of all objects, past the proxy."""
        text = self._send("GET", f"/{BUCKET}?list-type=2&max-keys=100000").decode()
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]

    def env(self) -> dict[str, str]:
        """Return the environment of a process that is to find this server: short timeouts, no tries of its client's."""
        client = {"connect_timeout": TIMEOUT_S, "read_timeout": TIMEOUT_S, "retries": {"total_max_attempts": 1}}
        # By its endpoint, which is another for each server, fsspec keeps one client apart from another.
        options = {"endpoint_url": self.endpoint, "config_kwargs": client}
        return {**_KEYS, "AWS_ENDPOINT_URL": self.endpoint, "FSSPEC_S3": json.dumps(options)}

    def next_action(self, method: str, path: str) -> str:
        with self._lock:
            action = next(self.plan)
            self.requests.append(Request(method, path, action))
        return action

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._thread.join()

    def _send(self, method: str, path: str, data: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, data, {"Authorization": _SIGNED})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, (method, path, content)
        return content


# moto routes by the service that a signature names, and checks none.
_SIGNED = "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@contextlib.contextmanager
def found_by(env: dict[str, str]) -> Iterator[None]:
    """Point fsspec in this process at the server of `Store.env`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "s3", json.loads(env["FSSPEC_S3"]))
        fsspec.filesystem("s3").invalidate_cache()
        yield


@contextlib.contextmanager
def serve_s3() -> Iterator[Store]:
    """Start a server in a process of its own, which ends with this one."""
    words = [sys.executable, __file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            store = Store(int(server.stdout.readline()))
            try:
                yield store
            finally:
                store.close()
        finally:
            server.stdin.close()  # the server ends


def at_first(actions: Iterable[str], then: str = "pass") -> Iterator[str]:
    """Return a plan: these actions, and for all later requests `then`."""
    return itertools.chain(actions, itertools.repeat(then))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback when a client disconnects."""


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, store: Store, port: int, *arguments: Any) -> None:
        self.store, self.port = store, port
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no request."""

    def _handle(self) -> None:
        action = self.store.next_action(self.command, self.path)
        if action == "reset":
            return self._reset()
        body = self._body()
        if action == "stall":
            time.sleep(STALL_S)
            return self._reset()
        if action.isdecimal():
            return self._refuse(int(action))
        status, reason, headers, content = self._pass_on(body)
        if action == "lost":
            return self._reset()
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if action == "slow":
            step = max(1, len(content) // 4)
            for start in range(0, len(content), step):
                self.wfile.write(content[start : start + step])
                self.wfile.flush()
                time.sleep(TIMEOUT_S / 4)
            return
        self.wfile.write(content[: len(content) // 2] if action == "half" else content)
        if action == "half":
            self.wfile.flush()
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return body

    def _pass_on(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        left_out = {"transfer-encoding", "content-length", "expect", "connection"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        try:
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in ("connection", *_LENGTH)]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        return answer.status, answer.reason, [*kept, ("Content-Length", length or str(len(content)))], content

    def _refuse(self, status: int) -> None:
        code = _CODES.get(status, "Unknown")
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planned</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


_LENGTH = ("content-length", "transfer-encoding")


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    out, sys.stdout = sys.stdout, sys.stderr
    print(server.get_host_and_port()[1], file=out, flush=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (its log)
    sys.stdin.read()  # until the process that started this one ends
    server.stop()


if __name__ == "__main__":
    _serve()
