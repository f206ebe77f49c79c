"""The one-launch builder of chunk tables.

Requirements
------------
1. One launch whose grid depends on the number of slots alone. A program writes SLOTS rows of the tables; the first also
   writes the offsets. No program waits for another: each adds up the chunks of all sequences again, TILE at a time.
2. A slot's sequence is the number of sequences that end at or before it, so sequences without chunks are passed over.
3. The values are those of ``graphsafe.metadata.build_tables``, bit for bit, in the dtype of ``cu_seqlens``.
"""

import triton
import triton.language as tl

from graphsafe_kernels.masks import spread

__all__ = ["chunk_tables_kernel"]


@triton.jit
def _write_slots(block, cu_seqlens, chunk_indices, chunk_offsets, sequences, slots,
                 BT: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, ONE_TILE: tl.constexpr):
    """SLOTS rows of the tables; the first block writes the offsets too."""
    slot = block * SLOTS + tl.arange(0, SLOTS)
    lane = tl.arange(0, TILE)
    tl.store(chunk_offsets + lane, (lane * 0).to(chunk_offsets.dtype.element_ty), mask=(lane == 0) & spread(block == 0))
    sequence = tl.zeros([SLOTS], tl.int32)
    first = tl.zeros([SLOTS], tl.int32)
    chunks = 0
    for base in range(0, sequences, TILE):
        n = base + lane
        inside = n < sequences
        start = tl.load(cu_seqlens + n, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + n + 1, mask=inside, other=0).to(tl.int32)
        count = tl.where(inside, (end - start + (BT - 1)) // BT, 0)
        reached = chunks + tl.cumsum(count, 0)
        tl.store(chunk_offsets + n + 1, reached.to(chunk_offsets.dtype.element_ty), mask=inside & spread(block == 0))
        # sequences that end at or before the slot, and where the last of them ends
        passed = inside[None, :] & (reached[None, :] <= slot[:, None])
        sequence += tl.sum(passed.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, reached[None, :], 0), 1))
        if not ONE_TILE:
            chunks += tl.sum(count, 0)
    live = sequence < sequences
    index = chunk_indices.dtype.element_ty
    # one store of whole rows: the Ascend compiler fails on two masked stores of every other element
    column = tl.arange(0, 2)[None, :]
    row = tl.where(column == 0, tl.where(live, sequence, -1)[:, None], tl.where(live, slot - first, 0)[:, None])
    tl.store(chunk_indices + 2 * slot[:, None] + column, row.to(index), mask=(slot < slots)[:, None])


@triton.jit(do_not_specialize=["sequences", "slots", "blocks"])
def chunk_tables_kernel(cu_seqlens, chunk_indices, chunk_offsets, sequences, slots, blocks,
                        BT: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, ONE_TILE: tl.constexpr,
                        LOOP: tl.constexpr):
    """chunk_indices ``[slots, 2]`` and chunk_offsets ``[N + 1]``. ONE_TILE: N is at most TILE. A program does one of
    ``blocks`` blocks of SLOTS slots, or walks them (LOOP)."""
    pid = tl.program_id(0)
    if LOOP:
        for block in range(pid, blocks, tl.num_programs(0)):
            _write_slots(block, cu_seqlens, chunk_indices, chunk_offsets, sequences, slots, BT, TILE, SLOTS, ONE_TILE)
    else:
        _write_slots(pid, cu_seqlens, chunk_indices, chunk_offsets, sequences, slots, BT, TILE, SLOTS, ONE_TILE)
