"""Flash attention: on a GPU in segments of rows, each causal by itself; on a CPU under a mask; forward and backward.

torch calls these kernels in `torch.nn.attention.varlen.varlen_attn`, which has none for a CPU, and whose autograd can't
be part of an operator of our own. A public backward would replace them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
WIDEST = 256  # heads' widest, for a GPU's kernels


def varlen_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, begins: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention on a GPU, and the logarithms (N, T) of the sums of exponentials; `begins` has the first token of
    each segment and, last, T."""
    out_TNH, lse_NT, *_ = aten._flash_attention_forward(
        *map(_aligned, (q_TNH, k_TKH, v_TKH)), begins, begins, longest, longest, 0.0, True, False, scale=scale
    )
    return out_TNH[..., : q_TNH.shape[-1]], lse_NT


def varlen_backward(
    d_out_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    begins: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values on a GPU: bitwise reproducible where torch is asked for
    deterministic algorithms."""
    unread = q_TNH.new_empty(2, dtype=torch.uint64)  # dropout's state; there is no dropout
    given = map(_aligned, (d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH))
    gradients = aten._flash_attention_backward(
        *given, lse_NT, begins, begins, longest, longest, 0.0, True, unread, unread, scale=scale
    )
    dq, dk, dv = (x[..., : q_TNH.shape[-1]] for x in gradients)
    return dq, dk, dv


def _aligned(x_TNH: Tensor) -> Tensor:
    """Pad heads to a multiple of eight: the kernels read whole words of 16 bytes."""
    return F.pad(x_TNH, (0, -x_TNH.shape[-1] % 8)) if x_TNH.shape[-1] % 8 else x_TNH


def cpu_forward(
    q_BNLH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, seen_LL: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention on a CPU, and the logarithms (B, N, L) of the sums of exponentials.

    Args:
        seen_LL: boolean, True where a query sees a key; None: each sees those up to its own place.
    """
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q_BNLH, k_BNLH, v_BNLH, 0.0, seen_LL is None, attn_mask=_bias(seen_LL, q_BNLH), scale=scale
    )


def cpu_backward(
    d_out_BNLH: Tensor,
    q_BNLH: Tensor,
    k_BNLH: Tensor,
    v_BNLH: Tensor,
    out_BNLH: Tensor,
    lse_BNL: Tensor,
    seen_LL: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values on a CPU."""
    given = d_out_BNLH, q_BNLH, k_BNLH, v_BNLH, out_BNLH, lse_BNL
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        *given, 0.0, seen_LL is None, attn_mask=_bias(seen_LL, q_BNLH), scale=scale
    )


def packed_bytes(k_BNLH: Tensor) -> int:
    """Return the bytes of a CPU's copies of keys and values in its forward kernel: in bfloat16 it lays them out for the
    processor's matrix tiles (AMX), if it has any and there are 64 queries and keys or more."""
    is_packed = k_BNLH.device.type == "cpu" and k_BNLH.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return 2 * k_BNLH.numel() * k_BNLH.element_size() if is_packed else 0


def _bias(seen_LL: Tensor | None, q_BNLH: Tensor) -> Tensor | None:
    if seen_LL is None:
        return None
    return q_BNLH.new_zeros(seen_LL.shape).masked_fill_(~seen_LL, float("-inf"))
