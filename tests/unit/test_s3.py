"""The tests' S3 server and its proxy: each planned fault happens, and a client that is patient gets over it."""

import fsspec
import pytest

from s3 import ACTIONS, Store, at_first
from torchtitan_graph import patience
from torchtitan_graph.patience import retry_io


@pytest.mark.parametrize("action", ACTIONS)
def test_a_planned_fault_happens_and_is_got_over(action: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    fs, data = fsspec.filesystem("s3"), bytes(range(256)) * 8
    for work in (lambda: fs.pipe_file("bucket/a", data), lambda: fs.cat_file("bucket/a")):
        store.requests.clear()
        store.plan = at_first([action])
        found = retry_io(work)
        assert store.requests[0].action == action
    assert found == data == store.get("a")
    assert store.list_keys() == ["a"]
