"""KDA's gradients of q, k and the gate, from what ``product_kernels`` left; one program per slot and value head.

In the names of ``product_kernels``, with G the gate sums, q^ and k^ the normalised q and k; q^, k^, G per channel c:

    dq^_i = scale 2^G_i do_i S^T + sum_j Z_ij 2^(G_i - G_j) k^_j
    dk^_i = -b_i 2^G_i dw_i S^T + b_i 2^(G_last - G_i) e_i D^T
            + sum_j Y_ij 2^(G_i - G_j) k^_j + sum_j 2^(G_j - G_i) (Y_ji k^_j + Z_ji q^_j)

The sums over pairs run tile by tile (``decay_kernels``), on tiles q^ a, k^ a and k^ r. Of the gate, each channel's pair
(i, j) is felt by the tokens t with i >= t > j alone:

    dg_t = sum_{i >= t} a_i + sum_{i < t} s_i + 2^G_last sum_v S D
    a_i = rows' uses of pairs less their columns' uses, and the first terms of dq^, dk^ times q^, k^
    s_i = k^ times the second term of dk^

and of x^ = r x with r the inverse norm, dx = r (dx^ - <x^, dx^> x^): the rows' products come from ``product_kernels``.

Requirements
------------
1. A pair that both ends of a sum hold enters it twice with opposite signs, and cancels (how far: with each form).
2. The diagonal pairs, which no gate touches, stay out of the gate's gradient.
3. Rows beyond the sequence's end are masked as they are loaded. A sentinel slot reads no operand and clears its share
   of the padding rows of the gradients.
4. dw and e are at hand rounded to half precision. With EXACT dbeta has the first order of neither rounding of its own
   row: <k^_i, dk^_i> is made of what both are made of, and

       b_i dbeta_i = <k^_i, dk^_i> + b_i <dw_i, v_i - e_i>

   Where keys are alike these terms are large and cancel, so dbeta moves from <dw_i, e_i> by at most 2^-7 of it (2^-10
   in fp16), and by nothing where beta is zero.
5. With FINE b e D^T comes in fp16 and a power of two for each row: in bf16 it made a quarter of dk's square error.
6. Where several value heads share a q/k head, dq and dk are parts per value head. Gate parameters get one partial sum
   per slot and head. ``finish_kernels`` sums both.
"""

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import clear_rows, locate_slot, padding_rows, padding_share
from graphsafe_kernels.kda.level_kernels import gradients_by_levels
from graphsafe_kernels.kda.operand_gradient_kernels import gradients_operands


@triton.jit
def clear_gradients(first, end, hv, dq, dk, dg, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Write zero to padding rows of one head's dg, and of dq and dk where they are WHOLE."""
    for column in tl.static_range(0, K, BK):
        if WHOLE:
            clear_rows(dq + hv * K, first, end, HV * K, column, K, BT, BK)
            clear_rows(dk + hv * K, first, end, HV * K, column, K, BT, BK)
        clear_rows(dg + hv * K, first, end, HV * K, column, K, BT, BK)


@triton.jit(do_not_specialize=["bound", "T", "N", "NT", "tasks"])
def gradients_kernel(
    q, k, g, A_log, dt_bias, vectors, tile_decays, pairs, own, products, inner, dq, dk, dg, dbeta, scale_sums,
    bias_sums, bias_tiles, row_sums, cu_seqlens, chunk_indices, chunk_offsets, tasks, bound, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SAFE: tl.constexpr, PAIRS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr, LATE: tl.constexpr, EXACT: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr,
    FINE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dq, dk ``[tokens, HV, K]`` (parts unless WHOLE) and dg ``[tokens, HV, K]`` of the raw inputs, from the results of
    ``products_kernel``; scale_sums ``[slots, HV]`` and bias_sums ``[slots, HV, K]`` fp32, the gate parameters' parts.
    bias_tiles ``[slots, HV, BT / 16, KD]`` fp32 (KD: K in whole blocks) is memory for the parts of bias_sums, which
    LEVELS do without. Heads fastest; one slot and head a program, or with LEVELS ``tasks`` that programs walk."""
    pid = tl.program_id(0)
    if LEVELS:
        BLOCKS: tl.constexpr = (K + BK - 1) // BK
        for step in tl.range(0, tasks - pid, tl.num_programs(0)):
            task = pid + step
            column = task % BLOCKS * BK
            hv = task // BLOCKS % HV
            slot = task // (BLOCKS * HV)
            at = slot.to(tl.int64) * HV + hv
            live = True
            if PACKED:
                live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
            if live:
                row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
                gradients_by_levels(
                    column, q, k, g, A_log, dt_bias, vectors, pairs, own, products, inner, dq, dk, dg,
                    row_sums + (at * BLOCKS + column // BK) * (3 * BT), bias_sums, row, rows, hv // (HV // H), hv, at,
                    bound, H, HV, K, BT, BK, L2NORM, GATE, SCALED, BIAS, PRECISION,
                )  # fmt: skip
            if PACKED:
                first, end = padding_share(slot, live == 0, cu_seqlens, chunk_offsets, T, N, BT)
                if first < end:
                    if WHOLE:
                        clear_rows(dq + hv * K, first, end, HV * K, column, K, BT, BK)
                        clear_rows(dk + hv * K, first, end, HV * K, column, K, BT, BK)
                    clear_rows(dg + hv * K, first, end, HV * K, column, K, BT, BK)
    else:
        slot = pid // HV
        hv = pid % HV
        at = slot.to(tl.int64) * HV + hv
        if PACKED:
            if tl.load(chunk_indices + 2 * slot.to(tl.int64)) < 0:
                first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, True, BT)
                clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)
                return
        row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
        gradients_operands(
            hv, at, q, k, g, A_log, dt_bias, vectors, tile_decays, pairs, own, products, inner, dq, dk, dg, dbeta,
            scale_sums, bias_sums, bias_tiles, row, rows, bound, H, HV, K, BT, BK, L2NORM, GATE, SCALED, BIAS, SAFE,
            PAIRS, PRECISION, PREFETCH, LATE, EXACT, SIGMOID, FACTOR, FINE,
            BP,
        )  # fmt: skip
        if PACKED:
            first, end = padding_rows(slot, cu_seqlens, chunk_offsets, T, N, False, BT)
            if first < end:
                clear_gradients(first, end, hv, dq, dk, dg, HV, K, BT, BK, WHOLE)
