"""Preparation of a chunk for KDA: everything that needs no state, in one launch.

Per slot and value head, with G the inclusive sum of the log gates (base 2) inside the chunk, b = beta, and r the
inverse norms of q and k (1 without l2norm):

    kg, qg, kd   k 2^G,  q 2^G,  k 2^(G_last - G): raw q and k, so the norms are factors of rows
    correction   N = -(I + C diag(b))^-1 C,  C_ij = r_ki r_kj sum_c k_ic k_jc 2^(G_ic - G_jc) for i > j
    scores       P_ij = scale r_qi r_kj sum_c q_ic k_jc 2^(G_ic - G_jc) for i >= j
    vectors      b,  r_k,  scale r_q,  r_q
    tile_decays  2^(sum of the gates of each 16 tokens),  and of all:  decay  2^G_last

Requirements
------------
1. Rows beyond a sequence's end are masked as they are loaded; their rows and columns of everything are zero.
2. Row i of N and P holds tokens up to i alone (see ``decay_kernels``).
3. A sentinel slot reads no operand; it clears its share of the padding rows of the output, and its intermediate state.
4. With SCORES off only kg, qg and kd are written: what a backward makes again.
"""

# ruff: noqa: SIM102, SIM108  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import activated_beta
from graphsafe_kernels.delta.inverse_kernels import correction_tile, refine_tile
from graphsafe_kernels.delta.row_kernels import clear_rows, load_rows, locate_slot, padding_rows
from graphsafe_kernels.kda.decay_kernels import (
    TILE,
    TILE_LEVELS,
    before_tile,
    level_pairs,
    level_weights,
    store_tile_decays,
    tile_decay,
    token_sums,
)
from graphsafe_kernels.kda.gate_kernels import gate_factor, load_gate, log_decay

VECTORS: tl.constexpr = tl.constexpr(4)
"""Rows of ``vectors``: b, r_k, scale r_q, r_q."""


@triton.jit
def clear_values(o, first, end, hv, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Write zero to rows [first, end) of one head of a tensor [tokens, HV, V]."""
    for column in tl.static_range(0, V, BV):
        clear_rows(o + hv * V, first, end, HV * V, column, V, BT, BV)


@triton.jit(do_not_specialize=["scale", "bound", "T", "N", "NT"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, tile_decays, decay, o,
    intermediates,
    cu_seqlens, chunk_indices, chunk_offsets, scale, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, SCORES: tl.constexpr,
    SAFE: tl.constexpr, INTERMEDIATES: tl.constexpr, SUMS: tl.constexpr, PAIRS: tl.constexpr,
    INVERSE: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per slot and value head, heads fastest. q, k ``[tokens, H, K]``; g ``[tokens, HV, K]``; beta
    ``[tokens, HV]``; A_log ``[HV]``; dt_bias ``[HV, K]``; kg, qg, kd ``[slots, HV, BT, K]``; correction, scores
    ``[slots, HV, BT, BT]``; vectors ``[slots, HV, 4, BT]``, tile_decays
    ``[slots, HV, BT / 16, K]``, decay ``[slots, HV, K]`` fp32; o ``[tokens, HV, V]`` and intermediates ``[slots, HV,
    K * V]`` are cleared. SAFE: the gates are bounded. SUMS, PAIRS, INVERSE: types of the
    dots that sum gates, meet pairs of tokens, and solve the triangular system. REFINE: beta may pass 1."""
    DT: tl.constexpr = k.dtype.element_ty
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    at = slot.to(tl.int64) * HV + hv
    if PACKED:
        if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
            if SCORES:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_values(o, first, end, hv, HV, V, BT, BV)
                if INTERMEDIATES:
                    for part in tl.range(0, K * V, 1024):
                        e = part + tl.arange(0, 1024)
                        tl.store(intermediates + at * (K * V) + e, tl.zeros([1024], tl.float32), mask=e < K * V)
            return
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    ii = i[:, None]
    jj = i[None, :]
    m = i < rows
    factor = gate_factor(A_log, hv, SCALED)
    if SCORES:
        C = tl.zeros([BT, BT], tl.float32)
        P = tl.zeros([BT, BT], tl.float32)
        own = tl.zeros([BT], tl.float32)
        kk = tl.zeros([BT], tl.float32)
        qq = tl.zeros([BT], tl.float32)
    tile = ii // TILE
    own_tile = tile == jj // TILE
    td = tile_decays + at * (BT // TILE * K)
    # Bounds that a compiler does not know, so that it keeps loops as they are: unrolled, they run out of registers.
    tiles = tl.cdiv(rows, TILE)
    levels = tl.minimum(rows, TILE_LEVELS)
    for column in tl.range(0, K, BK):
        c = column + tl.arange(0, BK)
        inside = m[:, None] & (c < K)[None, :]
        kt = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
        qt = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
        x = log_decay(load_gate(g, dt_bias, row, rows, hv, column, HV, K, BT, BK, BIAS), factor, bound, GATE)
        x = tl.where(inside, x, 0.0)
        if SCORES:
            store_tile_decays(x, td, column, K, BT, BK)
            tl.debug_barrier()  # the tiles' decays are read by threads that did not write them
        if L2NORM and SCORES:
            kk += tl.sum(kt * kt, 1)
            qq += tl.sum(qt * qt, 1)
        y = token_sums(own_tile & (jj <= ii), x, SUMS, PRECISION)
        a = tl.exp2(y)
        ka = kt * a
        qa = qt * a
        before = before_tile(tile, td, column, K, BT, BK)
        place = at * (BT * K) + i[:, None] * K + c[None, :]
        tl.store(kg + place, (ka * before).to(DT), mask=(c < K)[None, :])
        tl.store(qg + place, (qa * before).to(DT), mask=(c < K)[None, :])
        # kr: k times r of the tile I at hand, for tokens j up to the tile before (with a bound, up to tile I).
        if SAFE:
            kj = kt * tl.exp2(-y)
        else:
            kj = kt * tl.exp2(token_sums(own_tile & (jj > ii), x, SUMS, PRECISION))
        kr = tl.zeros([BT, BK], tl.float32)
        whole = tl.full([1, BK], 1.0, tl.float32)
        for index in tl.range(tiles):
            if SAFE:
                kr = tl.where(tile == index, kj, kr)
            if SCORES:
                right = tl.trans(kr.to(PAIRS))
                here = (tile == index).to(tl.float32)  # a product: a selection would be made on halves of registers
                C = tl.dot((ka * here).to(PAIRS), right, C, input_precision=PRECISION)
                P = tl.dot((qa * here).to(PAIRS), right, P, input_precision=PRECISION)
            step = tile_decay(td, index, column, K, BK)
            whole *= step
            kr *= step
            if not SAFE:
                kr = tl.where(tile == index, kj, kr)
        tl.store(kd + place, kr.to(DT), mask=(c < K)[None, :])
        if SCORES:
            tl.store(decay + at * K + c[None, :], whole, mask=(c < K)[None, :])
    if SCORES and not SAFE:
        for column in tl.range(0, K, BK):
            c = column + tl.arange(0, BK)
            inside = m[:, None] & (c < K)[None, :]
            kt = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
            qt = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32)
            x = log_decay(load_gate(g, dt_bias, row, rows, hv, column, HV, K, BT, BK, BIAS), factor, bound, GATE)
            x = tl.where(inside, x, 0.0)
            own += tl.sum(qt * kt, 1)
            for level in tl.range(levels):
                F = tl.exp2(token_sums(level_weights(ii, jj, level), x, SUMS, PRECISION))
                kF = (kt * F).to(DT)
                met = level_pairs(ii, jj, level)
                C += tl.where(met, tl.dot(kF, tl.trans(kF), input_precision=PRECISION), 0.0)
                P += tl.where(met, tl.dot((qt * F).to(DT), tl.trans(kF), input_precision=PRECISION), 0.0)
    if SCORES:
        if L2NORM:
            rk = tl.rsqrt(kk + 1e-6)
            rq = tl.rsqrt(qq + 1e-6)
        else:
            rk = tl.full([BT], 1.0, tl.float32)
            rq = tl.full([BT], 1.0, tl.float32)
        b = activated_beta(tl.load(beta + (row + i) * HV + hv, mask=m, other=0.0), SIGMOID, FACTOR)
        b = tl.where(m, b, 0.0)
        vec = vectors + at * (VECTORS * BT) + i
        tl.store(vec, b)
        tl.store(vec + BT, rk)
        tl.store(vec + 2 * BT, rq * scale)
        tl.store(vec + 3 * BT, rq)
        place = at * (BT * BT) + ii * BT + jj
        if SAFE:
            P = tl.where(ii >= jj, P, 0.0)
        else:
            P = tl.where(ii == jj, own[:, None], P)
        P *= (rq * scale)[:, None] * rk[None, :]
        tl.store(scores + place, P.to(scores.dtype.element_ty))
        C = C * rk[:, None] * rk[None, :]
        X = correction_tile(C, b, BT, INVERSE, PRECISION)
        if REFINE:
            if tl.max(b, 0) > 1.0:
                # A row is refined for its own and earlier tokens' beta alone, so that later ones change nothing.
                reached = tl.max(tl.where(jj <= ii, b[None, :], 0.0), 1) > 1.0
                X = tl.where(reached[:, None], refine_tile(X.to(tl.float16), C, b, BT), X)
        tl.store(correction + place, X.to(correction.dtype.element_ty))
        if PACKED:
            first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
            if first < end:
                clear_values(o, first, end, hv, HV, V, BT, BV)
