"""Small disks, which fill up."""

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, size: str, inodes: int = 0) -> Iterator[Path]:
    """Give a disk of this size, with so many inodes, at `place`; 0: as many as it can hold."""
    place.mkdir()
    options = f"size={size}" + f",nr_inodes={inodes}" * bool(inodes)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def fill(disk: Path, with_files: bool = False) -> None:
    """Use up all room, or all inodes."""
    with contextlib.suppress(OSError):
        for number in itertools.count():
            if with_files:
                (disk / f"filler{number}").touch()
                continue
            with (disk / "filler").open("ab", buffering=0) as file:
                file.write(bytes(4096))


def set_read_only(disk: Path, read_only: bool = True) -> None:
    subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", disk], check=True)
