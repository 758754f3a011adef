"""The cheapest choice of what is kept and what computed again, against every choice."""

import itertools
import random

import pytest

from torchtitan_graph.analysis.cut import Value, computed_again, hull, kept


def cost(values: tuple[Value, ...], again: set[int]) -> float:
    """What it costs to compute these again and keep what else is asked for; endless if that can't be."""
    total, pending, asked = 0.0, [i for i, v in enumerate(values) if v.wanted], set()
    while pending:
        i = pending.pop()
        if i in asked:
            continue
        asked.add(i)
        price = values[i].again if i in again else values[i].keep
        total += float("inf") if price is None else price
        pending += values[i].inputs if i in again else ()
    return total


def some_values(seed: int) -> tuple[Value, ...]:
    draw = random.Random(seed)
    values = [Value(draw.choice([0, 8, 32]), None, (), False)]
    for i in range(1, 9):
        inputs = tuple(sorted(draw.sample(range(i), min(i, draw.randint(1, 2)))))
        is_view = draw.random() < 0.2
        again = 0 if is_view else draw.choice([None, 1, 3, 9])
        values.append(Value(None if is_view else draw.choice([4, 8, 16]), again, inputs, draw.random() < 0.4))
    return tuple(values)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_cheaper(seed: int) -> None:
    values = some_values(seed)
    choices = itertools.chain.from_iterable(itertools.combinations(range(9), n) for n in range(10))
    assert cost(values, set(computed_again(values))) == min(cost(values, set(choice)) for choice in choices)


def test_a_feed_forward_keeps_its_two_products() -> None:
    w1, w3 = Value(8, None, (), True), Value(8, None, (), True)  # silu's backward, and the product's, read them
    silu, product = Value(8, 1, (0,), True), Value(8, 1, (2, 1), True)
    assert computed_again((w1, w3, silu, product)) == {2, 3}
    assert computed_again((w1, w3, silu._replace(again=9), product)) == {3}  # dear operators are kept


def work(values: tuple[Value, ...], again: frozenset[int]) -> int:
    return sum(values[i].again or 0 for i in again)


@pytest.mark.parametrize("seed", range(8))
def test_no_mixture_of_choices_is_better_than_the_hull(seed: int) -> None:
    """At every price of a byte one of the hull's choices costs as little as any."""
    values = some_values(seed)
    choices = [frozenset(c) for n in range(10) for c in itertools.combinations(range(9), n)]
    possible = [c for c in choices if cost(values, set(c)) < float("inf")]
    found = hull(values)
    assert found == sorted(found, key=lambda c: -kept(values, c)) and set(found) <= set(possible)
    for price in (0.01, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 2, 10):
        best = min(kept(values, c) * price + work(values, c) for c in possible)
        assert min(kept(values, c) * price + work(values, c) for c in found) == pytest.approx(best)


def test_what_costs_the_same_keeps_less() -> None:
    source = Value(0, None, (), False)
    assert hull((source, Value(8, 0, (0,), True))) == [frozenset({1})] * 2
