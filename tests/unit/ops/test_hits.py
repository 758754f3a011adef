"""What rows sent once for several experts are found by, and added up by."""

import torch

from torchtitan_graph.ops import exchange
from torchtitan_graph.ops.exchange import after_begins, hits, sums_at_home, sums_to_send

HIT_UK = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]])
SPLITS_2K = torch.tensor([[2, 2], [1, 3]])


def test_hits_are_found_column_by_column() -> None:
    assert hits(HIT_UK, SPLITS_2K, 9).tolist() == [0, 2, 3, 7]
    assert hits(HIT_UK.to(torch.uint8), SPLITS_2K, 9).tolist() == [0, 2, 3, 7]
    assert hits(HIT_UK[:0], torch.zeros_like(SPLITS_2K), 9).tolist() == []


def test_places_are_counted_from_where_their_source_begins() -> None:
    received_RE = torch.tensor([[2, 0], [0, 0], [1, 2]])
    place_S1 = torch.tensor([[0], [1], [0], [0], [1]])
    found = after_begins(place_S1, received_RE, torch.tensor([5, 100, 0]))
    assert found.flatten().tolist() == [5, 6, 0, 0, 1]


def test_sums_are_by_index_and_round_once() -> None:
    rows_SD = torch.randn(6, 3, dtype=torch.bfloat16)
    index_S = torch.tensor([2, 0, 2, 3, 2, 0])
    expected = torch.stack([rows_SD[index_S == i].float().sum(0) for i in range(4)]).to(torch.bfloat16)
    for found in (sums_at_home(rows_SD, index_S, 4), sums_to_send(rows_SD, index_S, SPLITS_2K, 9)):
        assert found.dtype is torch.bfloat16 and torch.equal(found, expected)


def test_whichever_reads_the_numbers_first_waits_for_their_copy(monkeypatch) -> None:
    """On a GPU they are copied to the host meanwhile; before its end they are anything."""

    class Copy:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)

    waited: list[int] = []
    rows_SD, index_S = torch.zeros(6, 3), torch.tensor([2, 0, 2, 3, 2, 0])
    for number, read in enumerate(
        (lambda: hits(HIT_UK, SPLITS_2K, 9), lambda: sums_to_send(rows_SD, index_S, SPLITS_2K, 9))
    ):
        monkeypatch.setitem(exchange._ENDS, SPLITS_2K.data_ptr(), Copy(number))
        read(), read()
    assert waited == [0, 1] and not exchange._ENDS


def test_the_operators_are_what_they_declare() -> None:
    torch.library.opcheck(sums_at_home, (torch.randn(4, 3), torch.tensor([1, 0, 1, 1]), 2))
    torch.library.opcheck(after_begins, (torch.zeros(3, 1).long(), torch.tensor([[1], [2]]), torch.tensor([0, 4])))
    # The number of rows of these depends on data; a trace shows the given one.
    torch.library.opcheck(hits, (HIT_UK, SPLITS_2K, 4))
    torch.library.opcheck(sums_to_send, (torch.randn(3, 2), torch.tensor([1, 0, 3]), SPLITS_2K, 4))
