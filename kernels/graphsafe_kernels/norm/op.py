"""``rms_norm`` and ``rms_norm_gated``: argument checks, and the choice of implementation by the operands' device.

Requirements
------------
1. Names, order and defaults of flash-linear-attention 0.6.0, plus ``cu_seqlens``; what is not served is refused.
2. With ``cu_seqlens`` padding takes part in nothing: neither in a row's result nor in the weight's gradient.
3. Everything wrong is refused here, by name, before any launch and without reading the device.
"""

from __future__ import annotations

import torch

from graphsafe.contract import check_cu_seqlens, check_tensor
from graphsafe.errors import error
from graphsafe_kernels.backend import resolve

__all__ = ["rms_norm", "rms_norm_gated"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ACTIVATIONS = ("swish", "silu", "sigmoid")


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y = x / sqrt(mean(x^2) + eps) * weight * act(g)`` over the last dimension.

    ``act`` is z sigmoid(z) for 'swish' and 'silu', sigmoid(z) for 'sigmoid'. Shapes: ``x`` and ``g``
    ``[B, T, ..., D]`` (per head: ``[B, T, HV, V]``), ``weight`` ``[D]`` or None for 1. Floating dtypes; computed in
    fp32 (fp64 for fp64), returned in x's dtype. With ``cu_seqlens`` ``[N + 1]`` (B = 1) the rows beyond the live total
    are exactly zero in the output and in every gradient, and the weight's gradient sums live rows alone.

    Raises :class:`graphsafe.errors.ArgumentError` (GS108) for wrong operands, GS106 for ``bias``, ``residual``,
    ``prenorm`` and ``residual_in_fp32``, which are not served, GS302 from the backward for changed boundaries.
    """
    for name, given in (("bias", bias is not None), ("residual", residual is not None), ("prenorm", prenorm),
                        ("residual_in_fp32", residual_in_fp32)):
        if given:
            raise error("unsupported", f"rms_norm_gated({name}=...) is not served",
                        why="The delta-rule layers have neither a norm bias nor a residual inside the norm.",
                        remedy=f"Leave {name} out and add it outside.")
    if activation not in ACTIVATIONS:
        raise error("argument", f"activation is {activation!r}; one of {', '.join(ACTIVATIONS)} is needed")
    _check(x, weight, cu_seqlens)
    check_tensor("g", g, shape=tuple(x.shape), dtypes=_DTYPES, device=x.device)
    return _run(x, g, weight, activation != "sigmoid", eps, cu_seqlens)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`rms_norm_gated` without a gate: ``y = x / sqrt(mean(x^2) + eps) * weight``."""
    _check(x, weight, cu_seqlens)
    return _run(x, None, weight, False, eps, cu_seqlens)


def _check(x: torch.Tensor, weight: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
    check_tensor("x", x, dtypes=_DTYPES)
    if x.dim() < 3 or x.shape[-1] == 0:
        raise error("argument", f"x has shape {list(x.shape)}; [B, T, ..., D] with D > 0 is needed")
    if weight is not None:
        check_tensor("weight", weight, shape=(int(x.shape[-1]),), dtypes=_DTYPES, device=x.device)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch=int(x.shape[0]), device=x.device)


def _run(x: torch.Tensor, g: torch.Tensor | None, weight: torch.Tensor | None, swish: bool, eps: float,
         cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = resolve("rms_norm", x.device)(x, g, weight, swish=swish, eps=eps, cu_seqlens=cu_seqlens)
    return y
