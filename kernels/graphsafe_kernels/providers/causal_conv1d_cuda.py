"""The CUDA kernels of ``causal-conv1d`` as a provider.

Requirements
------------
1. The layout is converted by views alone: ``[B, T, D]`` is handed on as the channel-last ``[B, D, T]`` it is.
2. Sequence numbers, which that library takes in place of boundaries, are made on the device without a host read.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from graphsafe_kernels.providers.service import Provider, Request, Service

__all__ = ["CausalConv1dProvider"]

_TAPS = (2, 3, 4)


class CausalConv1dProvider(Provider):
    """Convolution of 2 to 4 taps without states."""

    name = "causal-conv1d"
    install = "pip install causal-conv1d, built for this torch and CUDA"

    def __init__(self) -> None:
        self.services = {
            "causal_conv1d": Service(
                ("cuda",),
                (torch.float16, torch.bfloat16, torch.float32),
                frozenset({"weight", "bias", "residual", "activation", "cu_seqlens"}),
                unsafe="it takes rows behind the live total for one more sequence, and writes them",
                conversions=(
                    "[B, T, D] to a channel-last view of [B, D, T] and back",
                    "cu_seqlens to the sequence number of each token, on the device",
                    "the residual is added outside",
                ),
                limit=_limit,
            )
        }

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("causal-conv1d",)

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("causal_conv1d") is not None else "no module causal_conv1d"

    def function(self, operator: str) -> Callable[..., Any]:
        convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn

        def call(
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            residual: torch.Tensor | None = None,
            activation: str | None = None,
            cu_seqlens: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, None]:
            flat = x.flatten(2)
            numbers = None if cu_seqlens is None else _sequence_numbers(cu_seqlens, flat.shape[1])
            y = convolve(flat.transpose(1, 2), weight, bias, seq_idx=numbers, activation=activation)
            y = y.transpose(1, 2).reshape(x.shape)
            return (y if residual is None else y + residual), None

        return call


def _sequence_numbers(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[1, T]`` int32: the sequence of each token."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)[None]


def _limit(request: Request) -> str | None:
    weight, x = request.arguments.get("weight"), request.arguments["x"]
    if weight is None or weight.shape[-1] not in _TAPS:
        return f"it takes {_TAPS[0]} to {_TAPS[-1]} taps, and weight has {0 if weight is None else weight.shape[-1]}"
    if weight.dtype != x.dtype:
        return f"x and weight need one dtype, and they are {x.dtype} and {weight.dtype}"
    return None
