"""A slot's row of the chunk tables found by the program that needs it: the tables cost no launch of their own.

Requirements
------------
1. What is found, and written for the launches that follow, is what ``graphsafe.metadata.build_tables`` makes, bit for
   bit.
2. Every program adds up the chunks of all sequences again, so there are few: a tile of at most a warp's width.
"""

import triton
import triton.language as tl

__all__ = ["find_slot", "padding_between", "write_tables"]


@triton.jit
def find_slot(slot, cu_seqlens, N, BT: tl.constexpr, TILE: tl.constexpr):
    """(sequence, chunk within it, slots in use) of a slot; the sequence is N where the slot is unused."""
    lane = tl.arange(0, TILE)
    inside = lane < N
    start = tl.load(cu_seqlens + lane, mask=inside, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + lane + 1, mask=inside, other=0).to(tl.int32)
    count = tl.where(inside, (end - start + (BT - 1)) // BT, 0)
    reached = tl.cumsum(count, 0)
    passed = inside & (reached <= slot)
    first = tl.max(tl.where(passed, reached, 0), 0)
    return tl.sum(passed.to(tl.int32), 0), slot - first, tl.sum(count, 0)


@triton.jit
def write_tables(slot, n, c, cu_seqlens, chunk_indices, chunk_offsets, N, BT: tl.constexpr, TILE: tl.constexpr):
    """Write the slot's row, found to be (n, c), and with slot 0 the sequences' first slots."""
    index = chunk_indices.dtype.element_ty
    at = chunk_indices + 2 * slot.to(tl.int64)
    tl.store(at, tl.where(n < N, n, -1).to(index))
    tl.store(at + 1, tl.where(n < N, c, 0).to(index))
    if slot == 0:
        lane = tl.arange(0, TILE)
        inside = lane < N
        start = tl.load(cu_seqlens + lane, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + lane + 1, mask=inside, other=0).to(tl.int32)
        reached = tl.cumsum(tl.where(inside, (end - start + (BT - 1)) // BT, 0), 0)
        tl.store(chunk_offsets, (slot * 0).to(index))
        tl.store(chunk_offsets + lane + 1, reached.to(index), mask=inside)


@triton.jit
def padding_between(slot, live, slots, T, SENTINEL: tl.constexpr, BT: tl.constexpr):
    """``row_kernels.padding_rows`` from the live rows and slots in use."""
    boundary = tl.minimum(tl.cdiv(live, BT) * BT, T)
    if SENTINEL:
        first = tl.minimum(boundary + (slot - slots) * BT, T)
        end = tl.minimum(first + BT, T)
    else:
        first = live
        end = tl.where(slot + 1 == slots, boundary, live)
    return first, end
