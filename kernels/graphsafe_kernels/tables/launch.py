"""Building chunk tables on the device in one launch.

Requirements
------------
1. The result is that of ``graphsafe.metadata.build_tables``, bit for bit. Nothing is read on the host, and no result is
   kept: what is worked out once are sizes.
2. Tensors are allocated by the caller's allocator at each call: inside a capture they belong to the graph's pool.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from graphsafe.bucket import slot_count
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.policy import TablePolicy, policy_for
from graphsafe_kernels.tables.kernels import chunk_tables_kernel

__all__ = ["SlotTables", "TritonMetadataBuilder", "build_tables", "table_options"]


@dataclass(frozen=True)
class SlotTables(ChunkTables):
    """Chunk tables, and what a kernel would otherwise work out per slot.

    ``slot_rows`` ``[NT, 2]`` int32: (first row, rows) of a live slot, (first row, -rows) of the padding rows that a
    sentinel clears, possibly none. The live totals need no tensor of their own: rows ``cu_seqlens[N]``, slots
    ``chunk_offsets[N]``.
    """

    slot_rows: torch.Tensor | None = None


def table_options(policy: TablePolicy, sequences: int, chunk_size: int) -> tuple[dict[str, int], int]:
    """Compile-time sizes of the builder for N sequences, and its warps: one set per power of two up to a tile."""
    tile = min(policy.tile, max(16, 1 << (sequences - 1).bit_length()))
    slots = min(128, max(policy.slots, policy.compared // tile))
    return {"BT": chunk_size, "TILE": tile, "SLOTS": slots}, max(1, tile // policy.lane)


@functools.lru_cache(maxsize=256)
def _launch(device: torch.device, dtype: torch.dtype, sequences: int, chunk_size: int) -> PreparedLaunch:
    # the dtype is not looked at, but each is a kernel of its own
    sizes, warps = table_options(policy_for(device).tables, sequences, chunk_size)
    return PreparedLaunch(chunk_tables_kernel, sizes, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, dtype: torch.dtype, sequences: int, tokens: int,
          chunk_size: int) -> tuple[PreparedLaunch, int, int]:
    """The launch, its programs and the slots."""
    if chunk_size < 1 or not 0 <= tokens < 2**31 - chunk_size:
        raise error("argument", f"build_tables(tokens={tokens}, chunk_size={chunk_size}): a chunk size of at least 1 "
                    "and fewer than 2^31 tokens are needed")
    slots = slot_count(tokens, sequences, chunk_size)
    launch = _launch(device, dtype, 1 << (sequences - 1).bit_length(), chunk_size)
    return launch, max(1, -(-slots // launch.constants["SLOTS"])), slots


def build_tables(cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> SlotTables:
    """The tables of a batch, in one launch.

    ``cu_seqlens``: ``[N + 1]`` int32 or int64, contiguous, non-decreasing from 0, live total at most ``tokens``. The
    result has ``slot_count(tokens, N, chunk_size)`` slots; its tensors have the dtype and device of ``cu_seqlens``.
    Raises rule ``argument`` for a chunk size below 1 or for ``tokens`` of 2^31 and more.
    """
    device, dtype, sequences = cu_seqlens.device, cu_seqlens.dtype, cu_seqlens.shape[0] - 1
    launch, programs, slots = _plan(device, dtype, sequences, tokens, chunk_size)
    indices = torch.empty((slots, 2), dtype=dtype, device=device)
    offsets = torch.empty(sequences + 1, dtype=dtype, device=device)
    rows = torch.empty((slots, 2), dtype=torch.int32, device=device)
    launch(programs, device, (cu_seqlens, indices, offsets, rows), (tokens, sequences, slots))
    return SlotTables(cu_seqlens, indices, offsets, chunk_size, rows)


class TritonMetadataBuilder:
    """:class:`graphsafe.metadata.MetadataBuilder` in one launch of a Triton kernel."""

    def build(self, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> SlotTables:
        """Tables with ``slot_count(tokens, N, chunk_size)`` slots: see :func:`build_tables`."""
        return build_tables(cu_seqlens, tokens, chunk_size)
