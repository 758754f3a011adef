import pytest


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
