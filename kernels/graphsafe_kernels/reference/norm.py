"""Reference of the RMS norm over the last dimension, gated or not, with padding kept out of every result.

Requirements
------------
1. ``y = x / sqrt(mean(x^2) + eps) * weight * act(g)`` and its exact derivative; fp32 inside, fp64 for fp64.
2. With ``cu_seqlens``, rows beyond the live total get exact zeros in the output and in every gradient, whatever they
   and their incoming gradients hold.
3. dweight is summed over live rows in an order that padding does not change.
4. Nothing reads the device from the host, no shape depends on data, no tensor is made from host data.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries, compute_dtype, ordered_sum, padding_rows, sigmoid

__all__ = ["rms_norm"]


def _dead(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The padding mask shaped to broadcast over x ``[1, T, ...]``, or None for a dense batch."""
    if cu_seqlens is None:
        return None
    return padding_rows(cu_seqlens, x.shape[1]).reshape(1, -1, *[1] * (x.dim() - 2))


def _clear(t: torch.Tensor, dead: torch.Tensor | None) -> torch.Tensor:
    return t if dead is None else t.masked_fill(dead, 0)


class _RMSNorm(torch.autograd.Function):
    """x, g ``[B, T, ..., D]``, weight ``[D]``; ``swish`` chooses between z sigmoid(z) and sigmoid(z) for the gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, g: torch.Tensor | None, weight: torch.Tensor | None, swish: bool,
                eps: float, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, g, weight)
        ctx.swish, ctx.eps = swish, eps
        ctx.boundaries = None if cu_seqlens is None else SavedBoundaries("rms_norm", cu_seqlens)
        dtype = compute_dtype(x.dtype)
        wide = x.to(dtype)
        y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            y = y * weight.to(dtype)
        if g is not None:
            gate = g.to(dtype)
            y = y * (gate * sigmoid(gate) if swish else sigmoid(gate))
        return _clear(y, _dead(cu_seqlens, x)).to(x.dtype)

    @staticmethod
    @first_order_only("rms_norm")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, g, weight = ctx.saved_tensors
        need_x, need_g, need_weight = ctx.needs_input_grad[:3]
        dead = _dead(None if ctx.boundaries is None else ctx.boundaries.get(), x)
        dtype = compute_dtype(x.dtype)
        wide, dout = x.to(dtype), dy.to(dtype)
        inverse = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed = wide * inverse

        dg = None
        if g is not None:
            gate = g.to(dtype)
            s = sigmoid(gate)
            if need_g:
                slope = s * (1 + gate * (1 - s)) if ctx.swish else s * (1 - s)
                dgate = dout * normed * slope
                dg = _clear(dgate if weight is None else dgate * weight.to(dtype), dead).to(g.dtype)
            dout = dout * (gate * s if ctx.swish else s)

        dweight = None
        if need_weight:
            dweight = ordered_sum(_clear(dout * normed, dead).flatten(0, -2)).to(weight.dtype)
        dx = None
        if need_x:
            dnormed = dout if weight is None else dout * weight.to(dtype)
            dx = inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
            dx = _clear(dx, dead).to(x.dtype)
        return dx, dg, dweight, None, None, None


def rms_norm(x: torch.Tensor, g: torch.Tensor | None, weight: torch.Tensor | None, *, swish: bool,
             eps: float, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The norm on checked operands: ``[B, T, ..., D] -> [B, T, ..., D]`` in x's dtype; B is 1 with ``cu_seqlens``."""
    y: torch.Tensor = _RMSNorm.apply(x, g, weight, swish, eps, cu_seqlens)
    return y
