"""The parallel half of KDA's backward: every gradient but the states'; one program per slot and value head.

With S the state before the chunk, D the gradient of the state behind it, e the residuals, w = b e the written values,
dw as the reverse chain leaves it, G the gate sums, q^ and k^ the normalised q and k; q^, k^, G per channel c:

    dbeta_i = <dw_i, e_i>                 dv_i = b_i dw_i
    Z_ij = scale b_j <do_i, e_j>  (i >= j),       Y_ij = -b_i b_j <dw_i, e_j>   (i > j)
    dq^_i = scale 2^G_i do_i S^T + sum_j Z_ij 2^(G_i - G_j) k^_j
    dk^_i = -b_i 2^G_i dw_i S^T + b_i 2^(G_last - G_i) e_i D^T
            + sum_j Y_ij 2^(G_i - G_j) k^_j + sum_j 2^(G_j - G_i) (Y_ji k^_j + Z_ji q^_j)

The sums over pairs run tile by tile (``decay_kernels``), on tiles q^ a, k^ a and k^ r. Of the gate, each channel's pair
(i, j) is felt by the tokens t with i >= t > j alone:

    dg_t = sum_{i >= t} a_i + sum_{i < t} s_i + 2^G_last sum_v S D
    a_i = rows' uses of pairs less their columns' uses, and the first terms of dq^, dk^ times q^, k^
    s_i = k^ times the second term of dk^

``products_kernel`` has all that sums over V, which knows no gate: Z, Y, the three products with states, dbeta, dv.
``gradients_kernel`` has the rest: decays, pairs, the gate, l2norm's projection.

Requirements
------------
1. A pair that both ends of a sum hold enters it twice with opposite signs: both uses are products of the same rounded
   numbers, so they cancel to fp32's rounding.
2. Nothing is divided by beta. The diagonal pairs, which no gate touches, stay out of the gate's gradient.
3. Rows beyond the sequence's end are masked as they are loaded. A sentinel slot reads no operand and clears its share
   of the padding rows of the gradients.
4. Where several value heads share a q/k head, dq and dk are parts per value head, and ``finish_kernel`` sums them.
   Gate parameters get one partial sum per slot and head, which ``finish_kernel`` adds over live slots in order.
"""

# ruff: noqa: SIM102, SIM108  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import clear_rows, load_rows, locate_slot, padding_rows
from graphsafe_kernels.kda.decay_kernels import (
    TILE,
    TILE_LEVELS,
    before_tile,
    level_pairs,
    level_weights,
    tile_decay,
    token_sums,
)
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_gate, log_decay
from graphsafe_kernels.kda.prepare_kernels import VECTORS, clear_values


@triton.jit
def clear_gradients(first, end, hv, dq, dk, dg, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Write zero to padding rows of one head's dg, and of dq and dk where they are WHOLE."""
    for column in tl.static_range(0, K, BK):
        if WHOLE:
            clear_rows(dq + hv * K, first, end, HV * K, column, K, BT, BK)
            clear_rows(dk + hv * K, first, end, HV * K, column, K, BT, BK)
        clear_rows(dg + hv * K, first, end, HV * K, column, K, BT, BK)


@triton.jit
def load_residuals(residuals, column, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """The tile [BV, BT] of transposed residuals from ``column``."""
    j = column + tl.arange(0, BV)
    i = tl.arange(0, BT)
    return tl.load(residuals + j[:, None] * BT + i[None, :], mask=(j < V)[:, None], other=0.0)


@triton.jit(do_not_specialize=["scale", "T", "N", "NT"])
def products_kernel(
    do, dv, vectors, states, dstates, residuals, pairs, own, products, inner, dbeta,
    cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """do ``[tokens, HV, V]``; dv likewise holds dw and becomes dv; states, dstates ``[slots, HV, V, K]``; residuals
    ``[slots, HV, V, BT]``. Writes dbeta ``[tokens, HV]`` of the raw beta, pairs ``[slots, HV, 2, BT, BT]`` (Z and Y for
    i > j), own ``[slots, HV, BT]`` fp32 (the diagonal of Z), products ``[slots, HV, 3, BT, K]`` (scale do S^T,
    -b dw S^T, b e D^T) and inner ``[slots, HV, K]`` fp32 (sum_v S D). Heads fastest."""
    DT: tl.constexpr = states.dtype.element_ty
    KEEP: tl.constexpr = BV >= V
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    at = slot.to(tl.int64) * HV + hv
    if PACKED:
        if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
            first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
            clear_values(dv, first, end, hv, HV, V, BT, BV)
            clear_rows(dbeta + hv, first, end, HV, 0, 1, BT, 1)
            return
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    i = tl.arange(0, BT)
    ii = i[:, None]
    jj = i[None, :]
    m = i < rows
    b = tl.load(vectors + at * (VECTORS * BT) + i)
    Z = tl.zeros([BT, BT], tl.float32)
    Y = tl.zeros([BT, BT], tl.float32)
    for part in tl.static_range(0, V, BV):
        eT = load_residuals(residuals + at * (BT * V), part, V, BT, BV)
        ot = load_rows(do + hv * V, row, rows, part, V, HV * V, BT, BV)
        wt = load_rows(dv + hv * V, row, rows, part, V, HV * V, BT, BV)
        Z = tl.dot(ot, eT, Z, input_precision=PRECISION)
        Y = tl.dot(wt, eT, Y, input_precision=PRECISION)
    db = tl.sum(tl.where(ii == jj, Y, 0.0), 1)
    if SIGMOID:
        db *= b * (1.0 - b / FACTOR)
    tl.store(dbeta + (row + i) * HV + hv, db.to(dbeta.dtype.element_ty), mask=m)
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    tl.store(own + at * BT + i, tl.sum(tl.where(ii == jj, Z, 0.0), 1) * b * scale)
    tl.store(pair, tl.where(ii > jj, Z * (b * scale)[None, :], 0.0).to(pairs.dtype.element_ty))
    tl.store(pair + BT * BT, tl.where(ii > jj, Y * (0.0 - b)[:, None] * b[None, :], 0.0).to(pairs.dtype.element_ty))
    for column in tl.range(0, K, BK):
        c = column + tl.arange(0, BK)
        tq = tl.zeros([BT, BK], tl.float32)
        tk = tl.zeros([BT, BK], tl.float32)
        td = tl.zeros([BT, BK], tl.float32)
        whole = tl.zeros([BK], tl.float32)
        for part in tl.static_range(0, V, BV):
            iv = part + tl.arange(0, BV)
            block = at * (K * V) + iv[:, None] * K + c[None, :]
            some = (iv < V)[:, None] & (c < K)[None, :]
            St = tl.load(states + block, mask=some, other=0.0)
            Dt = tl.load(dstates + block, mask=some, other=0.0)
            whole += tl.sum(St.to(tl.float32) * Dt.to(tl.float32), 0)
            if not KEEP:
                ot = load_rows(do + hv * V, row, rows, part, V, HV * V, BT, BV)
                wt = load_rows(dv + hv * V, row, rows, part, V, HV * V, BT, BV)
                eT = load_residuals(residuals + at * (BT * V), part, V, BT, BV)
            tq = tl.dot(ot, St, tq, input_precision=PRECISION)
            tk = tl.dot(wt, St, tk, input_precision=PRECISION)
            td = tl.dot(tl.trans(eT), Dt, td, input_precision=PRECISION)
        tl.store(inner + at * K + c, whole, mask=c < K)
        place = products + at * (3 * BT * K) + ii * K + c[None, :]
        tl.store(place, (tq * scale).to(DT), mask=(c < K)[None, :])
        tl.store(place + BT * K, (tk * (0.0 - b)[:, None]).to(DT), mask=(c < K)[None, :])
        tl.store(place + 2 * BT * K, (td * b[:, None]).to(DT), mask=(c < K)[None, :])
    tl.debug_barrier()  # every thread has read dw before it becomes dv
    for part in tl.static_range(0, V, BV):
        jv = part + tl.arange(0, BV)
        wt = load_rows(dv + hv * V, row, rows, part, V, HV * V, BT, BV)
        out = dv + hv * V + (row + i)[:, None] * (HV * V) + jv[None, :]
        tl.store(out, (wt.to(tl.float32) * b[:, None]).to(dv.dtype.element_ty), mask=m[:, None] & (jv < V)[None, :])
    if PACKED:
        first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
        if first < end:
            clear_values(dv, first, end, hv, HV, V, BT, BV)
            clear_rows(dbeta + hv, first, end, HV, 0, 1, BT, 1)


@triton.jit(do_not_specialize=["bound", "T", "N", "NT"])
def gradients_kernel(
    q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg, scale_sums,
    bias_sums, cu_seqlens, chunk_indices, chunk_offsets, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, SUMS: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk ``[tokens, HV, K]`` (parts unless WHOLE) and dg ``[tokens, HV, K]`` of the raw inputs, from the results of
    ``products_kernel``; scale_sums ``[slots, HV]`` and bias_sums ``[slots, HV, K]`` fp32, the gate parameters' parts.
    Heads fastest."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    at = slot.to(tl.int64) * HV + hv
    if PACKED:
        if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
            first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
            clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)
            return
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    ii = i[:, None]
    jj = i[None, :]
    m = i < rows
    vec = vectors + at * (VECTORS * BT) + i
    rk = tl.load(vec + BT)
    rq = tl.load(vec + 3 * BT)
    factor = gate_factor(A_log, hv, SCALED)
    tile = ii // TILE
    own_tile = tile == jj // TILE
    # Bounds that a compiler does not know, so that it keeps loops as they are: unrolled, they run out of registers.
    tiles = tl.cdiv(rows, TILE)
    levels = tl.minimum(rows, TILE_LEVELS)
    tdp = tile_decays + at * (BT // TILE * K)
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    rows_q = tl.zeros([BT], tl.float32)
    rows_k = tl.zeros([BT], tl.float32)
    rows_scale = tl.zeros([BT], tl.float32)
    for column in tl.range(0, K, BK, disable_licm=not SAFE):
        c = column + tl.arange(0, BK)
        inside = m[:, None] & (c < K)[None, :]
        kh = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rk[:, None]
        x = log_decay(load_gate(g, dt_bias, row, rows, hv, column, HV, K, BT, BK, BIAS), factor, bound, GATE)
        x = tl.where(inside, x, 0.0)
        # What meets other tokens of the chunk: see decay_kernels.
        y = token_sums(own_tile & (jj <= ii), x, SUMS, PRECISION)
        a = tl.exp2(y)
        if SAFE:
            fj = tl.exp2(-y)
        else:
            fj = tl.exp2(token_sums(own_tile & (jj > ii), x, SUMS, PRECISION))
        dqh = tl.zeros([BT, BK], tl.float32)
        dkh = tl.zeros([BT, BK], tl.float32)
        ahead = tl.zeros([BT, BK], tl.float32)
        # f: the factor r of the tile at hand, its last value the decay to the chunk's end.
        f = tl.zeros([BT, BK], tl.float32)
        for side in tl.range(2, disable_licm=not SAFE):
            # Z with the rows of q, then Y with those of k: one at a time, to spare registers.
            Xb = tl.load(pair + side * (BT * BT))
            rp = q + hq * K
            rr = rq
            if side == 1:
                rp = k + hq * K
                rr = rk
            rh = load_rows(rp, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rr[:, None]
            ra = rh * a
            ar = tl.zeros([BT, BK], tl.float32)
            f = tl.zeros([BT, BK], tl.float32)
            for index in tl.range(tiles, disable_licm=not SAFE):
                if SAFE:
                    f = tl.where(tile == index, fj, f)
                kr = (kh * f).to(PAIRS)
                ar = tl.where(tile == index, tl.dot(Xb, kr, input_precision=PRECISION), ar)
                here = (tile == index).to(tl.float32)
                ac = tl.dot(tl.trans(Xb), (ra * here).to(PAIRS), input_precision=PRECISION)
                dkh += f * ac
                ahead -= kr.to(tl.float32) * ac
                f *= tile_decay(tdp, index, column, K, BK)
                if not SAFE:
                    f = tl.where(tile == index, fj, f)
            ahead += ra.to(PAIRS).to(tl.float32) * ar
            ar *= a
            if not SAFE:
                for level in tl.range(levels, disable_licm=True):
                    F = tl.exp2(token_sums(level_weights(ii, jj, level), x, SUMS, PRECISION))
                    met = level_pairs(ii, jj, level)
                    Xm = tl.where(met, tl.load(pair + side * (BT * BT)), 0.0)
                    kF = (kh * F).to(PAIRS)
                    al = tl.dot(Xm, kF, input_precision=PRECISION)
                    rF = (rh * F).to(PAIRS)
                    tl.debug_barrier()  # read again, not kept
                    Xm = tl.where(met, tl.load(pair + side * (BT * BT), eviction_policy="evict_last"), 0.0)
                    ac = tl.dot(tl.trans(Xm), rF, input_precision=PRECISION)
                    ar += F * al
                    dkh += F * ac
                    ahead += rF.to(tl.float32) * al - kF.to(tl.float32) * ac
            dqh += tl.where(side == 0, ar, 0.0)
            dkh += tl.where(side == 0, 0.0, ar)
        # What meets the states, and the token itself.
        qh = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rq[:, None]
        place = products + at * (3 * BT * K) + ii * K + c[None, :]
        grown = a * before_tile(tile, tdp, column, K, BT, BK)
        tq = tl.load(place, mask=(c < K)[None, :], other=0.0).to(tl.float32) * grown
        dqh += tq
        ahead += qh * tq
        tk = tl.load(place + BT * K, mask=(c < K)[None, :], other=0.0).to(tl.float32) * grown
        dkh += tk
        ahead += kh * tk
        td = tl.load(place + 2 * BT * K, mask=(c < K)[None, :], other=0.0).to(tl.float32) * f
        dkh += td
        dx = token_sums(jj >= ii, ahead, PAIRS, PRECISION) + token_sums(jj < ii, kh * td, PAIRS, PRECISION)
        diagonal = tl.load(own + at * BT + i)[:, None]
        dqh += diagonal * kh
        dkh += diagonal * qh
        if L2NORM:
            rows_q += tl.sum(qh * dqh, 1)
            rows_k += tl.sum(kh * dkh, 1)
        out = (row + i)[:, None] * (HV * K) + hv * K + c[None, :]
        tl.store(dq + out, dqh.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + out, dkh.to(dk.dtype.element_ty), mask=inside)
        whole = tl.load(inner + at * K + c, mask=c < K, other=0.0)
        dx += (whole * tl.load(decay + at * K + c, mask=c < K, other=0.0))[None, :]
        if GATE:
            z = load_gate(g, dt_bias, row, rows, hv, column, HV, K, BT, BK, BIAS)
            dx, dA = gate_gradient(z, dx, factor, bound, GATE)
            if SCALED:
                rows_scale += tl.sum(tl.where(inside, dA, 0.0), 1)
            if BIAS:
                tl.store(bias_sums + at * K + c, tl.sum(tl.where(inside, dx, 0.0), 0), mask=c < K)
        tl.store(dg + out, dx.to(dg.dtype.element_ty), mask=inside)
    if GATE and SCALED:
        tl.store(scale_sums + at, tl.sum(rows_scale, 0))
    if L2NORM:
        tl.debug_barrier()  # dq and dk are read by threads that did not write them
        for column in tl.range(0, K, BK):
            c = column + tl.arange(0, BK)
            inside = m[:, None] & (c < K)[None, :]
            out = (row + i)[:, None] * (HV * K) + hv * K + c[None, :]
            kh = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rk[:, None]
            qh = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rq[:, None]
            dqh = (tl.load(dq + out, mask=inside, other=0.0).to(tl.float32) - qh * rows_q[:, None]) * rq[:, None]
            dkh = (tl.load(dk + out, mask=inside, other=0.0).to(tl.float32) - kh * rows_k[:, None]) * rk[:, None]
            tl.store(dq + out, dqh.to(dq.dtype.element_ty), mask=inside)
            tl.store(dk + out, dkh.to(dk.dtype.element_ty), mask=inside)
    if PACKED:
        first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
        if first < end:
            clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)


@triton.jit(do_not_specialize=["T", "N", "slots", "row_programs"])
def finish_kernel(
    dq_parts, dk_parts, dq, dk, scale_sums, bias_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets, T, N, slots,
    row_programs,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Sums over value heads, and the gate parameters' sums over slots, in fixed orders.

    Programs 0 .. row_programs * 2 - 1 (with PARTS): ROWS rows of dq or dk ``[tokens * H, K]`` from the parts
    ``[tokens, HV, K]``; padding rows become zero. One more program per value head sums its gate parameters' parts over
    the live slots, SUMS at a time from slot 0, so that padding only ever adds exact zeros behind them. T: all rows.
    """
    pid = tl.program_id(0)
    if SCALED or BIAS:
        if pid >= row_programs * (2 if PARTS else 0):
            hv = pid - row_programs * (2 if PARTS else 0)
            live = slots
            if PACKED:
                live = tl.load(chunk_offsets + N).to(tl.int32)
            i = tl.arange(0, SUMS)
            if SCALED:
                total = 0.0
                for first in tl.range(0, live, SUMS):
                    at = (first + i).to(tl.int64) * HV + hv
                    total += tl.sum(tl.load(scale_sums + at, mask=first + i < live, other=0.0), 0)
                tl.store(dA_log + hv, total.to(dA_log.dtype.element_ty))
            if BIAS:
                c = tl.arange(0, BK)
                sums = tl.zeros([BK], tl.float32)
                for first in tl.range(0, live, SUMS):
                    at = ((first + i).to(tl.int64) * HV + hv)[:, None] * K + c[None, :]
                    mask = (first + i < live)[:, None] & (c < K)[None, :]
                    sums += tl.sum(tl.load(bias_sums + at, mask=mask, other=0.0), 0)
                tl.store(ddt_bias + hv * K + c, sums.to(ddt_bias.dtype.element_ty), mask=c < K)
            return
    if PARTS:
        parts = dq_parts
        out = dq
        if pid >= row_programs:
            parts = dk_parts
            out = dk
            pid -= row_programs
        live = T.to(tl.int64)
        if PACKED:
            live = tl.load(cu_seqlens + N).to(tl.int64)
        GROUP: tl.constexpr = HV // H
        i = pid.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        j = tl.arange(0, BK)
        mask = (i < live * H)[:, None] & (j < K)[None, :]
        sums = tl.zeros([ROWS, BK], tl.float32)
        for head in tl.static_range(GROUP):
            sums += tl.load(parts + (i * GROUP + head)[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
        at = out + i[:, None] * K + j[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=(i < T.to(tl.int64) * H)[:, None] & (j < K)[None, :])
