"""Read what config.json says in either of transformers' two forms, and refuse what a family can't express."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.rope import Llama3Scaling, YarnScaling

Config = TypeVar("Config")

_MISSING = object()


def rope_parameters(raw: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """Give `rope_theta`, `rope_type` and what belongs to that type.

    Released files have `rope_theta` and `rope_scaling` (null, or with `rope_type`, in older files `type`); since
    version 5 transformers writes it all into `rope_parameters`.
    """
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = found.pop("type", "default")
    return {"rope_theta": raw.get("rope_theta", default_theta), "rope_type": kind, **found}


def llama3_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    """Read the scaling of Llama 3.1 from what `rope_parameters` gave; None where it is of another type."""
    if rope["rope_type"] != "llama3":
        return None
    low, high, context = (
        rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    return Llama3Scaling(float(rope["factor"]), float(low), float(high), int(context))


def llama3_scaling_to_hf(scaling: Llama3Scaling | None) -> dict[str, Any] | None:
    """Write it as a config.json's `rope_scaling`."""
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def yarn_scaling(rope: Mapping[str, Any], magnitude: float = 1.0) -> YarnScaling | None:
    """Read YaRN's scaling from what `rope_parameters` gave; None where it is of another type."""
    if rope["rope_type"] != "yarn":
        return None
    return YarnScaling(
        float(rope["factor"]),
        float(rope.get("beta_fast", 32.0)),
        float(rope.get("beta_slow", 1.0)),
        int(rope["original_max_position_embeddings"]),
        truncate=rope.get("truncate", True),
        magnitude=magnitude,
    )


def yarn_scaling_to_hf(scaling: YarnScaling | None, **more: Any) -> dict[str, Any] | None:
    """Write it as a config.json's `rope_scaling`, with `more` in it; both names of the type, for old readers too."""
    if scaling is None:
        return None
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_context,
        "truncate": scaling.truncate,
        **more,
    }


class ConfigReader:
    """Take values out of a config.json, collecting everything that is wrong with it for one error."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.problems: list[str] = []

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Take a value; null counts as missing. A missing one without default is a problem, and comes back as 0."""
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            self.problems.append(f"{key} is missing")
            return 0
        return default

    def expect(self, key: str, legal: Iterable[Any], value: Any = _MISSING) -> None:
        """Note a problem if a value that is there, or the given one, is none of the legal ones."""
        found = self.raw.get(key) if value is _MISSING else value
        legal = list(legal)
        if found is not None and found not in legal:
            self.problems.append(f"{key} = {found!r} can't be expressed; legal is {' or '.join(map(repr, legal))}")

    def build(self, make: Callable[..., Config], **values: Any) -> Config:
        """Return `make(**values)`.

        Raises:
            UserError: there were problems; it lists them.
        """
        if self.problems:
            raise UserError("; ".join(self.problems))
        return make(**values)
