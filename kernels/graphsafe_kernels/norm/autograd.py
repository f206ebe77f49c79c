"""The norm's kernels as a differentiable function: what the operators call where they run on kernels.

Requirements
------------
1. Same arguments and results as the reference. fp64 operands are served by the reference, which is plain torch.
2. Without a gradient to compute, no autograd node is made. What is kept is what was passed: the backward makes the
   rows' factors again from x, which it must read anyway.
3. A ``cu_seqlens`` written to between forward and backward is refused; a second-order gradient is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe_kernels.norm import launch
from graphsafe_kernels.norm.launch import Rows, rows
from graphsafe_kernels.reference import norm as reference
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries

__all__ = ["rms_norm"]


def _rows(t: torch.Tensor | None) -> Rows | None:
    return None if t is None else rows(t)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, g: torch.Tensor | None, weight: torch.Tensor | None,
                options: tuple[bool, float, torch.Tensor | None]) -> torch.Tensor:
        swish, eps, cu_seqlens = options
        ctx.save_for_backward(x, g, weight)
        ctx.swish, ctx.eps = swish, eps
        ctx.boundaries = None if cu_seqlens is None else SavedBoundaries("rms_norm", cu_seqlens)
        return launch.forward(rows(x), _rows(g), weight, swish, eps, cu_seqlens).view(x.shape)

    @staticmethod
    @first_order_only("rms_norm")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, g, weight = ctx.saved_tensors
        cu_seqlens = None if ctx.boundaries is None else ctx.boundaries.get()
        dx, dg, dweight = launch.backward(rows(dy), rows(x), _rows(g), weight, ctx.swish, ctx.eps, cu_seqlens,
                                          ctx.needs_input_grad[:3])
        return (None if dx is None else dx.view(x.shape)), (None if dg is None else dg.view(x.shape)), dweight, None


def rms_norm(x: torch.Tensor, g: torch.Tensor | None, weight: torch.Tensor | None, *, swish: bool, eps: float,
             cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The norm on checked operands: ``[B, T, ..., D] -> [B, T, ..., D]`` in x's dtype; B is 1 with ``cu_seqlens``."""
    eps = float(eps)
    if x.dtype == torch.float64:
        return reference.rms_norm(x, g, weight, swish=swish, eps=eps, cu_seqlens=cu_seqlens)
    weight = None if weight is None else weight.contiguous()
    if torch.is_grad_enabled() and (
        x.requires_grad or (g is not None and g.requires_grad) or (weight is not None and weight.requires_grad)
    ):
        y: torch.Tensor = _RMSNorm.apply(x, g, weight, (swish, eps, cu_seqlens))
        return y
    return launch.forward(rows(x), _rows(g), weight, swish, eps, cu_seqlens).view(x.shape)
