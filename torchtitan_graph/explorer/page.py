"""The HTML page: template, style, script and data in one file that makes no network requests.

All names and lines are data. They travel compressed, in letters and digits that mean nothing to HTML, and the script
puts them on the page as text, never as markup. The page's content security policy allows no connection, and only its
own script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("base.js", "table.js", "tree.js", "memory.js", "timeline.js", "passes.js", "run.js", "main.js")


def page(data: Mapping[str, Any]) -> str:
    """Return the page as HTML, from data with `title`, `facts` (pairs of words), `strings`, `graphs`, see `graph_data`,
    and, for a run, `run`, see `run_data`."""
    style = (_FOLDER / "style.css").read_text(encoding="utf-8")
    scripts = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}\n}})();\n'
    packed = zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 6)
    policy = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    fillings = {
        "POLICY": "; ".join(policy),
        "TITLE": html.escape(str(data["title"])),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": base64.b64encode(packed).decode(),
    }
    # In one substitution: inserted text is not scanned again.
    return re.sub(
        r"\{\{([A-Z]+)\}\}", lambda place: fillings[place[1]], (_FOLDER / "page.html").read_text(encoding="utf-8")
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
