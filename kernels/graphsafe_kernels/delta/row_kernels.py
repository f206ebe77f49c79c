"""Where a slot's rows are, and the clearing of padding rows: pieces that every kernel over slots shares.

Requirements
------------
1. A slot is located by its table row alone (packed) or by its number alone (dense, every sequence T rows long).
2. Padding rows are cleared exactly once: the sentinel slots clear whole blocks of BT rows, counted from the first block
   that holds no live row; the last live slot clears the rest of the last live block.
"""

import triton
import triton.language as tl
from triton.backends import backends

IN_ORDER: tl.constexpr = tl.constexpr("ascend" in backends)
"""Whether states are read and written in the order of memory and turned between: on an Ascend an element that lies
apart takes 32 bytes of the unified buffer."""


@triton.jit
def clear_rows(pointer, first, end, stride, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zero to rows [first, min(end, first + ROWS)), columns [column, min(COLUMNS, column + BLOCK)) of a tensor
    whose rows are ``stride`` apart."""
    r = first + tl.arange(0, ROWS)
    c = column + tl.arange(0, BLOCK)
    at = pointer + r.to(tl.int64)[:, None] * stride + c[None, :]
    mask = (r < end)[:, None] & (c < COLUMNS)[None, :]
    tl.store(at, tl.zeros([ROWS, BLOCK], tl.float32).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def padding_rows(slot, cu_seqlens, chunk_offsets, T, N, SENTINEL: tl.constexpr, BT: tl.constexpr):
    """(first, end) of the padding rows that this slot clears; empty for live slots other than the last one."""
    live = tl.load(cu_seqlens + N).to(tl.int32)
    slots = tl.load(chunk_offsets + N).to(tl.int32)
    boundary = tl.minimum(tl.cdiv(live, BT) * BT, T)
    if SENTINEL:
        first = tl.minimum(boundary + (slot - slots) * BT, T)
        end = tl.minimum(first + BT, T)
    else:
        first = live
        end = tl.where(slot + 1 == slots, boundary, live)
    return first, end


@triton.jit
def padding_share(slot, unused, cu_seqlens, chunk_offsets, T, N, BT: tl.constexpr):
    """:func:`padding_rows` of a slot of which only the run says whether it is ``unused``."""
    live = tl.load(cu_seqlens + N).to(tl.int32)
    slots = tl.load(chunk_offsets + N).to(tl.int32)
    boundary = tl.minimum(tl.cdiv(live, BT) * BT, T)
    block = tl.minimum(boundary + (slot - slots) * BT, T)
    first = tl.where(unused, block, live)
    last = tl.where(slot + 1 == slots, boundary, live)
    return first, tl.where(unused, tl.minimum(block + BT, T), last)


@triton.jit
def locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED: tl.constexpr, BT: tl.constexpr):
    """(first row as int64, valid rows) of a live slot."""
    if PACKED:
        n = tl.load(chunk_indices + 2 * slot.to(tl.int64)).to(tl.int64)
        c = tl.load(chunk_indices + 2 * slot.to(tl.int64) + 1).to(tl.int32)
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - start).to(tl.int32)
    else:
        c = slot % NT
        start = (slot // NT).to(tl.int64) * T
        length = T
    return start + c * BT, tl.minimum(length - c * BT, BT)


@triton.jit
def locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED: tl.constexpr):
    """(first row as int64, rows, first slot) of a sequence."""
    if PACKED:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - start).to(tl.int32)
        slot = tl.load(chunk_offsets + n).to(tl.int32)
    else:
        start = n.to(tl.int64) * T
        length = T
        slot = n * NT
    return start, length, slot


@triton.jit
def state_offsets(i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """(32-bit offsets, mask) of the transposed tile [BV, BK] in one state [K, V], or [V, K] with V_FIRST."""
    k = tl.arange(0, BK)
    v = i_v * BV + tl.arange(0, BV)
    at = v[:, None] * (K if V_FIRST else 1) + k[None, :] * (1 if V_FIRST else V)
    return at, (v < V)[:, None] & (k < K)[None, :]


@triton.jit
def state_tile(n, hv, i_v, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               V_FIRST: tl.constexpr):  # fmt: skip
    """(offsets, mask) of the transposed tile [BV, BK] of a state [N, HV, K, V], or [N, HV, V, K] with V_FIRST."""
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    return (n.to(tl.int64) * HV + hv) * (K * V) + at, mask


@triton.jit
def load_state(pointer, place, mask, n, hv, i_v, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """The transposed tile [BV, BK] of a state [N, HV, K, V], or [N, HV, V, K] with V_FIRST, zero outside; ``place`` and
    ``mask`` are its :func:`state_tile`."""
    if IN_ORDER and not V_FIRST:
        k = tl.arange(0, BK)
        v = i_v * BV + tl.arange(0, BV)
        at = (n.to(tl.int64) * HV + hv) * (K * V) + k[:, None] * V + v[None, :]
        S = tl.trans(tl.load(pointer + at, mask=(k < K)[:, None] & (v < V)[None, :], other=0.0))
    else:
        S = tl.load(pointer + place, mask=mask, other=0.0)
    return S


@triton.jit
def store_state(pointer, S, place, mask, n, hv, i_v, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """Write a tile that :func:`load_state` reads."""
    if IN_ORDER and not V_FIRST:
        k = tl.arange(0, BK)
        v = i_v * BV + tl.arange(0, BV)
        at = (n.to(tl.int64) * HV + hv) * (K * V) + k[:, None] * V + v[None, :]
        tl.store(pointer + at, tl.trans(S), mask=(k < K)[:, None] & (v < V)[None, :])
    else:
        tl.store(pointer + place, S, mask=mask)


@triton.jit
def load_rows(pointer, row, left, column, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BT: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """A tile [BT, BLOCK] of a row-major tensor from (row, column of this head); zero past `left` rows or WIDTH."""
    i = tl.arange(0, BT)
    j = column + tl.arange(0, BLOCK)
    mask = (i < left)[:, None] & (j < WIDTH)[None, :]
    return tl.load(pointer + row * STRIDE + i[:, None] * STRIDE + j[None, :], mask=mask, other=0.0)
