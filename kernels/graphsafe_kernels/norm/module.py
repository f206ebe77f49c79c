"""Modules around the norm operators, with the parameter names of flash-linear-attention 0.6.0 (``weight``).

Requirements
------------
1. State-dict keys and shapes load that library's checkpoints.
2. ``cu_seqlens`` goes through, so that padding stays out of the weight's gradient.
"""

from __future__ import annotations

import torch
from torch import nn

from graphsafe.errors import error
from graphsafe_kernels.norm.op import ACTIVATIONS, rms_norm, rms_norm_gated

__all__ = ["FusedRMSNormGated", "RMSNorm"]


class RMSNorm(nn.Module):
    """:func:`rms_norm` with its ``weight`` ``[hidden_size]``, all ones at first."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, T, ..., hidden_size]`` to the same."""
        return rms_norm(x, self.weight, self.eps, cu_seqlens=cu_seqlens)


class FusedRMSNormGated(nn.Module):
    """:func:`rms_norm_gated` with its ``weight`` ``[hidden_size]``, all ones at first."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "swish") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise error("argument", f"activation is {activation!r}; one of {', '.join(ACTIVATIONS)} is needed")
        self.eps = eps
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation}"

    def forward(self, x: torch.Tensor, g: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` and ``g`` ``[B, T, ..., hidden_size]`` to the same."""
        return rms_norm_gated(x, g, self.weight, activation=self.activation, eps=self.eps, cu_seqlens=cu_seqlens)
