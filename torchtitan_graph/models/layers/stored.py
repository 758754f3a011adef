"""The place and form of a tensor in Hugging Face's files."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stored:
    """The file tensor that holds one of our parameters or buffers; a family's `HF_KEYS` is a table of these.

    name         of the file tensor: "*" is the layer, "#" the expert: one file tensor each, stacked on dim 0 of ours
    transpose    the last two dims are swapped in the file
    part         (i, n): ours is the i-th of n equal parts of the file tensor's last dim (before transposing)
    interleaved  the parts alternate: ours are the columns i, i + n, i + 2n, ...
    """

    name: str
    transpose: bool = False
    part: tuple[int, int] | None = None
    interleaved: bool = False

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one file tensor, from that of ours."""
        dims = list(shape[1:] if "#" in self.name else shape)
        if self.transpose:
            dims[-2:] = reversed(dims[-2:])
        if self.part is not None:
            dims[-1] *= self.part[1]
        return tuple(dims)


# Our parameters -> Hugging Face's, "*" the layer number, as `LlamaForCausalLM` and most others name them. A family adds
# its own, and replaces those that it names otherwise.
LLAMA_KEYS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
