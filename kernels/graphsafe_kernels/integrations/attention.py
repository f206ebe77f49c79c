"""Full attention of a ``transformers`` model over a packed batch.

Requirements
------------
1. Causal within each sequence, and within a layer's window where it has one; boundaries stay on the device. Without a
   packed batch, the model's own implementation.
2. Where torch has attention over variable lengths for the operands, it is used: no mask of T times T. Its longest
   sequence is the bucket's T, so the launch is the same for every batch.
3. Rows of padding attend among themselves: finite, and no other row's business. Their outputs are zero.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from graphsafe_kernels.integrations.packing import Packed

__all__ = ["NAME", "register"]

NAME = "graphsafe"
"""The attention implementation's name in ``transformers``."""


def _varlen(window: int | None) -> Any:
    """torch's attention over variable lengths and its keyword for causal within a window, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if "window_size" in names:
        causal: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    elif window is None:
        causal = {"is_causal": True}
    else:
        return None
    return None if "scale" not in names else (varlen_attn, causal)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, scale: float | None, dropout: float,
            window: int | None) -> torch.Tensor:
    """q ``[1, H, T, D]``, k, v ``[1, h, T, D]`` to ``[1, T, H, D]``."""
    varlen = _varlen(window) if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not dropout else None
    if varlen is not None and q.shape[-1] == v.shape[-1] <= 256:
        function, causal = varlen
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        rows = (t[0].transpose(0, 1) for t in (q, k, v))
        return function(*rows, packed.covering, packed.covering, packed.tokens, packed.tokens, scale=scale, **causal)[
            None
        ]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=packed.mask_within(window), dropout_p=dropout, scale=scale,
                                       enable_gqa=k.shape[1] != q.shape[1])
    return o.transpose(1, 2)


def register(otherwise: str | None) -> str:
    """Make the implementation known to ``transformers``; ``otherwise`` serves calls that are not packed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # the eager implementation is a function of each model's own module and has no name to call it by
    fallback = otherwise if otherwise in ALL_ATTENTION_FUNCTIONS and not str(otherwise).startswith(NAME) else "sdpa"
    name = f"{NAME}-{fallback}"

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
                  scaling: float | None = None, dropout: float = 0.0, **kwargs: Any) -> tuple[torch.Tensor, None]:
        packed = kwargs.pop("graphsafe", None)
        if packed is None:
            result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[fallback](
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return result
        o = _attend(query, key, value, packed, scaling, dropout, kwargs.get("sliding_window"))
        live = (packed.segments < packed.tables.max_num_seqs)[None, :, None, None]
        return torch.where(live, o, 0), None

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[fallback])
    return name
