"""Preparation of a chunk for the gated delta rule: everything that needs no state, in one launch.

Per slot and value head, with G the inclusive sum of the log gates (base 2) inside the chunk, b = beta, and r the
inverse norms of q and k (1 without l2norm):

    correction  N = -(I + C diag(b))^-1 C,  C_ij = r_ki r_kj <k_i, k_j> 2^(G_i - G_j) for i > j
    scores      P_ij = scale r_qi r_kj <q_i, k_j> 2^(G_i - G_j) for i >= j
    vectors     a = r_k 2^G,  b,  c = scale r_q 2^G,  d = r_k 2^(G_last - G),  G,  r_k,  r_q
    decay       2^G_last

Requirements
------------
1. Normalised q and k are never formed: the norms are row factors of products.
2. Rows beyond a sequence's end meet no other row's numbers: with descriptors they are loaded, and what products make of
   them is dropped by selection. Their rows and columns of N and P, and their b, are zero.
3. The gate enters as 2^(G_i - G_j) with i >= j only, before the triangular system is solved, so that strong gates make
   it easier and never overflow.
4. A sentinel slot reads no operand and clears its share of the padding rows of the output.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import LOG2E, activated_beta, log_gate
from graphsafe_kernels.delta.inverse_kernels import ALIKE, alike_rows, correction_tile, even_tile, refine_tile
from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.row_kernels import IN_ORDER, clear_rows, locate_slot, padding_rows
from graphsafe_kernels.delta.table_kernels import find_slot, padding_between, write_tables
from graphsafe_kernels.gdn.task_kernels import head_offset, live_slot, slot_count, turns

LOWEST: tl.constexpr = tl.constexpr(-160.0)
"""A gate of 2^-160 is zero in fp32; bounding it there changes no product and keeps the sums G exact enough."""
VECTORS: tl.constexpr = tl.constexpr(7)
"""Rows of ``vectors``: a, b, c, d, G, r_k, r_q."""


@triton.jit
def diagonal(X):
    """The diagonal of a square tile."""
    i = tl.arange(0, X.shape[0])
    return tl.sum(tl.where(i[:, None] == i[None, :], X, 0.0), 1)


@triton.jit
def key_products(k, base, m, G, rk, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """C of one chunk; entries above the diagonal are zero."""
    i = tl.arange(0, BT)
    KK = tl.zeros([BT, BT], tl.float32)
    for column in tl.static_range(0, K, BK):
        j = column + tl.arange(0, BK)
        kt = tl.load(k + base + j[None, :], mask=m[:, None] & (j < K)[None, :], other=0.0)
        KK = tl.dot(kt, tl.trans(kt), KK, input_precision=PRECISION)
    between = tl.exp2(tl.where(i[:, None] >= i[None, :], G[:, None] - G[None, :], -float("inf")))
    return KK * between * rk[:, None] * rk[None, :]


@triton.jit
def clear_output(o, hv, first, end, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Write zero to padding rows of one head's output."""
    for column in tl.static_range(0, V, BV):
        clear_rows(o + hv * V, first, end, HV * V, column, V, BT, BV)


@triton.jit
def prepare_slot(
    slot, hv, row, rows, used, q, k, g, beta, A_log, dt_bias, correction, scores, vectors, decay, o, q_tiles, k_tiles,
    cu_seqlens, chunk_offsets, scale, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, FACTOR: tl.constexpr, TILES: tl.constexpr, INVERSE: tl.constexpr, REFINE: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, BUILD: tl.constexpr, HEADS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One live slot and value head, its first row and valid rows; ``used`` slots are live, with BUILD."""
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    m = i < rows
    if HEADS_FIRST:
        token = head_offset(slot, row, hv, T, NT, HV, PACKED) + i
        gate = tl.load(g + token, mask=m, other=0.0).to(tl.float32)
        b = tl.load(beta + token, mask=m, other=0.0)
    else:
        gate = tl.load(g + row * HV + hv + i * HV, mask=m, other=0.0).to(tl.float32)
        b = tl.load(beta + row * HV + hv + i * HV, mask=m, other=0.0)
    if TILES:
        KK = tl.zeros([BT, BT], tl.float32)
        QK = tl.zeros([BT, BT], tl.float32)
        QQ = tl.zeros([BT, BT], tl.float32)
        # In a pipelined loop every load is in flight before the first product.
        for first_column in tl.range(0, K, BK, num_stages=STAGES):
            kt = k_tiles.load([row.to(tl.int32), hq * K + first_column])
            qt = q_tiles.load([row.to(tl.int32), hq * K + first_column])
            KK = tl.dot(kt, tl.trans(kt), KK, input_precision=PRECISION)
            QK = tl.dot(qt, tl.trans(kt), QK, input_precision=PRECISION)
            if L2NORM:
                # Sums of squares as a product's diagonal: the tile need not pass through registers.
                QQ = tl.dot(qt, tl.trans(qt), QQ, input_precision=PRECISION)
        if L2NORM:
            qq = diagonal(QQ)
    # Scalar bases are 64-bit, offsets inside a tile 32-bit: half the registers for addresses.
    k += row * (H * K) + hq * K
    q += row * (H * K) + hq * K
    base = i[:, None] * (H * K)
    if not TILES:
        QK = tl.zeros([BT, BT], tl.float32)
        KK = tl.zeros([BT, BT], tl.float32)
        qq = tl.zeros([BT], tl.float32)
        for column in tl.static_range(0, K, BK):
            j = column + tl.arange(0, BK)
            mask = m[:, None] & (j < K)[None, :]
            kt = tl.load(k + base + j[None, :], mask=mask, other=0.0)
            qt = tl.load(q + base + j[None, :], mask=mask, other=0.0)
            QK = tl.dot(qt, tl.trans(kt), QK, input_precision=PRECISION)
            KK = tl.dot(kt, tl.trans(kt), KK, input_precision=PRECISION)
            if L2NORM:
                qf = qt.to(tl.float32)
                qq += tl.sum(qf * qf, 1)
    if L2NORM:
        rk = tl.where(m, tl.rsqrt(diagonal(KK) + 1e-6), 1.0)
        rq = tl.where(m, tl.rsqrt(qq + 1e-6), 1.0)
    else:
        rk = tl.full([BT], 1.0, tl.float32)
        rq = tl.full([BT], 1.0, tl.float32)
    b = tl.where(m, activated_beta(b, SIGMOID, FACTOR), 0.0)
    gate = tl.where(m, log_gate(gate, A_log, dt_bias, hv, GATE, BIAS) * LOG2E, 0.0)
    gate = tl.where(gate < LOWEST, LOWEST, gate)
    G = tl.cumsum(gate, 0)
    last = tl.sum(gate, 0)
    at = slot.to(tl.int64) * HV + hv
    scores += at * (BT * BT)
    correction += at * (BT * BT)
    tile = i[:, None] * BT + i[None, :]
    vec = vectors + at * (VECTORS * BT) + i
    tl.store(vec + BT, b)
    tl.store(vec + 4 * BT, G)
    tl.store(vec + 5 * BT, rk)
    tl.store(vec + 6 * BT, rq)
    tl.store(decay + at, tl.exp2(last))
    between = tl.exp2(G[:, None] - G[None, :])  # above the diagonal anything, infinity too
    low = (i[:, None] >= i[None, :]) & m[:, None]
    P = tl.where(low, QK * between * (rq * scale)[:, None] * rk[None, :], 0.0)
    tl.store(scores + tile, P.to(scores.dtype.element_ty))
    Gm, rkm, rqm = G, rk, rq
    if not IN_ORDER:
        # What is in the layout of products reaches other vectors' through memory: by registers it takes two barriers
        # each.
        tl.debug_barrier()
        Gm = tl.load(vec + 4 * BT)
        rkm = tl.load(vec + 5 * BT)
        rqm = tl.load(vec + 6 * BT)
    C = tl.where(low, KK * between * rk[:, None] * rk[None, :], 0.0)
    X = correction_tile(C, b, BT, tl.float16 if INVERSE == "fp16" else tl.float32, PRECISION)
    grown = tl.exp2(Gm)
    tl.store(vec, grown * rkm)
    tl.store(vec + 2 * BT, grown * rqm * scale)
    tl.store(vec + 3 * BT, tl.exp2(last - Gm) * rkm)
    if PACKED:
        if BUILD > 0:
            first, end = padding_between(slot, tl.load(cu_seqlens + N).to(tl.int32), used, T, False, BT)
        else:
            first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
        if first < end:
            clear_output(o, hv, first, end, HV, V, BT, BV)
    if REFINE and INVERSE == "fp16":
        half = X.to(tl.float16)
        highest = b
        if EVEN:
            # Or the first two keys are alike: nearly as much as even rows are, so that rounding leaves none out.
            second = tl.sum(tl.where((i[:, None] == 1) & (i[None, :] == 0), C, 0.0), 1)
            highest = tl.where(second >= ALIKE - 0.01, 2.0, b)
        refined = tl.max(highest, 0) > 1.0
        # What the refinement starts from is left in the output as fp16, and everything else is made again from memory:
        # kept, it would take registers that the rest needs, branch taken or not.
        bits = (correction + tile).to(tl.pointer_type(tl.int16), bitcast=True)
        rounded = half.to(tl.float32).to(correction.dtype.element_ty)
        tl.store(bits, tl.where(refined, half.to(tl.int16, bitcast=True), rounded.to(tl.int16, bitcast=True)))
        if refined:
            tl.debug_barrier()
            C = key_products(k, base, m, tl.load(vec + 4 * BT), tl.load(vec + 5 * BT), K, BT, BK, PRECISION)
            b = tl.load(vec + BT)
            half = tl.load(bits).to(tl.float16, bitcast=True)
            X = refine_tile(half, C, b, BT)
            # A row is refined for its own and earlier tokens' beta alone, so that later ones change nothing.
            reached = tl.max(tl.where(i[:, None] >= i[None, :], b[None, :], 0.0), 1) > 1.0
            X = tl.where(reached[:, None], X, half.to(tl.float32))
            if EVEN:
                tl.store(correction + tile, even_tile(X, alike_rows(X, BT), BT, correction.dtype.element_ty))
            else:
                tl.store(correction + tile, X.to(correction.dtype.element_ty))
    else:
        tl.store(correction + tile, X.to(correction.dtype.element_ty))


@triton.jit(do_not_specialize=["scale", "T", "N", "NT", "first_slot"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, correction, scores, vectors, decay, o, q_tiles, k_tiles, cu_seqlens, chunk_indices,
    chunk_offsets, scale, T, N, NT, first_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, FACTOR: tl.constexpr, TILES: tl.constexpr, INVERSE: tl.constexpr, REFINE: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, BUILD: tl.constexpr, LOOP: tl.constexpr, HEADS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per slot from first_slot on and value head, heads fastest; with LOOP programs walk all of them. q, k
    ``[tokens, H, K]``; g, beta ``[tokens, HV]``, with HEADS_FIRST ``[batch, HV, T]``; A_log, dt_bias ``[HV]``;
    correction, scores ``[slots, HV, BT, BT]``; vectors ``[slots, HV, 7, BT]`` fp32; decay ``[slots, HV]`` fp32; o
    ``[tokens, HV, V]`` (padding rows are cleared). INVERSE: fp16, fp32. REFINE: beta may pass 1; with EVEN keys may be
    alike too. BUILD: the tables are written here, the sequences a tile of so many; 0: they are there, as they are with
    LOOP."""
    follow(OVERLAP)
    pid = tl.program_id(0)
    if LOOP:
        tl.static_assert(BUILD == 0, "programs that walk tasks read the tables")
        for turn in tl.range(0, turns(pid, slot_count(N, NT, PACKED) * HV)):
            task = pid + turn * tl.num_programs(0)
            slot = task // HV
            hv = task % HV
            if live_slot(slot, chunk_indices, PACKED):
                row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
                prepare_slot(slot, hv, row, rows, 0, q, k, g, beta, A_log, dt_bias, correction, scores, vectors, decay,
                             o, q_tiles, k_tiles, cu_seqlens, chunk_offsets, scale, T, N, NT, H, HV, K, V, BT, BK, BV,
                             PACKED, L2NORM, GATE, BIAS, SIGMOID, FACTOR, TILES, INVERSE, REFINE, STAGES, EVEN, 0,
                             HEADS_FIRST, PRECISION)  # fmt: skip
            elif PACKED:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_output(o, hv, first, end, HV, V, BT, BV)
    else:
        slot = first_slot + pid // HV
        hv = pid % HV
        used = 0
        if PACKED:
            if BUILD > 0:
                n, chunk, used = find_slot(slot, cu_seqlens, N, BT, BUILD)
                if hv == 0:
                    write_tables(slot, n, chunk, cu_seqlens, chunk_indices, chunk_offsets, N, BT, BUILD)
                unused = n >= N
            else:
                unused = tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0
            if unused:
                if BUILD > 0:
                    first, end = padding_between(slot, tl.load(cu_seqlens + N).to(tl.int32), used, T, True, BT)
                else:
                    first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_output(o, hv, first, end, HV, V, BT, BV)
                return
        if PACKED and BUILD > 0:
            row = tl.load(cu_seqlens + n).to(tl.int64)
            rows = tl.load(cu_seqlens + n + 1).to(tl.int32) - row.to(tl.int32) - chunk * BT
            row += chunk * BT
            rows = tl.minimum(rows, BT)
        else:
            row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
        prepare_slot(slot, hv, row, rows, used, q, k, g, beta, A_log, dt_bias, correction, scores, vectors, decay, o,
                     q_tiles, k_tiles, cu_seqlens, chunk_offsets, scale, T, N, NT, H, HV, K, V, BT, BK, BV, PACKED,
                     L2NORM, GATE, BIAS, SIGMOID, FACTOR, TILES, INVERSE, REFINE, STAGES, EVEN, BUILD, HEADS_FIRST,
                     PRECISION)  # fmt: skip
