"""The column blocks of KDA's preparation held as operands (``operand_kernels``); ``prepare_kernels`` names the results.

A turn loads the next block and sums its gates, and writes its tiles' decays, so that nobody waits for them; the stores
come last, behind the products.
"""

import triton
import triton.language as tl

from graphsafe_kernels.kda.decay_kernels import TILE
from graphsafe_kernels.kda.gate_kernels import load_bias, log_decay
from graphsafe_kernels.kda.operand_kernels import (
    both_halves,
    column_factors,
    columns_inside,
    load_decays,
    operand,
    operand_rows,
    over_tiles,
    quad_sums,
    right_operand,
    row_order,
    row_sums,
    running_sums,
    side_by_side,
    start_factor,
    store_decays,
    store_operand,
)


@triton.jit
def prepare_operands(
    C, P, q, k, g, dt_bias, kg, qg, kd, td, decay, row, rows, at, hq, hv, factor, bound, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SCORES: tl.constexpr, SAFE: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write kg, qg, kd and (with SCORES) the decays of tiles and chunk; return (C, P, <q, k> of each token, squares of
    k, squares of q). C and P ``[BT, BT]`` hold what the products are added to, without the norms; ``td``: the slot's
    and head's tile_decays."""
    NT: tl.constexpr = BT // TILE
    KD: tl.constexpr = (K + BK - 1) // BK * BK
    C = tl.reshape(C, [NT, TILE, BT])
    P = tl.reshape(P, [NT, TILE, BT])
    own = tl.zeros([8, NT, 2, BK // 4], tl.float32)
    kk = tl.zeros([8, NT, 2, BK // 4], tl.float32)
    qq = tl.zeros([8, NT, 2, BK // 4], tl.float32)
    tile = tl.arange(0, NT)[None, :, None, None]
    live = row_order(BT) < rows
    kp = operand_rows(k + hq * K + row * (H * K), H * K, BT, BK)
    qp = operand_rows(q + hq * K + row * (H * K), H * K, BT, BK)
    gp = operand_rows(g + hv * K + row * (HV * K), HV * K, BT, BK)
    kgp = operand_rows(kg + at * (BT * K), K, BT, BK)
    qgp = operand_rows(qg + at * (BT * K), K, BT, BK)
    kdp = operand_rows(kd + at * (BT * K), K, BT, BK)
    inside = live & columns_inside(0, K, BK)
    z = tl.load(both_halves(gp, HV * K), mask=inside, other=0.0).to(tl.float32)
    k_next = tl.load(both_halves(kp, H * K), mask=inside, other=0.0)
    q_next = tl.load(both_halves(qp, H * K), mask=inside, other=0.0)
    g_next = tl.load(both_halves(gp + BK, HV * K), mask=live & columns_inside(BK, K, BK), other=0.0)
    bias_next = load_bias(dt_bias, hv, BK, K, BK, BIAS)
    z += load_bias(dt_bias, hv, 0, K, BK, BIAS)[None, None, None, :]
    x = tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)
    y_next = running_sums(x)
    if SCORES:
        store_decays(y_next, td, 0, KD, BT, BK)
        tl.debug_barrier()  # the tiles' decays are read by threads that did not write them
    d0, d1, d2, d3 = load_decays(td, 0, KD, BT, BK)
    for column in tl.range(0, K, BK):
        kt = k_next.to(tl.float32)
        qt = q_next.to(tl.float32)
        y = y_next
        if not SAFE:
            whole = tl.sum(tl.sum(x, 2), 0)[None, :, None, :]
        z = g_next.to(tl.float32) + bias_next[None, None, None, :]
        kp += BK
        qp += BK
        gp += BK
        inside = live & columns_inside(column + BK, K, BK)
        k_next = tl.load(both_halves(kp, H * K), mask=inside, other=0.0)
        q_next = tl.load(both_halves(qp, H * K), mask=inside, other=0.0)
        g_next = tl.load(both_halves(gp + BK, HV * K), mask=live & columns_inside(column + 2 * BK, K, BK), other=0.0)
        bias_next = load_bias(dt_bias, hv, column + 2 * BK, K, BK, BIAS)
        x = tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)
        y_next = running_sums(x)
        if SCORES:
            store_decays(y_next, td, column + BK, KD, BT, BK)
            own += quad_sums(qt * kt, BT, BK)
            if L2NORM:
                kk += quad_sums(kt * kt, BT, BK)
                qq += quad_sums(qt * qt, BT, BK)
        a = tl.exp2(y)
        fj = tl.exp2(-y) if SAFE else tl.exp2(whole - y)
        r0, r1, r2, r3, end = column_factors(tile, d0, d1, d2, d3, NT, SAFE)
        kf = kt * fj
        ka = kt * a
        qa = qt * a
        before = start_factor(tile, d0, d1, d2, NT)
        if SCORES:
            tl.debug_barrier()  # of the next decays
            kr = side_by_side((kf * r0).to(PAIRS), (kf * r1).to(PAIRS), (kf * r2).to(PAIRS), (kf * r3).to(PAIRS), BT,
                              BK)  # fmt: skip
            kr = right_operand(kr, BT, BK)
            C = tl.dot(operand(ka.to(PAIRS), BT, BK), kr, C, input_precision=PRECISION)
            P = tl.dot(operand(qa.to(PAIRS), BT, BK), kr, P, input_precision=PRECISION)
        d0, d1, d2, d3 = load_decays(td, column + BK, KD, BT, BK)
        store_operand(kgp, ka * before, column, K, K, BK)
        store_operand(qgp, qa * before, column, K, K, BK)
        store_operand(kdp, kf * end, column, K, K, BK)
        kgp += BK
        qgp += BK
        kdp += BK
    if SCORES:
        tl.debug_barrier()
        over_tiles(td, decay + at * K, K, KD, BT, True)
    return tl.reshape(C, [BT, BT]), tl.reshape(P, [BT, BT]), row_sums(own, BT), row_sums(kk, BT), row_sums(qq, BT)
