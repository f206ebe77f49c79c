"""What of KDA's gradients sums over V and knows no gate; one program per slot and value head.

With S the state before the chunk, D the gradient of the state behind it, e the residuals, w = b e the written values
and dw as the reverse chain leaves it:

    dbeta_i = <dw_i, e_i>  (with EXACT ``gradient_kernels`` finishes it)     dv_i = b_i dw_i
    Z_ij = scale b_j <do_i, e_j>  (i >= j),       Y_ij = -b_i b_j <dw_i, e_j>   (i > j)

and scale do S^T, -b dw S^T, b e D^T and sum_v S D, of which ``gradient_kernels`` makes the rest. What l2norm's gradient
needs of whole rows is known before them, with q^ and k^ the normalised q and k:

    <q^_i, dq^_i> = <do_i, o_i>                    o is linear in q^
    <k^_i, dk^_i> = b_i (2 <dw_i, e_i> - <dw_i, v_i>)

The second is Euler's identity: k^ times l, v times l and b divided by l^2 leave every result as it is, so that
<k^, dk^> + <v, dv> - 2 b db = 0.

Requirements
------------
1. Nothing is divided by beta.
2. Rows beyond the sequence's end are masked as they are loaded. A sentinel slot reads no operand and clears its share
   of the padding rows of the gradients.
"""

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import clear_rows, load_rows, locate_slot, padding_rows
from graphsafe_kernels.kda.prepare_kernels import VECTORS, clear_values


@triton.jit
def load_residuals(residuals, column, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """The tile [BV, BT] of transposed residuals from ``column``."""
    j = column + tl.arange(0, BV)
    i = tl.arange(0, BT)
    return tl.load(residuals + j[:, None] * BT + i[None, :], mask=(j < V)[:, None], other=0.0)


OWN_ROWS: tl.constexpr = tl.constexpr(4)
"""Rows of ``own`` without LOOP; with FINE there is one more for each of the products' blocks of K."""


@triton.jit
def powers_of_rows(x):
    """Powers of two, one a row of x, that bring its largest entry to [2^14, 2^15), and their inverses; exact. Rows
    whose largest is below 2^-100 are brought less far; zero, inf and NaN stay what they are."""
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23  # of fp32, from 127 for 1
    exponent = tl.maximum(exponent, 27)  # 2^-100: what is below needs no more
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


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
    slot, hv, at, v, o, do, dv, vectors, decay, states, dstates, residuals, pairs, own, products, inner, dbeta,
    cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, EXACT: tl.constexpr,
    FINE: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The products of one live slot and value head."""
    DT: tl.constexpr = states.dtype.element_ty
    KEEP: tl.constexpr = BV >= V
    OWN: tl.constexpr = 2 if LOOP else OWN_ROWS + FINE * ((K + BK - 1) // BK)
    row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
    i = tl.arange(0, BT)
    ii = i[:, None]
    jj = i[None, :]
    m = i < rows
    b = tl.load(vectors + at * (VECTORS * BT) + i)
    rows_q = tl.zeros([BT], tl.float32)
    rows_v = tl.zeros([BT], tl.float32)
    if L2NORM or EXACT:
        for part in tl.static_range(0, V, BV):
            if L2NORM:
                ot = load_rows(do + hv * V, row, rows, part, V, HV * V, BT, BV).to(tl.float32)
                rows_q += tl.sum(ot * load_rows(o + hv * V, row, rows, part, V, HV * V, BT, BV).to(tl.float32), 1)
            wt = load_rows(dv + hv * V, row, rows, part, V, HV * V, BT, BV).to(tl.float32)
            rows_v += tl.sum(wt * load_rows(v + hv * V, row, rows, part, V, HV * V, BT, BV).to(tl.float32), 1)
    Z = tl.zeros([BT, BT], tl.float32)
    Y = tl.zeros([BT, BT], tl.float32)
    for part in tl.static_range(0, V, BV):
        eT = load_residuals(residuals + at * (BT * V), part, V, BT, BV)
        ot = load_rows(do + hv * V, row, rows, part, V, HV * V, BT, BV)
        wt = load_rows(dv + hv * V, row, rows, part, V, HV * V, BT, BV)
        Z = tl.dot(ot, eT, Z, input_precision=PRECISION)
        Y = tl.dot(wt, eT, Y, input_precision=PRECISION)
    db = tl.sum(tl.where(ii == jj, Y, 0.0), 1)
    if L2NORM:
        tl.store(own + (at * OWN + 1) * BT + i, rows_q)
    if L2NORM or EXACT:
        tl.store(own + (at * OWN + 2) * BT + i, b * (2.0 * db - rows_v))
    if EXACT:
        tl.store(own + (at * OWN + 3) * BT + i, db)
    elif SIGMOID:
        db *= b * (1.0 - b / FACTOR)
    if LOOP:
        # Through memory: an Ascend pads what goes to elements apart to 32 bytes each, and all that it is computed from.
        tl.store(own + (at * OWN + 1) * BT + i, db)
        tl.debug_barrier()
        db = tl.load(own + (at * OWN + 1) * BT + i)
    if not EXACT:
        tl.store(dbeta + (row + i) * HV + hv, db.to(dbeta.dtype.element_ty), mask=m)
    pair = pairs + at * (2 * BT * BT) + ii * BT + jj
    tl.store(own + at * (OWN * BT) + i, tl.sum(tl.where(ii == jj, Z, 0.0), 1) * b * scale)
    tl.store(pair, tl.where(ii > jj, Z * (b * scale)[None, :], 0.0).to(pairs.dtype.element_ty))
    tl.store(pair + BT * BT, tl.where(ii > jj, Y * (0.0 - b)[:, None] * b[None, :], 0.0).to(pairs.dtype.element_ty))
    for column in tl.range(0, K, BK):
        c = column + tl.arange(0, BK)
        tq = tl.zeros([BT, BK], tl.float32)
        tk = tl.zeros([BT, BK], tl.float32)
        td = tl.zeros([BT, BK], tl.float32)
        whole = tl.zeros([BK], tl.float32)
        last = tl.load(decay + at * K + c, mask=c < K, other=0.0)
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
            td = tl.dot(tl.trans(eT), Dt, td, input_precision=PRECISION)
            tq = tl.dot(ot, St, tq, input_precision=PRECISION)
            tk = tl.dot(wt, St, tk, input_precision=PRECISION)
        tl.store(inner + at * K + c, whole * last, mask=c < K)
        place = products + at * (3 * BT * K) + ii * K + c[None, :]
        tl.store(place, (tq * scale).to(DT), mask=(c < K)[None, :])
        tl.store(place + BT * K, (tk * (0.0 - b)[:, None]).to(DT), mask=(c < K)[None, :])
        if FINE:
            up, down = powers_of_rows(td)
            down *= b
            tl.store(own + at * (OWN * BT) + (OWN_ROWS * BT + column // BK * BT) + i, down)
            half = (place + 2 * BT * K).to(tl.pointer_type(tl.float16), bitcast=True)
            tl.store(half, (td * up[:, None]).to(tl.float16), mask=(c < K)[None, :])
        else:
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
    v, o, do, dv, vectors, decay, states, dstates, residuals, pairs, own, products, inner, dbeta,
    cu_seqlens, chunk_indices, chunk_offsets, tasks, scale, T, N, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr, EXACT: tl.constexpr,
    FINE: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """v, o, do ``[tokens, HV, V]``; dv likewise holds dw and becomes dv; states, dstates ``[slots, HV, V, K]``;
    residuals ``[slots, HV, V, BT]``. Writes dbeta ``[tokens, HV]`` of the raw beta, pairs ``[slots, HV, 2, BT, BT]`` (Z
    and Y for i > j), own ``[slots, HV, R, BT]`` fp32 (the diagonal of Z; <q^, dq^> with L2NORM; <k^, dk^> with L2NORM
    or EXACT; <dw, e> with EXACT, and dbeta is left to ``gradients_kernel``; with FINE a row for each block of K; with
    LOOP the diagonal and one row to work in), products ``[slots, HV, 3, BT, K]`` (scale do S^T, -b dw S^T, b e D^T;
    with FINE the last in fp16, to be multiplied by its row of ``own``) and inner ``[slots, HV, K]`` fp32 (2^G_last
    sum_v S D). Heads fastest; one slot and head a program, or with LOOP ``tasks`` that programs walk."""
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
                    slot, hv, slot.to(tl.int64) * HV + hv, v, o, do, dv, vectors, decay, states, dstates, residuals,
                    pairs, own, products, inner, dbeta, cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT, HV,
                    K, V, BT, BK, BV, PACKED, L2NORM, SIGMOID, FACTOR, EXACT, FINE, PRECISION, True,
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
            slot, hv, at, v, o, do, dv, vectors, decay, states, dstates, residuals, pairs, own, products, inner, dbeta,
            cu_seqlens, chunk_indices, chunk_offsets, scale, T, N, NT, HV, K, V, BT, BK, BV, PACKED, L2NORM, SIGMOID,
            FACTOR, EXACT, FINE, PRECISION, False,
        )  # fmt: skip
