"""Operands for provider tests: small, on the CPU, from one seed."""

from __future__ import annotations

from typing import Any

import torch


def operands(operator: str = "chunk_kda", tokens: int = 70, dtype: torch.dtype = torch.float32, width: int = 16) -> Any:
    """The operands of ``operator`` for two sequences, as keywords."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int, dt: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dt)

    boundaries = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
    if operator == "causal_conv1d":
        return {"x": normal(1, tokens, 6), "weight": normal(6, 4), "bias": normal(6), "cu_seqlens": boundaries}
    gate = (1, tokens, 2, width) if operator == "chunk_kda" else (1, tokens, 2)
    return {
        "q": normal(1, tokens, 1, width),
        "k": normal(1, tokens, 1, width),
        "v": normal(1, tokens, 2, width),
        "g": torch.nn.functional.logsigmoid(normal(*gate, dt=torch.float32)),
        "beta": normal(1, tokens, 2).sigmoid(),
        "cu_seqlens": boundaries,
    }
