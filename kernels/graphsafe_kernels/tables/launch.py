"""Building chunk tables on the device in one launch.

Requirements
------------
1. The result is that of ``graphsafe.metadata.build_tables``, bit for bit. Nothing is read on the host, and no result is
   kept: what is worked out once are sizes.
2. Tensors are allocated by the caller's allocator at each call: inside a capture they belong to the graph's pool.
3. What later kernels need besides is in them, on the device: the live rows are ``cu_seqlens[N]``, the live slots
   ``chunk_offsets[N]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from graphsafe.bucket import slot_count
from graphsafe.contract import check_cu_seqlens
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.policy import TablePolicy, policy_for
from graphsafe_kernels.tables.kernels import chunk_tables_kernel

__all__ = ["TritonMetadataBuilder", "build_tables", "table_options"]

_DTYPES = (torch.int32, torch.int64)


def table_options(policy: TablePolicy, sequences: int, chunk_size: int) -> tuple[dict[str, int], int]:
    """Compile-time sizes of the builder for N sequences, and its warps: one set per power of two up to a tile."""
    tile = min(policy.tile, max(16, 1 << (sequences - 1).bit_length()))
    # a program adds up all sequences again: with more than a tile of them, fewer programs of more slots
    slots = min(64, policy.compared // tile) if sequences <= tile else policy.many
    sizes = {"BT": chunk_size, "TILE": tile, "SLOTS": slots, "ONE_TILE": sequences <= tile}
    return sizes, max(policy.warps, tile // policy.lane)


@functools.lru_cache(maxsize=256)
def _launch(device: torch.device, dtype: torch.dtype, sequences: int, chunk_size: int) -> PreparedLaunch:
    # the dtype is not looked at, but each is a kernel of its own
    policy = policy_for(device)
    sizes, warps = table_options(policy.tables, sequences, chunk_size)
    return PreparedLaunch(chunk_tables_kernel, {**sizes, "LOOP": policy.cores > 0}, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, dtype: torch.dtype, sequences: int, tokens: int,
          chunk_size: int) -> tuple[Callable[..., None], int]:
    """The launch and the slots."""
    if chunk_size < 1 or not 0 <= tokens < 2**31 - chunk_size:
        raise error("argument", f"build_tables(tokens={tokens}, chunk_size={chunk_size}): a chunk size of at least 1 "
                    "and fewer than 2^31 tokens are needed")
    slots = slot_count(tokens, sequences, chunk_size)
    launch = _launch(device, dtype, 1 << (sequences - 1).bit_length(), chunk_size)
    blocks = max(1, -(-slots // launch.constants["SLOTS"]))
    programs = min(blocks, policy_for(device).cores or blocks)
    return launch.bind(device, programs, (sequences, slots, blocks)), slots


def build_tables(cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> ChunkTables:
    """The tables of a batch, in one launch.

    ``cu_seqlens``: ``[N + 1]`` int32 or int64, contiguous, non-decreasing from 0, live total at most ``tokens``. The
    result has ``slot_count(tokens, N, chunk_size)`` slots; its tensors have the dtype and device of ``cu_seqlens``.
    Raises rule ``argument`` for boundaries of another shape, dtype or layout, for a chunk size below 1 and for
    ``tokens`` of 2^31 and more.
    """
    if (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in _DTYPES
            or not cu_seqlens.is_contiguous()):  # fmt: skip
        check_cu_seqlens(cu_seqlens, batch=1, device=cu_seqlens.device)
    device, dtype, sequences = cu_seqlens.device, cu_seqlens.dtype, cu_seqlens.shape[0] - 1
    launch, slots = _plan(device, dtype, sequences, tokens, chunk_size)
    indices = cu_seqlens.new_empty((slots, 2))
    offsets = cu_seqlens.new_empty(sequences + 1)
    launch(cu_seqlens, indices, offsets)
    return ChunkTables(cu_seqlens, indices, offsets, chunk_size)


class TritonMetadataBuilder:
    """:class:`graphsafe.metadata.MetadataBuilder` in one launch of a Triton kernel."""

    def build(self, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> ChunkTables:
        """Tables with ``slot_count(tokens, N, chunk_size)`` slots: see :func:`build_tables`."""
        return build_tables(cu_seqlens, tokens, chunk_size)
