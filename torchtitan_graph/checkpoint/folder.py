"""Checkpoint folders on disk: which are complete, and how one comes and goes without ever being half there.

Note [Atomic save]: a save is written into `step-N.tmp`. Its last file is `manifest.json`, which lists every file with
its size: a folder whose manifest holds is complete. Then it is renamed to `step-N`, and a folder that is to go is
renamed to `step-N.deleting` before anything in it is deleted. Every file, and every folder after a rename, is flushed
to disk (fsync) before the next step. So a kill at any moment leaves all `step-N` whole, and leftovers that are
recognised by name.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torchtitan_graph.checkpoint.tensors import read_metadata
from torchtitan_graph.log import logger

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is, or would be."""
    return folder / f"step-{step}"


def find_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder`, oldest first; warn about each that is not complete."""
    found = {}
    for path in folder.glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            if problem := find_problem(path):
                logger.warning(f"skipping checkpoint {path}: {problem}")
            else:
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def find_problem(path: Path) -> str | None:
    """Say what keeps a folder from being a complete checkpoint, or None if nothing does."""
    try:
        sizes = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} can't be read ({error!r})"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size} bytes, not {size}"
    return None


def clean_up(folder: Path) -> None:
    """Finish or delete what a killed save left in `folder`."""
    for path in folder.glob("step-*.tmp"):
        if find_problem(path) is None and not path.with_suffix("").exists():
            logger.warning(f"finishing the save of {path.with_suffix('')}, which was killed when it was all but done")
            _rename(path, path.with_suffix(""))
        else:
            logger.warning(f"deleting {path}, which a killed save left unfinished")
            shutil.rmtree(path)
    for path in folder.glob("step-*.deleting"):
        shutil.rmtree(path)


def prepare(tmp: Path) -> None:
    """Make the empty folder that a save is written into."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    clean_up(tmp.parent)
    tmp.mkdir()


def write_train_state(tmp: Path, state: dict[str, Any]) -> None:
    """Write everything that is not a tensor."""
    _write_json(tmp / TRAIN_STATE, state)


def write_manifest(tmp: Path) -> None:
    """Mark `tmp` as complete, after a look whether it is."""
    metadata = read_metadata(tmp)
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if not (tmp / name).is_file():
            raise ValueError(
                f"{tmp / name} was written by another rank, and rank 0 can't see it: "
                "checkpoint.folder must be on storage that all nodes share"
            )
    sizes = {path.name: path.stat().st_size for path in sorted(tmp.iterdir())}
    _write_json(tmp / MANIFEST, {"files": sizes})
    _sync_folder(tmp)


def commit(tmp: Path) -> None:
    """Give a complete folder its name; one that has the name (an older branch of the run) makes place."""
    final = tmp.with_suffix("")
    if final.exists():
        _rename(final, final.with_suffix(".deleting"))
    _rename(tmp, final)


def prune(newest: Path, keep_latest_k: int) -> None:
    """Delete all complete checkpoints but `newest`, just written, and the `keep_latest_k - 1` of the highest steps.

    0 keeps all.
    """
    others = [path for path in find_steps(newest.parent).values() if path != newest]
    excess = others[: max(len(others) - (keep_latest_k - 1), 0)] if keep_latest_k else []
    for path in excess:
        _rename(path, path.with_suffix(".deleting"))
    for path in newest.parent.glob("step-*.deleting"):
        shutil.rmtree(path)


def _rename(old: Path, new: Path) -> None:
    os.rename(old, new)
    _sync_folder(new.parent)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
