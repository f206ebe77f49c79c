"""What KDA's gradients leave to be summed: over value heads that share a q/k head, and the gate parameters over slots.

Requirements
------------
1. Sums are in fp32 and in an order that padding does not change.
"""

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl


@triton.jit
def sum_parameters(
    hv, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One value head's gradients of the gate's parameters."""
    live = slots
    if PACKED:
        live = tl.load(chunk_offsets + N).to(tl.int32)
    i = tl.arange(0, SUMS)
    if SCALED:
        total = 0.0
        for first in tl.range(0, live, SUMS):
            at = (first + i).to(tl.int64) * HV + hv
            total += tl.sum(tl.load(scale_sums + at, mask=first + i < live, other=0.0), 0)
        tl.store(dA_log + hv, total.to(dA_log.dtype.element_ty))
    if BIAS:
        c = tl.arange(0, BK)
        sums = tl.zeros([BK], tl.float32)
        for first in tl.range(0, live, SUMS):
            at = ((first + i).to(tl.int64) * HV + hv)[:, None] * K + c[None, :]
            mask = (first + i < live)[:, None] & (c < K)[None, :]
            sums += tl.sum(tl.load(bias_sums + at, mask=mask, other=0.0), 0)
        tl.store(ddt_bias + hv * K + c, sums.to(ddt_bias.dtype.element_ty), mask=c < K)


@triton.jit
def sum_heads(
    task, parts, out, cu_seqlens, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of dq or dk from the value heads' parts."""
    live = T.to(tl.int64)
    if PACKED:
        live = tl.load(cu_seqlens + N).to(tl.int64)
    GROUP: tl.constexpr = HV // H
    i = task.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BK)
    mask = (i < live * H)[:, None] & (j < K)[None, :]
    sums = tl.zeros([ROWS, BK], tl.float32)
    for head in tl.static_range(GROUP):
        sums += tl.load(parts + (i * GROUP + head)[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
    at = out + i[:, None] * K + j[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=(i < T.to(tl.int64) * H)[:, None] & (j < K)[None, :])


@triton.jit(do_not_specialize=["T", "N", "slots", "row_programs"])
def finish_kernel(
    dq_parts, dk_parts, dq, dk, scale_sums, bias_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets, T, N, slots,
    row_programs,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """Sums over value heads, and the gate parameters' sums over slots, in fixed orders.

    Tasks 0 .. row_programs * 2 - 1 (with PARTS): ROWS rows of dq or dk ``[tokens * H, K]`` from the parts
    ``[tokens, HV, K]``; padding rows become zero. One more task per value head sums its gate parameters' parts over
    the live slots, SUMS at a time from slot 0, so that padding only ever adds exact zeros behind them. T: all rows. A
    program has one task, or with LOOP walks them.
    """
    pid = tl.program_id(0)
    first = row_programs * (2 if PARTS else 0)
    if LOOP:
        for step in tl.range(0, first + (HV if SCALED or BIAS else 0) - pid, tl.num_programs(0)):
            task = pid + step
            if task >= first:
                if SCALED or BIAS:
                    sum_parameters(task - first, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV,
                                   K, BK, PACKED, SCALED, BIAS, SUMS)  # fmt: skip
            elif task >= row_programs:
                if PARTS:
                    sum_heads(task - row_programs, dk_parts, dk, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
            else:
                if PARTS:
                    sum_heads(task, dq_parts, dq, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
    else:
        if SCALED or BIAS:
            if pid >= first:
                sum_parameters(pid - first, scale_sums, bias_sums, dA_log, ddt_bias, chunk_offsets, N, slots, HV, K, BK,
                               PACKED, SCALED, BIAS, SUMS)  # fmt: skip
                return
        if PARTS:
            parts = dq_parts
            out = dq
            if pid >= row_programs:
                parts = dk_parts
                out = dk
                pid -= row_programs
            sum_heads(pid, parts, out, cu_seqlens, T, N, H, HV, K, BK, ROWS, PACKED)
