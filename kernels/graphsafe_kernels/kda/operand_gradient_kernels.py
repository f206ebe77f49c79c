"""The column blocks of KDA's gradients held as operands (``operand_kernels``); formulas are in ``gradient_kernels``.

With Z, Y as in ``product_kernels``, pairs within tiles counted by the bounded form, and per tile I or J:

    rows      a_i sum_j Z_ij kr_j,  kr of the tile that i is in        (and Y)
    columns   sum_I r_j sum_{i in I} (Z_ij qa_i + Y_ij ka_i),  r of the tile that i is in

so rows are one batch of products of tiles; columns are one of pairs of tiles (I, J), whose results each thread weighs.

Requirements
------------
1. A pair that both ends of a sum of the gate's gradient hold enters it twice with opposite signs: as products of the
   same rounded numbers (Z, Y, qa, ka and kr), so that they cancel to fp32's rounding.
2. The diagonal pairs, which no gate touches, stay out of the gate's gradient.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.prefetch_kernels import prefetch_rows, prefetch_span
from graphsafe_kernels.kda.decay_kernels import TILE, part_level
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_bias, log_decay
from graphsafe_kernels.kda.operand_kernels import (
    as_tiles,
    both_halves,
    column_factors,
    columns_inside,
    from_operand,
    from_tile_operands,
    from_tiles,
    load_decays,
    operand_rows,
    over_tiles,
    quad_sums,
    right_operand,
    row_order,
    row_sums,
    running_sums,
    side_by_side,
    start_factor,
    store_sums,
    sums_over_chunk,
    tile_operands,
    weighed,
)
from graphsafe_kernels.kda.prepare_kernels import VECTORS
from graphsafe_kernels.kda.product_kernels import OWN_ROWS


@triton.jit
def load_block(kp, qp, gp, dt_bias, hv, column, live, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
               BK: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """k, q and the gate's input of a column block, and the bias of its channels; zero outside."""
    inside = live & columns_inside(column, K, BK)
    k = tl.load(both_halves(kp, H * K), mask=inside, other=0.0)
    q = tl.load(both_halves(qp, H * K), mask=inside, other=0.0)
    g = tl.load(both_halves(gp, HV * K), mask=inside, other=0.0)
    return k, q, g, load_bias(dt_bias, hv, column, K, BK, BIAS)


@triton.jit
def gradients_operands(
    hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, pairs, own, products, inner, dq, dk, dg, dbeta, scale_sums,
    bias_sums, bias_tiles, row, rows, bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr,
    LATE: tl.constexpr, EXACT: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, FINE: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """One live slot and value head."""
    hq = hv // (HV // H)
    tl.static_assert(BP % BK == 0, "a column block lies in one block of the products")
    OWN: tl.constexpr = OWN_ROWS + FINE * ((K + BP - 1) // BP)
    TILES: tl.constexpr = BT // TILE
    i = tl.arange(0, BT)
    place = row_order(BT)
    live = place < rows
    vec = vectors + at * (VECTORS * BT) + place
    rk = tl.load(vec + BT)
    rq = tl.load(vec + 3 * BT)
    factor = gate_factor(A_log, hv, SCALED)
    tile = tl.arange(0, TILES)[None, :, None, None]
    KD: tl.constexpr = (K + BK - 1) // BK * BK
    tdp = tile_decays + at * (TILES * KD)
    prefetch_span(tdp, TILES * KD, PREFETCH)
    prefetch_rows(g + (row * HV + hv) * K, rows, HV * K, K, BT, PREFETCH)
    prefetch_rows(k + (row * H + hq) * K, rows, H * K, K, BT, PREFETCH)
    prefetch_rows(q + (row * H + hq) * K, rows, H * K, K, BT, PREFETCH)
    prefetch_span(products + at * (3 * BT * K), 3 * BT * K, PREFETCH)
    prefetch_span(inner + at * K, K, PREFETCH)
    if GATE and BIAS:
        tbp = bias_tiles + at * (TILES * KD)
    pair = pairs + at * (2 * BT * BT) + i[:, None] * BT + i[None, :]
    t = tl.arange(0, TILES)[:, None, None] * TILE
    r = tl.arange(0, TILE)
    inner_pair = pairs + at * (2 * BT * BT) + (t + r[None, :, None]) * BT + t + r[None, None, :]
    turned_pair = pairs + at * (2 * BT * BT) + (t + r[None, None, :]) * BT + t + r[None, :, None]
    scales = tl.zeros([8, TILES, BK // 4], tl.float32)
    uses = tl.zeros([8, TILES, 2, BK // 4], tl.float32)
    # By pairs of tiles (I, J), J fastest, and once more by tiles I: laid out in shared memory without conflicts.
    Z = tl.trans(tl.load(pair))
    Y = tl.trans(tl.load(pair + BT * BT))
    second = tl.arange(0, 2)[None, :, None] == 1
    turned = tl.where(second, tl.reshape(Y, [BT, 1, BT]), tl.reshape(Z, [BT, 1, BT]))
    turned = tl.permute(tl.reshape(turned, [TILES, TILE, 2, TILES, TILE]), [3, 0, 1, 2, 4])
    turned = tl.reshape(turned, [TILES * TILES, TILE, 2 * TILE])
    whole_pair = pairs + at * (2 * BT * BT) + (t + r[None, :, None]) * BT + tl.arange(0, BT)[None, None, :]
    Z = tl.load(whole_pair)
    Y = tl.load(whole_pair + BT * BT)
    kp = operand_rows(k + hq * K + row * (H * K), H * K, BT, BK)
    qp = operand_rows(q + hq * K + row * (H * K), H * K, BT, BK)
    gp = operand_rows(g + hv * K + row * (HV * K), HV * K, BT, BK)
    pp = operand_rows(products + at * (3 * BT * K), K, BT, BK)
    dqp = operand_rows(dq + hv * K + row * (HV * K), HV * K, BT, BK)
    dkp = operand_rows(dk + hv * K + row * (HV * K), HV * K, BT, BK)
    dgp = operand_rows(dg + hv * K + row * (HV * K), HV * K, BT, BK)
    k_next, q_next, g_next, bias_next = load_block(kp, qp, gp, dt_bias, hv, 0, live, H, HV, K, BK, BIAS)
    for column in tl.range(0, K, BK):
        # From memory first, so that it is waited for together; what is needed last is loaded last, for its registers.
        d0, d1, d2, d3 = load_decays(tdp, column, KD, BT, BK)
        c = column + tl.arange(0, BK)
        held = columns_inside(column, K, BK)
        inside = live & held
        all_rows = (place >= 0) & held
        tq = tl.load(both_halves(pp, K), mask=all_rows, other=0.0)
        if not LATE:
            tk = tl.load(both_halves(pp + BT * K, K), mask=all_rows, other=0.0)
        kh = k_next.to(tl.float32) * rk
        qh = q_next.to(tl.float32) * rq
        z = g_next.to(tl.float32) + bias_next[None, None, None, :]
        x = tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)
        kp += BK
        qp += BK
        gp += BK
        if SAFE:
            k_next, q_next, g_next, bias_next = load_block(kp, qp, gp, dt_bias, hv, column + BK, live, H, HV, K, BK,
                                                           BIAS)  # fmt: skip
        y = running_sums(x)
        a = tl.exp2(y)
        if SAFE:
            fj = tl.exp2(-y)
        else:
            whole = tl.sum(tl.sum(x, 2), 0)
            fj = tl.exp2(whole[None, :, None, :] - y)
        r0, r1, r2, r3, end = column_factors(tile, d0, d1, d2, d3, TILES, SAFE)
        ka = kh * a
        qa = qh * a
        kf = kh * fj
        kr = side_by_side((kf * r0).to(PAIRS), (kf * r1).to(PAIRS), (kf * r2).to(PAIRS), (kf * r3).to(PAIRS), BT, BK)
        qr = qa.to(PAIRS)
        kar = ka.to(PAIRS)
        right = tl.permute(right_operand(kr, BT, BK), [0, 2, 1])
        az = from_operand(tl.dot(Z, right, input_precision=PRECISION), BT, BK)
        ay = from_operand(tl.dot(Y, right, input_precision=PRECISION), BT, BK)
        right = tl.permute(tile_operands(qr, kar, BT, BK), [0, 2, 1])
        ac = from_tile_operands(tl.dot(turned, right, input_precision=PRECISION), BT, BK)
        grown = a * start_factor(tile, d0, d1, d2, TILES)
        sq = tq.to(tl.float32) * grown
        if LATE:
            tk = tl.load(both_halves(pp + BT * K, K), mask=all_rows, other=0.0)
        sk = tk.to(tl.float32) * grown
        if FINE:
            half = both_halves(pp + 2 * BT * K, K).to(tl.pointer_type(tl.float16), bitcast=True)
            td = tl.load(half, mask=all_rows, other=0.0).to(tl.float32)
            td *= tl.load(own + (at * OWN + OWN_ROWS + column // BP) * BT + place)
        else:
            td = tl.load(both_halves(pp + 2 * BT * K, K), mask=all_rows, other=0.0).to(tl.float32)
        sd = td * (fj * end)
        diagonal = tl.load(own + at * (OWN * BT) + place)
        dqh = a * az + sq + diagonal * kh
        dkh = a * ay + sk + sd + diagonal * qh + fj * weighed(ac, r0, r1, r2, r3, BT, BK)
        ahead = qr.to(tl.float32) * az + qh * sq + kar.to(tl.float32) * ay + kh * sk
        ahead -= tl.reshape(tl.sum(kr.to(tl.float32) * ac, 3), [8, TILES, 2, BK])
        if not SAFE:
            # last of all: these products need the most registers
            y3 = as_tiles(y, BT, BK)
            kt3 = as_tiles(kh, BT, BK)
            qt3 = as_tiles(qh, BT, BK)
            e3 = as_tiles(dqh, BT, BK)
            u3 = as_tiles(dkh, BT, BK)
            w3 = as_tiles(ahead, BT, BK)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 0)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 1)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 2)
            e3, u3, w3 = part_level(kt3, qt3, y3, inner_pair, turned_pair, e3, u3, w3, BT, PAIRS, PRECISION, 3)
            dqh = from_tiles(e3, BT, BK)
            dkh = from_tiles(u3, BT, BK)
            ahead = from_tiles(w3, BT, BK)
        if EXACT:
            uses += quad_sums(kh * dkh, BT, BK)
        if L2NORM:
            dqh = (dqh - qh * tl.load(own + (at * OWN + 1) * BT + place)) * rq
            dkh = (dkh - kh * tl.load(own + (at * OWN + 2) * BT + place)) * rk
        tl.store(both_halves(dqp, HV * K), dqh.to(dq.dtype.element_ty), mask=inside)
        tl.store(both_halves(dkp, HV * K), dkh.to(dk.dtype.element_ty), mask=inside)
        dx = sums_over_chunk(ahead, kh * sd, BT)
        whole = tl.load(inner + at * K + c, mask=c < K, other=0.0)
        dx += whole[None, None, None, :]
        if GATE:
            dx, dA = gate_gradient(z, dx, factor, bound, GATE)
            if SCALED:
                scales += tl.sum(quad_sums(tl.where(inside, dA, 0.0), BT, BK), 2)
            if BIAS:
                store_sums(tl.where(inside, dx, 0.0), tbp, column, KD, BT, BK)
        tl.store(both_halves(dgp, HV * K), dx.to(dg.dtype.element_ty), mask=inside)
        if not SAFE:
            # here, where registers are free again
            k_next, q_next, g_next, bias_next = load_block(kp, qp, gp, dt_bias, hv, column + BK, live, H, HV, K, BK,
                                                           BIAS)  # fmt: skip
        pp += BK
        dqp += BK
        dkp += BK
        dgp += BK
    if GATE and BIAS:
        tl.debug_barrier()
        over_tiles(tbp, bias_sums + at * K, K, KD, BT, False)
    if GATE and SCALED:
        tl.store(scale_sums + at, tl.sum(tl.sum(tl.sum(scales, 2), 1), 0))
    if EXACT:
        ROUNDING: tl.constexpr = 2.0**-7 if k.dtype.element_ty == tl.bfloat16 else 2.0**-10
        b = tl.load(vectors + at * (VECTORS * BT) + i)
        db = tl.load(own + (at * OWN + 3) * BT + i)
        limit = tl.abs(db) * ROUNDING
        # where b is zero, so is what it would divide
        more = (row_sums(uses, BT) - tl.load(own + (at * OWN + 2) * BT + i)) / tl.where(b == 0.0, 1.0, b)
        db += tl.minimum(tl.maximum(more, 0.0 - limit), limit)
        if SIGMOID:
            db *= b * (1.0 - b / FACTOR)
        tl.store(dbeta + (row + i) * HV + hv, db.to(dbeta.dtype.element_ty), mask=i < rows)
