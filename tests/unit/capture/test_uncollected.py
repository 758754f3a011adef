"""Python's collector stands still while a graph is built, and only then."""

import gc

import pytest
import torch

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.compiler import Inspection, Pass, run_passes


def test_nothing_is_collected_while_a_function_is_traced_and_passes_run() -> None:
    def watched(x):
        assert not gc.isenabled()
        return x

    traced = minimal_fx_tracer(lambda x: watched(x) + 1)(torch.ones(2))
    run_passes(traced.gm, [Pass("watched", watched)], [], torch.device("cpu"), Inspection())
    assert gc.isenabled()


def test_after_an_error_there_is_a_collector_again() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_who_had_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
