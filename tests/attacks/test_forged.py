"""Whatever a small file holds, its reader answers with its content or one clear refusal, in seconds and bounded memory.

The fast tier reads a few files of each kind, the slow one 10,000.
"""

import forged
import pytest


@pytest.mark.parametrize("kind", forged.KINDS)
def test_forged_files_are_read_or_refused(kind: str):
    assert not [each for each in forged.attack(kind, range(8)) if each.is_fault]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", forged.KINDS)
def test_many_forged_files_are_read_or_refused(kind: str):
    assert not [each for each in forged.attack(kind, range(360), seed=1) if each.is_fault]


def test_a_reader_at_fault_is_found(monkeypatch: pytest.MonkeyPatch):
    """The negative control: readers that raise, run out of memory, stall, end the process or execute what is said."""
    kind = forged.KINDS["status.json"]

    def faults(read: object) -> set[str]:
        monkeypatch.setitem(forged.KINDS, "status.json", kind._replace(read=read))
        return {each.what for each in forged.attack("status.json", range(100, 101))}

    def broken(fault: object) -> object:
        def read(path):  # sound files, which are in `sound`, are read
            if "sound" not in str(path):
                fault(path)

        return read

    assert faults(broken(lambda path: None)) == {"read"}
    assert faults(broken(lambda path: {}["x"])) == {"traceback"}
    assert faults(broken(lambda path: bytearray(2**30 + 2**26).count(1))) == {"memory"}
    assert faults(broken(lambda path: forged.os._exit(3))) == {"ended the process"}
    assert faults(broken(lambda path: forged.os.system("touch canary"))) == {"executed"}
    monkeypatch.setattr(forged, "STALLED", 0.3)
    assert faults(broken(lambda path: forged.time.sleep(60))) == {"took more than 0.3 s"}
    monkeypatch.setattr(forged, "STALLED", 60)
