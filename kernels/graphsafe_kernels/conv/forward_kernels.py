"""The forward of the short causal convolution.

Requirements
------------
1. A program walks down the rows of a slot, or of a part of one, with the last W - 1 inputs in registers: x is read
   once, but for W - 1 rows before the part.
2. Tasks are numbered from the bucket alone: ``slots * BT / ROWS * blocks`` slot tasks, blocks of BD channels
   fastest, then, if the final state is asked for, ``sequences * ceil(D / BS)`` state tasks. A program does one, or
   walks them (LOOP).
3. FAST: whole turns go through a loop of their own without masks; it doubles the code, so the policy chooses.
4. A slot task's first act is to read its table row; a sentinel clears its share of the padding and does no more.
"""

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

__all__ = ["conv_forward_kernel"]


@triton.jit
def _forward_turn(t, rows, xp, rp, yp, channel, offset, k0, k1, k2, k3, k4, k5, k6, k7, x1, x2, x3, x4, x5, x6, x7,
                  e0, e1, e2, e3, e4, e5, e6, e7,
                  C, Y_ROW, W: tl.constexpr, U: tl.constexpr, X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr,
                  SILU: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
                  MASKED: tl.constexpr):
    """Rows t .. t + U - 1, whose inputs are e0.. already; loads the next U first, as no load is moved above a store."""
    f0, f1, f2, f3, f4, f5, f6, f7 = load_rows(xp, t + U, rows, channel, X_ROW, C, U, EVEN, MASKED)
    if HAS_RESIDUAL:
        r0, r1, r2, r3, r4, r5, r6, r7 = load_rows(rp, t, rows, channel, RESIDUAL_ROW, C, U, EVEN, MASKED)
    q = yp + t * Y_ROW
    for u in tl.static_range(U):
        x0 = pick(u, e0, e1, e2, e3, e4, e5, e6, e7).to(tl.float32)
        v = combine(offset, W, k0, k1, k2, k3, k4, k5, k6, k7, x0, x1, x2, x3, x4, x5, x6, x7)
        if SILU:
            v = v * reciprocal(1.0 + tl.exp2(v * -1.4426950408889634), PTX)
        if HAS_RESIDUAL:
            v += pick(u, r0, r1, r2, r3, r4, r5, r6, r7).to(tl.float32)
        store(q + channel + u * Y_ROW, v, t + u < rows, channel, C, EVEN, MASKED)
        x7 = x6
        x6 = x5
        x5 = x4
        x4 = x3
        x3 = x2
        x2 = x1
        x1 = x0
    return x1, x2, x3, x4, x5, x6, x7, f0, f1, f2, f3, f4, f5, f6, f7


@triton.jit
def _forward_slot(task, x, weight, bias, residual, initial_state, y0, y1, y2, cu_seqlens, chunk_indices, chunk_offsets,
                  tokens, sequences, chunks, x_batch, residual_batch,
                  C: tl.constexpr, D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
                  W: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, U: tl.constexpr,
                  X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
                  HAS_RESIDUAL: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
                  FAST: tl.constexpr):
    """y of ROWS rows of a slot and BD channels of a part of C, or the clearing of as many padding rows."""
    EVEN: tl.constexpr = P0 % BD + P1 % BD + P2 % BD == 0
    BLOCKS: tl.constexpr = (P0 + BD - 1) // BD + (P1 + BD - 1) // BD + (P2 + BD - 1) // BD
    PIECES: tl.constexpr = BT // ROWS
    piece = (task // BLOCKS) % PIECES
    slot = task // (BLOCKS * PIECES)
    first_channel, _, place = part_of(task % BLOCKS, BD, P0, P1, P2)
    y = select_part(task % BLOCKS, y0, y1, y2, BD, P0, P1)
    channel = place + tl.arange(0, BD)
    sequence, chunk, start, length = locate(slot, cu_seqlens, chunk_indices, tokens, chunks, PACKED)
    if sequence >= 0:
        position = chunk * BT + piece * ROWS
        rows = tl.minimum(length - position, ROWS)
        if rows > 0:
            k0, k1, k2, k3, k4, k5, k6, k7 = load_taps(weight + first_channel * W, channel, C, W, EVEN)
            offset = channel.to(tl.float32) * 0.0
            if HAS_BIAS:
                offset = load(bias + first_channel + channel, True, channel, C, EVEN, False).to(tl.float32)
            if PACKED:
                xp = x + ((start + position) * X_ROW + first_channel)
            else:
                xp = x + (sequence.to(tl.int64) * x_batch + position.to(tl.int64) * X_ROW + first_channel)
            rp = xp
            if HAS_RESIDUAL:
                if PACKED:
                    rp = residual + ((start + position) * RESIDUAL_ROW + first_channel)
                else:
                    rp = residual + (sequence.to(tl.int64) * residual_batch + position.to(tl.int64) * RESIDUAL_ROW
                                     + first_channel)
            sp = xp
            if HAS_INITIAL:
                sp = initial_state + (sequence.to(tl.int64) * (D * W) + first_channel * W)
            yp = y + (start + position) * C
            x1, x2, x3, x4, x5, x6, x7 = load_history(xp, sp, position, channel, X_ROW, C, W, EVEN, HAS_INITIAL)
            e0, e1, e2, e3, e4, e5, e6, e7 = load_rows(xp, 0, rows, channel, X_ROW, C, U, EVEN, True)
            whole = 0
            if FAST:
                # unmasked while this turn and the next, whose rows it loads, are whole
                whole = tl.maximum(rows // U - 1, 0) * U
                for t in range(0, whole, U):
                    x1, x2, x3, x4, x5, x6, x7, e0, e1, e2, e3, e4, e5, e6, e7 = _forward_turn(
                        t, rows, xp, rp, yp, channel, offset, k0, k1, k2, k3, k4, k5, k6, k7,
                        x1, x2, x3, x4, x5, x6, x7, e0, e1, e2, e3, e4, e5, e6, e7,
                        C, C, W, U, X_ROW, RESIDUAL_ROW, SILU, HAS_RESIDUAL, EVEN, PTX, False
                    )
            for t in range(whole, rows, U):
                x1, x2, x3, x4, x5, x6, x7, e0, e1, e2, e3, e4, e5, e6, e7 = _forward_turn(
                    t, rows, xp, rp, yp, channel, offset, k0, k1, k2, k3, k4, k5, k6, k7, x1, x2, x3, x4, x5, x6, x7,
                    e0, e1, e2, e3, e4, e5, e6, e7, C, C, W, U, X_ROW, RESIDUAL_ROW, SILU, HAS_RESIDUAL, EVEN, PTX, True
                )
            if PACKED:
                first, end = shared_block_rows(cu_seqlens, tokens, sequences, start + position + rows, BT)
                clear_rows(y, first, end, channel, C, C, EVEN)
    else:
        if PACKED:
            first, end = sentinel_rows(slot, piece, cu_seqlens, chunk_offsets, tokens, sequences, BT, ROWS)
            clear_rows(y, first, end, channel, C, C, EVEN)


@triton.jit
def _final_state(task, x, initial_state, final_state, cu_seqlens, tokens, x_batch,
                 D: tl.constexpr, W: tl.constexpr, BS: tl.constexpr, WP: tl.constexpr, X_ROW: tl.constexpr,
                 HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr):
    """final_state[:, s] = X(L - W + s) of one sequence and BS channels. WP: W to the next power of two."""
    BLOCKS: tl.constexpr = (D + BS - 1) // BS
    sequence = (task // BLOCKS).to(tl.int64)
    channel = (task % BLOCKS) * BS + tl.arange(0, BS)
    tap = tl.arange(0, WP)
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
        xp = x + start * X_ROW
    else:
        length = tokens.to(tl.int64)
        xp = x + sequence * x_batch
    keep = (channel < D)[:, None] & (tap < W)[None, :]
    position = length - W + tap
    state = sequence * (D * W) + channel[:, None] * W + tap[None, :]
    v = tl.load(xp + (position * X_ROW)[None, :] + channel[:, None], mask=keep & (position >= 0)[None, :], other=0.0)
    if HAS_INITIAL:
        # X(p) for p < 0 is slot W + p = L + s of the initial state
        old = tl.load(initial_state + state + length, mask=keep & (position < 0)[None, :], other=0.0)
        v = tl.where((position >= 0)[None, :], v, old.to(v.dtype))
    tl.store(final_state + state, v.to(final_state.dtype.element_ty), mask=keep)


@triton.jit
def _forward_task(task, x, weight, bias, residual, initial_state, y0, y1, y2, final_state, cu_seqlens, chunk_indices,
                  chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, slot_tasks,
                  D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, W: tl.constexpr,
                  WP: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
                  U: tl.constexpr, X_ROW: tl.constexpr,
                  RESIDUAL_ROW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                  HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
                  PTX: tl.constexpr, FAST: tl.constexpr):
    if task < slot_tasks:
        BLOCKS: tl.constexpr = (P0 + BD - 1) // BD + (P1 + BD - 1) // BD + (P2 + BD - 1) // BD
        EQUAL: tl.constexpr = (P0 + BD - 1) // BD + (P1 + BD - 1) // BD
        if P2 == 0 or P2 == P0:
            _forward_slot(task, x, weight, bias, residual, initial_state, y0, y1, y2, cu_seqlens, chunk_indices,
                          chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, P0, D, P0, P1, P2, W, BT,
                          ROWS, BD, U, X_ROW, RESIDUAL_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_INITIAL, PACKED, PTX,
                          FAST)
        else:
            # a width known at compile time spares 40 registers
            if task % BLOCKS < EQUAL:
                _forward_slot(task, x, weight, bias, residual, initial_state, y0, y1, y2, cu_seqlens, chunk_indices,
                              chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, P0, D, P0, P1, P2, W,
                              BT, ROWS, BD, U, X_ROW, RESIDUAL_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_INITIAL, PACKED,
                              PTX, FAST)
            else:
                _forward_slot(task, x, weight, bias, residual, initial_state, y0, y1, y2, cu_seqlens, chunk_indices,
                              chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, P2, D, P0, P1, P2, W,
                              BT, ROWS, BD, U, X_ROW, RESIDUAL_ROW, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_INITIAL, PACKED,
                              PTX, FAST)
    else:
        if HAS_FINAL:
            _final_state(task - slot_tasks, x, initial_state, final_state, cu_seqlens, tokens, x_batch,
                         D, W, BS, WP, X_ROW, HAS_INITIAL, PACKED)


@triton.jit(do_not_specialize=["tokens", "sequences", "chunks", "x_batch", "residual_batch", "slot_tasks", "tasks"])
def conv_forward_kernel(x, weight, bias, residual, initial_state, y0, y1, y2, final_state, cu_seqlens, chunk_indices,
                        chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, slot_tasks, tasks,
                        D: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, W: tl.constexpr,
                        WP: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
                        U: tl.constexpr, X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr, SILU: tl.constexpr,
                        HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
                        HAS_FINAL: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr, FAST: tl.constexpr,
                        LOOP: tl.constexpr):
    """y and the final state. Dense: ``tokens`` and ``chunks`` per sequence, no tables; packed: ``tokens`` in all.

    y is contiguous, in parts of P0, P1 and P2 channels, D in sum and the first two equal, or in one part, P1 and P2
    being 0.
    """
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _forward_task(task, x, weight, bias, residual, initial_state, y0, y1, y2, final_state, cu_seqlens,
                          chunk_indices, chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, slot_tasks,
                          D, P0, P1, P2, W, WP, BT, ROWS, BD, BS, U, X_ROW, RESIDUAL_ROW, SILU, HAS_BIAS, HAS_RESIDUAL,
                          HAS_INITIAL, HAS_FINAL, PACKED, PTX, FAST)
    else:
        _forward_task(pid, x, weight, bias, residual, initial_state, y0, y1, y2, final_state, cu_seqlens, chunk_indices,
                      chunk_offsets, tokens, sequences, chunks, x_batch, residual_batch, slot_tasks,
                      D, P0, P1, P2, W, WP, BT, ROWS, BD, BS, U, X_ROW, RESIDUAL_ROW, SILU, HAS_BIAS, HAS_RESIDUAL,
                      HAS_INITIAL, HAS_FINAL, PACKED, PTX, FAST)
