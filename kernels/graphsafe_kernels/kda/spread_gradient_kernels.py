"""The column blocks of KDA's gradients by products of whole chunks: the form measured on sm_90 (``decay_kernels``).

The formulas are in ``gradient_kernels``, the arguments those of ``operand_gradient_kernels``. Both uses of a pair are
products of the same rounded numbers, so they cancel in the gate's gradient to fp32's rounding.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows
from graphsafe_kernels.kda.decay_kernels import (
    TILE,
    apart,
    beside,
    gathered,
    in_tiles,
    load_tile_decays,
    narrow,
    own_factors,
    part_level,
    spread,
    tile_factors,
    tile_sums,
)
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_bias, log_decay
from graphsafe_kernels.kda.prepare_kernels import VECTORS


@triton.jit
def gradients_spread(
    hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, decay, pairs, own, products, inner, dq, dk, dg, scale_sums,
    bias_sums, row, rows, bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr,
    PAIRS: tl.constexpr, PACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head."""
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
    rows_scale = tl.zeros([BT], tl.float32)
    diagonal = tl.load(own + at * (3 * BT) + i)[:, None]
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
            dqh = (dqh - qh * tl.load(own + (at * 3 + 1) * BT + i)[:, None]) * rq[:, None]
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
            dkh = (dkh - kh * tl.load(own + (at * 3 + 2) * BT + i)[:, None]) * rk[:, None]
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
