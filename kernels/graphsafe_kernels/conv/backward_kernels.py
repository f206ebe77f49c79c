"""The backward of the short causal convolution, up to the partial sums of its weight gradients.

Requirements
------------
1. A program walks down the rows of a slot with the last W - 1 inputs and pre-activation gradients in registers: x and
   dy are read once, but for W - 1 rows on either side, the activation is computed again, dx is written once.
2. Tasks are numbered as in the forward, with the initial state's gradient as state tasks. dy comes in the forward's
   parts; dx is written where it belongs in a wider matrix, or by itself.
3. dweight and dbias: a live slot writes one fp32 partial, which does not depend on how much padding there is.
"""

# ruff: noqa: SIM108 - a compile-time if is not a choice of values

import triton
import triton.language as tl

from graphsafe_kernels.conv.rows import (
    clear_rows,
    combine,
    load,
    load_history,
    load_rows,
    load_taps,
    locate,
    part_of,
    pick,
    reciprocal,
    select_part,
    sentinel_rows,
    shared_block_rows,
    store,
)
from graphsafe_kernels.masks import spread

__all__ = ["conv_backward_kernel"]


@triton.jit
def _combine_reversed(z, W: tl.constexpr, k0, k1, k2, k3, k4, k5, k6, k7, d0, d1, d2, d3, d4, d5, d6, d7):
    """z + the sum of k_i d_(W-1-i) over i < W, the oldest row first."""
    for i in tl.static_range(W):
        z += pick(i, k0, k1, k2, k3, k4, k5, k6, k7) * pick(W - 1 - i, d0, d1, d2, d3, d4, d5, d6, d7)
    return z


@triton.jit
def _pre_activation_gradient(z, dy, SILU: tl.constexpr, PTX: tl.constexpr):
    """With SiLU dy act'(z) times -ln 2, z given over -ln 2, so that exp2 needs no product; without, dy.

    silu'(z) = s (1 + z (1 - s)) with s the sigmoid.
    """
    if SILU:
        # 0.6931... = ln 2, 0.4804... = ln 2 squared
        s = reciprocal(1.0 + tl.exp2(z), PTX)
        dz = dy * s * (z * (0.4804530139182014 - s * 0.4804530139182014) - 0.6931471805599453)
    else:
        dz = dy
    return dz


@triton.jit
def _backward_turn(t, rows, end, to_end, xp, dyp, dxp, drp, dhp, channel, offset,
                   k0, k1, k2, k3, k4, k5, k6, k7, x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7,
                   a0, a1, a2, a3, a4, a5, a6, a7, total, e0, e1, e2, e3, e4, e5, e6, e7,
                   g0, g1, g2, g3, g4, g5, g6, g7,
                   C, DY_ROW, D: tl.constexpr, W: tl.constexpr, U: tl.constexpr, X_ROW: tl.constexpr,
                   DX_ROW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                   HAS_DFINAL: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr):
    """Rows t .. t + U - 1 of dz, and dx of the rows W - 1 before them; loads the next U rows first.

    ``rows``: the slot's; ``end``: also the rows behind it whose dz its dx needs; ``to_end``: rows from the slot's
    first to its sequence's end.
    """
    n0, n1, n2, n3, n4, n5, n6, n7 = load_rows(xp, t + U, end, channel, X_ROW, C, U, EVEN, MASKED)
    m0, m1, m2, m3, m4, m5, m6, m7 = load_rows(dyp, t + U, end, channel, DY_ROW, C, U, EVEN, MASKED)
    q = dxp + t * DX_ROW
    for u in tl.static_range(U):
        x0 = pick(u, e0, e1, e2, e3, e4, e5, e6, e7).to(tl.float32)
        dy = pick(u, g0, g1, g2, g3, g4, g5, g6, g7)
        if HAS_RESIDUAL:
            store(drp + t * D + u * D + channel, dy, t + u < rows, channel, C, EVEN, MASKED)
        z = offset
        if SILU:
            z = combine(offset, W, k0, k1, k2, k3, k4, k5, k6, k7, x0, x1, x2, x3, x4, x5, x6, x7)
        d0 = _pre_activation_gradient(z, dy.to(tl.float32), SILU, PTX)
        own = d0
        if MASKED:
            own = tl.where(t + u < rows, d0, 0.0)
        a0 += own * x0
        if W > 1:
            a1 += own * x1
        if W > 2:
            a2 += own * x2
        if W > 3:
            a3 += own * x3
        if W > 4:
            a4 += own * x4
        if W > 5:
            a5 += own * x5
        if W > 6:
            a6 += own * x6
        if W > 7:
            a7 += own * x7
        if HAS_BIAS:
            total += own
        dx = _combine_reversed(offset * 0.0, W, k0, k1, k2, k3, k4, k5, k6, k7, d0, d1, d2, d3, d4, d5, d6, d7)
        r = t + u - (W - 1)
        inside = r >= 0
        if MASKED:
            inside = (r >= 0) & (r < rows)
            if HAS_DFINAL:
                # a sequence's last W rows are its final state
                slot = r + W - to_end
                p = dhp + channel * W + slot
                dx += load(p, inside & (slot >= 0), channel, C, EVEN, True).to(tl.float32)
        if MASKED or u < W - 1:
            store(q + channel + (u - (W - 1)) * DX_ROW, dx, inside, channel, C, EVEN, True)
        else:
            store(q + channel + (u - (W - 1)) * DX_ROW, dx, inside, channel, C, EVEN, False)
        x7 = x6
        x6 = x5
        x5 = x4
        x4 = x3
        x3 = x2
        x2 = x1
        x1 = x0
        d7 = d6
        d6 = d5
        d5 = d4
        d4 = d3
        d3 = d2
        d2 = d1
        d1 = d0
    return (x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7, a0, a1, a2, a3, a4, a5, a6, a7, total,
            n0, n1, n2, n3, n4, n5, n6, n7, m0, m1, m2, m3, m4, m5, m6, m7)


@triton.jit
def _store_partial(p, j: tl.constexpr, v, channel, C, D: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr):
    if j < W:
        store(p + j * D + channel, v, True, channel, C, EVEN, False)


@triton.jit
def _backward_slot(task, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, partials, cu_seqlens,
                   chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, dy_batch,
                   D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, W: tl.constexpr,
                   BT: tl.constexpr, BD: tl.constexpr, U: tl.constexpr, X_ROW: tl.constexpr, DY_ROW0: tl.constexpr,
                   DX_ROW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                   HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
                   FAST: tl.constexpr):
    """dx (and dresidual) of a slot and BD channels with its partial of dweight and dbias, or the clearing of padding.

    ``partials`` ``[slots, W + 1, D]`` fp32: dweight by age, then dbias.
    """
    EVEN: tl.constexpr = P0 % BD + P1 % BD + P2 % BD == 0
    BLOCKS: tl.constexpr = (P0 + BD - 1) // BD + (P1 + BD - 1) // BD + (P2 + BD - 1) // BD
    slot = task // BLOCKS
    first_channel, C, place = part_of(task % BLOCKS, BD, P0, P1, P2)
    dy = select_part(task % BLOCKS, dy0, dy1, dy2, BD, P0, P1)
    channel = place + tl.arange(0, BD)
    DY_ROW = C
    if P1 == 0:
        DY_ROW = DY_ROW0
    sequence, chunk, start, length = locate(slot, cu_seqlens, chunk_indices, tokens, chunks, PACKED)
    if sequence >= 0:
        # z and the taps over -ln 2, dz times -ln 2, so that their products are right: see _pre_activation_gradient
        SCALE: tl.constexpr = -1.4426950408889634 if SILU else 1.0
        k0, k1, k2, k3, k4, k5, k6, k7 = load_taps(weight + first_channel * W, channel, C, W, EVEN)
        k0 *= SCALE
        k1 *= SCALE
        k2 *= SCALE
        k3 *= SCALE
        k4 *= SCALE
        k5 *= SCALE
        k6 *= SCALE
        k7 *= SCALE
        zero = channel.to(tl.float32) * 0.0
        offset = zero
        if HAS_BIAS:
            offset = load(bias + first_channel + channel, True, channel, C, EVEN, False).to(tl.float32) * SCALE
        position = chunk * BT
        to_end = length - position
        rows = tl.minimum(to_end, BT)
        end = tl.minimum(to_end, BT + W - 1)
        if PACKED:
            xp = x + ((start + position) * X_ROW + first_channel)
        else:
            xp = x + (sequence.to(tl.int64) * x_batch + position.to(tl.int64) * X_ROW + first_channel)
        if PACKED or P1 > 0:
            dyp = dy + (start + position) * DY_ROW
        else:
            dyp = dy + (sequence.to(tl.int64) * dy_batch + position.to(tl.int64) * DY_ROW)
        dxp = dx + ((start + position) * DX_ROW + first_channel)
        drp = dxp
        if HAS_RESIDUAL:
            drp = dresidual + ((start + position) * D + first_channel)
        sp = xp
        if HAS_INITIAL:
            sp = initial_state + (sequence.to(tl.int64) * (D * W) + first_channel * W)
        dhp = xp
        if HAS_DFINAL:
            dhp = dfinal + (sequence.to(tl.int64) * (D * W) + first_channel * W)
        x1, x2, x3, x4, x5, x6, x7 = load_history(xp, sp, position, channel, X_ROW, C, W, EVEN, HAS_INITIAL)
        e0, e1, e2, e3, e4, e5, e6, e7 = load_rows(xp, 0, end, channel, X_ROW, C, U, EVEN, True)
        g0, g1, g2, g3, g4, g5, g6, g7 = load_rows(dyp, 0, end, channel, DY_ROW, C, U, EVEN, True)
        d1 = zero
        d2 = zero
        d3 = zero
        d4 = zero
        d5 = zero
        d6 = zero
        d7 = zero
        a0 = zero
        a1 = zero
        a2 = zero
        a3 = zero
        a4 = zero
        a5 = zero
        a6 = zero
        a7 = zero
        total = zero
        whole = 0
        if FAST:
            whole = rows
            if HAS_DFINAL:
                # dx of the last W rows is left to the masked turns
                whole = tl.minimum(rows, to_end - 1)
            whole = tl.maximum(whole // U - 1, 0) * U
            for t in range(0, whole, U):
                (x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7, a0, a1, a2, a3, a4, a5, a6, a7, total,
                 e0, e1, e2, e3, e4, e5, e6, e7, g0, g1, g2, g3, g4, g5, g6, g7) = _backward_turn(
                    t, rows, end, to_end, xp, dyp, dxp, drp, dhp, channel, offset,
                    k0, k1, k2, k3, k4, k5, k6, k7, x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7,
                    a0, a1, a2, a3, a4, a5, a6, a7, total, e0, e1, e2, e3, e4, e5, e6, e7,
                    g0, g1, g2, g3, g4, g5, g6, g7,
                    C, DY_ROW, D, W, U, X_ROW, DX_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_DFINAL, EVEN, PTX, False)
        for t in range(whole, rows + W - 1, U):
            (x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7, a0, a1, a2, a3, a4, a5, a6, a7, total,
             e0, e1, e2, e3, e4, e5, e6, e7, g0, g1, g2, g3, g4, g5, g6, g7) = _backward_turn(
                t, rows, end, to_end, xp, dyp, dxp, drp, dhp, channel, offset,
                k0, k1, k2, k3, k4, k5, k6, k7, x1, x2, x3, x4, x5, x6, x7, d1, d2, d3, d4, d5, d6, d7,
                a0, a1, a2, a3, a4, a5, a6, a7, total, e0, e1, e2, e3, e4, e5, e6, e7, g0, g1, g2, g3, g4, g5, g6, g7,
                C, DY_ROW, D, W, U, X_ROW, DX_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_DFINAL, EVEN, PTX, True)
        p = partials + (slot.to(tl.int64) * ((W + 1) * D) + first_channel)
        _store_partial(p, 0, a0 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 1, a1 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 2, a2 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 3, a3 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 4, a4 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 5, a5 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 6, a6 * SCALE, channel, C, D, W, EVEN)
        _store_partial(p, 7, a7 * SCALE, channel, C, D, W, EVEN)
        if HAS_BIAS:
            store(p + W * D + channel, total * SCALE, True, channel, C, EVEN, False)
        if PACKED:
            first, stop = shared_block_rows(cu_seqlens, tokens, sequences, start + position + rows, BT)
            clear_rows(dx + first_channel, first, stop, channel, DX_ROW, C, EVEN)
            if HAS_RESIDUAL:
                clear_rows(dresidual + first_channel, first, stop, channel, D, C, EVEN)
    else:
        if PACKED:
            first, stop = sentinel_rows(slot, 0, cu_seqlens, chunk_offsets, tokens, sequences, BT, BT)
            clear_rows(dx + first_channel, first, stop, channel, DX_ROW, C, EVEN)
            if HAS_RESIDUAL:
                clear_rows(dresidual + first_channel, first, stop, channel, D, C, EVEN)


@triton.jit
def _initial_state_gradient(task, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dinitial, cu_seqlens, tokens,
                            x_batch, dy_batch, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
                            W: tl.constexpr, BS: tl.constexpr, WP: tl.constexpr, X_ROW: tl.constexpr,
                            DY_ROW0: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
                            HAS_DFINAL: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr):
    """d initial_state of one sequence and BS channels, from dz of its first W - 1 rows, made here anew.

    Slot s is X(s - W): row t reads it with tap s - 1 - t, and a sequence shorter than W hands it on as slot s - L.
    """
    BLOCKS: tl.constexpr = (P0 + BS - 1) // BS + (P1 + BS - 1) // BS + (P2 + BS - 1) // BS
    sequence = (task // BLOCKS).to(tl.int64)
    first_channel, C, place = part_of(task % BLOCKS, BS, P0, P1, P2)
    dy = select_part(task % BLOCKS, dy0, dy1, dy2, BS, P0, P1)
    inner = place + tl.arange(0, BS)
    channel = first_channel + inner
    tap = tl.arange(0, WP)
    DY_ROW = C
    if P1 == 0:
        DY_ROW = DY_ROW0
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
        xp = x + start * X_ROW
        dyp = dy + start * DY_ROW
    else:
        length = tokens.to(tl.int64)
        xp = x + sequence * x_batch
        if P1 > 0:
            dyp = dy + sequence * length * DY_ROW
        else:
            dyp = dy + sequence * dy_batch
    held = inner < C
    keep = held[:, None] & (tap < W)[None, :]
    taps = channel[:, None] * W + tap[None, :]
    state = sequence * (D * W) + taps
    total = taps.to(tl.float32) * 0.0
    if HAS_DFINAL:
        total = tl.load(dfinal + state - length, mask=keep & (tap >= length)[None, :], other=0.0).to(tl.float32)
    w = tl.load(weight + taps, mask=keep, other=0.0).to(tl.float32)
    offset = channel.to(tl.float32) * 0.0
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=held, other=0.0).to(tl.float32)
    for t in range(0, W - 1):
        live = spread(t < length)
        g = tl.load(dyp + t * DY_ROW + inner, mask=held & live, other=0.0).to(tl.float32)
        if SILU:
            position = tap + (t - W + 1)
            rows = keep & live & (position >= 0)[None, :]
            v = tl.load(xp + (position * X_ROW)[None, :] + channel[:, None], mask=rows, other=0.0).to(tl.float32)
            before = keep & live & (position < 0)[None, :]
            v += tl.load(initial_state + state + (t + 1), mask=before, other=0.0).to(tl.float32)
            z = (tl.sum(v * w, 1) + offset) * -1.4426950408889634
            g = _pre_activation_gradient(z, g, SILU, PTX) * -1.4426950408889634
        read = keep & (tap > t)[None, :]
        total += g[:, None] * tl.load(weight + taps - (t + 1), mask=read, other=0.0).to(tl.float32)
    tl.store(dinitial + state, total.to(dinitial.dtype.element_ty), mask=keep)


@triton.jit
def _backward_task(task, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, dinitial, partials,
                   cu_seqlens, chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, dy_batch, slot_tasks,
                   D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, W: tl.constexpr,
                   WP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, U: tl.constexpr,
                   X_ROW: tl.constexpr, DY_ROW: tl.constexpr, DX_ROW: tl.constexpr, SILU: tl.constexpr,
                   HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
                   HAS_DFINAL: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr, FAST: tl.constexpr):
    if task < slot_tasks:
        _backward_slot(task, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, partials, cu_seqlens,
                       chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, dy_batch, D, P0, P1, P2, W, BT,
                       BD, U, X_ROW, DY_ROW, DX_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_INITIAL, HAS_DFINAL, PACKED, PTX,
                       FAST)
    else:
        if HAS_INITIAL:
            _initial_state_gradient(task - slot_tasks, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dinitial,
                                    cu_seqlens, tokens, x_batch, dy_batch, D, P0, P1, P2, W, BS, WP, X_ROW, DY_ROW,
                                    SILU, HAS_BIAS, HAS_DFINAL, PACKED, PTX)


@triton.jit(do_not_specialize=["tokens", "sequences", "chunks", "x_batch", "dy_batch", "slot_tasks", "tasks"])
def conv_backward_kernel(x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, dinitial, partials,
                         cu_seqlens, chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, dy_batch,
                         slot_tasks, tasks, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
                         W: tl.constexpr, WP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
                         U: tl.constexpr, X_ROW: tl.constexpr, DY_ROW: tl.constexpr, DX_ROW: tl.constexpr,
                         SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                         HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr, PACKED: tl.constexpr,
                         PTX: tl.constexpr, FAST: tl.constexpr, LOOP: tl.constexpr):
    """dx, dresidual, d initial_state and the partials of dweight and dbias. Sizes as in the forward.

    Rows of dx are DX_ROW apart, all of a dense batch's too. Parts of dy are contiguous; DY_ROW is that of a single one.
    """
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _backward_task(task, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, dinitial,
                           partials, cu_seqlens, chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch,
                           dy_batch, slot_tasks, D, P0, P1, P2, W, WP, BT, BD, BS, U, X_ROW, DY_ROW, DX_ROW, SILU,
                           HAS_BIAS, HAS_RESIDUAL, HAS_INITIAL, HAS_DFINAL, PACKED, PTX, FAST)
    else:
        _backward_task(pid, x, weight, bias, dy0, dy1, dy2, dfinal, initial_state, dx, dresidual, dinitial, partials,
                       cu_seqlens, chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, dy_batch,
                       slot_tasks, D, P0, P1, P2, W, WP, BT, BD, BS, U, X_ROW, DY_ROW, DX_ROW, SILU, HAS_BIAS,
                       HAS_RESIDUAL, HAS_INITIAL, HAS_DFINAL, PACKED, PTX, FAST)
