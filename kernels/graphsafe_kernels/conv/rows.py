"""What the convolution's kernels share: rows in and out of registers, and where a slot's rows lie.

Requirements
------------
1. Loads of rows that are not the sequence's are masked before any arithmetic.
2. Row offsets are 64-bit from a tensor's start to a slot's first row, and 32-bit within a slot. A row's stride is a
   compile-time constant, so that the rows of a turn differ by an immediate.
3. Channels may come in up to three parts, each a tensor of its own; a block of channels lies in one part.
4. Padding is cleared by programs that are there anyway: the k-th sentinel owns the k-th block of BT rows behind the
   block that holds the last live row; the rest of that block is cleared by the program that reached the last live row.

W is 1 to 8. C is how many channels a part has: all of them where there is one. A tap's ``age`` i is the distance to the
row it multiplies: weight[:, W - 1 - i] multiplies X(t - i).
"""

# ruff: noqa: SIM108 - a compile-time if is not a choice of values

import triton
import triton.language as tl

from graphsafe_kernels.masks import spread

__all__ = [
    "clear_rows", "combine", "load", "load_earlier", "load_history", "load_rows", "load_tap", "load_taps", "locate",
    "part_of", "pick", "reciprocal", "select_part", "sentinel_rows", "shared_block_rows", "store",
]


@triton.jit
def pick(i: tl.constexpr, v0, v1, v2, v3, v4, v5, v6, v7):
    """The i-th of eight values; i is a compile-time constant, so this costs nothing."""
    if i == 0:
        v = v0
    elif i == 1:
        v = v1
    elif i == 2:
        v = v2
    elif i == 3:
        v = v3
    elif i == 4:
        v = v4
    elif i == 5:
        v = v5
    elif i == 6:
        v = v6
    else:
        v = v7
    return v


@triton.jit
def part_of(block, BD: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):
    """(first channel of the part that a block lies in, the part's channels, the block's first channel in the part)."""
    B0: tl.constexpr = (P0 + BD - 1) // BD
    B1: tl.constexpr = B0 + (P1 + BD - 1) // BD
    first = 0
    count = P0
    place = block
    if P1 > 0:
        first = tl.where(block < B0, 0, tl.where(block < B1, P0, P0 + P1))
        count = tl.where(block < B0, P0, tl.where(block < B1, P1, P2))
        place = block - tl.where(block < B0, 0, tl.where(block < B1, B0, B1))
    return first, count, place * BD


@triton.jit
def select_part(block, p0, p1, p2, BD: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):
    """The tensor of the part that a block lies in."""
    B0: tl.constexpr = (P0 + BD - 1) // BD
    B1: tl.constexpr = B0 + (P1 + BD - 1) // BD
    p = p0
    if P1 > 0:
        if block >= B0:
            p = p1
        if block >= B1:
            p = p2
    return p


@triton.jit
def load(p, live, channel, C, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """One row's channels; zero where not ``live``. EVEN: C is a multiple of the block, so no channel is masked."""
    if MASKED:
        if EVEN:
            v = tl.load(p, mask=spread(live), other=0.0)
        else:
            v = tl.load(p, mask=spread(live) & (channel < C), other=0.0)
    else:
        if EVEN:
            v = tl.load(p)
        else:
            v = tl.load(p, mask=channel < C, other=0.0)
    return v


@triton.jit
def store(p, v, live, channel, C, EVEN: tl.constexpr, MASKED: tl.constexpr):
    v = v.to(p.dtype.element_ty)
    if MASKED:
        if EVEN:
            tl.store(p, v, mask=spread(live))
        else:
            tl.store(p, v, mask=spread(live) & (channel < C))
    else:
        if EVEN:
            tl.store(p, v)
        else:
            tl.store(p, v, mask=channel < C)


@triton.jit
def load_rows(p, first, end, channel, ROW, C, U: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """U rows (1, 2, 4 or 8) from row ``first`` of the tile at ``p``, those below ``end`` where MASKED."""
    q = p + first * ROW
    r0 = load(q + channel, first < end, channel, C, EVEN, MASKED)
    r1 = r0
    r2 = r0
    r3 = r0
    r4 = r0
    r5 = r0
    r6 = r0
    r7 = r0
    if U >= 2:
        r1 = load(q + channel + ROW, first + 1 < end, channel, C, EVEN, MASKED)
    if U >= 4:
        r2 = load(q + channel + 2 * ROW, first + 2 < end, channel, C, EVEN, MASKED)
        r3 = load(q + channel + 3 * ROW, first + 3 < end, channel, C, EVEN, MASKED)
    if U == 8:
        r4 = load(q + channel + 4 * ROW, first + 4 < end, channel, C, EVEN, MASKED)
        r5 = load(q + channel + 5 * ROW, first + 5 < end, channel, C, EVEN, MASKED)
        r6 = load(q + channel + 6 * ROW, first + 6 < end, channel, C, EVEN, MASKED)
        r7 = load(q + channel + 7 * ROW, first + 7 < end, channel, C, EVEN, MASKED)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def load_tap(weight, age: tl.constexpr, channel, C, W: tl.constexpr, EVEN: tl.constexpr):
    """The fp32 tap of ``age``, zero beyond the last."""
    if age < W:
        k = load(weight + channel * W + (W - 1 - age), True, channel, C, EVEN, False).to(tl.float32)
    else:
        k = channel.to(tl.float32) * 0.0
    return k


@triton.jit
def load_taps(weight, channel, C, W: tl.constexpr, EVEN: tl.constexpr):
    k0 = load_tap(weight, 0, channel, C, W, EVEN)
    k1 = load_tap(weight, 1, channel, C, W, EVEN)
    k2 = load_tap(weight, 2, channel, C, W, EVEN)
    k3 = load_tap(weight, 3, channel, C, W, EVEN)
    k4 = load_tap(weight, 4, channel, C, W, EVEN)
    k5 = load_tap(weight, 5, channel, C, W, EVEN)
    k6 = load_tap(weight, 6, channel, C, W, EVEN)
    k7 = load_tap(weight, 7, channel, C, W, EVEN)
    return k0, k1, k2, k3, k4, k5, k6, k7


@triton.jit
def load_earlier(p, state, age: tl.constexpr, position, channel, ROW: tl.constexpr, C, W: tl.constexpr,
                 EVEN: tl.constexpr, HAS_STATE: tl.constexpr):
    """X(position - age) in fp32: a row before the tile at ``p``, or of the initial state; zero where not needed."""
    if age < W:
        v = load(p + channel - age * ROW, position >= age, channel, C, EVEN, True).to(tl.float32)
        if HAS_STATE:
            slot = W - age + position
            v += load(state + channel * W + slot, position < age, channel, C, EVEN, True).to(tl.float32)
    else:
        v = channel.to(tl.float32) * 0.0
    return v


@triton.jit
def load_history(p, state, position, channel, ROW: tl.constexpr, C, W: tl.constexpr, EVEN: tl.constexpr,
                 HAS_STATE: tl.constexpr):
    """X(position - 1) .. X(position - 7), as far as W asks for them."""
    x1 = load_earlier(p, state, 1, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x2 = load_earlier(p, state, 2, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x3 = load_earlier(p, state, 3, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x4 = load_earlier(p, state, 4, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x5 = load_earlier(p, state, 5, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x6 = load_earlier(p, state, 6, position, channel, ROW, C, W, EVEN, HAS_STATE)
    x7 = load_earlier(p, state, 7, position, channel, ROW, C, W, EVEN, HAS_STATE)
    return x1, x2, x3, x4, x5, x6, x7


@triton.jit
def combine(z, W: tl.constexpr, k0, k1, k2, k3, k4, k5, k6, k7, x0, x1, x2, x3, x4, x5, x6, x7):
    """z + the sum of k_i x_i over i < W, the oldest row first."""
    for i in tl.static_range(W):
        z += pick(W - 1 - i, k0, k1, k2, k3, k4, k5, k6, k7) * pick(W - 1 - i, x0, x1, x2, x3, x4, x5, x6, x7)
    return z


@triton.jit
def reciprocal(v, PTX: tl.constexpr):
    if PTX:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True,
                                      pack=1)
    else:
        r = 1.0 / v
    return r


@triton.jit
def clear_rows(p, first, end, channel, ROW, C, EVEN: tl.constexpr):
    """Zeros to rows first .. end - 1 (int64) of ``p``, whose rows are ROW apart."""
    zero = channel.to(tl.float32) * 0.0
    for r in range(first, end):
        store(p + r * ROW + channel, zero, True, channel, C, EVEN, False)


@triton.jit
def locate(slot, cu_seqlens, chunk_indices, tokens, chunks, PACKED: tl.constexpr):
    """(sequence, chunk, first row of the sequence as int64, its length); sequence -1 for a sentinel."""
    if PACKED:
        sequence = tl.load(chunk_indices + 2 * slot.to(tl.int64)).to(tl.int32)
        chunk = tl.load(chunk_indices + 2 * slot.to(tl.int64) + 1).to(tl.int32)
        start = tl.load(cu_seqlens + sequence, mask=sequence >= 0, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1, mask=sequence >= 0, other=0).to(tl.int64)
        length = (end - start).to(tl.int32)
    else:
        sequence = slot // chunks
        chunk = slot - sequence * chunks
        start = sequence.to(tl.int64) * tokens
        length = tokens
    return sequence, chunk, start, length


@triton.jit
def sentinel_rows(slot, part, cu_seqlens, chunk_offsets, tokens, sequences, BT: tl.constexpr, ROWS: tl.constexpr):
    """The padding rows, first and end (int64), that this part of a sentinel slot clears."""
    total = tl.load(cu_seqlens + sequences).to(tl.int64)
    rank = slot - tl.load(chunk_offsets + sequences).to(tl.int32)
    first = ((total + BT - 1) // BT + rank) * BT + part * ROWS
    return first, tl.minimum(first + ROWS, tokens)


@triton.jit
def shared_block_rows(cu_seqlens, tokens, sequences, reached, BT: tl.constexpr):
    """The padding rows in the last live row's block of BT rows, for the program that reached that row; else none."""
    total = tl.load(cu_seqlens + sequences).to(tl.int64)
    end = tl.minimum((total + BT - 1) // BT * BT, tokens)
    return total, tl.where(reached == total, end, total)
