"""Reader of config.json, like transformers'; what a family can't express is an error by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchtitan_graph.errors import UserError

Config = TypeVar("Config")

_MISSING: Any = object()

# Keys that affect every family's forward, with the only values supported. silu has two names.
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0, None),
    "per_layer_config": (None,),
}


# No release comes near: the largest have 126 layers, or 61 of 384 experts. Modules are built one by one.
MOST_LAYERS, MOST_EXPERTS, MOST_EXPERTS_IN_ALL = 2_000, 4_096, 200_000


class ConfigReader:
    """Typed reader of a config.json that collects every problem for one error.

    Null is a value of its own: it is refused, or differs from a missing key, as in transformers. In place of a wrong
    value the methods return a legal one, so that reading goes on.

    Args:
        where: prefix of the keys' names in messages.
        problems: the list that problems are added to.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "", problems: list[str] | None = None):
        self.raw, self.where = raw, where
        self.problems: list[str] = [] if problems is None else problems

    def integer(
        self,
        key: str,
        default: int = _MISSING,
        *,
        null: int = _MISSING,
        least: int = 1,
        most: int = 2**31 - 1,
        alias: str = "",
    ) -> int:
        """Return an integer.

        Args:
            default: value for a missing key; `null`: value for null. Without them that is a problem.
            alias: a second name, which must have the same value where both are present.
        """
        if alias in self.raw:
            self.expect(alias, self.raw.get(key, self.raw[alias]))
            key = key if key in self.raw else alias
        value = self.raw.get(key)
        if value is None:
            return self._instead(key, default, null, least)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        shown = "2^31 - 1" if most == 2**31 - 1 else f"{most:,}"
        return self._wrong(key, value, f"an integer from {least} to {shown}", least)

    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def num_experts(self, key: str, default: int = _MISSING, *, alias: str = "") -> int:
        """Return the number of a layer's experts; arguments as in `integer`."""
        return self.integer(key, default, most=MOST_EXPERTS, alias=alias)

    def number(self, key: str, default: float = _MISSING, *, null: float = _MISSING, above: float = 0.0) -> float:
        """Return a finite number larger than `above`, as a float; `default` and `null` as in `integer`."""
        value = self.raw.get(key)
        if value is None:
            return self._instead(key, default, null, 1.0)
        if isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf:
            return float(value)
        return self._wrong(key, value, f"a number above {above:g}", 1.0)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw.get(key, default)
        return value if isinstance(value, bool) else self._wrong(key, value, "true or false", default)

    def expect(self, key: str, *legal: Any) -> None:
        """Record a problem if the key is present and its value is none of the legal ones."""
        if key in self.raw and self.raw[key] not in legal:
            listed = " or ".join(f"{value!r:.200}" for value in legal if value is not None) or "null"
            self.problems.append(f"{self.where}{key} = {self.raw[key]!r:.200} can't be expressed; legal is {listed}")

    def need(self, condition: bool, problem: str) -> None:
        """Record a contradiction between values, if each is legal by itself."""
        if not condition and not self.problems:
            self.problems.append(problem)

    def expect_of_all(self, *model_types: str) -> None:
        """Check the keys that have one value in every family, and the family's `model_type`."""
        self.expect("model_type", *model_types)
        for key, legal in _EVERYWHERE.items():
            self.expect(key, *legal)

    def check_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Check that key heads divide query heads, and that a head's width is even."""
        self.need(
            num_heads % num_kv_heads == 0,
            f"num_key_value_heads = {num_kv_heads} must divide num_attention_heads = {num_heads}",
        )
        self.need(head_dim % 2 == 0, f"head_dim = {head_dim} must be even")

    def check_experts(self, num_experts: int, top_k: int, in_all: int) -> None:
        """Check that a token can choose `top_k` of a layer's experts, and that there are not too many `in_all`."""
        self.need(top_k <= num_experts, f"num_experts_per_tok = {top_k}: a token chooses from {num_experts} experts")
        self.need(in_all <= MOST_EXPERTS_IN_ALL, f"{in_all:,} experts in all: at most {MOST_EXPERTS_IN_ALL:,} are read")

    def build(self, make: Callable[..., Config], **values: Any) -> Config:
        """Return `make(**values)`.

        Raises:
            UserError: there were problems; it lists them.
        """
        if self.problems:
            raise UserError("; ".join(self.problems))
        return make(**values)

    def _instead(self, key: str, default: Any, null: Any, legal: Any) -> Any:
        instead = null if key in self.raw else default
        if instead is _MISSING:
            self.problems.append(f"{self.where}{key} is {'null' if key in self.raw else 'missing'}")
            return legal
        return instead

    def _wrong(self, key: str, value: Any, wanted: str, instead: Any) -> Any:
        self.problems.append(f"{self.where}{key} = {value!r:.200}: {wanted} is wanted")
        return instead
