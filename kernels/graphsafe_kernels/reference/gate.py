"""The gates in log space and beta: activations and their derivatives, and the KDA gate as an operator of its own.

Requirements
------------
1. Softplus form ``g = -exp(A_log) softplus(x + b)``; bounded form ``g = lb sigmoid(exp(A_log) (x + b))``. An omitted
   ``A_log`` is a factor of exactly 1, an omitted bias one of exactly 0.
2. A saturated gate is finite, and so are its gradients: ``exp(A_log)`` stops at the largest finite number, and g at
   -1e30, far below where ``exp(g)`` has become zero in any precision.
3. An element has the same bits wherever it lies in a tensor: only operators of which that is true are used
   (``torch.sigmoid`` and ``softplus`` are not among them).
4. ``fused_kda_gate``: an element whose incoming gradient is zero contributes exactly zero, whatever it holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import compute_dtype, ordered_sum, sigmoid

__all__ = ["LOWEST", "Gate", "fused_kda_gate", "gate_backward", "gate_forward", "sigmoid_beta_backward", "softplus"]

LOWEST = -1e30
"""No gate is below this: a chunk's sum of such gates is still finite in fp32."""

_SOFTPLUS_LINEAR_FROM = 20.0


class Gate(NamedTuple):
    """The parameters of an in-kernel gate, shaped to broadcast against its input; see :func:`gate_forward`."""

    A_log: torch.Tensor | None
    bias: torch.Tensor | None
    lower_bound: float | None

    def factor(self) -> torch.Tensor | None:
        """``exp(A_log)``, finite; None for 1."""
        if self.A_log is None:
            return None
        return self.A_log.exp().clamp(max=torch.finfo(self.A_log.dtype).max)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, and x itself from 20 up."""
    return torch.where(x < _SOFTPLUS_LINEAR_FROM, torch.log1p(torch.exp(x.clamp(max=_SOFTPLUS_LINEAR_FROM))), x)


def gate_forward(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The gate g of its input x, of one shape and dtype."""
    z = x if gate.bias is None else x + gate.bias
    factor = gate.factor()
    if gate.lower_bound is not None:
        return sigmoid(z if factor is None else z * factor) * gate.lower_bound
    g = softplus(z).neg()
    return g.clamp(min=LOWEST) if factor is None else (g * factor).clamp(min=LOWEST)


def gate_backward(x: torch.Tensor, gate: Gate, dg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(dx, dA)``, both like x: dx is also what the bias sums, dA what ``A_log`` sums (None without ``A_log``).

    Softplus form: ``dx = -exp(A_log) sigmoid(z) dg``, ``dA = dg g``. Bounded form with ``s = sigmoid(exp(A_log) z)``:
    ``dx = exp(A_log) lb s (1 - s) dg``, ``dA = dx z``; z = x + b.
    """
    z = x if gate.bias is None else x + gate.bias
    factor = gate.factor()
    if gate.lower_bound is not None:
        s = sigmoid(z if factor is None else z * factor)
        dx = dg * ((1 - s) * s * gate.lower_bound)
        if factor is None:
            return dx, None
        dx = dx * factor
        return dx, dx * z
    slope = sigmoid(z).neg()
    if factor is None:
        return dg * slope, None
    return dg * (slope * factor), dg * (softplus(z).neg() * factor).clamp(min=LOWEST)


def sigmoid_beta_backward(beta: torch.Tensor, beta_scale: float, dbeta: torch.Tensor) -> torch.Tensor:
    """dx of ``beta = c sigmoid(x)``: ``dbeta beta (1 - beta / c)``."""
    return dbeta * beta * (1 - beta / beta_scale)


class _KdaGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                lower_bound: float | None, output_dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return gate_forward(g.to(compute_dtype(g.dtype)), _token_gate(g, A_log, dt_bias, lower_bound)).to(output_dtype)

    @staticmethod
    @first_order_only("fused_kda_gate")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, A_log, dt_bias = ctx.saved_tensors
        gate = _token_gate(g, A_log, dt_bias, ctx.lower_bound)
        dtype = compute_dtype(g.dtype)
        x, dy = g.to(dtype), dy.to(dtype)
        dx, dA = gate_backward(x, gate, dy)
        silent = dy == 0
        dx = dx.masked_fill(silent, 0)
        rows = (-1, *g.shape[-2:])
        dA_log = ddt_bias = None
        if A_log is not None and dA is not None:
            dA_log = ordered_sum(dA.masked_fill(silent, 0).reshape(rows).sum(-1)).to(A_log.dtype)
        if dt_bias is not None:
            ddt_bias = ordered_sum(dx.reshape(rows)).reshape(-1).to(dt_bias.dtype)
        return dx.to(g.dtype), dA_log, ddt_bias, None, None


def _token_gate(g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                lower_bound: float | None) -> Gate:
    dtype, (heads, width) = compute_dtype(g.dtype), g.shape[-2:]
    return Gate(None if A_log is None else A_log.to(dtype).view(heads, 1),
                None if dt_bias is None else dt_bias.to(dtype).view(heads, width), lower_bound)


def fused_kda_gate(g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                   lower_bound: float | None, output_dtype: torch.dtype) -> torch.Tensor:
    """The KDA gate on checked operands: ``g`` ``[..., HV, K]``, ``A_log`` ``[HV]``, ``dt_bias`` ``[HV * K]``."""
    result: torch.Tensor = _KdaGate.apply(g, A_log, dt_bias, lower_bound, output_dtype)
    return result
