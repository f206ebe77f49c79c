"""What the gated delta rule's kernels need where a grid has the cores' size and memory is read in order.

Requirements
------------
1. How many tasks there are follows from the bucket's sizes; a sentinel ends its own task alone.
2. With HEADS_FIRST a head's gates ``[batch, HV, T]`` lie side by side. In ``[tokens, HV]`` they lie apart, and where a
   vector unit reads blocks of 32 bytes every one of them takes such a block; for the same reason states are read there
   in the order of memory, and turned.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import IN_ORDER


@triton.jit
def turns(pid, tasks):
    """How many of the tasks ``pid``, ``pid`` + programs, ... there are."""
    return tl.cdiv(tasks - pid, tl.num_programs(0))


@triton.jit
def slot_count(N, NT, PACKED: tl.constexpr):
    """Slots of the bucket; NT: chunks of a dense sequence, or of the bucket's tokens taken together."""
    count = N * NT
    if PACKED:
        count = NT + N - 1
    return count


@triton.jit
def live_slot(slot, chunk_indices, PACKED: tl.constexpr):
    """Whether a slot is not a sentinel."""
    live = slot >= 0
    if PACKED:
        live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
    return live


@triton.jit
def head_offset(slot, row, hv, T, NT, HV: tl.constexpr, PACKED: tl.constexpr):
    """Offset in ``[batch, HV, T]`` of one head's gate of a slot's first row, ``row`` of all tokens."""
    head = hv.to(tl.int64)
    if not PACKED:
        head += (slot // NT).to(tl.int64) * (HV - 1)
    return row + head * T


@triton.jit
def ordered_offsets(i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """(offsets, mask) of the tile [BK, BV] of one state [K, V]."""
    k = tl.arange(0, BK)
    v = i_v * BV + tl.arange(0, BV)
    return k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def load_state_tile(state, at, mask, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              V_FIRST: tl.constexpr):  # fmt: skip
    """The transposed tile [BV, BK] of one state; ``at`` and ``mask`` are its ``state_offsets``."""
    if IN_ORDER and not V_FIRST:
        ordered, inside = ordered_offsets(i_v, K, V, BK, BV)
        S = tl.trans(tl.load(state + ordered, mask=inside, other=0.0))
    else:
        S = tl.load(state + at, mask=mask, other=0.0)
    return S


@triton.jit
def store_state_tile(state, S, at, mask, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               V_FIRST: tl.constexpr):  # fmt: skip
    """Write a tile that :func:`load_state_tile` reads."""
    if IN_ORDER and not V_FIRST:
        ordered, inside = ordered_offsets(i_v, K, V, BK, BV)
        tl.store(state + ordered, tl.trans(S), mask=inside)
    else:
        tl.store(state + at, S, mask=mask)
