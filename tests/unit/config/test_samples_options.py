"""Samples are refused where a forward pass has no whole model, before anything starts."""

import pytest

from torchtitan_graph.config import check, load
from torchtitan_graph.errors import UserError

PROMPTS = ["--samples.prompts", "import os"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parallelism.context_parallel_degree", "2"], "not with parallelism.context_parallel_degree = 2"),
        (["--parallelism.pipeline_parallel_degree", "2"], "not with parallelism.pipeline_parallel_degree = 2"),
        (["--model.converters", "quantize.linear.float8"], "not with model.converters"),
    ],
)
def test_they_are_refused(options: list[str], words: str) -> None:
    check(load(options), 2)
    with pytest.raises(UserError, match=words) as refused:
        check(load([*options, *PROMPTS]), 2)
    assert "run python -m torchtitan_graph.generate on the run's checkpoints" in str(refused.value)


def test_options_without_prompts_have_a_notice() -> None:
    (notice,) = (line for line in check(load(["--samples.freq", "3"]), 1) if "samples" in line)
    assert "there are no samples while samples.prompts is empty" in notice
    assert not [line for line in check(load(["--samples.freq", "3", *PROMPTS]), 1) if "samples" in line]
