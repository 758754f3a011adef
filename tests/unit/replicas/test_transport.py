"""State for a replica that heals: what is sent is what arrives, and nothing else is taken."""

import http.server
import io
import json
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

pytest.importorskip("torchft", reason="replica groups need torchft")

from torchtitan_graph.replicas.transport import HealError, State, Transport, send

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (), (7,), (0, 4), (2, 3, 4), (1,)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    cast = (x > 0 if dtype == torch.bool else x.to(dtype) for x, dtype in zip(made, DTYPES, strict=True))
    found = {f"x{i}": x for i, x in enumerate(cast)}
    return found | {"turned": torch.randn(4, 6, generator=generator).T}


def given(seed: int = 0, **rest: Any) -> dict[str, Any]:
    return {"user": {"default": State(tensors(seed), rest)}, "torchft": {"step": 7, "batches_committed": 3}}


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Transport] = []

    def transport(token: str = "secret", mine: dict[str, Tensor] | None = None, seconds: float = 20) -> Transport:
        there = tensors(1) if mine is None else mine
        made.append(Transport("127.0.0.1", token, lambda: there, timedelta(seconds=seconds)))
        return made[-1]

    yield transport
    for each in made:
        each.disallow_checkpoint()
        each.close()


def receive(here: Transport, there: Transport, step: int = 7) -> Any:
    return here.recv_checkpoint(1, there.metadata(), step, timedelta(seconds=1))


def test_what_arrives_is_what_was_sent(make: Any) -> None:
    there, here = make(), make()
    there.send_checkpoint([1], 7, given(schedule={"num_steps_done": 7}), timedelta(seconds=1))
    state = receive(here, there)
    assert state["torchft"] == {"step": 7, "batches_committed": 3}
    received = state["user"]["default"]
    assert received.rest == {"schedule": {"num_steps_done": 7}}
    for name, x in tensors().items():
        assert received.tensors[name].dtype == x.dtype and received.tensors[name].shape == x.shape
        assert torch.equal(received.tensors[name].double(), x.double())


def test_what_is_sent_is_a_safetensors_file() -> None:
    file = io.BytesIO()
    send(file.write, State(tensors(), {"rest": {}}), lambda: True)
    read = load(file.getvalue())
    assert read.keys() == tensors().keys()
    for name, x in tensors().items():
        assert read[name].dtype == x.dtype and torch.equal(read[name].float(), x.float())


def test_a_request_waits_for_the_step_that_the_sender_does_not_know_of_yet(make: Any) -> None:
    there, here = make(), make()
    threading.Timer(0.3, there.send_checkpoint, [[1], 7, given(), timedelta(seconds=1)]).start()
    assert receive(here, there)["torchft"]["step"] == 7


def test_without_the_token_nothing_is_sent(make: Any) -> None:
    there, here = make("secret"), make("another")
    there.send_checkpoint([1], 7, given(), timedelta(seconds=1))
    with pytest.raises(HealError, match="403"):
        receive(here, there)


@pytest.mark.parametrize("change", ["dtype", "shape", "missing", "more"])
def test_another_state_is_refused_by_name(make: Any, change: str) -> None:
    mine = tensors()
    if change == "dtype":
        mine["x0"] = mine["x0"].double()
    elif change == "shape":
        mine["x0"] = torch.zeros(5, 3)
    elif change == "missing":
        del mine["x0"]
    else:
        mine = {"x0": mine.pop("x0"), "y": torch.zeros(2), **mine}
    there, here = make(), make(mine=mine)
    there.send_checkpoint([1], 7, given(), timedelta(seconds=1))
    with pytest.raises(HealError, match="not those of this rank: (x0|y) is"):
        receive(here, there)


def test_the_state_does_not_change_while_it_is_sent(make: Any) -> None:
    """A transfer that is cut fails, and only then may the state change."""
    big = {"x": torch.zeros(2**24)}
    there = make()
    state = {"user": {"default": State(big, {})}, "torchft": {}}
    there.send_checkpoint([1], 7, state, timedelta(seconds=1))
    with there.serving(7) as served:
        assert served is not None
        ended = threading.Thread(target=there.disallow_checkpoint)
        ended.start()
        time.sleep(0.2)
        assert ended.is_alive() and not there.is_served()
    ended.join(5)
    assert not ended.is_alive()


def answering(body: bytes, pause_s: float = 0.0) -> http.server.HTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
            time.sleep(pause_s)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def whole() -> bytes:
    file = io.BytesIO()
    send(file.write, State(tensors(1), {"rest": {}, "torchft": {}}), lambda: True)
    return file.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        whole()[:5],
        whole()[:-1],
        struct.pack("<Q", 2**62) + whole()[8:],
        struct.pack("<Q", 3) + b"{]}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}",
        b"\x80\x04\x95" + bytes(100),  # a pickle
    ],
)
def test_malformed_answers_are_one_error(make: Any, body: bytes) -> None:
    server, here = answering(body), make()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(HealError, match="did not send the state of step 7"):
        here.recv_checkpoint(1, address, 7, timedelta(seconds=1))
    server.shutdown()
    server.server_close()


def test_it_takes_no_longer_than_its_limit(make: Any) -> None:
    header = json.dumps({"__metadata__": {"state": '{"rest": {}, "torchft": {}}'}}).encode()
    server, here = answering(struct.pack("<Q", len(header)) + header, pause_s=0.5), make(seconds=-1)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(HealError, match="heal_timeout_seconds"):
        here.recv_checkpoint(1, address, 7, timedelta(seconds=1))
    server.shutdown()
    server.server_close()
