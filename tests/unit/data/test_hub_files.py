"""Files of the Hugging Face hub (`hf://`) are read by ranges, once, from a server that speaks what the hub does."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs

import fsspec
import pytest

from torchtitan_graph.data import parquet, remote_file, sources
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.errors import UserError

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow  # the hub's own library waits a second after a failure
TEXTS = [f"document {i} " * (1 + i % 30) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


class Hub(BaseHTTPRequestHandler):
    """Answers for the dataset owner/name, whose files are `files`."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}
    parts: list[tuple[int, int]] = []  # that were asked for, of all files
    plan: list[int] = []  # statuses of the next answers with a part

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request."""

    def do_GET(self) -> None:
        path, asked = self.path.partition("?")[0], self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if found := re.fullmatch(r"/api/datasets/owner/name/(tree|paths-info)/main/?(.*)", path):
            names = json.loads(asked)["paths"] if asked.startswith(b"{") else parse_qs(asked.decode()).get("paths", [])
            below = [name for name in self.files if found[2] == "" or name.startswith(f"{found[2]}/")]
            listed = below if found[1] == "tree" else [name for name in names if name in self.files]
            self.answer([self.entry(name) for name in listed])
        elif path.startswith("/api/datasets/owner/name"):
            self.answer({"id": "owner/name", "sha": "c" * 40, "private": False, "tags": [], "siblings": []})
        elif (found := re.fullmatch(r"/datasets/owner/name/resolve/main/(.*)", path)) and found[1] not in self.files:
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        elif found:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.parts.append((first, last + 1))
            status = self.plan.pop(0) if self.plan else 206
            self.answer(self.files[found[1]][first : last + 1] if status == 206 else b"", status)
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_POST = do_HEAD = do_GET

    def entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def answer(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, each in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in [("files", {}), ("parts", []), ("plan", [])]:
        monkeypatch.setattr(Hub, name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": endpoint})
        yield Hub
        server.shutdown()
        thread.join()


def parquet_of(path: Path) -> bytes:
    arrow, written = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pictures = [random.Random(i).randbytes(5000) for i in range(len(TEXTS))]
    written.write_table(arrow.table({"picture": pictures, "text": TEXTS}), path, row_group_size=100)
    return path.read_bytes()


@pytest.mark.parametrize("address", ["hf://datasets/owner/name", "hf://datasets/owner/name/data/*.jsonl"])
def test_blocks_of_a_file_of_the_hub_are_read_once(
    hub: type[Hub], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "CHUNK", 10_000)
    hub.files["data/lines.jsonl"] = LINES
    hub.plan = [206, 503, 206]
    assert [*open_corpus("", address, "all", 0).source] == TEXTS
    blocks = [(start, min(start + 10_000, len(LINES))) for start in range(0, len(LINES), 10_000)]
    assert len(hub.parts) == len(blocks) + 1 and {*hub.parts} == {*blocks}, "one that failed is asked for again"
    hub.parts.clear()
    assert [*open_corpus("", address, "all", 0).source] == TEXTS and not hub.parts
    hub.files["data/lines.jsonl"] = LINES.replace(b"o", b"0")
    assert open_corpus("", address, "all", 0).source[7] == TEXTS[7].replace("o", "0"), "another version"


def test_of_parquet_of_the_hub_the_used_column_alone_is_read(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GAP", 500)
    hub.files["data/wide.parquet"] = parquet_of(tmp_path / "wide.parquet")
    assert [*open_corpus("", "hf://datasets/owner/name/data/*.parquet", "all", 0).source] == TEXTS
    read = sum(end - start for start, end in hub.parts)
    assert 0 < read < len(hub.files["data/wide.parquet"]) / 5


def test_what_is_not_kept_of_the_hub_is_read_without_its_library_s_read_ahead(hub: type[Hub], tmp_path: Path) -> None:
    hub.files["lines.jsonl"] = LINES
    reading = RowFormat(cache=NodeCache(str(tmp_path / "small"), 4000))
    source = open_corpus("", "hf://datasets/owner/name/lines.jsonl", "all", 0, reading).source
    hub.parts.clear()
    assert source[150] == TEXTS[150] and source[50] == TEXTS[50]
    assert sum(end - start for start, end in hub.parts) < 3 * max(map(len, TEXTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.update({"lines.jsonl": LINES.replace(b"o", b"0")}), "was written since it was opened"),
        (lambda files: files.update({"lines.jsonl": LINES[:-9]}), "bytes when it was opened"),
        (lambda files: files.clear(), "was deleted while the run reads it"),
    ],
)
def test_a_file_of_the_hub_that_changes_is_named(
    hub: type[Hub],
    tmp_path: Path,
    change: Callable[[dict[str, bytes]], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_file, "_CHECK_S", 0.0)
    hub.files["lines.jsonl"] = LINES
    reading = RowFormat(cache=NodeCache(str(tmp_path / "small"), 4000))
    source = open_corpus("", "hf://datasets/owner/name/lines.jsonl", "all", 0, reading).source
    change(hub.files)
    with pytest.raises(UserError, match=f"hf://datasets/owner/name/lines.jsonl.*{message}"):
        source[7]


def test_what_the_hub_refuses_is_said_in_a_line(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["lines.jsonl"] = LINES
    hub.plan = [403]
    with pytest.raises(UserError, match="^hf://datasets/owner/name/lines.jsonl: can't be read: 403 [^\n]+$"):
        open_corpus("", "hf://datasets/owner/name/lines.jsonl", "all", 0)


def test_a_dataset_that_the_hub_does_not_have_is_named(hub: type[Hub]) -> None:
    with pytest.raises(UserError, match="hf://datasets/owner/none.*there is no such file or folder"):
        open_corpus("", "hf://datasets/owner/none", "all", 0)
