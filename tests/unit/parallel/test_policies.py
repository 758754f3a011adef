"""A recomputation policy is proposed wherever policies are, by being in the list."""

import pytest

from torchtitan_graph.check.family import checks
from torchtitan_graph.parallel import recompute
from torchtitan_graph.parallel.recompute import Policy, Recompute
from torchtitan_graph.plan import search


def proposed() -> tuple[list[str], list[object]]:
    """Return the policies that a family is checked with, and those that a search tries."""
    titles = [check.title for check in checks("llama3", "debugmodel", ["sdpa"], full=False)]
    degrees = {"parallelism.data_parallel_shard_degree": 1, "parallelism.context_parallel_degree": 1}
    words = [title[title.index("(") :] for title in titles if "recomputation" in title]
    return words, [settings["activation_checkpoint.mode"] for (settings,) in search.ways(degrees, {})]


def test_a_new_policy_is_checked_and_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proposed() == (["(op)", "(full)"], ["none", "selective", "full"])
    third = Policy({"mode": "selective", "selective_ac_option": "3"}, Recompute(every=3))
    monkeypatch.setattr(recompute, "POLICIES", (*recompute.POLICIES, third))
    assert proposed() == (["(op)", "(full)", "(3)"], ["none", "selective", "full", "selective"])
    assert str(third) == 'mode = "selective", selective_ac_option = "3"'
