import pytest


@pytest.fixture(autouse=True)
def cache_of_the_node(tmp_path_factory, monkeypatch):
    """Nothing is kept among the user's caches, nor found there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))


class Texts:
    """Documents in memory, as a source."""

    is_whole = False

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.digest = repr(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        return self._texts[index]

    def identity(self, index: int) -> str:
        return f"document {index}"


@pytest.fixture(scope="session")
def texts_source() -> type[Texts]:
    return Texts
