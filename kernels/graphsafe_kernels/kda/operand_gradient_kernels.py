"""The column blocks of KDA's gradients held as operands (``operand_kernels``); formulas are in ``gradient_kernels``.

With Z, Y as in ``product_kernels``, pairs within tiles counted by the bounded form, and per tile I or J:

    rows      a_i sum_j Z_ij kr_j,  kr of the tile that i is in        (and Y)
    columns   fj_j sum_i (Z_ij qs_i + Y_ij ks_i),  qs = q^ a s and ks = k^ a s of the tile that j is in

so each is one batch of products of tiles, and both right operands of the columns pass through shared memory at once.

Requirements
------------
1. A pair that both ends of a sum of the gate's gradient hold enters it twice with opposite signs. Within a tile both
   uses are products of the same rounded numbers; across tiles either side carries the decay between them, so they
   cancel to half precision: of dg's error that is less than the rounding of Z itself.
2. The diagonal pairs, which no gate touches, stay out of the gate's gradient.
"""

import triton
import triton.language as tl

from graphsafe_kernels.kda.decay_kernels import TILE, part_level
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_bias, log_decay
from graphsafe_kernels.kda.operand_kernels import (
    as_tiles,
    both_halves,
    column_factors,
    columns_inside,
    from_operand,
    from_tiles,
    load_decays,
    operand_rows,
    over_tiles,
    quad_sums,
    right_operand,
    right_operands,
    row_factors,
    row_order,
    row_sums,
    running_sums,
    store_sums,
    sums_over_chunk,
)
from graphsafe_kernels.kda.prepare_kernels import VECTORS


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
    hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg, scale_sums,
    bias_sums, bias_tiles, row, rows, bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head."""
    hq = hv // (HV // H)
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
    if GATE and BIAS:
        tbp = bias_tiles + at * (TILES * KD)
    pair = pairs + at * (2 * BT * BT) + i[:, None] * BT + i[None, :]
    t = tl.arange(0, TILES)[:, None, None] * TILE
    r = tl.arange(0, TILE)
    inner_pair = pairs + at * (2 * BT * BT) + (t + r[None, :, None]) * BT + t + r[None, None, :]
    turned_pair = pairs + at * (2 * BT * BT) + (t + r[None, None, :]) * BT + t + r[None, :, None]
    scales = tl.zeros([8, TILES, 2, BK // 4], tl.float32)
    diagonal = tl.load(own + at * (3 * BT) + place)
    Z = tl.load(pair)
    Y = tl.load(pair + BT * BT)
    second = tl.arange(0, 2)[None, :, None] == 1
    turned = tl.where(second, tl.reshape(tl.trans(Y), [BT, 1, BT]), tl.reshape(tl.trans(Z), [BT, 1, BT]))
    turned = tl.reshape(turned, [TILES, TILE, 2 * BT])
    Z = tl.reshape(Z, [TILES, TILE, BT])
    Y = tl.reshape(Y, [TILES, TILE, BT])
    kp = operand_rows(k + hq * K + row * (H * K), H * K, BT, BK)
    qp = operand_rows(q + hq * K + row * (H * K), H * K, BT, BK)
    gp = operand_rows(g + hv * K + row * (HV * K), HV * K, BT, BK)
    pp = operand_rows(products + at * (3 * BT * K), K, BT, BK)
    dqp = operand_rows(dq + hv * K + row * (HV * K), HV * K, BT, BK)
    dkp = operand_rows(dk + hv * K + row * (HV * K), HV * K, BT, BK)
    dgp = operand_rows(dg + hv * K + row * (HV * K), HV * K, BT, BK)
    k_next, q_next, g_next, bias_next = load_block(kp, qp, gp, dt_bias, hv, 0, live, H, HV, K, BK, BIAS)
    for column in tl.range(0, K, BK):
        # Everything from memory first, so that it is waited for together.
        d0, d1, d2, d3 = load_decays(tdp, column, KD, BT, BK)
        c = column + tl.arange(0, BK)
        held = columns_inside(column, K, BK)
        inside = live & held
        all_rows = (place >= 0) & held
        tq = tl.load(both_halves(pp, K), mask=all_rows, other=0.0)
        tk = tl.load(both_halves(pp + BT * K, K), mask=all_rows, other=0.0)
        td = tl.load(both_halves(pp + 2 * BT * K, K), mask=all_rows, other=0.0)
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
        s0, s1, s2, s3, before = row_factors(tile, d0, d1, d2, TILES, SAFE)
        r0, r1, r2, r3, end = column_factors(tile, d0, d1, d2, d3, TILES, SAFE)
        kf = kh * fj
        ka = kh * a
        qa = qh * a
        kr = right_operand((kf * r0).to(PAIRS), (kf * r1).to(PAIRS), (kf * r2).to(PAIRS), (kf * r3).to(PAIRS), BT, BK)
        xs = right_operands((qa * s0).to(PAIRS), (qa * s1).to(PAIRS), (qa * s2).to(PAIRS), (qa * s3).to(PAIRS),
                            (ka * s0).to(PAIRS), (ka * s1).to(PAIRS), (ka * s2).to(PAIRS), (ka * s3).to(PAIRS), BT,
                            BK)  # fmt: skip
        kr = tl.permute(kr, [0, 2, 1])
        az = from_operand(tl.dot(Z, kr, input_precision=PRECISION), BT, BK)
        ay = from_operand(tl.dot(Y, kr, input_precision=PRECISION), BT, BK)
        ac = from_operand(tl.dot(turned, tl.permute(xs, [0, 2, 1]), input_precision=PRECISION), BT, BK)
        grown = a * before
        sq = tq.to(tl.float32) * grown
        sk = tk.to(tl.float32) * grown
        sd = td.to(tl.float32) * (fj * end)
        dqh = a * az + sq + diagonal * kh
        dkh = a * ay + sk + sd + diagonal * qh + fj * ac
        ahead = qa.to(PAIRS).to(tl.float32) * az + qh * sq + ka.to(PAIRS).to(tl.float32) * ay + kh * sk
        ahead -= kf.to(PAIRS).to(tl.float32) * ac
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
        if L2NORM:
            dqh = (dqh - qh * tl.load(own + (at * 3 + 1) * BT + place)) * rq
            dkh = (dkh - kh * tl.load(own + (at * 3 + 2) * BT + place)) * rk
        tl.store(both_halves(dqp, HV * K), dqh.to(dq.dtype.element_ty), mask=inside)
        tl.store(both_halves(dkp, HV * K), dkh.to(dk.dtype.element_ty), mask=inside)
        dx = sums_over_chunk(ahead, kh * sd, BT)
        whole = tl.load(inner + at * K + c, mask=c < K, other=0.0)
        whole *= tl.load(decay + at * K + c, mask=c < K, other=0.0)
        dx += whole[None, None, None, :]
        if GATE:
            dx, dA = gate_gradient(z, dx, factor, bound, GATE)
            if SCALED:
                scales += quad_sums(tl.where(inside, dA, 0.0), BT, BK)
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
        tl.store(scale_sums + at, tl.sum(row_sums(scales, BT), 0))
