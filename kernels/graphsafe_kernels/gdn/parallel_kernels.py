"""The parallel half of the backward: every gradient but the states', one program per slot and value head.

With S the state before the chunk, D the gradient of the state behind it, e the residuals, w = b e the written values,
dw their gradient, G the gate sums (base 2), g_ij = 2^(G_i - G_j), and q^, k^ the normalised q and k:

    dbeta_i = <dw_i, e_i>                         dv_i = b_i dw_i
    Z_ij = scale b_j g_ij <do_i, e_j>  (i >= j)   = d<q^_i, k^_j>
    Y_ij = -b_i b_j g_ij <dw_i, e_j>   (i > j)    = d<k^_i, k^_j>
    dq^_i = scale 2^G_i do_i S^T + sum_j Z_ij k^_j
    dk^_i = -b_i 2^G_i dw_i S^T + b_i 2^(G_last - G_i) e_i D^T + sum_j Z_ji q^_j + sum_j (Y_ij + Y_ji) k^_j

and for the gate, with W_ij = Z_ij <q^_i, k^_j> + Y_ij <k^_i, k^_j> for i > j and the first three terms above dotted
with their own row (p_i = <q^_i, .>, r_i = <k^_i, .>, s_i = <k^_i, .>):

    dg_t = sum_{i >= t} (p_i + r_i + sum_j (W_ij - W_ji)) + sum_{i < t} s_i + decay <S, D>

Requirements
------------
1. Each pair (i, j) enters the gate's gradient twice with opposite signs and cancels but for i >= t > j: both uses are
   the same fp32 number, so rounding cancels with it.
2. Nothing is divided by beta but what 5 and 6 add to dbeta, which is bounded, and zero where beta is.
3. Rows beyond the sequence's end are masked as they are loaded. A sentinel slot reads no operand and clears its share
   of the padding rows of the gradients.
4. dq^ and dk^ are parts per value head; ``finish_kernel`` sums them over the heads that share a q/k head, in their
   order, and projects. Orders of sums are fixed: no atomics. Gate parameters get one partial sum per slot and head.
5. dw is at hand rounded to half precision. As dw_i = y_i - sum_j C_ji b_j dw_j, with EXACT dbeta is made of what y is
   made of, and meets no rounding of its own row's dw:
   b_i dbeta_i = s_i + b_i P_ii <do_i, e_i> + sum_{j > i} W_ji, where P is the scores'. Where keys are alike these terms
   are large and cancel, so dbeta moves from <dw_i, e_i> by at most 2^-7 of it (2^-10 in fp16).
6. So are the residuals, and e_i = v_i - 2^G_i k^_i S - sum_{j < i} C_ij b_j e_j. <dw, e> with one made again, plus that
   with the other, less <dw, e> has the first order of neither rounding, and what makes both is what makes dk^:
   b_i dbeta_i = <k^_i, dk^_i> + b_i <dw_i, v_i - e_i>. With EXACT 2, bounded as in 5. It reads v, so it is for keys
   that come normalised: with l2norm in the kernel 5 is enough to be nearer than the peers.
"""

# ruff: noqa: SIM102  (a compile-time condition and a run-time one do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import log_gate, log_gate_slope
from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.row_kernels import IN_ORDER, clear_rows, load_rows, locate_slot, padding_rows
from graphsafe_kernels.gdn.prepare_kernels import VECTORS
from graphsafe_kernels.gdn.task_kernels import head_offset, live_slot, slot_count, turns


@triton.jit
def clear_gradients(first, end, hv, dq, dk, dv, dg, dbeta, T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr,
                    HEADS_FIRST: tl.constexpr):  # fmt: skip
    """Write zero to padding rows of one value head's gradients, with WHOLE also of its parts of dq and dk."""
    for column in tl.static_range(0, V, BV):
        clear_rows(dv + hv * V, first, end, HV * V, column, V, BT, BV)
    if HEADS_FIRST:  # padding is the end of a packed batch
        r = first + tl.arange(0, BT)
        at = hv.to(tl.int64) * T + r
        tl.store(dg + at, tl.zeros([BT], tl.float32).to(dg.dtype.element_ty), mask=r < end)
        tl.store(dbeta + at, tl.zeros([BT], tl.float32).to(dbeta.dtype.element_ty), mask=r < end)
    else:
        clear_rows(dg + hv, first, end, HV, 0, 1, BT, 1)
        clear_rows(dbeta + hv, first, end, HV, 0, 1, BT, 1)
    if WHOLE:
        for column in tl.static_range(0, K, BK):
            clear_rows(dq + hv * K, first, end, H * K, column, K, BT, BK)
            clear_rows(dk + hv * K, first, end, H * K, column, K, BT, BK)


@triton.jit
def value_scores(x, residuals, row, rows, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
                 TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """<x_i, e_j> as [i, j], or as [j, i] with TRANSPOSED, for a head's tensor x [tokens, HV, V], V in blocks of BV."""
    i = tl.arange(0, BT)
    total = tl.zeros([BT, BT], tl.float32)
    for column in tl.static_range(0, V, BV):
        j = column + tl.arange(0, BV)
        eT = tl.load(residuals + j[:, None] * BT + i[None, :], mask=(j < V)[:, None], other=0.0)
        xt = load_rows(x, row, rows, column, V, HV * V, BT, BV)
        if TRANSPOSED:
            total = tl.dot(tl.trans(eT), tl.trans(xt), total, input_precision=PRECISION)
        else:
            total = tl.dot(xt, eT, total, input_precision=PRECISION)
    return total


@triton.jit
def slot_gradients(
    slot, hv, q, k, v, do, dv, g, beta, A_log, dt_bias, scores, vectors, states, dstates, residuals, dq, dk, dg, dbeta,
    gate_sums, beta_sums, states_tiles, dstates_tiles, cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, KEY: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, HEADS_FIRST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head."""
    DT: tl.constexpr = k.dtype.element_ty
    ROUNDING: tl.constexpr = 2.0**-7 if DT == tl.bfloat16 else 2.0**-10
    # On an Ascend the cube unit may load dw by itself: it becomes dv behind the last product of it.
    KEEP: tl.constexpr = BV >= V and not IN_ORDER
    STATE_ROWS: tl.constexpr = (V + BV - 1) // BV * BV
    KEY_BLOCK: tl.constexpr = KEY if KEY < 128 else 128  # min() is no constant in Triton 3.2
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    hq = hv // (HV // H)
    at = slot.to(tl.int64) * HV + hv
    i = tl.arange(0, BT)
    m = i < rows
    low = i[:, None] > i[None, :]
    eye = i[:, None] == i[None, :]
    vec = vectors + at * (VECTORS * BT) + i
    b = tl.load(vec + BT)
    G = tl.load(vec + 4 * BT)
    if L2NORM:
        rk = tl.load(vec + 5 * BT)
        rq = tl.load(vec + 6 * BT)
    else:
        rk = tl.full([BT], 1.0, tl.float32)
        rq = rk
    last = tl.load(vectors + at * (VECTORS * BT) + 5 * BT - 1)
    # What is loaded here is in flight together; what follows waits for it once.
    kt = load_rows(k + hq * K, row, rows, 0, K, H * K, BT, KEY_BLOCK)
    if KEEP:
        j = tl.arange(0, BV)
        eT = tl.load(residuals + at * (BT * V) + j[:, None] * BT + i[None, :], mask=(j < V)[:, None], other=0.0)
        dw = load_rows(dv + hv * V, row, rows, 0, V, HV * V, BT, BV)
        dt = load_rows(do + hv * V, row, rows, 0, V, HV * V, BT, BV)
        if EXACT < 2:
            out = dv + hv * V + row * (HV * V) + i[:, None] * (HV * V) + j[None, :]
            tl.store(out, (dw.to(tl.float32) * b[:, None]).to(DT), mask=m[:, None] & (j < V)[None, :])
    KK = tl.dot(kt, tl.trans(kt), input_precision=PRECISION)
    for column in tl.static_range(KEY_BLOCK, K, KEY_BLOCK):
        kn = load_rows(k + hq * K, row, rows, column, K, H * K, BT, KEY_BLOCK)
        KK = tl.dot(kn, tl.trans(kn), KK, input_precision=PRECISION)
    # Scores, in both orientations: a transposed accumulator is never an operand. One at a time, to spare registers.
    if KEEP:
        s = tl.dot(dw, eT, input_precision=PRECISION)
    else:
        s = value_scores(dv + hv * V, residuals + at * (BT * V), row, rows, HV, V, BT, BV, False, PRECISION)
    db = tl.sum(tl.where(eye, s, 0.0), 1)
    between = tl.exp2(tl.where(i[:, None] >= i[None, :], G[:, None] - G[None, :], -float("inf")))
    s = s * between * (0.0 - b)[:, None] * (b * rk)[None, :]
    W = s * (KK * rk[:, None])
    Yk = s.to(DT)
    if KEEP:
        z = tl.dot(dt, eT, input_precision=PRECISION)
    else:
        z = value_scores(do + hv * V, residuals + at * (BT * V), row, rows, HV, V, BT, BV, False, PRECISION)
    P = tl.load(scores + at * (BT * BT) + i[:, None] * BT + i[None, :]).to(tl.float32)
    own = tl.sum(tl.where(eye, z, 0.0), 1)
    Zq = (z * between * (b * rk * scale)[None, :]).to(DT)
    W = tl.where(low, W + z * tl.load(vec + BT)[None, :] * P, 0.0)
    uses = tl.sum(W, 1)
    pairs = uses - tl.sum(W, 0)
    if EXACT:
        # b (the new dbeta - <dw, e>) but for s. Parked in memory, as is the other sum that waits for the loop's end:
        # kept, they would take registers that it needs.
        parked = beta_sums + at * (2 * BT) + i
        if EXACT == 1:
            own = (own * tl.load(scores + at * (BT * BT) + i * (BT + 1)).to(tl.float32) - db) * b + (uses - pairs)
            tl.store(parked, pairs)
            tl.store(parked + BT, own)
        else:
            tl.store(parked, pairs)
            tl.store(parked + BT, db)
    if KEEP:
        sT = tl.dot(tl.trans(eT), tl.trans(dw), input_precision=PRECISION)
    else:
        sT = value_scores(dv + hv * V, residuals + at * (BT * V), row, rows, HV, V, BT, BV, True, PRECISION)
    between = tl.exp2(tl.where(i[:, None] <= i[None, :], G[None, :] - G[:, None], -float("inf")))
    # Both uses of Y meet k^: Y_ij below the diagonal, its transpose above.
    sT = sT * between * (0.0 - b)[:, None] * (b * rk)[None, :]
    Yk = tl.where(low, Yk, tl.where(eye, 0.0, sT).to(DT))
    if KEEP:
        zT = tl.dot(tl.trans(eT), tl.trans(dt), input_precision=PRECISION)
    else:
        zT = value_scores(do + hv * V, residuals + at * (BT * V), row, rows, HV, V, BT, BV, True, PRECISION)
    Zk = (zT * between * (b * scale)[:, None] * rq[None, :]).to(DT)
    # K in blocks: the state's products, and the rows' own products for the gate.
    grown = tl.exp2(G)
    shrunk = tl.exp2(last - G)
    p = tl.zeros([BT], tl.float32)
    r = tl.zeros([BT], tl.float32)
    kc = tl.zeros([BT], tl.float32)
    turned = tl.zeros([BT], tl.float32)
    inner = tl.zeros([BV], tl.float32)
    for block in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
        ik = block * BK + tl.arange(0, BK)
        kb = load_rows(k + hq * K, row, rows, block * BK, K, H * K, BT, BK)
        qb = load_rows(q + hq * K, row, rows, block * BK, K, H * K, BT, BK)
        tq = tl.zeros([BT, BK], tl.float32)
        tk = tl.zeros([BT, BK], tl.float32)
        td = tl.zeros([BT, BK], tl.float32)
        for first in tl.static_range(0, V, BV):
            iv = first + tl.arange(0, BV)
            if TILES:
                St = states_tiles.load([(slot * HV + hv) * STATE_ROWS + first, block * BK])
                Dt = dstates_tiles.load([(slot * HV + hv) * STATE_ROWS + first, block * BK])
            else:
                tile = iv[:, None] * KEY + ik[None, :]
                St = tl.load(states + at * (STATE_ROWS * KEY) + tile)
                Dt = tl.load(dstates + at * (STATE_ROWS * KEY) + tile)
            inner += tl.sum(St.to(tl.float32) * Dt.to(tl.float32), 1)
            if KEEP:
                tq = tl.dot(dt, St, tq, input_precision=PRECISION)
                tk = tl.dot(dw, St, tk, input_precision=PRECISION)
                td = tl.dot(tl.trans(eT), Dt, td, input_precision=PRECISION)
            else:
                tile = residuals + at * (BT * V) + iv[:, None] * BT + i[None, :]
                et = tl.load(tile, mask=(iv < V)[:, None], other=0.0)
                wt = load_rows(dv + hv * V, row, rows, first, V, HV * V, BT, BV)
                ot = load_rows(do + hv * V, row, rows, first, V, HV * V, BT, BV)
                tq = tl.dot(ot, St, tq, input_precision=PRECISION)
                tk = tl.dot(wt, St, tk, input_precision=PRECISION)
                td = tl.dot(tl.trans(et), Dt, td, input_precision=PRECISION)
        live = m[:, None] & (ik < K)[None, :]
        place = i[:, None] * (HV * K) + ik[None, :]
        kf = kb.to(tl.float32)
        tq = tq * (grown * scale)[:, None]
        p += tl.sum(tq * qb.to(tl.float32), 1)
        tq = tl.dot(Zq, kb, tq, input_precision=PRECISION)
        tl.store(dq + row * (HV * K) + hv * K + place, tq.to(dq.dtype.element_ty), mask=live)
        tk = tk * (0.0 - b * grown)[:, None]
        if L2NORM:
            r += tl.sum(tk * kf, 1)
        else:
            p += tl.sum(tk * kf, 1)  # both norms are 1, and one sum takes fewer registers
        td = td * (b * shrunk)[:, None]
        kc += tl.sum(td * kf, 1)
        tk = tl.dot(Zk, qb, tk + td, input_precision=PRECISION)
        tk = tl.dot(Yk, kb, tk, input_precision=PRECISION)
        if EXACT == 2:
            turned += tl.sum(tk * kf, 1)
        tl.store(dk + row * (HV * K) + hv * K + place, tk.to(dk.dtype.element_ty), mask=live)
    # Loaded again: kept across the loop, these would take registers that it needs.
    b = tl.load(vec + BT)
    if L2NORM:
        rk = tl.load(vec + 5 * BT)
        rq = tl.load(vec + 6 * BT)
    else:
        rk = tl.full([BT], 1.0, tl.float32)
        rq = rk
    last = tl.load(vectors + at * (VECTORS * BT) + 5 * BT - 1)
    kc = tl.where(m, kc * rk, 0.0)
    if EXACT:
        tl.debug_barrier()
        pairs = tl.load(parked)
    total = tl.cumsum(tl.where(m, p * rq + r * rk + pairs, 0.0), 0, reverse=True)
    total += tl.cumsum(kc, 0) - kc + tl.exp2(last) * tl.sum(inner, 0)
    if EXACT == 1:
        own = tl.load(parked + BT) + kc
        limit = tl.abs(db) * ROUNDING
        # where b is zero, so is what it would divide
        db += tl.minimum(tl.maximum(own / tl.where(b == 0.0, 1.0, b), 0.0 - limit), limit)
    token = (row + i) * HV + hv
    if HEADS_FIRST:
        token = head_offset(slot, row, hv, T, NT, HV, PACKED) + i
    if GATE:
        x = tl.load(g + token, mask=m, other=0.0).to(tl.float32)
        total = tl.where(m, total, 0.0)
        tl.store(gate_sums + at * 2, tl.sum(total * log_gate(x, A_log, dt_bias, hv, GATE, BIAS), 0))
        total *= log_gate_slope(x, A_log, dt_bias, hv, BIAS)
        tl.store(gate_sums + at * 2 + 1, tl.sum(tl.where(m, total, 0.0), 0))
    tl.store(dg + token, total.to(dg.dtype.element_ty), mask=m)
    if not KEEP or EXACT == 2:
        tl.debug_barrier()  # every thread has read dw before it becomes dv
        rest = tl.zeros([BT], tl.float32)
        for column in tl.static_range(0, V, BV):
            jv = column + tl.arange(0, BV)
            wv = load_rows(dv + hv * V, row, rows, column, V, HV * V, BT, BV)
            if EXACT == 2:
                vt = load_rows(v + hv * V, row, rows, column, V, HV * V, BT, BV)
                rest += tl.sum(wv.to(tl.float32) * vt.to(tl.float32), 1)
            place = dv + hv * V + row * (HV * V) + i[:, None] * (HV * V) + jv[None, :]
            tl.store(place, (wv.to(tl.float32) * b[:, None]).to(DT), mask=m[:, None] & (jv < V)[None, :])
    if EXACT == 2:
        db = tl.load(parked + BT)
        limit = tl.abs(db) * ROUNDING
        own = turned * rk + (rest - 2.0 * db) * b
        db += tl.minimum(tl.maximum(own / tl.where(b == 0.0, 1.0, b), 0.0 - limit), limit)
    if SIGMOID:
        db *= b * (1.0 - b / FACTOR)
    tl.store(dbeta + token, db.to(dbeta.dtype.element_ty), mask=m)
    if PACKED:
        first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
        if first < end:
            clear_gradients(first, end, hv, dq, dk, dv, dg, dbeta, T, H, HV, K, V, BT, BK, BV, WHOLE, HEADS_FIRST)


@triton.jit(do_not_specialize=["scale", "T", "N", "NT"])
def gradients_kernel(
    q, k, v, do, dv, g, beta, A_log, dt_bias, scores, vectors, states, dstates, residuals, dq, dk, dg, dbeta, gate_sums,
    beta_sums, states_tiles, dstates_tiles, cu_seqlens, chunk_indices, chunk_offsets, scale,
    T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, KEY: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, LOOP: tl.constexpr, HEADS_FIRST: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per slot and value head, heads fastest. dv ``[tokens, HV, V]`` holds dw and
    becomes dv; dq, dk ``[tokens, HV, K]`` are parts, or with WHOLE the gradients themselves; dg, dbeta
    ``[tokens, HV]`` for the raw inputs; gate_sums ``[slots, HV, 2]`` fp32 (A_log, dt_bias) with GATE; beta_sums
    ``[slots, HV, 2, BT]`` fp32, scratch, with EXACT. States have V and K rounded up to whole blocks."""
    follow(OVERLAP)
    pid = tl.program_id(0)
    if LOOP:
        for turn in tl.range(0, turns(pid, slot_count(N, NT, PACKED) * HV)):
            task = pid + turn * tl.num_programs(0)
            slot = task // HV
            hv = task % HV
            if live_slot(slot, chunk_indices, PACKED):
                slot_gradients(slot, hv, q, k, v, do, dv, g, beta, A_log, dt_bias, scores, vectors, states, dstates,
                               residuals, dq, dk, dg, dbeta, gate_sums, beta_sums, states_tiles, dstates_tiles,
                               cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT, H, HV, K, V, BT, BK, BV, KEY,
                               PACKED, L2NORM, GATE, BIAS, SIGMOID, FACTOR, TILES, STAGES, WHOLE, HEADS_FIRST, EXACT,
                               PRECISION)  # fmt: skip
            elif PACKED:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_gradients(first, end, hv, dq, dk, dv, dg, dbeta, T, H, HV, K, V, BT, BK, BV, WHOLE, HEADS_FIRST)
    else:
        slot = pid // HV
        hv = pid % HV
        if PACKED:
            if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_gradients(first, end, hv, dq, dk, dv, dg, dbeta, T, H, HV, K, V, BT, BK, BV, WHOLE, HEADS_FIRST)
                return
        slot_gradients(slot, hv, q, k, v, do, dv, g, beta, A_log, dt_bias, scores, vectors, states, dstates, residuals,
                       dq, dk, dg, dbeta, gate_sums, beta_sums, states_tiles, dstates_tiles, cu_seqlens, chunk_indices,
                       chunk_offsets, scale, T, N, NT, H, HV, K, V, BT, BK, BV, KEY, PACKED, L2NORM, GATE, BIAS,
                       SIGMOID, FACTOR, TILES, STAGES, WHOLE, HEADS_FIRST, EXACT, PRECISION)  # fmt: skip


@triton.jit
def sum_parts(
    block, x, parts, out, cu_seqlens, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one gradient ``[tokens * H, K]`` from its parts, projected with L2NORM; padding rows become zero."""
    live = T.to(tl.int64)
    if PACKED:
        live = tl.load(cu_seqlens + N).to(tl.int64)
    G: tl.constexpr = HV // H
    i = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BK)
    mask = (i < live * H)[:, None] & (j < K)[None, :]
    total = tl.zeros([ROWS, BK], tl.float32)
    for head in tl.static_range(G):
        total += tl.load(parts + (i * G + head)[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
    if L2NORM:
        y = tl.load(x + i[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
        y *= r[:, None]
        total = (total - y * tl.sum(total * y, 1)[:, None]) * r[:, None]
    at = out + i[:, None] * K + j[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(i < T.to(tl.int64) * H)[:, None] & (j < K)[None, :])


@triton.jit
def sum_gates(
    hv, gate_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One head's gate parameters' gradients: its partial sums over the live slots, SUMS at a time."""
    # T is the rows of all sequences here, so a dense batch has every slot live.
    live = slots
    if PACKED:
        live = tl.load(chunk_offsets + N).to(tl.int32)
    i = tl.arange(0, SUMS)
    total = 0.0
    bias = 0.0
    for first in tl.range(0, live, SUMS):
        at = gate_sums + ((first + i).to(tl.int64) * HV + hv) * 2
        total += tl.sum(tl.load(at, mask=first + i < live, other=0.0), 0)
        bias += tl.sum(tl.load(at + 1, mask=first + i < live, other=0.0), 0)
    tl.store(dA_log + hv, total.to(dA_log.dtype.element_ty))
    if BIAS:
        tl.store(ddt_bias + hv, bias.to(ddt_bias.dtype.element_ty))


@triton.jit
def sum_both(
    task, q, k, dq_parts, dk_parts, dq, dk, cu_seqlens, T, N, row_programs, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """ROWS rows of dq, or from task ``row_programs`` on of dk."""
    # two calls, since Triton-Ascend takes no pointer that is chosen at run time
    if task < row_programs:
        sum_parts(task, q, dq_parts, dq, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED, L2NORM)
    else:
        sum_parts(task - row_programs, k, dk_parts, dk, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED, L2NORM)


@triton.jit(do_not_specialize=["T", "N", "slots", "row_programs"])
def finish_kernel(
    q, k, dq_parts, dk_parts, dq, dk, gate_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets, T, N, slots, row_programs,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
    LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over value heads, l2norm's projection, and the gate parameters' sums over slots, in fixed orders.

    Programs 0 .. row_programs * 2 - 1 (with PARTS): ROWS rows of dq or dk ``[tokens * H, K]`` from the parts
    ``[tokens, HV, K]``; padding rows become zero. With GATE, one more program per value head sums its ``gate_sums``
    over the live slots, SUMS at a time from slot 0, so that padding only ever adds exact zeros behind them.
    """
    follow(OVERLAP)
    pid = tl.program_id(0)
    heads = row_programs * (2 if PARTS else 0)
    if LOOP:
        for turn in tl.range(0, turns(pid, heads + (HV if GATE else 0))):
            task = pid + turn * tl.num_programs(0)
            if PARTS:
                if task < heads:
                    sum_both(task, q, k, dq_parts, dk_parts, dq, dk, cu_seqlens, T, N, row_programs, H, HV, K, BK, ROWS,
                             PACKED, L2NORM)  # fmt: skip
            if GATE:
                if task >= heads:
                    sum_gates(task - heads, gate_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV, PACKED, BIAS,
                              SUMS)  # fmt: skip
    else:
        if GATE:
            if pid >= heads:
                sum_gates(pid - heads, gate_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV, PACKED, BIAS, SUMS)
                return
        if PARTS:
            sum_both(pid, q, k, dq_parts, dk_parts, dq, dk, cu_seqlens, T, N, row_programs, H, HV, K, BK, ROWS, PACKED,
                     L2NORM)  # fmt: skip
