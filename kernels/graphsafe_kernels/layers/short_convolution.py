"""The short convolution of a projection as a module.

Requirements
------------
1. State-dict keys and shapes (``weight`` ``[D, 1, W]``, ``bias`` ``[D]``) and initial values are those of
   ``torch.nn.Conv1d`` and with it of flash-linear-attention 0.6.0.
2. States go in and out as values; nothing is updated in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphsafe_kernels.conv import causal_conv1d

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Conv1d):
    """:func:`causal_conv1d` over ``hidden_size`` channels with its weight and bias.

    A subclass of ``nn.Conv1d`` for its parameters alone, so that code which initialises or counts such modules finds
    it; the convolution is not computed by torch.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu",
                 device: torch.device | str | None = None) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, padding=kernel_size - 1, bias=bias,
                         device=device)
        self.activation = activation

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(self, x: torch.Tensor, initial_state: torch.Tensor | None = None, output_final_state: bool = False,  # type: ignore[override]
                **graph_arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x ``[B, T, D]`` -> (y ``[B, T, D]``, state ``[N, D, W]`` or None); the rest goes to :func:`causal_conv1d`."""
        return causal_conv1d(x, self.weight.squeeze(1), self.bias, initial_state=initial_state,
                             output_final_state=output_final_state, activation=self.activation, **graph_arguments)
