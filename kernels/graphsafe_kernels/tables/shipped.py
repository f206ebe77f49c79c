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
    """Every tile, at the largest and the smallest chunk size, in both index dtypes."""
    for dtype in (torch.int32, torch.int64):
        index = pointer(dtype)
        types = {"cu_seqlens": index, "chunk_indices": index, "chunk_offsets": index, "slot_rows": "*i32",
                 "tokens": "i32", "sequences": "i32", "slots": "i32"}
        sequences = 1
        while sequences <= policy.tables.tile:
            sizes, warps = table_options(policy.tables, sequences, 64)
            if sizes["TILE"] >= sequences:
                yield Shipped(chunk_tables_kernel, f"{index} {sequences} sequences", types, sizes, warps)
            sequences *= 4
