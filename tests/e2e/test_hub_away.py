"""A hub that does not answer is waited for, and is no mistake of the user's."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import patched_train
import pytest
from runs import EAGER, train

pytestmark = pytest.mark.slow  # the hub's own library tries for half a minute


class Busy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request."""


@pytest.fixture
def busy_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_hub_that_is_busy(busy_hub: str, tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path / "run"), "--training.dataset", "owner/name", *EAGER]
    env = {"HF_ENDPOINT": busy_hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    code, output = train(*options, patch=patched_train.have_no_patience, **env)
    assert code == 6, output
    assert "training.dataset = 'owner/name': can't be streamed from the Hugging Face hub" in output
    assert "storage is unavailable; start the run again" in output
