"""Draws have the distribution of transformers' generation, and depend on the seed and the prompt alone."""

import pytest
import torch
from tiny_models import PROMPTS, build, continuations
from torch import Tensor

from torchtitan_graph.generate import Sampling


def theirs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of transformers' processors, in the order of its `generate`."""
    process = pytest.importorskip("transformers.generation.logits_process")
    ids, scores_BV = torch.zeros(len(logits_BV), 1, dtype=torch.int64), logits_BV.double()
    if sampling.temperature != 1:
        scores_BV = process.TemperatureLogitsWarper(sampling.temperature)(ids, scores_BV)
    if sampling.top_k:
        scores_BV = process.TopKLogitsWarper(sampling.top_k)(ids, scores_BV)
    if sampling.top_p < 1:
        scores_BV = process.TopPLogitsWarper(sampling.top_p)(ids, scores_BV)
    return scores_BV.softmax(-1)


@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.01])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits_BV = 3 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampling = Sampling(temperature, top_k, top_p)
    torch.testing.assert_close(sampling.probabilities(logits_BV), theirs(logits_BV, sampling), rtol=1e-12, atol=0)


def test_ties_are_kept_by_top_k_as_in_transformers_and_cut_by_top_p() -> None:
    logits_BV = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    sampling = Sampling(1.0, top_k=2)
    assert (sampling.probabilities(logits_BV) > 0).tolist() == [[False, True, True, True, False]]
    torch.testing.assert_close(sampling.probabilities(logits_BV), theirs(logits_BV, sampling))
    # Which of equal tokens go is left open there; how many, and their shares, are the same.
    sampling = Sampling(1.0, top_p=0.5)
    found, expected = (x.sort().values for x in (sampling.probabilities(logits_BV), theirs(logits_BV, sampling)))
    torch.testing.assert_close(found, expected)
    assert sampling.probabilities(torch.zeros(1, 2)).tolist() == [[1, 0]]  # one sums to just that


def test_draws_have_their_probabilities() -> None:
    sampling = Sampling(1.0, top_k=3)
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 1.5]])
    number, generator = 20_000, sampling.generator(0)
    drawn = sampling.choose(logits_BV.expand(number, -1), [generator] * number)
    shares = drawn.bincount(minlength=4) / number
    torch.testing.assert_close(shares, sampling.probabilities(logits_BV)[0].float(), atol=0.015, rtol=0)
    assert shares[0] == 0


def test_the_least_draw_takes_no_token_without_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))  # once in 2**53
    assert Sampling(1.0, top_k=1).choose(torch.tensor([[0.0, 1.0]]), [torch.Generator()]).tolist() == [1]


def test_a_prompt_has_the_same_samples_in_every_batch_and_others_by_another_seed() -> None:
    model, sampling = build("llama3"), Sampling(1.0, top_p=0.9, seed=3)
    found = continuations(model, PROMPTS, sampling=sampling)
    assert found == [continuations(model, [prompt], sampling=sampling)[0] for prompt in PROMPTS]
    assert found == continuations(model, PROMPTS, sampling=sampling, cache=False)
    assert found != continuations(model, PROMPTS, sampling=Sampling(1.0, top_p=0.9, seed=4))
    before = torch.get_rng_state()
    continuations(model, PROMPTS, sampling=sampling)
    assert torch.equal(before, torch.get_rng_state())
