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

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import (
    clear_rows,
    load_rows,
    locate_slot,
    padding_rows,
    padding_share,
)
from graphsafe_kernels.kda.decay_kernels import (
    TILE,
    apart,
    beside,
    gathered,
    in_tiles,
    level_factors,
    level_pairs,
    load_tile_decays,
    narrow,
    own_factors,
    spread,
    tile_factors,
    tile_sums,
)
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_bias, log_decay
from graphsafe_kernels.kda.level_kernels import gradients_by_levels
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


@triton.jit
def clear_products(
    slot, hv, dv, dbeta, cu_seqlens, chunk_offsets, T, N, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """A sentinel slot's share of the padding rows of dv and dbeta."""
    first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
    clear_values(dv, first, end, hv, HV, V, BT, BV)
    clear_rows(dbeta + hv, first, end, HV, 0, 1, BT, 1)


@triton.jit
def products_of(
    slot, hv, at, do, dv, vectors, states, dstates, residuals, pairs, own, products, inner, dbeta,
    cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The products of one live slot and value head."""
    DT: tl.constexpr = states.dtype.element_ty
    KEEP: tl.constexpr = BV >= V
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
    if LOOP:
        # Through memory: an Ascend pads what goes to elements apart to 32 bytes each, and all that it is computed from.
        tl.store(own + (at * 2 + 1) * BT + i, db)
        tl.debug_barrier()
        db = tl.load(own + (at * 2 + 1) * BT + i)
    tl.store(dbeta + (row + i) * HV + hv, db.to(dbeta.dtype.element_ty), mask=m)
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    tl.store(own + at * ((2 if LOOP else 1) * BT) + i, tl.sum(tl.where(ii == jj, Z, 0.0), 1) * b * scale)
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


@triton.jit(do_not_specialize=["scale", "T", "N", "NT", "tasks"])
def products_kernel(
    do, dv, vectors, states, dstates, residuals, pairs, own, products, inner, dbeta,
    cu_seqlens, chunk_indices, chunk_offsets, tasks, scale, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """do ``[tokens, HV, V]``; dv likewise holds dw and becomes dv; states, dstates ``[slots, HV, V, K]``; residuals
    ``[slots, HV, V, BT]``. Writes dbeta ``[tokens, HV]`` of the raw beta, pairs ``[slots, HV, 2, BT, BT]`` (Z and Y for
    i > j), own ``[slots, HV, BT]`` fp32 (the diagonal of Z), products ``[slots, HV, 3, BT, K]`` (scale do S^T,
    -b dw S^T, b e D^T) and inner ``[slots, HV, K]`` fp32 (sum_v S D). Heads fastest; one slot and head a program, or
    with LOOP ``tasks`` that programs walk."""
    pid = tl.program_id(0)
    if LOOP:
        for step in tl.range(0, tasks - pid, tl.num_programs(0)):
            task = pid + step
            slot = task // HV
            hv = task % HV
            live = True
            if PACKED:
                live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
            if live:
                products_of(
                    slot, hv, slot.to(tl.int64) * HV + hv, do, dv, vectors, states, dstates, residuals, pairs, own,
                    products, inner, dbeta, cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT, HV, K, V, BT, BK,
                    BV, PACKED, SIGMOID, FACTOR, PRECISION, True,
                )  # fmt: skip
            else:
                if PACKED:
                    clear_products(slot, hv, dv, dbeta, cu_seqlens, chunk_offsets, T, N, HV, V, BT, BV)
    else:
        slot = pid // HV
        hv = pid % HV
        at = slot.to(tl.int64) * HV + hv
        if PACKED:
            if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
                clear_products(slot, hv, dv, dbeta, cu_seqlens, chunk_offsets, T, N, HV, V, BT, BV)
                return
        products_of(
            slot, hv, at, do, dv, vectors, states, dstates, residuals, pairs, own, products, inner, dbeta, cu_seqlens,
            chunk_indices, chunk_offsets, scale, T, N, NT, HV, K, V, BT, BK, BV, PACKED, SIGMOID, FACTOR, PRECISION,
            False,
        )  # fmt: skip


@triton.jit
def part_level(k3, q3, y3, pair, turned, dq, dk, ahead, BT: tl.constexpr, PAIRS: tl.constexpr,
               PRECISION: tl.constexpr, LEVEL: tl.constexpr):  # fmt: skip
    """Add what one level's pairs within tiles give dq^, dk^ and the gate's a to ``[tiles, 16, BK]`` of each."""
    F = level_factors(y3, LEVEL)
    met = level_pairs(LEVEL)
    meeting = tl.permute(met, [0, 2, 1])
    kF = (k3 * F).to(PAIRS)
    qF = (q3 * F).to(PAIRS)
    Z = tl.where(met, tl.load(pair), 0.0)
    Y = tl.where(met, tl.load(pair + BT * BT), 0.0)
    az = tl.dot(Z, kF, input_precision=PRECISION)
    ay = tl.dot(Y, kF, input_precision=PRECISION)
    # Loaded the other way round rather than turned.
    Z = tl.where(meeting, tl.load(turned), 0.0)
    Y = tl.where(meeting, tl.load(turned + BT * BT), 0.0)
    ac = tl.dot(Z, qF, input_precision=PRECISION)
    ac = tl.dot(Y, kF, ac, input_precision=PRECISION)
    dq += F * az
    dk += F * (ay + ac)
    ahead += qF.to(tl.float32) * az + kF.to(tl.float32) * (ay - ac)
    return dq, dk, ahead


@triton.jit
def project(q, k, dq, dk, row, rows, hq, hv, i, m, rq, rk, rows_q, rows_k, H: tl.constexpr, HV: tl.constexpr,
            K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """l2norm's gradient: dq and dk of one head, less their parts along q and k."""
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


@triton.jit
def gradients_in_tiles(
    slot, hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg,
    scale_sums, bias_sums, cu_seqlens, chunk_indices, chunk_offsets, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, PACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head, pairs met by tiles of 16 tokens (``decay_kernels``)."""
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
    KD: tl.constexpr = (K + BK - 1) // BK * BK
    tdp = tile_decays + at * (BT // TILE * KD)
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    t = tl.arange(0, BT // TILE)[:, None, None] * TILE
    r = tl.arange(0, TILE)
    inner_pair = pairs + at * (2 * BT * BT) + (t + r[None, :, None]) * BT + t + r[None, None, :]
    turned_pair = pairs + at * (2 * BT * BT) + (t + r[None, None, :]) * BT + t + r[None, :, None]
    rows_q = tl.zeros([BT], tl.float32)
    rows_k = tl.zeros([BT], tl.float32)
    rows_scale = tl.zeros([BT], tl.float32)
    diagonal = tl.load(own + at * BT + i)[:, None]
    Z = tl.load(pair)
    Y = tl.load(pair + BT * BT)
    k_next = load_rows(k + hq * K, row, rows, 0, K, H * K, BT, BK)
    q_next = load_rows(q + hq * K, row, rows, 0, K, H * K, BT, BK)
    g_next = load_rows(g + hv * K, row, rows, 0, K, HV * K, BT, BK)
    bias_next = load_bias(dt_bias, hv, 0, K, BK, BIAS)
    for column in tl.range(0, K, BK, disable_licm=True):
        if SAFE:
            # Everything from memory first, so that it is waited for together.
            d0, d1, d2, d3 = load_tile_decays(tdp, column, KD, BT, BK)
        c = column + tl.arange(0, BK)
        inside = m[:, None] & (c < K)[None, :]
        place = products + at * (3 * BT * K) + ii * K + c[None, :]
        tq = tl.load(place, mask=(c < K)[None, :], other=0.0)
        kh = k_next.to(tl.float32) * rk[:, None]
        qh = q_next.to(tl.float32) * rq[:, None]
        z = g_next.to(tl.float32) + bias_next[None, :]
        x = tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)
        # What meets other tokens of the chunk: see decay_kernels.
        y = tile_sums(x, BT, BK)
        a = tl.exp2(y)
        if not SAFE:
            y3 = in_tiles(y, BT, BK)
            kt3 = in_tiles(kh, BT, BK)
            qt3 = in_tiles(qh, BT, BK)
            e3 = tl.zeros([BT // TILE, TILE, BK], tl.float32)
            u3 = tl.zeros([BT // TILE, TILE, BK], tl.float32)
            w3 = tl.zeros([BT // TILE, TILE, BK], tl.float32)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 0)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 1)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 2)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 3)
        fj = own_factors(y, BT, BK, SAFE)
        if not SAFE:
            d0, d1, d2, d3 = load_tile_decays(tdp, column, KD, BT, BK)
        k0, k1, k2, k3, f0, f1, f2, f3, end, before = tile_factors(kh, fj, tile, d0, d1, d2, d3, PAIRS, BT, BK, SAFE,
                                                                   PACK)  # fmt: skip
        kr = beside(k0, k1, k2, k3, BT, BK)
        ka = narrow(kh * a, PAIRS, PACK)
        qa = narrow(qh * a, PAIRS, PACK)
        grown = a * before
        # q's side first, down to its gradient: what it holds is free again for k's.
        az = gathered(tl.dot(Z, kr, input_precision=PRECISION), tile, BT, BK)
        sq = tq.to(tl.float32) * grown
        ahead = qa.to(tl.float32) * az + qh * sq
        dqh = a * az + sq + diagonal * kh
        dkh = diagonal * qh
        if not SAFE:
            dqh += tl.reshape(e3, [BT, BK])
            dkh += tl.reshape(u3, [BT, BK])
            ahead += tl.reshape(w3, [BT, BK])
        if L2NORM:
            rows_q += tl.sum(qh * dqh, 1)
        out = (row + i)[:, None] * (HV * K) + hv * K + c[None, :]
        tl.store(dq + out, dqh.to(dq.dtype.element_ty), mask=inside)
        tk = tl.load(place + BT * K, mask=(c < K)[None, :], other=0.0)
        td = tl.load(place + 2 * BT * K, mask=(c < K)[None, :], other=0.0)
        ay = gathered(tl.dot(Y, kr, input_precision=PRECISION), tile, BT, BK)
        sk = tk.to(tl.float32) * grown
        sd = td.to(tl.float32) * end
        ahead += ka.to(tl.float32) * ay + kh * sk
        dkh += a * ay + sk + sd
        # Forwards without the token itself.
        behind = kh * sd
        dx = tl.cumsum(behind, 0) - behind
        ac = tl.dot(tl.trans(Z), spread(qa, tile, BT, BK), input_precision=PRECISION)
        ac = tl.dot(tl.trans(Y), spread(ka, tile, BT, BK), ac, input_precision=PRECISION)
        c0, c1, c2, c3 = apart(ac, BT, BK)
        # Here and not above, so that the compiler lets the products follow the layout of what is loaded.
        ahead -= k0.to(tl.float32) * c0 + k1.to(tl.float32) * c1
        dkh += f0 * c0 + f1 * c1
        if BT == 4 * TILE:
            ahead -= k2.to(tl.float32) * c2 + k3.to(tl.float32) * c3
            dkh += f2 * c2 + f3 * c3
        if L2NORM:
            rows_k += tl.sum(kh * dkh, 1)
        tl.store(dk + out, dkh.to(dk.dtype.element_ty), mask=inside)
        dx += tl.cumsum(ahead, 0, reverse=True)
        k_next = load_rows(k + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        q_next = load_rows(q + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        g_next = load_rows(g + hv * K, row, rows, column + BK, K, HV * K, BT, BK)
        bias_next = load_bias(dt_bias, hv, column + BK, K, BK, BIAS)
        tl.debug_barrier()  # what is loaded below is loaded there, and not kept from above
        whole = tl.load(inner + at * K + c, mask=c < K, other=0.0)
        whole *= tl.load(decay + at * K + c, mask=c < K, other=0.0)
        dx += whole[None, :]
        if GATE:
            z = load_rows(g + hv * K, row, rows, column, K, HV * K, BT, BK).to(tl.float32)
            z += load_bias(dt_bias, hv, column, K, BK, BIAS)[None, :]
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
        project(q, k, dq, dk, row, rows, hq, hv, i, m, rq, rk, rows_q, rows_k, H, HV, K, BT, BK)
    if PACKED:
        first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
        if first < end:
            clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)


@triton.jit(do_not_specialize=["bound", "T", "N", "NT", "tasks"])
def gradients_kernel(
    q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg, scale_sums,
    bias_sums, row_sums, cu_seqlens, chunk_indices, chunk_offsets, tasks, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, PACK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk ``[tokens, HV, K]`` (parts unless WHOLE) and dg ``[tokens, HV, K]`` of the raw inputs, from the results of
    ``products_kernel``; scale_sums ``[slots, HV]`` and bias_sums ``[slots, HV, K]`` fp32, the gate parameters' parts.
    Heads fastest; one slot and head a program, or with LEVELS ``tasks`` that programs walk."""
    pid = tl.program_id(0)
    if LEVELS:
        BLOCKS: tl.constexpr = (K + BK - 1) // BK
        for step in tl.range(0, tasks - pid, tl.num_programs(0)):
            task = pid + step
            column = task % BLOCKS * BK
            hv = task // BLOCKS % HV
            slot = task // (BLOCKS * HV)
            at = slot.to(tl.int64) * HV + hv
            live = True
            if PACKED:
                live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
            if live:
                row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
                gradients_by_levels(
                    column, q, k, g, A_log, dt_bias, vectors, decay, pairs, own, products, inner, dq, dk, dg,
                    row_sums + (at * BLOCKS + column // BK) * (3 * BT), bias_sums, row, rows, hv // (HV // H), hv, at,
                    bound, H, HV, K, BT, BK, L2NORM, GATE, SCALED, BIAS, PRECISION,
                )  # fmt: skip
            if PACKED:
                first, end = padding_share(slot, live == 0, cu_seqlens, chunk_offsets, T, N, BT)
                if first < end:
                    if WHOLE:
                        clear_rows(dq + hv * K, first, end, HV * K, column, K, BT, BK)
                        clear_rows(dk + hv * K, first, end, HV * K, column, K, BT, BK)
                    clear_rows(dg + hv * K, first, end, HV * K, column, K, BT, BK)
    else:
        slot = pid // HV
        hv = pid % HV
        at = slot.to(tl.int64) * HV + hv
        if PACKED:
            if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)
                return
        gradients_in_tiles(
            slot, hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg,
            scale_sums, bias_sums, cu_seqlens, chunk_indices, chunk_offsets, bound, T, N, NT, H, HV, K, BT, BK, PACKED,
            WHOLE, L2NORM, GATE, SCALED, BIAS, SAFE, PAIRS, PACK, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "NT", "tasks"])
def project_kernel(
    q, k, vectors, row_sums, dq, dk, scale_sums, cu_seqlens, chunk_indices, tasks, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What gradients by levels leave to whole rows: l2norm's projection of dq and dk, in place, and scale_sums."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    for step in tl.range(0, tasks - tl.program_id(0), tl.num_programs(0)):
        task = tl.program_id(0) + step
        slot = task // HV
        hv = task % HV
        at = slot.to(tl.int64) * HV + hv
        live = True
        if PACKED:
            live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
        if live:
            row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
            i = tl.arange(0, BT)
            rows_q = tl.zeros([BT], tl.float32)
            rows_k = tl.zeros([BT], tl.float32)
            rows_scale = tl.zeros([BT], tl.float32)
            for block in tl.range(0, BLOCKS):
                sums = row_sums + (at * BLOCKS + block) * (3 * BT) + i
                if L2NORM:
                    rows_q += tl.load(sums)
                    rows_k += tl.load(sums + BT)
                if SCALED:
                    rows_scale += tl.load(sums + 2 * BT)
            if SCALED:
                tl.store(scale_sums + at, tl.sum(rows_scale, 0))
            if L2NORM:
                rk = tl.load(vectors + at * (VECTORS * BT) + BT + i)
                rq = tl.load(vectors + at * (VECTORS * BT) + 3 * BT + i)
                project(q, k, dq, dk, row, rows, hv // (HV // H), hv, i, i < rows, rq, rk, rows_q, rows_k, H, HV, K, BT,
                        BK)  # fmt: skip


@triton.jit
def sum_parameters(
    hv, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One value head's gradients of the gate's parameters."""
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


@triton.jit
def sum_heads(
    task, parts, out, cu_seqlens, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of dq or dk from the value heads' parts."""
    live = T.to(tl.int64)
    if PACKED:
        live = tl.load(cu_seqlens + N).to(tl.int64)
    GROUP: tl.constexpr = HV // H
    i = task.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BK)
    mask = (i < live * H)[:, None] & (j < K)[None, :]
    sums = tl.zeros([ROWS, BK], tl.float32)
    for head in tl.static_range(GROUP):
        sums += tl.load(parts + (i * GROUP + head)[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
    at = out + i[:, None] * K + j[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=(i < T.to(tl.int64) * H)[:, None] & (j < K)[None, :])


@triton.jit(do_not_specialize=["T", "N", "slots", "row_programs"])
def finish_kernel(
    dq_parts, dk_parts, dq, dk, scale_sums, bias_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets, T, N, slots,
    row_programs,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """Sums over value heads, and the gate parameters' sums over slots, in fixed orders.

    Tasks 0 .. row_programs * 2 - 1 (with PARTS): ROWS rows of dq or dk ``[tokens * H, K]`` from the parts
    ``[tokens, HV, K]``; padding rows become zero. One more task per value head sums its gate parameters' parts over
    the live slots, SUMS at a time from slot 0, so that padding only ever adds exact zeros behind them. T: all rows. A
    program has one task, or with LOOP walks them.
    """
    pid = tl.program_id(0)
    first = row_programs * (2 if PARTS else 0)
    if LOOP:
        for step in tl.range(0, first + (HV if SCALED or BIAS else 0) - pid, tl.num_programs(0)):
            task = pid + step
            if task >= first:
                if SCALED or BIAS:
                    sum_parameters(task - first, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV,
                                   K, BK, PACKED, SCALED, BIAS, SUMS)  # fmt: skip
            elif task >= row_programs:
                if PARTS:
                    sum_heads(task - row_programs, dk_parts, dk, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
            else:
                if PARTS:
                    sum_heads(task, dq_parts, dq, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
    else:
        if SCALED or BIAS:
            if pid >= first:
                sum_parameters(pid - first, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV, K, BK,
                               PACKED, SCALED, BIAS, SUMS)  # fmt: skip
                return
        if PARTS:
            parts = dq_parts
            out = dq
            if pid >= row_programs:
                parts = dk_parts
                out = dk
                pid -= row_programs
            sum_heads(pid, parts, out, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
