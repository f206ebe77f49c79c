"""The serial chains of the gated delta rule: the state from chunk to chunk, and its gradient back.

The state is held transposed, S^T ``[BV, K]`` fp32 in registers, so that every left operand of the serial products is a
register tile that was never transposed after a product. Per chunk, in the names of ``prepare_kernels``:

    x = v - a (k S)          e = x + N (b x)          w = b e
    o = c (q S) + P w        S <- decay S + k^T (d w)

and backward, with D the gradient of the state behind the chunk:

    dw = y + N^T (b y),  y = P^T do + d (k D)
    D <- decay D + q^T (c do) - k^T (a b dw)

Requirements
------------
1. Full chunks go through one pipelined loop without masks; the rest of a sequence, whose block loads take along rows of
   the next one, is one masked step behind it. Without descriptors every step is masked.
2. A sequence without tokens hands its state through, and its state's gradient back.
3. The only rows of o or dw written are the sequence's own.
"""

# ruff: noqa: SIM102  (a compile-time condition and a run-time one do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows, locate_sequence, state_offsets
from graphsafe_kernels.gdn.prepare_kernels import VECTORS


@triton.jit
def forward_step(
    S, row, left, slot, hv, i_v, q, k, v, correction, scores, vectors, decay, o, states, residuals,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of the forward chain; returns the next state. TILES: tiles by descriptors; not WHOLE: token rows by
    masked loads all the same, because the chunk's block loads would take along another sequence's rows."""
    DT: tl.constexpr = k.dtype.element_ty
    ROWS: tl.constexpr = (V + BV - 1) // BV * BV
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    iv = i_v * BV + tl.arange(0, BV)
    at = slot.to(tl.int64) * HV + hv
    if TILES:
        # Loads in a row: neighbours share one barrier of the pipeline.
        nt = correction_tiles.load([(slot * HV + hv) * BT, 0])
        if OUTPUT:
            pt = scores_tiles.load([(slot * HV + hv) * BT, 0])
    else:
        nt = tl.load(correction + at * (BT * BT) + i[:, None] * BT + i[None, :])
        if OUTPUT:
            pt = tl.load(scores + at * (BT * BT) + i[:, None] * BT + i[None, :])
    if WHOLE:
        kt = k_tiles.load([row.to(tl.int32), hq * K])
        vt = v_tiles.load([row.to(tl.int32), hv * V + i_v * BV])
        if OUTPUT:
            qt = q_tiles.load([row.to(tl.int32), hq * K])
    else:
        kt = load_rows(k + hq * K, row, left, 0, K, H * K, BT, BK)
        vt = load_rows(v + hv * V, row, left, i_v * BV, V, HV * V, BT, BV)
        if OUTPUT:
            qt = load_rows(q + hq * K, row, left, 0, K, H * K, BT, BK)
    # Vectors are loaded where they are used: each takes 16 registers for as long as it lives.
    vec = vectors + at * (VECTORS * BT) + i
    Sb = S.to(DT)
    if SAVE:
        if TILES:
            states_tiles.store([(slot * HV + hv) * ROWS + i_v * BV, 0], Sb)
        else:
            ik = tl.arange(0, BK)
            tl.store(states + at * (ROWS * BK) + iv[:, None] * BK + ik[None, :], Sb)
    x = tl.trans(vt).to(tl.float32) - tl.dot(Sb, tl.trans(kt), input_precision=PRECISION) * tl.load(vec)[None, :]
    b = tl.load(vec + BT)[None, :]
    e = tl.dot((x * b).to(DT), tl.trans(nt), x, input_precision=PRECISION)
    w = e * b
    if OUTPUT:
        c = tl.load(vec + 2 * BT)[None, :]
        y = tl.dot(Sb, tl.trans(qt), input_precision=PRECISION) * c
        y = tl.dot(w.to(DT), tl.trans(pt), y, input_precision=PRECISION)
        mask = (i < left)[:, None] & (iv < V)[None, :]
        tl.store(o + hv * V + row * (HV * V) + i[:, None] * (HV * V) + iv[None, :], tl.trans(y).to(DT), mask=mask)
    if SAVE:
        if TILES:
            residuals_tiles.store([(slot * HV + hv) * V + i_v * BV, 0], e.to(DT))
        else:
            tl.store(residuals + at * (BT * V) + iv[:, None] * BT + i[None, :], e.to(DT), mask=(iv < V)[:, None])
    d = tl.load(vec + 3 * BT)[None, :]
    return tl.dot((w * d).to(DT), kt, S * tl.load(decay + at), input_precision=PRECISION)


@triton.jit
def forward_chain(
    n, hv, i_v, q, k, v, correction, scores, vectors, decay, o, states, residuals, initial_state, final_state,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    cu_seqlens, chunk_offsets, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chain of one sequence, value head and block of V columns."""
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    base = (n.to(tl.int64) * HV + hv) * (K * V)
    if INITIAL:
        S = tl.load(initial_state + base + at, mask=mask, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BV, BK], tl.float32)
    chunks = length // BT if TILES else tl.cdiv(length, BT)
    for c in tl.range(0, chunks, num_stages=STAGES):
        S = forward_step(
            S, start + c * BT, length - c * BT, slot + c, hv, i_v, q, k, v, correction, scores, vectors, decay, o,
            states, residuals, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles,
            residuals_tiles, H, HV, K, V, BT, BK, BV, OUTPUT, SAVE, TILES, TILES, PRECISION,
        )  # fmt: skip
    if TILES:
        if chunks * BT < length:
            S = forward_step(
                S, start + chunks * BT, length - chunks * BT, slot + chunks, hv, i_v, q, k, v, correction, scores,
                vectors, decay, o, states, residuals, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles,
                states_tiles, residuals_tiles, H, HV, K, V, BT, BK, BV, OUTPUT, SAVE, True, False, PRECISION,
            )  # fmt: skip
    if FINAL:
        tl.store(final_state + base + at, S, mask=mask)


@triton.jit
def reverse_step(
    D, row, left, slot, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates,
    q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of the reverse chain; stores D and dw, returns the gradient of the chunk's first state. TILES and WHOLE
    as in :func:`forward_step`."""
    DT: tl.constexpr = k.dtype.element_ty
    ROWS: tl.constexpr = (V + BV - 1) // BV * BV
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    iv = i_v * BV + tl.arange(0, BV)
    at = slot.to(tl.int64) * HV + hv
    if TILES:
        pt = scores_tiles.load([(slot * HV + hv) * BT, 0])
        nt = correction_tiles.load([(slot * HV + hv) * BT, 0])
    else:
        pt = tl.load(scores + at * (BT * BT) + i[:, None] * BT + i[None, :])
        nt = tl.load(correction + at * (BT * BT) + i[:, None] * BT + i[None, :])
    if WHOLE:
        kt = k_tiles.load([row.to(tl.int32), hq * K])
        dt = do_tiles.load([row.to(tl.int32), hv * V + i_v * BV])
        qt = q_tiles.load([row.to(tl.int32), hq * K])
    else:
        kt = load_rows(k + hq * K, row, left, 0, K, H * K, BT, BK)
        dt = load_rows(do + hv * V, row, left, i_v * BV, V, HV * V, BT, BV)
        qt = load_rows(q + hq * K, row, left, 0, K, H * K, BT, BK)
    vec = vectors + at * (VECTORS * BT) + i
    Db = D.to(DT)
    if TILES:
        dstates_tiles.store([(slot * HV + hv) * ROWS + i_v * BV, 0], Db)
    else:
        ik = tl.arange(0, BK)
        tl.store(dstates + at * (ROWS * BK) + iv[:, None] * BK + ik[None, :], Db)
    dT = tl.trans(dt)
    y = tl.dot(Db, tl.trans(kt), input_precision=PRECISION) * tl.load(vec + 3 * BT)[None, :]
    y = tl.dot(dT, pt, y, input_precision=PRECISION)
    b = tl.load(vec + BT)[None, :]
    y = tl.dot((y * b).to(DT), nt, y, input_precision=PRECISION)
    # b again rather than kept, and dw stored between the products: what lives at once just fits the registers.
    a = tl.load(vec)[None, :]
    b = tl.load(vec + BT)[None, :]
    D = tl.dot((y * (0.0 - a * b)).to(DT), kt, D * tl.load(decay + at), input_precision=PRECISION)
    mask = (i < left)[:, None] & (iv < V)[None, :]
    tl.store(dw + hv * V + row * (HV * V) + i[:, None] * (HV * V) + iv[None, :], tl.trans(y).to(DT), mask=mask)
    c = tl.load(vec + 2 * BT)[None, :]
    return tl.dot((dT.to(tl.float32) * c).to(DT), qt, D, input_precision=PRECISION)


@triton.jit
def reverse_chain(
    n, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
    q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles,
    cu_seqlens, chunk_offsets, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse chain of one sequence, value head and block of V columns."""
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    base = (n.to(tl.int64) * HV + hv) * (K * V)
    if FINAL:
        D = tl.load(dfinal_state + base + at, mask=mask, other=0.0).to(tl.float32)
    else:
        D = tl.zeros([BV, BK], tl.float32)
    chunks = length // BT if TILES else tl.cdiv(length, BT)
    if TILES:
        if chunks * BT < length:
            D = reverse_step(
                D, start + chunks * BT, length - chunks * BT, slot + chunks, hv, i_v, q, k, do, correction, scores,
                vectors, decay, dw, dstates, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles,
                dstates_tiles, H, HV, K, V, BT, BK, BV, True, False, PRECISION,
            )  # fmt: skip
    for r in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - r
        D = reverse_step(
            D, start + c * BT, length - c * BT, slot + c, hv, i_v, q, k, do, correction, scores, vectors, decay, dw,
            dstates, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, H, HV, K, V, BT, BK,
            BV, TILES, TILES, PRECISION,
        )  # fmt: skip
    if INITIAL:
        tl.store(dinitial_state + base + at, D, mask=mask)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def forward_chain_kernel(
    q, k, v, correction, scores, vectors, decay, o, states, residuals, initial_state, final_state,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
    cu_seqlens, chunk_offsets, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    SAVE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and final state. One program per sequence, value head and block of BV columns, blocks fastest.

    q, k ``[tokens, H, K]``; v, o ``[tokens, HV, V]``; states ``[slots, HV, V, K]``, V and K rounded up to whole blocks
    and zero there, and residuals ``[slots, HV, V, BT]`` are written with SAVE. ``*_tiles`` are descriptors of the same
    tensors, used with TILES.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    forward_chain(
        pid // (BLOCKS * HV), pid // BLOCKS % HV, pid % BLOCKS, q, k, v, correction, scores, vectors, decay, o,
        states, residuals, initial_state, final_state, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles,
        states_tiles, residuals_tiles, cu_seqlens, chunk_offsets, T, NT, H, HV, K, V, BT, BK, BV, PACKED, INITIAL,
        FINAL, V_FIRST, True, SAVE, TILES, STAGES, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "NT"])
def backward_chains_kernel(
    q, k, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state,
    q_tiles, k_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles,
    cu_seqlens, chunk_offsets, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    RECOMPUTE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, STATE_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Both chains of the backward in one launch: the reverse chain, and with RECOMPUTE the state chain beside it.

    Grid: (RECOMPUTE + 1) programs per sequence, value head and block. Writes dstates (the gradient of the state behind
    each chunk, laid out like states), dw ``[tokens, HV, V]``, dinitial_state, and with RECOMPUTE the states before each
    chunk and the residuals, as :func:`forward_chain_kernel` does.
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
            n, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
            q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, cu_seqlens, chunk_offsets, T,
            NT, H, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, TILES, STAGES, PRECISION,
        )  # fmt: skip
    else:
        forward_chain(
            n, hv, i_v, q, k, v, correction, scores, vectors, decay, dw, states, residuals, initial_state,
            dinitial_state, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles,
            cu_seqlens, chunk_offsets, T, NT, H, HV, K, V, BT, BK, BV, PACKED, INITIAL, False, V_FIRST, False, True,
            TILES, STATE_STAGES, PRECISION,
        )  # fmt: skip
