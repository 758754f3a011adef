"""A family of a user's own, found on PYTHONPATH by `model.name = "my_models.tiny"`: llama3 with 35,000 weights."""

from torchtitan_graph.models.llama3 import (
    HF_ARCHITECTURES,
    HF_KEYS,
    PLAN,
    Config,
    Model,
    from_hf_config,
    to_hf_config,
)

__all__ = ["FLAVORS", "HF_ARCHITECTURES", "HF_KEYS", "PLAN", "Model", "from_hf_config", "to_hf_config"]

FLAVORS = {"debugmodel": Config(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, rope_scaling=None)}
