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
"""

# ruff: noqa: SIM108  (compile-time conditions choose what is compiled)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows, locate_sequence, state_tile
from graphsafe_kernels.kda.prepare_kernels import VECTORS


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
        tiles.store([(at * ROWS).to(tl.int32) + i_v * BR, 0], x)
    else:
        r = i_v * BR + tl.arange(0, BR)
        c = tl.arange(0, BW)
        out = pointer + at * (ROWS * WIDTH) + r[:, None] * WIDTH + c[None, :]
        tl.store(out, x, mask=(r < ROWS)[:, None] & (c < WIDTH)[None, :])


@triton.jit
def forward_chain(
    n, hv, i_v, kg, qg, kd, v, correction, scores, vectors, decay, o, states, residuals, intermediates, initial_state,
    final_state, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    cu_seqlens, chunk_offsets, T, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, OUTPUT: tl.constexpr,
    SAVE: tl.constexpr, INTERMEDIATES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The chain of one sequence, value head and block of V columns. SAVE: states before each chunk and residuals."""
    DT: tl.constexpr = kg.dtype.element_ty
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    i = tl.arange(0, BT)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    place, mask = state_tile(n, hv, i_v, HV, K, V, BK, BV, V_FIRST)
    if INITIAL:
        S = tl.load(initial_state + place, mask=mask, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BV, BK], tl.float32)
    for c in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        at = (slot + c).to(tl.int64) * HV + hv
        left = length - c * BT
        row = start + c * BT
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
        if INTERMEDIATES:
            inner, _ = state_tile(slot + c, hv, i_v, HV, K, V, BK, BV, V_FIRST)
            tl.store(intermediates + inner, S, mask=mask)
        x = vT.to(tl.float32) - tl.dot(Sb, tl.trans(kgt), input_precision=PRECISION) * rk
        e = tl.dot((x * b).to(DT), tl.trans(nt), x, input_precision=PRECISION)
        if SAVE:
            store_block(residuals, residuals_tiles, e.to(DT), at, i_v, V, BT, BV, BT, TILES)
        w = e * b
        if OUTPUT:
            y = tl.dot(Sb, tl.trans(qgt), input_precision=PRECISION) * tl.load(vec + 2 * BT)[None, :]
            y = tl.dot(w.to(DT), tl.trans(pt), y, input_precision=PRECISION)
            out = o + hv * V + (row + i)[:, None] * (HV * V) + iv[None, :]
            tl.store(out, tl.trans(y).to(o.dtype.element_ty), mask=(i < left)[:, None] & (iv < V)[None, :])
        S = tl.dot((w * rk).to(DT), kdt, S * de, input_precision=PRECISION)
    if FINAL:
        tl.store(final_state + place, S, mask=mask)


@triton.jit
def reverse_chain(
    n, hv, i_v, kg, qg, kd, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
    kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, cu_seqlens, chunk_offsets, T,
    NT, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse chain of one sequence, value head and block of V columns; stores D behind each chunk, and dw."""
    DT: tl.constexpr = kg.dtype.element_ty
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    i = tl.arange(0, BT)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    place, mask = state_tile(n, hv, i_v, HV, K, V, BK, BV, V_FIRST)
    if FINAL:
        D = tl.load(dfinal_state + place, mask=mask, other=0.0).to(tl.float32)
    else:
        D = tl.zeros([BV, BK], tl.float32)
    chunks = tl.cdiv(length, BT)
    for r in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - r
        at = (slot + c).to(tl.int64) * HV + hv
        left = length - c * BT
        row = start + c * BT
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
        store_block(dstates, dstates_tiles, Db, at, i_v, V, K, BV, BK, TILES)
        y = tl.dot(Db, tl.trans(kdt), input_precision=PRECISION) * rk
        y = tl.dot(dT, pt, y, input_precision=PRECISION)
        y = tl.dot((y * b).to(DT), nt, y, input_precision=PRECISION)
        out = dw + hv * V + (row + i)[:, None] * (HV * V) + iv[None, :]
        tl.store(out, tl.trans(y).to(dw.dtype.element_ty), mask=(i < left)[:, None] & (iv < V)[None, :])
        # Loaded here, behind a store: earlier, or kept from above, these would take registers that the products need.
        cq = tl.load(vec + 2 * BT)[None, :]
        de = tl.load(decay + at * K + ik, mask=ik < K, other=0.0)[None, :]
        D = tl.dot((dT.to(tl.float32) * cq).to(DT), qgt, D * de, input_precision=PRECISION)
        y *= 0.0 - tl.load(vec)[None, :] * tl.load(vec + BT)[None, :]
        D = tl.dot(y.to(DT), kgt, D, input_precision=PRECISION)
    if INITIAL:
        tl.store(dinitial_state + place, D, mask=mask)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def forward_chain_kernel(
    kg, qg, kd, v, correction, scores, vectors, decay, o, states, residuals, intermediates, initial_state, final_state,
    kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    cu_seqlens, chunk_offsets, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, SAVE: tl.constexpr,
    INTERMEDIATES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and final state. One program per sequence, value head and block of BV columns, blocks fastest.

    v, o ``[tokens, HV, V]``; states ``[slots, HV, V, K]`` and residuals ``[slots, HV, V, BT]`` are written with SAVE,
    intermediates ``[slots, HV, K, V]`` fp32 (or V, K) with INTERMEDIATES. ``*_tiles``: descriptors, used with TILES.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    forward_chain(
        pid // (BLOCKS * HV), pid // BLOCKS % HV, pid % BLOCKS, kg, qg, kd, v, correction, scores, vectors, decay, o,
        states, residuals, intermediates, initial_state, final_state, kg_tiles, qg_tiles, kd_tiles, v_tiles,
        correction_tiles, scores_tiles, states_tiles, residuals_tiles, cu_seqlens, chunk_offsets, T, NT, HV, K, V, BT,
        BK, BV, PACKED, INITIAL, FINAL, V_FIRST, True, SAVE, INTERMEDIATES, TILES, STAGES, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "NT"])
def backward_chains_kernel(
    kg, qg, kd, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state,
    kg_tiles, qg_tiles, kd_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    dstates_tiles, cu_seqlens, chunk_offsets, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, RECOMPUTE: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both chains of the backward in one launch: the reverse chain, and with RECOMPUTE the state chain beside it.

    Grid: (RECOMPUTE + 1) programs per sequence, value head and block. Writes dstates ``[slots, HV, V, K]`` (the
    gradient of the state behind each chunk), dw ``[tokens, HV, V]``, dinitial_state, and with RECOMPUTE the states
    ``[slots, HV, V, K]`` before each chunk and the residuals ``[slots, HV, V, BT]``.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % BLOCKS
    task = pid // BLOCKS
    reverse = True
    if RECOMPUTE:
        reverse = task % 2 == 0
        task = task // 2
    hv = task % HV
    n = task // HV
    if reverse:
        reverse_chain(
            n, hv, i_v, kg, qg, kd, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
            kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, cu_seqlens,
            chunk_offsets, T, NT, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, TILES, STAGES, PRECISION,
        )  # fmt: skip
    else:
        forward_chain(
            n, hv, i_v, kg, qg, kd, v, correction, scores, vectors, decay, dw, states, residuals, None, initial_state,
            None, kg_tiles, qg_tiles, kd_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
            cu_seqlens, chunk_offsets, T, NT, HV, K, V, BT, BK, BV, PACKED, INITIAL, False, V_FIRST, False, True, False,
            TILES, STAGES, PRECISION,
        )  # fmt: skip
