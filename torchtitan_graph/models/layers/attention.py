"""Attention under a mask, through `scaled_dot_product_attention`, flex attention, or kernels for segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.init import RESIDUAL
from torchtitan_graph.models.layers.masks import Mask
from torchtitan_graph.models.layers.rope import Rotation
from torchtitan_graph.ops import flex_strips  # also lets uncompiled flex attention run in strips, eagerly
from torchtitan_graph.ops.flex_kernels import flex_kernel_options
from torchtitan_graph.ops.varlen import Segments, varlen_attention
from torchtitan_graph.torch_private.flash import WIDEST
from torchtitan_graph.torch_private.flex import ScoreFunction, flex_attention_op


class Seen(nn.Module):
    """The module at which context parallelism gathers a token's keys and values, or the latents they come from. Under
    it the result is of the whole row, in order; else the arguments are returned."""

    def forward(self, *parts_BL: Tensor) -> tuple[Tensor, ...]:
        return parts_BL


def attend(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    sinks_N: Tensor | None = None,
    score: ScoreFunction | None = None,
) -> Tensor:
    """Return attention with grouped queries (B, L, N, width of values): each of the K key heads serves N/K query heads.

    Args:
        scale: factor of the products of queries and keys; None is 1 / sqrt(H).
        sinks_N: a logit per head that takes part in the softmax and has no value: it lets a head attend to nothing.
        score: function of a scaled score, `(score, b, h, q, kv) -> score`, as a soft cap or a bias does; flex only.

    Raises:
        UserError: a score function without flex attention, which alone has one; sinks, or heads that are too wide, for
            a GPU's kernels for segments; or a use that context parallelism can't split.
    """
    _check_places(q_BLNH.shape[1], k_BLKH.shape[1], mask, score)
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(mask, Segments):
        _check_segments(q_BLNH, sinks_N, score)
        places = mask.begins, mask.sizes, mask.places
        out_BLNH, _ = varlen_attention(q_BLNH, k_BLKH, _as_wide(v_BLKH, q_BLNH), *places, sinks_N, scale)
        return out_BLNH[..., : v_BLKH.shape[-1]]
    q_BNLH, k_BKLH, v_BKLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    if isinstance(mask, BlockMask):
        out_BNLH, lse_BNL = flex_attention_op(q_BNLH, k_BKLH, v_BKLH, mask, scale, score, flex_kernel_options(q_BNLH))
        if sinks_N is not None:
            # softmax over keys and sink = softmax over keys * exp(lse) / (exp(lse) + exp(sink))
            share_BNL = torch.sigmoid(lse_BNL - sinks_N.view(1, -1, 1))
            out_BNLH = (out_BNLH * share_BNL.unsqueeze(-1)).type_as(out_BNLH)
    elif score is not None:
        raise UserError("model.attn = 'sdpa': this model changes attention's scores, which only 'flex' can")
    else:
        out_BNLH = _sdpa(q_BNLH, k_BKLH, v_BKLH, mask, scale, sinks_N)
    return out_BNLH.transpose(1, 2)


def _check_places(Lq: int, Lk: int, mask: Mask, score: ScoreFunction | None) -> None:
    of_mask = Lk if isinstance(mask, Segments) else mask.shape[-1]
    if Lk != of_mask:
        raise UserError(
            f"attention is given {Lk} keys, and a mask of {of_mask}: with parallelism.context_parallel_degree "
            "an attention of your own has a module `seen = Seen()`, in its PLAN 'seen': {'cp': 'context'}, and says "
            "`k, v = self.seen(k, v)` before it attends; or leave the degree at 1"
        )
    if score is not None and Lq < Lk and _reads_query(score):
        raise UserError(
            "parallelism.context_parallel_degree: this model changes attention's scores by the query's place, of which "
            "a rank that has a part of the row knows only the number in its part; leave the degree at 1"
        )


def _check_segments(q_BLNH: Tensor, sinks_N: Tensor | None, score: ScoreFunction | None) -> None:
    if score is not None:
        raise UserError("model.attn = 'varlen': this model changes attention's scores, which only 'flex' can")
    if q_BLNH.is_cuda and sinks_N is not None:
        raise UserError("model.attn = 'varlen': on a GPU its kernels have no sinks, and this model has; use flex")
    if q_BLNH.is_cuda and q_BLNH.shape[-1] > WIDEST:
        width = q_BLNH.shape[-1]
        raise UserError(f"model.attn = 'varlen': its heads have {width} features, and {WIDEST} at most; use flex")


def _reads_query(score: ScoreFunction) -> bool:
    """Return whether a score function reads its argument `q`; True if it can't be traced."""
    try:
        # Through a function of its own: for a method FX would count `self` among the arguments.
        followed = torch.fx.symbolic_trace(lambda x, b, h, q, kv: score(x, b, h, q, kv))
        _, _, _, query, _ = followed.graph.find_nodes(op="placeholder")
    except Exception:
        return True
    return bool(query.users)


def _sdpa(
    q_BNLH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, mask_B1LL: Tensor, scale: float, sinks_N: Tensor | None
) -> Tensor:
    """Return scaled-dot-product attention; keys and values have N heads, or fewer for groups of queries."""
    width, groups = v_BNLH.shape[-1], q_BNLH.shape[1] // k_BNLH.shape[1]
    if groups > 1 and (sinks_N is not None or not _takes_groups(q_BNLH, k_BNLH, v_BNLH, mask_B1LL)):
        k_BNLH, v_BNLH = (x.repeat_interleave(groups, dim=1) for x in (k_BNLH, v_BNLH))
        groups = 1
    if sinks_N is not None:
        # One more key for each head, seen by all, that only a new feature of queries and keys touches: its score is the
        # sink. The fused kernels have no sinks, and no gradient of a float mask. Eight features keep rows aligned.
        B, N, L, H = q_BNLH.shape
        q_BNLH = torch.cat((q_BNLH, q_BNLH.new_ones(B, N, L, 1), q_BNLH.new_zeros(B, N, L, 7)), dim=-1)
        sink_BN11 = (sinks_N / scale).view(1, N, 1, 1).expand(B, N, 1, 1)
        sink_BN1H = torch.cat((k_BNLH.new_zeros(B, N, 1, H), sink_BN11, k_BNLH.new_zeros(B, N, 1, 7)), dim=-1)
        k_BNLH = torch.cat((F.pad(k_BNLH, (0, 8)), sink_BN1H), dim=2)
        v_BNLH = F.pad(v_BNLH, (0, 0, 0, 1))
        mask_B1LL = F.pad(mask_B1LL, (0, 1), value=True if mask_B1LL.dtype == torch.bool else 0.0)
    v_BNLH = _as_wide(v_BNLH, q_BNLH)
    out_BNLH = F.scaled_dot_product_attention(
        q_BNLH, k_BNLH, v_BNLH, attn_mask=mask_B1LL, scale=scale, enable_gqa=groups > 1
    )
    return out_BNLH[..., :width]


def _takes_groups(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask_B1LL: Tensor) -> bool:
    """Return whether a fused kernel shares keys among queries' heads, and none that holds every score can be chosen.

    cuDNN's on a GPU does, in half precision and not in deterministic runs. torch chooses the kernel; the efficient one
    precedes the one that holds every score, so it must take groups as well: not in torch 2.11. A CPU's fused kernel has
    no grouped form.
    """
    if not q_BNLH.is_cuda:
        return False
    cuda = torch.backends.cuda
    asked = cuda.SDPAParams(q_BNLH, k_BKLH, v_BKLH, mask_B1LL, 0.0, False, True)
    return cuda.can_use_cudnn_attention(asked) and cuda.can_use_efficient_attention(asked)


def _as_wide(values: Tensor, keys: Tensor) -> Tensor:
    """Return values padded to the keys' width: fused kernels require it, and the fallback would hold every score."""
    more = keys.shape[-1] - values.shape[-1]
    return F.pad(values, (0, more)) if more > 0 else values


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Under tensor parallelism it has a rank's own heads.

    Args:
        bias: of all four projections.
        qk_norm_eps: if given, queries and keys are normalised over each head's width, before they are rotated.
        sinks: a learned logit per head in the softmax's denominator.
    """

    PLAN = {
        "": {"tp": "partial"},
        "wq.weight": {"tp": "shard 0"},
        "wq.bias": {"tp": "shard 0"},
        "wk.weight": {"tp": "shard 0"},
        "wk.bias": {"tp": "shard 0"},
        "wv.weight": {"tp": "shard 0"},
        "wv.bias": {"tp": "shard 0"},
        "wo.weight": {"tp": "shard 1"},
        "wo.bias": {"tp": "share"},
        "q_norm.weight": {"tp": "replicate"},
        "k_norm.weight": {"tp": "replicate"},
        "sinks": {"tp": "shard 0"},
        "seen": {"cp": "context"},
    }
    INITIAL = {"wo.weight": RESIDUAL, "sinks": 0.0}

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        sinks: bool = False,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None
        self.sinks = nn.Parameter(torch.empty(num_heads)) if sinks else None
        self.rotate = Rotation()
        self.seen = Seen()

    def forward(self, x_BLD: Tensor, *, rope: tuple[Tensor, ...], mask: Mask) -> Tensor:
        q_BLNH, k_BLKH, v_BLKH = (w(x_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BLNH, k_BLKH = self.placed(q_BLNH, k_BLKH, rope)
        k_BLKH, v_BLKH = self.seen(k_BLKH, v_BLKH)
        return self.wo(attend(q_BLNH, k_BLKH, v_BLKH, mask, sinks_N=self.sinks).flatten(-2))

    def placed(self, q_BLNH: Tensor, k_BLKH: Tensor, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normalised and rotated to their positions."""
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        cos, sin = rope
        return self.rotate(q_BLNH, cos, sin), self.rotate(k_BLKH, cos, sin)


def flex_cpu_bytes(batch: int, num_heads: int, Lq: int, Lk: int) -> int:
    """Return an estimate of the peak bytes of one layer's uncompiled flex attention, forward and backward, on a CPU.

    It holds scores in fp32, several times over in the backward: 14 GiB were measured at batch 8, 16 heads, sequence
    2048, all of whose scores were held: seven matrices of them.
    """
    return 7 * 4 * flex_strips.most_scores(batch, num_heads, Lq, Lk)
