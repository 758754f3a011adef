"""The public functions, at a stable path, to capture a function as a graph and run it on live state."""

from torchtitan_graph.capture.dynamo import dynamo_capture
from torchtitan_graph.capture.trace import Capture, InParts, make_fx_capture, minimal_fx_tracer
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.graph.hierarchy import call_hierarchy, fwd_call_hierarchy, shown
from torchtitan_graph.graph.meta import origin
from torchtitan_graph.graph.signature import signature_of

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
