"""The column blocks of KDA's preparation by products of whole chunks: the form measured on sm_90 (``decay_kernels``).

The arguments and results are those of ``operand_prepare_kernels``.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows
from graphsafe_kernels.kda.decay_kernels import (
    TILE,
    beside,
    load_tile_decays,
    own_factors,
    spread,
    store_chunk_decay,
    store_tile_decays,
    tile_factors,
    tile_sums,
)
from graphsafe_kernels.kda.gate_kernels import load_bias, load_gates, log_decay


@triton.jit
def prepare_spread(
    C, P, q, k, g, dt_bias, kg, qg, kd, td, decay, row, rows, at, hq, hv, factor, bound, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SCORES: tl.constexpr, SAFE: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write kg, qg, kd and (with SCORES) the decays of tiles and chunk; return (C, P, <q, k> of each token, squares of
    k, squares of q)."""
    DT: tl.constexpr = k.dtype.element_ty
    KD: tl.constexpr = (K + BK - 1) // BK * BK
    i = tl.arange(0, BT)
    m = i < rows
    tile = i[:, None] // TILE
    own = tl.zeros([BT], tl.float32)
    kk = tl.zeros([BT], tl.float32)
    qq = tl.zeros([BT], tl.float32)
    # A turn sums the next column block's gates and writes its tiles' decays, so that nobody waits for them.
    x = load_gates(g, dt_bias, row, rows, hv, 0, factor, bound, HV, K, BT, BK, GATE, BIAS)
    y_next = tile_sums(x, BT, BK)
    if SCORES:
        store_tile_decays(tl.exp2(y_next), td, 0, KD, BT, BK)
    k_next = load_rows(k + hq * K, row, rows, 0, K, H * K, BT, BK)
    q_next = load_rows(q + hq * K, row, rows, 0, K, H * K, BT, BK)
    g_next = load_rows(g + hv * K, row, rows, BK, K, HV * K, BT, BK)
    bias_next = load_bias(dt_bias, hv, BK, K, BK, BIAS)
    for column in tl.range(0, K, BK):
        if SCORES:
            tl.debug_barrier()  # the tiles' decays are read by threads that did not write them
        c = column + tl.arange(0, BK)
        kt = k_next.to(tl.float32)
        qt = q_next.to(tl.float32)
        y = y_next
        z = g_next.to(tl.float32) + bias_next[None, :]
        k_next = load_rows(k + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        q_next = load_rows(q + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        g_next = load_rows(g + hv * K, row, rows, column + 2 * BK, K, HV * K, BT, BK)
        bias_next = load_bias(dt_bias, hv, column + 2 * BK, K, BK, BIAS)
        inside = m[:, None] & (column + BK + tl.arange(0, BK) < K)[None, :]
        y_next = tile_sums(tl.where(inside, log_decay(z, factor, bound, GATE), 0.0), BT, BK)
        if SCORES:
            store_tile_decays(tl.exp2(y_next), td, column + BK, KD, BT, BK)
        if L2NORM and SCORES:
            kk += tl.sum(kt * kt, 1)
            qq += tl.sum(qt * qt, 1)
        a = tl.exp2(y)
        fj = own_factors(y, BT, BK, SAFE)
        d0, d1, d2, d3 = load_tile_decays(td, column, KD, BT, BK)
        k0, k1, k2, k3, _, _, _, _, end, before = tile_factors(kt, fj, tile, d0, d1, d2, d3, PAIRS, BT, BK, SAFE, False)
        ka = kt * a
        qa = qt * a
        place = at * (BT * K) + i[:, None] * K + c[None, :]
        tl.store(kg + place, (ka * before).to(DT), mask=(c < K)[None, :])
        tl.store(qg + place, (qa * before).to(DT), mask=(c < K)[None, :])
        tl.store(kd + place, (kt * end).to(DT), mask=(c < K)[None, :])
        if SCORES:
            own += tl.sum(qt * kt, 1)
            kr = beside(k0, k1, k2, k3, BT, BK)
            C = tl.dot(spread(ka.to(PAIRS), tile, BT, BK), tl.trans(kr), C, input_precision=PRECISION)
            P = tl.dot(spread(qa.to(PAIRS), tile, BT, BK), tl.trans(kr), P, input_precision=PRECISION)
    if SCORES:
        tl.debug_barrier()
        store_chunk_decay(td, decay + at * K, K, KD, BT, BK)
    return C, P, own, kk, qq
