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

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import activated_beta
from graphsafe_kernels.delta.inverse_kernels import correction_tile, refine_tile
from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.prefetch_kernels import prefetch_rows
from graphsafe_kernels.delta.row_kernels import clear_rows, load_rows, locate_slot, padding_rows
from graphsafe_kernels.kda.decay_kernels import TILE, in_tiles, level_factors, level_pairs, tile_sums
from graphsafe_kernels.kda.gate_kernels import gate_factor, load_bias, log_decay
from graphsafe_kernels.kda.level_kernels import VECTORS, chunk_by_levels
from graphsafe_kernels.kda.operand_prepare_kernels import prepare_operands


@triton.jit
def clear_values(o, first, end, hv, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Write zero to rows [first, end) of one head of a tensor [tokens, HV, V]."""
    for column in tl.static_range(0, V, BV):
        clear_rows(o + hv * V, first, end, HV * V, column, V, BT, BV)


@triton.jit
def meet_level(kt, qt, y, C, P, DT: tl.constexpr, PRECISION: tl.constexpr, LEVEL: tl.constexpr):
    """Add the products of one level to C and P ``[tiles, 16, 16]``."""
    F = level_factors(y, LEVEL)
    kF = (kt * F).to(DT)
    right = tl.permute(kF, [0, 2, 1])
    C = tl.dot(kF, right, C, input_precision=PRECISION)
    P = tl.dot((qt * F).to(DT), right, P, input_precision=PRECISION)
    return C, P


@triton.jit
def on_diagonal(x, BT: tl.constexpr):
    """Tiles ``[tiles, 16, 16]`` on the diagonal of ``[BT, BT]``."""
    tile = tl.arange(0, BT // TILE)
    own = tile[:, None, None, None] == tile[None, None, :, None]
    return tl.reshape(tl.where(own, x[:, :, None, :], 0.0), [BT, BT])


@triton.jit
def pairs_in_tiles(q, k, g, dt_bias, row, rows, hq, hv, factor, bound, H: tl.constexpr, HV: tl.constexpr,
                   K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """(C, P) ``[BT, BT]`` of the pairs within tiles, without the norms, by levels; zero elsewhere."""
    DT: tl.constexpr = k.dtype.element_ty
    C0 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    C1 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    C2 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    C3 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    P0 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    P1 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    P2 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    P3 = tl.zeros([BT // TILE, TILE, TILE], tl.float32)
    k_next = load_rows(k + hq * K, row, rows, 0, K, H * K, BT, BK)
    q_next = load_rows(q + hq * K, row, rows, 0, K, H * K, BT, BK)
    g_next = load_rows(g + hv * K, row, rows, 0, K, HV * K, BT, BK)
    bias_next = load_bias(dt_bias, hv, 0, K, BK, BIAS)
    for column in tl.range(0, K, BK):
        kt = in_tiles(k_next.to(tl.float32), BT, BK)
        qt = in_tiles(q_next.to(tl.float32), BT, BK)
        z = g_next.to(tl.float32) + bias_next[None, :]
        k_next = load_rows(k + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        q_next = load_rows(q + hq * K, row, rows, column + BK, K, H * K, BT, BK)
        g_next = load_rows(g + hv * K, row, rows, column + BK, K, HV * K, BT, BK)
        bias_next = load_bias(dt_bias, hv, column + BK, K, BK, BIAS)
        inside = (tl.arange(0, BT) < rows)[:, None] & (column + tl.arange(0, BK) < K)[None, :]
        x = tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)
        y = in_tiles(tile_sums(x, BT, BK), BT, BK)
        C0, P0 = meet_level(kt, qt, y, C0, P0, DT, PRECISION, 0)
        C1, P1 = meet_level(kt, qt, y, C1, P1, DT, PRECISION, 1)
        C2, P2 = meet_level(kt, qt, y, C2, P2, DT, PRECISION, 2)
        C3, P3 = meet_level(kt, qt, y, C3, P3, DT, PRECISION, 3)
    C = tl.where(level_pairs(0), C0, tl.where(level_pairs(1), C1, tl.where(level_pairs(2), C2, C3)))
    P = tl.where(level_pairs(0), P0, tl.where(level_pairs(1), P1, tl.where(level_pairs(2), P2, P3)))
    return on_diagonal(C, BT), on_diagonal(P, BT)


@triton.jit
def finish_preparation(
    C, P, own, kk, qq, beta, correction, scores, vectors, o, cu_seqlens, chunk_offsets, slot, hv, at, row, i, ii, jj, m,
    scale, T, N, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, INVERSE: tl.constexpr, REFINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what comes of C and P without the norms, <q, k> of each token and the squares of k and q; clear padding."""
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
    P = tl.where(ii >= jj, P, 0.0)
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


@triton.jit
def prepare_in_tiles(
    slot, hv, at, q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, tile_decays, decay, o,
    cu_seqlens, chunk_indices, chunk_offsets, scale, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, SCORES: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, INVERSE: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """One live slot and value head, pairs met by tiles of 16 tokens (``decay_kernels``)."""
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    hq = hv // (HV // H)
    prefetch_rows(g + (row * HV + hv) * K, rows, HV * K, K, BT, PREFETCH)
    prefetch_rows(k + (row * H + hq) * K, rows, H * K, K, BT, PREFETCH)
    prefetch_rows(q + (row * H + hq) * K, rows, H * K, K, BT, PREFETCH)
    factor = gate_factor(A_log, hv, SCALED)
    C = tl.zeros([BT, BT], tl.float32)
    P = tl.zeros([BT, BT], tl.float32)
    if SCORES:
        if not SAFE:
            C, P = pairs_in_tiles(q, k, g, dt_bias, row, rows, hq, hv, factor, bound, H, HV, K, BT, BK, GATE, BIAS,
                                  PRECISION)  # fmt: skip
    KD: tl.constexpr = (K + BK - 1) // BK * BK
    td = tile_decays + at * (BT // TILE * KD)
    C, P, own, kk, qq = prepare_operands(
        C, P, q, k, g, dt_bias, kg, qg, kd, td, decay, row, rows, at, hq, hv, factor, bound, H, HV, K, BT, BK, L2NORM,
        GATE, BIAS, SCORES, SAFE, PAIRS, PRECISION,
    )  # fmt: skip
    if SCORES:
        i = tl.arange(0, BT)
        finish_preparation(C, P, own, kk, qq, beta, correction, scores, vectors, o, cu_seqlens, chunk_offsets, slot, hv,
                           at, row, i, i[:, None], i[None, :], i < rows, scale, T, N, HV, V, BT, BV, PACKED, L2NORM,
                           SIGMOID, FACTOR, INVERSE, REFINE, PRECISION)  # fmt: skip


@triton.jit
def clear_slot(
    slot, hv, at, o, intermediates, cu_seqlens, chunk_offsets, T, N, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, INTERMEDIATES: tl.constexpr,
):  # fmt: skip
    """A sentinel slot's share of the padding rows of o, and its intermediate state."""
    first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
    clear_values(o, first, end, hv, HV, V, BT, BV)
    if INTERMEDIATES:
        for part in tl.range(0, K * V, 1024):
            e = part + tl.arange(0, 1024)
            tl.store(intermediates + at * (K * V) + e, tl.zeros([1024], tl.float32), mask=e < K * V)


@triton.jit
def prepare_by_levels(
    slot, hv, at, q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, decay, o,
    cu_seqlens, chunk_indices, chunk_offsets, scale, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, SCORES: tl.constexpr,
    INVERSE: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head, pairs met by levels (``level_kernels``)."""
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    factor = gate_factor(A_log, hv, SCALED)
    C, P, own, kk, qq = chunk_by_levels(q, k, g, dt_bias, kg, qg, kd, decay, row, rows, hv // (HV // H), hv, at, factor,
                                        bound, H, HV, K, BT, BK, L2NORM, GATE, BIAS, SCORES, PRECISION)  # fmt: skip
    if SCORES:
        i = tl.arange(0, BT)
        ii = i[:, None]
        jj = i[None, :]
        m = i < rows
        finish_preparation(C, P, own, kk, qq, beta, correction, scores, vectors, o, cu_seqlens, chunk_offsets, slot, hv,
                           at, row, i, ii, jj, m, scale, T, N, HV, V, BT, BV, PACKED, L2NORM, SIGMOID, FACTOR, INVERSE,
                           REFINE, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["scale", "bound", "T", "N", "NT", "tasks"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, tile_decays, decay, o,
    intermediates,
    cu_seqlens, chunk_indices, chunk_offsets, tasks, scale, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, SCORES: tl.constexpr,
    SAFE: tl.constexpr, INTERMEDIATES: tl.constexpr, PAIRS: tl.constexpr,
    INVERSE: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr,
    OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One task per slot and value head, heads fastest: one a program, or with LEVELS ``tasks`` (else None) that they
    walk.

    q, k ``[tokens, H, K]``; g ``[tokens, HV, K]``; beta
    ``[tokens, HV]``; A_log ``[HV]``; dt_bias ``[HV, K]``; kg, qg, kd ``[slots, HV, BT, K]``; correction, scores
    ``[slots, HV, BT, BT]``; vectors ``[slots, HV, 4, BT]``, tile_decays ``[slots, HV, BT / 16, KD]`` (KD: K in whole
    blocks), decay ``[slots, HV, K]`` fp32; o ``[tokens, HV, V]`` and intermediates ``[slots, HV, K * V]`` are cleared.
    SAFE: the gates are bounded. PAIRS, INVERSE: types of the dots that meet pairs of tokens, and solve the triangular
    system. REFINE: beta may pass 1. LEVELS: pairs are met by levels, whatever the bound, and there are no
    tile_decays."""
    follow(OVERLAP)
    pid = tl.program_id(0)
    if LEVELS:
        for step in tl.range(0, tasks - pid, tl.num_programs(0)):
            task = pid + step
            slot = task // HV
            hv = task % HV
            at = slot.to(tl.int64) * HV + hv
            live = True
            if PACKED:
                live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
            if live:
                prepare_by_levels(
                    slot, hv, at, q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, decay, o,
                    cu_seqlens, chunk_indices, chunk_offsets, scale, bound, T, N, NT, H, HV, K, V, BT, BK, BV, PACKED,
                    L2NORM, GATE, SCALED, BIAS, SIGMOID, FACTOR, SCORES, INVERSE, REFINE, PRECISION,
                )  # fmt: skip
            else:
                if PACKED and SCORES:
                    clear_slot(slot, hv, at, o, intermediates, cu_seqlens, chunk_offsets, T, N, HV, K, V, BT, BV,
                               INTERMEDIATES)  # fmt: skip
    else:
        slot = pid // HV
        hv = pid % HV
        at = slot.to(tl.int64) * HV + hv
        if PACKED:
            if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
                if SCORES:
                    clear_slot(slot, hv, at, o, intermediates, cu_seqlens, chunk_offsets, T, N, HV, K, V, BT, BV,
                               INTERMEDIATES)  # fmt: skip
                return
        prepare_in_tiles(
            slot, hv, at, q, k, g, beta, A_log, dt_bias, kg, qg, kd, correction, scores, vectors, tile_decays, decay, o,
            cu_seqlens, chunk_indices, chunk_offsets, scale, bound, T, N, NT, H, HV, K, V, BT, BK, BV, PACKED, L2NORM,
            GATE, SCALED, BIAS, SIGMOID, FACTOR, SCORES, SAFE, PAIRS, INVERSE, REFINE, PRECISION, PREFETCH,
        )  # fmt: skip
