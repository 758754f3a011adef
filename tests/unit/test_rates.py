"""Files of devices: those that are shipped, and what is said of one that is wrong."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_graph import device
from torchtitan_graph.errors import UserError
from torchtitan_graph.rates import RATES, Rates, find_rates, read_rates

FILES = sorted(Path(device.__file__).parent.glob("rates/*.toml"))
NUMBERS = [key for key in Rates._fields if key not in ("name", "num_near")]


def text(**changes: object) -> str:
    """Give a file like H100's with other values, as they stand in TOML; None leaves a key out."""
    values = {key: f'"{x}"' if key == "name" else x for key, x in RATES["H100"]._asdict().items()} | changes
    return "\n".join(f"{key} = {value}" for key, value in values.items() if value is not None)


def read(folder: Path, content: str) -> Rates:
    path = folder / "mine.toml"
    path.write_text(content)
    return read_rates(path)


def test_shipped_files_are_named_as_their_devices() -> None:
    assert {path.stem.upper() for path in FILES} == set(RATES)
    for path in FILES:
        assert find_rates(path.stem) == find_rates(str(path)) == RATES[path.stem.upper()]


def test_each_figure_of_a_shipped_file_says_where_it_is_from() -> None:
    """On its line, or on the line of words above its group."""
    for path in FILES:
        group = ""
        for line in path.read_text().splitlines():
            group = line if line.startswith("#") else group if line else ""
            of_group = re.search("data sheet|measured|assumed|as h100", group)
            assert not line or line.startswith(("#", "name")) or of_group or "#" in line, f"{path.name}: {line}"


def test_peaks_are_those_that_mfu_is_told_by() -> None:
    for name, rates in RATES.items():
        known = device._peak_flops_of(f"NVIDIA {name} 80GB".replace("_", " "))
        assert known is None or known == rates.half


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, text(name='"Mine"', near=2 * 10**9)) == RATES["H100"]._replace(name="Mine", near=2e9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (text(near=None), "near: missing"),
        (text(nearr=1), "nearr: unknown; did you mean near"),
        (text(zzzzz=1), "zzzzz: unknown; legal are name, fp8"),
        (text(half=-1), "half = -1: must be FLOP/s, from 1e.07"),
        (text(half=989), "half = 989: must be FLOP/s, from 1e.07"),  # TFLOP/s
        (text(memory_gib=80e9), "must be GiB, from 0.001 to 1e.06"),  # bytes
        (text(launch=6), "launch = 6: must be 0, or seconds"),  # microseconds
        (text(launch=-1e-6), "launch = -1e-06: must be 0, or seconds"),
        (text(memory_share=1.5), "memory_share = 1.5: must be a part"),
        (text(message_share=1.0), "message_share = 1.0: must be 0, or a part, up to 0.9"),
        (text(fp8_share="1e-300"), "fp8_share = 1e-300: must be a part"),
        (text(num_near=0), "num_near = 0: must be a whole number"),
        (text(num_near=8.0), "num_near = 8.0: must be a whole number"),
        (text(far="true"), "far = True: must be bytes/s"),
        (text(far="inf"), "far = inf: must be bytes/s"),
        (text(name=3), "name = 3: must be a name"),
        (text(half="0x" + "f" * 5000), "half = a whole number: must be FLOP/s"),
        ("half = ", "is not valid TOML"),
        ("half = " + "[" * 100_000, "nested more than 100 levels deep"),
    ],
)
def test_what_is_wrong_is_named(content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        read(tmp_path, content)
    assert "mine.toml" in str(error.value)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(NUMBERS), value=st.one_of(st.floats(), st.integers(), st.text(max_size=5), st.booleans()))
def test_any_value_is_taken_or_refused_by_its_key(
    key: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:

    words = {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(str(value)) or json.dumps(value)
    try:
        found = read(tmp_path_factory.mktemp("rates"), text(**{key: words}))
    except UserError as error:
        assert "mine.toml" in str(error) and (key in str(error) or "TOML" in str(error))
    else:
        assert getattr(found, key) in (value, float(value)) and type(value) is not bool


def test_a_file_of_figures_is_not_this_machine(tmp_path: Path) -> None:
    """--device cpu times operators here: the figures of a file that says it is the same would not be looked at."""
    (tmp_path / "mine.toml").write_text(text(name='"CPU"'))
    with pytest.raises(UserError, match="mine.toml: name = 'CPU': means this machine"):
        find_rates(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("name", "said"), [("h10", "did you mean h100"), ("none.toml", "can't be read"), ("", "legal")]
)
def test_an_unknown_device_is_named(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_rates(name)
