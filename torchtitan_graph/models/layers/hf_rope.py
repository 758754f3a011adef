"""What every family has in a config.json. Rotary parameters are in either of transformers' two forms, by its
precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.rope import LinearScaling, Llama3Scaling, Scaling, YarnScaling, yarn_magnitude

_CONTEXT = "original_max_position_embeddings"


def read_common(
    reader: ConfigReader, theta: float = 10000.0, norm_eps: float = 1e-6, implied: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], float]:
    """Return the fields of a configuration that every family has, by name; and `mscale_all_dim`, as `read_rope`.

    Args:
        theta, implied: as in `read_rope`.
        norm_eps: default value.
    """
    rope_theta, rope_scaling, mscale = read_rope(reader, theta, implied)
    common = {
        "dim": reader.integer("hidden_size"),
        "num_layers": reader.num_layers(),
        "num_heads": reader.integer("num_attention_heads"),
        "vocab_size": reader.integer("vocab_size"),
        "tied": reader.flag("tie_word_embeddings", False),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "norm_eps": reader.number("rms_norm_eps", norm_eps),
    }
    return common, mscale


def common_to_hf(config: Any, architecture: str, model_type: str) -> dict[str, Any]:
    """Return the entries of a config.json that every family has, in the form of the releases."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "hidden_act": "silu",
        "attention_bias": False,
    }


def read_rope(
    reader: ConfigReader, theta: float = 10000.0, implied: Mapping[str, Any] | None = None
) -> tuple[float, Scaling | None, float]:
    """Return the base of the frequencies, their scaling, and `mscale_all_dim`, which is DeepSeek's (0: none).

    Released files have `rope_theta` and `rope_scaling` (null, or with `rope_type`, in older files `type`); since
    version 5 transformers writes it all into `rope_parameters`. Scalings that depend on the length of a sequence
    ("dynamic", "longrope") are refused.

    Args:
        theta: default base.
        implied: default parameters.
    """
    rope = _parameters(reader, theta, implied)
    rope.expect("rope_type", "default", "linear", "llama3", "yarn")
    rope.expect("partial_rotary_factor", 1.0, None)
    kind = rope.raw["rope_type"]
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor"))
    elif kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        scaling = Llama3Scaling(rope.number("factor"), low, high, rope.integer(_CONTEXT))
    elif kind == "yarn":
        scaling = _yarn(rope)
    return rope.number("rope_theta", above=1.0), scaling, _unless_zero(rope, "mscale_all_dim") if scaling else 0.0


def scaling_to_hf(scaling: Scaling | None, mscale: float = 0.0) -> dict[str, Any] | None:
    """Return a scaling as a config.json's `rope_scaling`; `mscale` is DeepSeek's, and 0 is left out."""
    if isinstance(scaling, LinearScaling):
        written: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        written = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            _CONTEXT: scaling.original_context,
        }
    elif isinstance(scaling, YarnScaling):
        written = {
            "rope_type": "yarn",
            "type": "yarn",  # for old readers, too
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            _CONTEXT: scaling.original_context,
            "truncate": scaling.truncate,
        }
        if scaling.magnitude != _implied_magnitude(scaling.factor, mscale, mscale):
            written["attention_factor"] = scaling.magnitude
    else:
        return None
    return {**written, "mscale": mscale, "mscale_all_dim": mscale} if mscale else written


def _parameters(reader: ConfigReader, theta: float, implied: Mapping[str, Any] | None) -> ConfigReader:
    """Return the parameters of both forms, and of the keys next to them, in the newer form."""
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
    for key in ("full_attention", "sliding_attention", "chunked_attention"):
        if key in parameters:
            reader.problems.append(f"rope_scaling: {key} has parameters of its own; legal are those of all layers")
    return ConfigReader(parameters, "rope_scaling: ", reader.problems)


def _yarn(rope: ConfigReader) -> YarnScaling:
    factor = rope.number("factor")
    implied = _implied_magnitude(factor, _unless_zero(rope, "mscale"), _unless_zero(rope, "mscale_all_dim"))
    return YarnScaling(
        factor,
        _unless_zero(rope, "beta_fast", 32.0),
        _unless_zero(rope, "beta_slow", 1.0),
        rope.integer(_CONTEXT),
        truncate=bool(rope.raw.get("truncate", True)),
        magnitude=rope.number("attention_factor", implied, null=implied),
    )


def _unless_zero(rope: ConfigReader, key: str, otherwise: float = 0.0) -> float:
    """Return a number of YaRN's, where 0 and null are like a missing key."""
    return rope.number(key) if rope.raw.get(key) else otherwise


def _implied_magnitude(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return the factor of cosine and sine where `attention_factor` is missing."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)
