"""The table builder's shipped configurations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphsafe_kernels.policy import Policy
from graphsafe_kernels.shipped import Shipped, pointer
from graphsafe_kernels.tables.kernels import chunk_tables_kernel
from graphsafe_kernels.tables.launch import table_options

__all__ = ["shipped"]


def shipped(policy: Policy) -> Iterator[Shipped]:
    """Tiles of every fourth power, and more sequences than a tile, in both index dtypes."""
    for dtype in (torch.int32, torch.int64):
        index = pointer(dtype)
        types = {"cu_seqlens": index, "chunk_indices": index, "chunk_offsets": index,
                 "sequences": "i32", "slots": "i32", "blocks": "i32"}
        sequences = 16
        while sequences <= 4096:
            sizes, warps = table_options(policy.tables, sequences, 64)
            yield Shipped(chunk_tables_kernel, f"{index} {sequences} sequences", types,
                          {**sizes, "LOOP": policy.cores > 0}, warps)
            sequences *= 4
