"""State for a replica that heals: what is sent is what arrives, and nothing else is taken."""

import contextlib
import http.server
import io
import socket
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
    rest = {"schedule": {"num_steps_done": 7}} | rest
    return {"user": {"default": State(tensors(seed), rest)}, "torchft": {"step": 7, "batches_committed": 3}}


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Transport] = []

    def transport(token: str = "secret", mine: dict[str, Tensor] | None = None, seconds: float = 20) -> Transport:
        there = tensors(1) if mine is None else mine
        own = State(there, {"schedule": {"num_steps_done": 0}})
        made.append(Transport("127.0.0.1", token, lambda: own, timedelta(seconds=seconds)))
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
    sender, receiver = socket.socketpair()
    with sender, receiver, there.serving(7, sender) as served:
        assert served is not None
        ended = threading.Thread(target=there.disallow_checkpoint)
        ended.start()
        time.sleep(0.2)
        assert ended.is_alive() and not there.is_served()
        assert receiver.recv(1) == b"", "a receiver that reads slowly is cut off"
    ended.join(5)
    assert not ended.is_alive()


@pytest.fixture
def answering() -> Iterator[Any]:
    """Servers that know the token, if it is given, and answer anything."""
    made: list[http.server.HTTPServer] = []

    def serve(body: bytes, member: Transport | None = None, pause_s: float = 0.0) -> str:
        made.append(hostile(body, member, pause_s))
        return f"http://127.0.0.1:{made[-1].server_address[1]}"

    yield serve
    for server in made:
        server.shutdown()
        server.server_close()


def hostile(body: bytes, member: Transport | None, pause_s: float) -> http.server.HTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if member is not None:
                self.send_header("X-Proof", member.proof("has", self.headers["Authorization"].split()[0]))
            self.end_headers()
            with contextlib.suppress(OSError):
                for byte in body if pause_s else ():
                    time.sleep(pause_s)
                    self.wfile.write(bytes([byte]))
                self.wfile.write(b"" if pause_s else body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


GOOD = {"rest": {"schedule": {}}, "torchft": {"step": 7, "batches_committed": 3}}


def whole(rest: Any = GOOD) -> bytes:
    file = io.BytesIO()
    send(file.write, State(tensors(1), rest), lambda: True)
    return file.getvalue()


def test_who_answers_has_to_know_the_token_which_is_not_sent(make: Any, answering: Any) -> None:
    here = make()
    assert here.recv_checkpoint(1, answering(whole(), here), 7, timedelta(seconds=1))["torchft"]["step"] == 7
    for other in (None, make("another")):
        with pytest.raises(HealError, match="does not know the job's token"):
            here.recv_checkpoint(1, answering(whole(), other), 7, timedelta(seconds=1))
    # What is said to one address is of no use at another.
    asked = here.proof("asks", "http://127.0.0.1:1", 7, "nonce")
    assert here.is_asked_by_member(f"nonce {asked}", "7") is None
    assert here.is_asked_by_member(f"nonce {here.proof('asks', here.metadata(), 7, 'nonce')}", "7") == "nonce"


@pytest.mark.parametrize(
    "address", ["", "x", "http://[", "file:///etc/passwd", "https://127.0.0.1:1", "http://h:\u0661"]
)
def test_only_an_address_of_a_replica_is_asked(make: Any, address: str) -> None:
    with pytest.raises(HealError, match="no address of a replica"):
        make().recv_checkpoint(1, address, 7, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ({"rest": {}, "torchft": GOOD["torchft"]}, "schedule is not in both"),
        ({"rest": {"schedule": {}, "more": 1}, "torchft": GOOD["torchft"]}, "more is not in both"),
        ({"rest": {"schedule": 1}, "torchft": GOOD["torchft"]}, "schedule is a int, here a dict"),
        ({"rest": {"schedule": {}}, "torchft": {}}, "batches_committed is not in both"),
        ({"rest": {"schedule": {}}, "torchft": [["step", 1]]}, "torchft is a list, here a dict"),
        ({"rest": {"schedule": {}}, "torchft": {"step": float("nan"), "batches_committed": 1}}, "step is a float"),
        ({"rest": {"schedule": {}}, "torchft": {"step": 7, "batches_committed": -1}}, "negative"),
        ([], "is a list, not an object"),
    ],
)
def test_a_state_with_other_parts_is_refused_before_any_is_taken(
    make: Any, answering: Any, rest: Any, why: str
) -> None:
    here = make()
    with pytest.raises(HealError, match=why):
        here.recv_checkpoint(1, answering(whole(rest), here), 7, timedelta(seconds=1))


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
        struct.pack("<Q", 200_000) + b"[" * 200_000,  # nests too deeply
        b"\x80\x04\x95" + bytes(100),  # a pickle
    ],
)
def test_malformed_answers_are_one_error(make: Any, answering: Any, body: bytes) -> None:
    here = make()
    with pytest.raises(HealError, match="did not send the state of step 7") as error:
        here.recv_checkpoint(1, answering(body, here), 7, timedelta(seconds=1))
    assert "token" not in str(error.value) and len(str(error.value)) < 700


def test_it_takes_no_longer_than_its_limit_however_slowly_bytes_come(make: Any, answering: Any) -> None:
    here = make(seconds=1)  # all of it would take minutes
    with pytest.raises(HealError, match="heal_timeout_seconds"):
        here.recv_checkpoint(1, answering(whole(), here, pause_s=0.2), 7, timedelta(seconds=1))
