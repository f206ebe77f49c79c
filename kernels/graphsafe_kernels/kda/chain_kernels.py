"""The serial chains of KDA: the state from chunk to chunk, and its gradient back.

The state is held transposed, S^T ``[BV, BK]`` fp32 in registers, so that every left operand of the serial products is a
register tile that was never transposed after a product. Per chunk, in the names of ``prepare_kernels``:

    x = v - r_k (kg S)       e = x + N (b x)          w = b e
    o = scale r_q (qg S) + P w                        S <- 2^G_last S + kd^T (r_k w)

and backward, with D the gradient of the state behind the chunk and dw that of w, less what comes through N:

    dw = y + N^T (b y),  y = P^T do + r_k (kd D)
    D <- 2^G_last D + qg^T (scale r_q do) - kg^T (r_k b dw)

Requirements
------------
1. A chunk's tiles are whole; only v and do, and o and dw, are rows of sequences: loads of rows that belong to the next
   sequence are masked before any arithmetic, and stores touch the sequence's own rows alone.
2. A sequence without tokens hands its state through, and its state's gradient back.
3. A segment of a sequence is a chain of its own that starts from the state ``segment_kernels`` left for it.
"""

# ruff: noqa: SIM102  (compile-time conditions choose what is compiled)
import triton
import triton.language as tl

from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.row_kernels import (
    load_rows,
    load_state,
    locate_sequence,
    state_offsets,
    state_tile,
    store_state,
)
from graphsafe_kernels.gdn.segment_kernels import segment_gradient, segment_state
from graphsafe_kernels.kda.prepare_kernels import VECTORS
from graphsafe_kernels.masks import spread


@triton.jit
def load_chunk(pointer, tiles, at, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):
    """The tile [BT, BK] of slot and head ``at`` of a tensor [slots, HV, BT, K]."""
    if TILES:
        return tiles.load([(at * BT).to(tl.int32), 0])
    i = tl.arange(0, BT)
    c = tl.arange(0, BK)
    return tl.load(pointer + at * (BT * K) + i[:, None] * K + c[None, :], mask=(c < K)[None, :], other=0.0)


@triton.jit
def load_values(pointer, tiles, row, left, hv, i_v, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                BV: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The transposed tile [BV, BT] of rows of a tensor [tokens, HV, V]; zero past ``left`` rows."""
    if TILES:
        xT = tl.trans(tiles.load([row.to(tl.int32), hv * V + i_v * BV]))
        xT = tl.where((tl.arange(0, BT) < left)[None, :], xT, 0.0)
    else:
        xT = tl.trans(load_rows(pointer + hv * V, row, left, i_v * BV, V, HV * V, BT, BV))
    return xT


@triton.jit
def store_block(pointer, tiles, x, at, i_v, ROWS: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr,
                BW: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Write the tile [BR, BW], block ``i_v`` of rows of slot and head ``at``, of a tensor [slots, HV, ROWS, WIDTH]."""
    if TILES:
        row = (at * ROWS).to(tl.int32) + i_v * BR
        if 4 * tiles.block_shape[1] == BW:
            # In quarters, which pass through the same shared memory one after the other.
            x = tl.permute(tl.reshape(x, [BR, 4, BW // 4]), [0, 2, 1])
            even, odd = tl.split(tl.reshape(x, [BR, BW // 4, 2, 2]))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            tiles.store([row, 0], x0)
            tiles.store([row, BW // 4], x1)
            tiles.store([row, BW // 2], x2)
            tiles.store([row, BW // 4 * 3], x3)
        else:
            tiles.store([row, 0], x)
    else:
        r = i_v * BR + tl.arange(0, BR)
        c = tl.arange(0, BW)
        out = pointer + at * (ROWS * WIDTH) + r[:, None] * WIDTH + c[None, :]
        tl.store(out, x, mask=(r < ROWS)[:, None] & (c < WIDTH)[None, :])


@triton.jit
def forward_step(
    S, at, row, left, hv, i_v, kg, qg, kd, v, correction, scores, vectors, decay, o, states, residuals,
    kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr, valued=True,
):  # fmt: skip
    """One chunk of the forward chain; returns the next state. SAVE: also the state before it and the residuals.
    valued: v counts, else it is taken for zero."""
    DT: tl.constexpr = kg.dtype.element_ty
    i = tl.arange(0, BT)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    kgt = load_chunk(kg, kg_tiles, at, K, BT, BK, TILES)
    vT = load_values(v, v_tiles, row, left, hv, i_v, HV, V, BT, BV, TILES)
    nt = load_chunk(correction, correction_tiles, at, BT, BT, BT, TILES)
    if OUTPUT:
        qgt = load_chunk(qg, qg_tiles, at, K, BT, BK, TILES)
        pt = load_chunk(scores, scores_tiles, at, BT, BT, BT, TILES)
    kdt = load_chunk(kd, kd_tiles, at, K, BT, BK, TILES)
    vec = vectors + at * (VECTORS * BT) + i
    b = tl.load(vec)[None, :]
    rk = tl.load(vec + BT)[None, :]
    de = tl.load(decay + at * K + ik, mask=ik < K, other=0.0)[None, :]
    Sb = S.to(DT)
    if SAVE:
        store_block(states, states_tiles, Sb, at, i_v, V, K, BV, BK, TILES)
    vT = vT.to(tl.float32)
    if not OUTPUT and not SAVE:
        vT = tl.where(valued, vT, 0.0)
    x = vT - tl.dot(Sb, tl.trans(kgt), input_precision=PRECISION) * rk
    e = tl.dot((x * b).to(DT), tl.trans(nt), x, input_precision=PRECISION)
    if SAVE:
        store_block(residuals, residuals_tiles, e.to(DT), at, i_v, V, BT, BV, BT, TILES)
    w = e * b
    if OUTPUT:
        y = tl.dot(Sb, tl.trans(qgt), input_precision=PRECISION) * tl.load(vec + 2 * BT)[None, :]
        y = tl.dot(w.to(DT), tl.trans(pt), y, input_precision=PRECISION)
        out = o + hv * V + (row + i)[:, None] * (HV * V) + iv[None, :]
        tl.store(out, tl.trans(y).to(o.dtype.element_ty), mask=(i < left)[:, None] & (iv < V)[None, :])
    return tl.dot((w * rk).to(DT), kdt, S * de, input_precision=PRECISION)


@triton.jit
def forward_chain(
    n, segment, hv, i_v, kg, qg, kd, v, correction, scores, vectors, decay, o, states, residuals, intermediates,
    initial_state, final_state, ends, transitions, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles,
    scores_tiles, states_tiles, residuals_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, OUTPUT: tl.constexpr,
    SAVE: tl.constexpr, INTERMEDIATES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chain of one sequence, or of a segment of one, value head and block of V columns. SAVE: states before each
    chunk and residuals."""
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    place, mask = state_tile(n, hv, i_v, HV, K, V, BK, BV, V_FIRST)
    first = 0
    end = tl.cdiv(length, BT)
    if SEGMENTS > 1:
        first = segment * span
        final = first + span >= end
        end = tl.minimum(end, first + span)
        inner, _ = state_offsets(i_v, K, V, BK, BV, V_FIRST)
        S = segment_state(segment, n, hv, inner, mask, initial_state, ends, transitions, transitions_tiles, HV, K, V,
                          BK, INITIAL, TILES, SEGMENTS, PRECISION)  # fmt: skip
    else:
        if INITIAL:
            S = load_state(initial_state, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST).to(tl.float32)
        else:
            S = tl.zeros([BV, BK], tl.float32)
    for c in tl.range(first, end, num_stages=STAGES):
        if INTERMEDIATES:
            inner, _ = state_tile(slot + c, hv, i_v, HV, K, V, BK, BV, V_FIRST)
            store_state(intermediates, S, inner, mask, slot + c, hv, i_v, HV, K, V, BK, BV, V_FIRST)
        S = forward_step(
            S, (slot + c).to(tl.int64) * HV + hv, start + c * BT, length - c * BT, hv, i_v, kg, qg, kd, v, correction,
            scores, vectors, decay, o, states, residuals, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles,
            scores_tiles, states_tiles, residuals_tiles, HV, K, V, BT, BK, BV, OUTPUT, SAVE, TILES, PRECISION,
        )  # fmt: skip
    if FINAL:
        if SEGMENTS > 1:
            tl.store(final_state + place, S, mask=mask & spread(final))
        else:
            store_state(final_state, S, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST)


@triton.jit
def reverse_step(
    D, at, row, left, hv, i_v, kg, qg, kd, do, correction, scores, vectors, decay, dw, dstates,
    kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SAVE: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of the reverse chain; with SAVE stores D behind it and dw; returns the gradient of its first state."""
    DT: tl.constexpr = kg.dtype.element_ty
    i = tl.arange(0, BT)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    kdt = load_chunk(kd, kd_tiles, at, K, BT, BK, TILES)
    dT = load_values(do, do_tiles, row, left, hv, i_v, HV, V, BT, BV, TILES)
    pt = load_chunk(scores, scores_tiles, at, BT, BT, BT, TILES)
    nt = load_chunk(correction, correction_tiles, at, BT, BT, BT, TILES)
    qgt = load_chunk(qg, qg_tiles, at, K, BT, BK, TILES)
    kgt = load_chunk(kg, kg_tiles, at, K, BT, BK, TILES)
    vec = vectors + at * (VECTORS * BT) + i
    b = tl.load(vec)[None, :]
    rk = tl.load(vec + BT)[None, :]
    Db = D.to(DT)
    if SAVE:
        store_block(dstates, dstates_tiles, Db, at, i_v, V, K, BV, BK, TILES)
    y = tl.dot(Db, tl.trans(kdt), input_precision=PRECISION) * rk
    y = tl.dot(dT, pt, y, input_precision=PRECISION)
    y = tl.dot((y * b).to(DT), nt, y, input_precision=PRECISION)
    if SAVE:
        out = dw + hv * V + (row + i)[:, None] * (HV * V) + iv[None, :]
        tl.store(out, tl.trans(y).to(dw.dtype.element_ty), mask=(i < left)[:, None] & (iv < V)[None, :])
    # Loaded here, behind a store: earlier, or kept from above, these would take registers that the products need.
    cq = tl.load(vec + 2 * BT)[None, :]
    de = tl.load(decay + at * K + ik, mask=ik < K, other=0.0)[None, :]
    D = tl.dot((dT.to(tl.float32) * cq).to(DT), qgt, D * de, input_precision=PRECISION)
    y *= 0.0 - tl.load(vec)[None, :] * tl.load(vec + BT)[None, :]
    return tl.dot(y.to(DT), kgt, D, input_precision=PRECISION)


@triton.jit
def reverse_rest(D, at, row, left, hv, i_v, qg, do, vectors, qg_tiles, do_tiles, HV: tl.constexpr, K: tl.constexpr,
                 V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """D, the gradient of a chunk's first state, with what scale r_q do lost when :func:`reverse_step` rounded it: half
    of D's error where a state is forgotten within the chunk."""
    DT: tl.constexpr = qg.dtype.element_ty
    qgt = load_chunk(qg, qg_tiles, at, K, BT, BK, TILES)
    x = load_values(do, do_tiles, row, left, hv, i_v, HV, V, BT, BV, TILES).to(tl.float32)
    x *= tl.load(vectors + at * (VECTORS * BT) + 2 * BT + tl.arange(0, BT))[None, :]
    return tl.dot((x - x.to(DT).to(tl.float32)).to(DT), qgt, D, input_precision=PRECISION)


@triton.jit
def reverse_chain(
    n, segment, hv, i_v, kg, qg, kd, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
    dends, transitions, kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles,
    transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse chain of one sequence, or of a segment of one, value head and block of V columns; stores D behind
    each chunk, and dw."""
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    place, mask = state_tile(n, hv, i_v, HV, K, V, BK, BV, V_FIRST)
    first = 0
    end = tl.cdiv(length, BT)
    if SEGMENTS > 1:
        first = segment * span
        last = tl.maximum(end - 1, 0) // span
        end = tl.minimum(end, first + span)
        inner, _ = state_offsets(i_v, K, V, BK, BV, V_FIRST)
        D = segment_gradient(segment, last, n, hv, inner, mask, dfinal_state, dends, transitions, transitions_tiles, HV,
                             K, V, BK, FINAL, TILES, SEGMENTS, PRECISION)  # fmt: skip
    else:
        if FINAL:
            D = load_state(dfinal_state, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST).to(tl.float32)
        else:
            D = tl.zeros([BV, BK], tl.float32)
    for r in tl.range(0, end - first, num_stages=STAGES):
        c = end - 1 - r
        D = reverse_step(
            D, (slot + c).to(tl.int64) * HV + hv, start + c * BT, length - c * BT, hv, i_v, kg, qg, kd, do, correction,
            scores, vectors, decay, dw, dstates, kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles,
            dstates_tiles, HV, K, V, BT, BK, BV, True, TILES, PRECISION,
        )  # fmt: skip
    if INITIAL:
        if (first == 0) & (length > 0):
            D = reverse_rest(D, slot.to(tl.int64) * HV + hv, start, length, hv, i_v, qg, do, vectors, qg_tiles,
                             do_tiles, HV, K, V, BT, BK, BV, TILES, PRECISION)  # fmt: skip
        if SEGMENTS > 1:
            tl.store(dinitial_state + place, D, mask=mask & spread(segment == 0))
        else:
            store_state(dinitial_state, D, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST)


@triton.jit
def is_past(n, segment, span, cu_seqlens, chunk_offsets, T, NT, PACKED: tl.constexpr, BT: tl.constexpr):
    """Whether a segment lies behind its sequence's last one."""
    _, length, _ = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    return (segment > 0) & (segment * span * BT >= length)


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def forward_chain_kernel(
    kg, qg, kd, v, correction, scores, vectors, decay, o, states, residuals, intermediates, initial_state, final_state,
    ends, transitions, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles,
    residuals_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, SAVE: tl.constexpr,
    INTERMEDIATES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr, LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Output and final state. One task per sequence, segment, value head and block of BV columns, blocks fastest; a
    program has one, or with LOOP walks them (and sequences are whole).

    v, o ``[tokens, HV, V]``; states ``[slots, HV, V, K]`` and residuals ``[slots, HV, V, BT]`` are written with SAVE,
    intermediates ``[slots, HV, K, V]`` fp32 (or V, K) with INTERMEDIATES; ends and transitions as ``segment_kernels``
    leaves them, with SEGMENTS > 1. ``*_tiles``: descriptors, used with TILES.
    """
    follow(OVERLAP)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if LOOP:
        tl.static_assert(SEGMENTS == 1)
        for step in tl.range(0, N * (HV * BLOCKS) - pid, tl.num_programs(0)):
            task = pid + step
            forward_chain(
                task // (BLOCKS * HV), 0, task // BLOCKS % HV, task % BLOCKS, kg, qg, kd, v, correction, scores,
                vectors, decay, o, states, residuals, intermediates, initial_state, final_state, ends, transitions,
                kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
                transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL,
                V_FIRST, True, SAVE, INTERMEDIATES, TILES, STAGES, SEGMENTS, PRECISION,
            )  # fmt: skip
    else:
        task = pid // (BLOCKS * HV)
        n = task // SEGMENTS
        segment = task % SEGMENTS
        if SEGMENTS > 1:
            if is_past(n, segment, span, cu_seqlens, chunk_offsets, T, NT, PACKED, BT):
                return
        forward_chain(
            n, segment, pid // BLOCKS % HV, pid % BLOCKS, kg, qg, kd, v, correction, scores, vectors, decay, o, states,
            residuals, intermediates, initial_state, final_state, ends, transitions, kg_tiles, qg_tiles, kd_tiles,
            v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, transitions_tiles, cu_seqlens,
            chunk_offsets, T, NT, span, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, True, SAVE,
            INTERMEDIATES, TILES, STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip


@triton.jit
def backward_chain(
    reverse, n, segment, hv, i_v, kg, qg, kd, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state, ends, transitions, dends,
    kg_tiles, qg_tiles, kd_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    dstates_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse chain, or the state chain without an output."""
    if reverse:
        reverse_chain(
            n, segment, hv, i_v, kg, qg, kd, do, correction, scores, vectors, decay, dw, dstates, dfinal_state,
            dinitial_state, dends, transitions, kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles,
            dstates_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, HV, K, V, BT, BK, BV, PACKED,
            INITIAL, FINAL, V_FIRST, TILES, STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip
    else:
        forward_chain(
            n, segment, hv, i_v, kg, qg, kd, v, correction, scores, vectors, decay, dw, states, residuals, None,
            initial_state, None, ends, transitions, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles,
            scores_tiles, states_tiles, residuals_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, HV,
            K, V, BT, BK, BV, PACKED, INITIAL, False, V_FIRST, False, True, False, TILES, STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def backward_chains_kernel(
    kg, qg, kd, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state, ends, transitions, dends,
    kg_tiles, qg_tiles, kd_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    dstates_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, RECOMPUTE: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Both chains of the backward in one launch: the reverse chain, and with RECOMPUTE the state chain beside it.

    (RECOMPUTE + 1) tasks per sequence, segment, value head and block, walked as in the forward. Writes dstates
    ``[slots, HV, V, K]`` (the gradient of the state behind each chunk), dw ``[tokens, HV, V]``, dinitial_state, and
    with RECOMPUTE the states ``[slots, HV, V, K]`` before each chunk and the residuals ``[slots, HV, V, BT]``.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if LOOP:
        tl.static_assert(SEGMENTS == 1)
        for step in tl.range(0, N * (HV * BLOCKS * (RECOMPUTE + 1)) - pid, tl.num_programs(0)):
            number = pid + step
            task = number // BLOCKS
            reverse = True
            if RECOMPUTE:
                reverse = task % 2 == 0
                task = task // 2
            backward_chain(
                reverse, task // HV, 0, task % HV, number % BLOCKS, kg, qg, kd, v, do, correction, scores, vectors,
                decay, states, residuals, dstates, dw, initial_state, dfinal_state, dinitial_state, ends, transitions,
                dends, kg_tiles, qg_tiles, kd_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles,
                residuals_tiles, dstates_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, HV, K, V, BT,
                BK, BV, PACKED, INITIAL, FINAL, V_FIRST, TILES, STAGES, SEGMENTS, PRECISION,
            )  # fmt: skip
    else:
        i_v = pid % BLOCKS
        task = pid // BLOCKS
        reverse = True
        if RECOMPUTE:
            reverse = task % 2 == 0
            task = task // 2
        hv = task % HV
        task = task // HV
        n = task // SEGMENTS
        segment = task % SEGMENTS
        if SEGMENTS > 1:
            if is_past(n, segment, span, cu_seqlens, chunk_offsets, T, NT, PACKED, BT):
                return
        backward_chain(
            reverse, n, segment, hv, i_v, kg, qg, kd, v, do, correction, scores, vectors, decay, states, residuals,
            dstates, dw, initial_state, dfinal_state, dinitial_state, ends, transitions, dends, kg_tiles, qg_tiles,
            kd_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles,
            transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL,
            V_FIRST, TILES, STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip
