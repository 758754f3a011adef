"""How positions are rotated, as a config.json says it: in either of transformers' two forms, and by its precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.rope import Llama3Scaling, YarnScaling, yarn_magnitude

_CONTEXT = "original_max_position_embeddings"


def rope_parameters(
    reader: ConfigReader, *scalings: str, theta: float = 10000.0, implied: Mapping[str, Any] | None = None
) -> ConfigReader:
    """Give a reader of `rope_type`, `rope_theta` and what belongs to that type.

    Released files have `rope_theta` and `rope_scaling` (null, or with `rope_type`, in older files `type`); since
    version 5 transformers writes it all into `rope_parameters`.

    Args:
        scalings: the types, beside "default", that the family can express.
        theta: where the file says none.
        implied: the parameters where the file says nothing of them.
    """
    raw = reader.raw
    found = raw.get("rope_scaling") or raw.get("rope_parameters")
    found = (implied or {}) if found is None else found
    if not isinstance(found, Mapping):
        reader.problems.append(f"rope_scaling = {found!r}: an object is wanted")
        found = {}
    parameters = {"rope_theta": raw.get("rope_theta", theta), "rope_type": found.get("type", "default"), **found}
    if _CONTEXT in raw:
        parameters[_CONTEXT] = raw[_CONTEXT]
    elif _CONTEXT not in found and "max_position_embeddings" in raw:
        parameters[_CONTEXT] = raw["max_position_embeddings"]
    rope = ConfigReader(parameters, "rope_scaling: ", reader.problems)
    rope.expect("rope_type", "default", *scalings)
    rope.expect("partial_rotary_factor", 1.0, None)
    for key, value in found.items():
        if isinstance(value, Mapping):
            reader.problems.append(f"rope_scaling: {key} has parameters of its own; legal are those of all layers")
    return rope


def llama3_scaling(rope: ConfigReader) -> Llama3Scaling | None:
    """Read the scaling of Llama 3.1; None where it is of another type."""
    if rope.raw["rope_type"] != "llama3":
        return None
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    return Llama3Scaling(rope.number("factor"), low, high, rope.integer(_CONTEXT))


def llama3_scaling_to_hf(scaling: Llama3Scaling | None) -> dict[str, Any] | None:
    """Write it as a config.json's `rope_scaling`."""
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        _CONTEXT: scaling.original_context,
    }


def yarn_scaling(rope: ConfigReader) -> YarnScaling | None:
    """Read YaRN's scaling; None where it is of another type."""
    if rope.raw["rope_type"] != "yarn":
        return None
    factor = rope.number("factor")
    implied = _implied_magnitude(factor, number_unless_zero(rope, "mscale"), number_unless_zero(rope, "mscale_all_dim"))
    return YarnScaling(
        factor,
        number_unless_zero(rope, "beta_fast", 32.0),
        number_unless_zero(rope, "beta_slow", 1.0),
        rope.integer(_CONTEXT),
        truncate=bool(rope.raw.get("truncate", True)),
        magnitude=rope.number("attention_factor", implied, null=implied),
    )


def number_unless_zero(rope: ConfigReader, key: str, otherwise: float = 0.0) -> float:
    """Take a number of YaRN's, where 0 and null mean what a missing key means."""
    return rope.number(key) if rope.raw.get(key) else otherwise


def yarn_scaling_to_hf(scaling: YarnScaling | None, mscale: float = 0.0) -> dict[str, Any] | None:
    """Write it as a config.json's `rope_scaling`; both names of the type, for old readers too.

    Args:
        mscale: DeepSeek's, written under both of its names; 0 is left out.
    """
    if scaling is None:
        return None
    written = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        _CONTEXT: scaling.original_context,
        "truncate": scaling.truncate,
    }
    if mscale:
        written |= {"mscale": mscale, "mscale_all_dim": mscale}
    if scaling.magnitude != _implied_magnitude(scaling.factor, mscale, mscale):
        written["attention_factor"] = scaling.magnitude
    return written


def _implied_magnitude(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Give what multiplies cosine and sine where `attention_factor` doesn't say it."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)
