"""Small disks, which fill up, and disks that hang."""

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def disk_that_hangs(place: Path) -> Iterator[tuple[Path, Callable[[bool], None]]]:
    """Mount a disk at `place`, and yield a function that blocks all writes to it, or unblocks them."""
    image = place.with_suffix(".image")
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    commands = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place])
    try:
        able = not any(subprocess.run(command, capture_output=True).returncode for command in commands)
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs ext4 and the right to mount a file")

    def hang(now: bool) -> None:
        subprocess.run(["fsfreeze", "--freeze" if now else "--unfreeze", place], capture_output=True)

    try:
        yield place, hang
    finally:
        hang(False)
        subprocess.run(["umount", place], check=True)
