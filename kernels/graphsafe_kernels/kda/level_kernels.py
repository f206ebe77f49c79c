"""Pairs of tokens of a chunk met by levels over the whole of it, and sums of gates as products with zeros and ones.

The form for devices that multiply matrices and do little else with a tile's rows: no shuffles, no gathers, no tiles of
16. i > j meet at exactly one level l, where i lies in an odd block of 2^l tokens and j in the even block before it, and

    exp(G_i - G_j) = F_i F_j,   F_i = exp(g summed from the odd block's start to i),
                                F_j = exp(g summed behind j to the even block's end)

as within the tiles of ``decay_kernels``, but up to the chunk's length, so there is nothing left between tiles.

Requirements
------------
1. Every sum of gates is a product of a matrix of zeros and ones with the gates in fp32: no differences of sums, so no
   cancellation, and every factor of gates that are not positive is at most 1.
2. A level's product is taken of all pairs and masked: a factor of a pair that does not meet is at most 1 as well.
3. An earlier token's result holds gates of tokens up to itself alone: the others enter its sums times zero.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows
from graphsafe_kernels.kda.gate_kernels import gate_factor, gate_gradient, load_bias, load_gates

VECTORS: tl.constexpr = tl.constexpr(4)
"""Rows of ``vectors``: b, r_k, scale r_q, r_q."""


@triton.jit
def level_sums(level, BT: tl.constexpr):
    """The matrix ``[BT, BT]`` that sums each token's gates of a level."""
    i = tl.arange(0, BT)[:, None]
    t = tl.arange(0, BT)[None, :]
    near = (i >> level) == (t >> level)
    odd = ((i >> level) & 1) == 1
    return tl.where(near & ((odd & (t <= i)) | ((odd == 0) & (t > i))), 1.0, 0.0)


@triton.jit
def level_meets(level, BT: tl.constexpr):
    """Where a level meets the pair (i, j), i > j; ``[BT, BT]``."""
    i = tl.arange(0, BT)[:, None] >> level
    j = tl.arange(0, BT)[None, :] >> level
    return ((i & 1) == 1) & (i == j + 1)


@triton.jit
def chunk_by_levels(
    q, k, g, dt_bias, kg, qg, kd, decay, row, rows, hq, hv, at, factor, bound, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write kg, qg, kd and (with SCORES) the chunk's decay; return C and P without the norms, of i > j alone, <q, k> of
    each token, and the squares of k and q."""
    DT: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, BT)
    C = tl.zeros([BT, BT], tl.float32)
    P = tl.zeros([BT, BT], tl.float32)
    own = tl.zeros([BT], tl.float32)
    kk = tl.zeros([BT], tl.float32)
    qq = tl.zeros([BT], tl.float32)
    for column in tl.range(0, K, BK):
        c = column + tl.arange(0, BK)
        kt = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
        qt = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
        x = load_gates(g, dt_bias, row, rows, hv, column, factor, bound, HV, K, BT, BK, GATE, BIAS)
        upto = tl.where(i[None, :] <= i[:, None], 1.0, 0.0)
        behind = tl.where(i[None, :] > i[:, None], 1.0, 0.0)
        grown = tl.exp2(tl.dot(upto, x, input_precision="ieee"))
        place = at * (BT * K) + i[:, None] * K + c[None, :]
        held = (c < K)[None, :]
        tl.store(kg + place, (kt * grown).to(DT), mask=held)
        tl.store(qg + place, (qt * grown).to(DT), mask=held)
        left = tl.exp2(tl.dot(behind, x, input_precision="ieee"))
        tl.store(kd + place, (kt * left).to(DT), mask=held)
        if SCORES:
            tl.store(decay + at * K + c, tl.exp2(tl.sum(x, 0)), mask=c < K)
            own += tl.sum(qt * kt, 1)
            if L2NORM:
                kk += tl.sum(kt * kt, 1)
                qq += tl.sum(qt * qt, 1)
            for level in tl.range(0, 6 if BT == 64 else 5):
                F = tl.exp2(tl.dot(level_sums(level, BT), x, input_precision="ieee"))
                met = level_meets(level, BT)
                kF = (kt * F).to(DT)
                right = tl.trans(kF)
                C += tl.where(met, tl.dot(kF, right, input_precision=PRECISION), 0.0)
                P += tl.where(met, tl.dot((qt * F).to(DT), right, input_precision=PRECISION), 0.0)
    return C, P, own, kk, qq


@triton.jit
def gradients_by_levels(
    column, q, k, g, A_log, dt_bias, vectors, pairs, own, products, inner, dq, dk, dg, row_sums, bias_sums, row,
    rows, hq, hv, at, bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the block of BK columns from ``column`` of dq and dk before l2norm's projection, of dg and the bias' sums;
    and what each row sums over these columns, ``row_sums`` ``[3, BT]``: for the projection of q, of k, and for the
    gradient of A_log."""
    DT: tl.constexpr = pairs.dtype.element_ty
    LEVELS: tl.constexpr = 6 if BT == 64 else 5
    i = tl.arange(0, BT)
    ii = i[:, None]
    jj = i[None, :]
    c = column + tl.arange(0, BK)
    held = (c < K)[None, :]
    inside = (i < rows)[:, None] & held
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    place = products + at * (3 * BT * K) + ii * K + c[None, :]
    out = (row + i)[:, None] * (HV * K) + hv * K + c[None, :]
    factor = gate_factor(A_log, hv, SCALED)
    rk = tl.load(vectors + at * (VECTORS * BT) + BT + i)
    rq = tl.load(vectors + at * (VECTORS * BT) + 3 * BT + i)
    diagonal = tl.load(own + at * (2 * BT) + i)[:, None]
    kh = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rk[:, None]
    qh = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rq[:, None]
    x = load_gates(g, dt_bias, row, rows, hv, column, factor, bound, HV, K, BT, BK, GATE, BIAS)
    grown = tl.exp2(tl.dot(tl.where(jj <= ii, 1.0, 0.0), x, input_precision="ieee"))
    left = tl.exp2(tl.dot(tl.where(jj > ii, 1.0, 0.0), x, input_precision="ieee"))
    sq = tl.load(place, mask=held, other=0.0).to(tl.float32) * grown
    sk = tl.load(place + BT * K, mask=held, other=0.0).to(tl.float32) * grown
    sd = tl.load(place + 2 * BT * K, mask=held, other=0.0).to(tl.float32) * left
    behind = kh * sd
    dqh = sq + diagonal * kh
    dkh = sk + sd + diagonal * qh
    ahead = qh * sq + kh * sk
    for level in tl.range(0, LEVELS):
        F = tl.exp2(tl.dot(level_sums(level, BT), x, input_precision="ieee"))
        met = level_meets(level, BT)
        Z = tl.where(met, tl.load(pair), 0.0).to(DT)
        Y = tl.where(met, tl.load(pair + BT * BT), 0.0).to(DT)
        kF = (kh * F).to(DT)
        qF = (qh * F).to(DT)
        az = tl.dot(Z, kF, input_precision=PRECISION)
        ay = tl.dot(Y, kF, input_precision=PRECISION)
        ac = tl.dot(tl.trans(Z), qF, input_precision=PRECISION)
        ac = tl.dot(tl.trans(Y), kF, ac, input_precision=PRECISION)
        dqh += F * az
        dkh += F * (ay + ac)
        ahead += qF.to(tl.float32) * az + kF.to(tl.float32) * (ay - ac)
    sums = row_sums + i
    if L2NORM:
        tl.store(sums, tl.sum(qh * dqh, 1))
        tl.store(sums + BT, tl.sum(kh * dkh, 1))
    tl.store(dq + out, dqh.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + out, dkh.to(dk.dtype.element_ty), mask=inside)
    dx = tl.dot(tl.where(jj < ii, 1.0, 0.0), behind, input_precision="ieee")
    dx = tl.dot(tl.where(jj >= ii, 1.0, 0.0), ahead, dx, input_precision="ieee")
    whole = tl.load(inner + at * K + c, mask=c < K, other=0.0)
    dx += whole[None, :]
    if GATE:
        z = load_rows(g + hv * K, row, rows, column, K, HV * K, BT, BK).to(tl.float32)
        z += load_bias(dt_bias, hv, column, K, BK, BIAS)[None, :]
        dx, dA = gate_gradient(z, dx, factor, bound, GATE)
        if SCALED:
            tl.store(sums + 2 * BT, tl.sum(tl.where(inside, dA, 0.0), 1))
        if BIAS:
            tl.store(bias_sums + at * K + c, tl.sum(tl.where(inside, dx, 0.0), 0), mask=c < K)
    tl.store(dg + out, dx.to(dg.dtype.element_ty), mask=inside)
