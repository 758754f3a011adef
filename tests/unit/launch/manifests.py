"""A check of manifests by the schemas in tests/assets/kubernetes.json: names of fields, types, what is required."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "assets" / "kubernetes.json").read_text())
PLAIN = {"string": str, "integer": int, "boolean": bool, "number": (int, float), "quantity": str, "any": object}


def problems(value: Any, kind: str, place: str = "") -> Iterator[str]:
    """Yield what is wrong with a value of a kind: `[K]` is a list of K, `{K}` a map to K, `A|B` one of two strings."""
    if kind.startswith("["):
        if not isinstance(value, list):
            yield f"{place}: is not a list"
            return
        for index, item in enumerate(value):
            yield from problems(item, kind[1:-1], f"{place}[{index}]")
    elif kind.startswith("{"):
        if not isinstance(value, dict):
            yield f"{place}: is not a map"
            return
        for name, item in value.items():
            yield from problems(item, kind[1:-1], f"{place}.{name}")
    elif "|" in kind:
        if value not in kind.split("|"):
            yield f"{place}: {value!r} is not one of {kind}"
    elif kind in PLAIN:
        wrong = isinstance(value, bool) and kind in ("integer", "number")
        if wrong or not isinstance(value, PLAIN[kind]):
            yield f"{place}: {value!r} is not of type {kind}"
        if kind == "quantity" and not re.fullmatch(r"\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?", str(value)):
            yield f"{place}: {value!r} is not a quantity"
    elif not isinstance(value, dict):
        yield f"{place}: is not an object"
    else:
        fields = SCHEMAS[kind]["fields"]
        yield from (f"{place}.{name}: is missing" for name in SCHEMAS[kind]["required"] if name not in value)
        for name, item in value.items():
            if name in fields:
                yield from problems(item, fields[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}: is not a field of {kind}"
