"""Train large language models with a training step that is one graph."""

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names of torchtitan_graph.capture. They are imported when they are asked for: torch takes seconds.
__all__ = [
    "Capture",
    "InParts",
    "TracedResult",
    "call_hierarchy",
    "dynamo_capture",
    "fwd_call_hierarchy",
    "make_fx_capture",
    "minimal_fx_tracer",
    "origin",
    "run_traced",
    "shown",
    "signature_of",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("torchtitan_graph.capture"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
