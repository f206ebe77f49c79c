"""Bytes before anything is allocated.

Requirements
------------
1. A price is a list of tensors with their shapes, dtypes and bytes; the total is their sum.
2. The price of a bucket's operator inputs and outputs needs the bucket and the head counts alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphsafe.bucket import Bucket

__all__ = ["Price", "PriceLine", "operator_price"]


@dataclass(frozen=True)
class PriceLine:
    """One tensor: ``name``, ``shape``, ``dtype``, ``bytes``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> PriceLine:
        return cls(name, shape, dtype, math.prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class Price:
    """Bytes by tensor."""

    lines: tuple[PriceLine, ...]

    @property
    def bytes(self) -> int:
        """The sum over all tensors."""
        return sum(line.bytes for line in self.lines)


def operator_price(
    bucket: Bucket,
    *,
    operator: str,
    heads: int,
    value_heads: int | None = None,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    workspace: int = 0,
) -> Price:
    """What a bucket's static tensors of ``gdn`` or ``kda`` take: operands, states, tables, output, and gradients.

    Shapes as in the operators' documentation: q and k ``[1, T, H, K]``, v and o ``[1, T, HV, V]``, the gate
    ``[1, T, HV]`` (GDN, fp32) or ``[1, T, HV, K]`` (KDA), beta ``[1, T, HV]``, states ``[N, HV, K, V]`` fp32.
    ``workspace``: bytes that a device's compiler takes beside them for a launch; launches of one graph share them.
    """
    t, n, h, hv = bucket.tokens, bucket.sequences, heads, value_heads or heads
    gate = (1, t, hv) if operator == "gdn" else (1, t, hv, key_dim)
    gate_dtype = torch.float32 if operator == "gdn" else dtype
    operands = [
        ("q", (1, t, h, key_dim), dtype),
        ("k", (1, t, h, key_dim), dtype),
        ("v", (1, t, hv, value_dim), dtype),
        ("g", gate, gate_dtype),
        ("beta", (1, t, hv), dtype),
        ("initial_state", (n, hv, key_dim, value_dim), torch.float32),
    ]
    results = [("o", (1, t, hv, value_dim), dtype), ("final_state", (n, hv, key_dim, value_dim), torch.float32)]
    tables = [
        ("cu_seqlens", (n + 1,), torch.int32),
        ("chunk_indices", (bucket.slots, 2), torch.int32),
        ("chunk_offsets", (n + 1,), torch.int32),
    ]
    lines = operands + results + tables
    if backward:
        lines += [(f"d{name}", shape, dt) for name, shape, dt in (*operands, *results)]
    if workspace:
        lines.append(("workspace", (workspace,), torch.uint8))
    return Price(tuple(PriceLine.of(name, shape, dt) for name, shape, dt in lines))
