"""The id of a run at a dashboard, kept in the run's folder, so that a resumed run continues there."""

import re
from pathlib import Path

from torchtitan_graph.log import logger
from torchtitan_graph.small_files import BadFile, read_text, write_text


def read_id(kept: Path, dashboard: str) -> str | None:
    """Return the run id in a file; None where there is no file, or, with a warning, where it holds no id."""
    try:
        if re.fullmatch(r"[\w-]{1,128}", found := read_text(kept), re.ASCII):
            return found
        raise BadFile(f"{kept}: holds no id of a run")
    except FileNotFoundError:
        return None
    except BadFile as error:
        logger.warning(f"{error}; a new run begins at {dashboard}")
        return None


def keep_id(kept: Path, run_id: str) -> None:
    """Write a run id to its file."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, run_id)
