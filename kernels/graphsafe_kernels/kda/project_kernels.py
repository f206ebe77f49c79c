"""What KDA's gradients by levels, which are made by blocks of columns, leave to whole rows.

l2norm's gradient, of x^ = r x with r the inverse norm, and dx^ the gradient of x^:

    dx = r (dx^ - <x^, dx^> x^)
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows, locate_slot
from graphsafe_kernels.kda.prepare_kernels import VECTORS


@triton.jit
def project(q, k, dq, dk, row, rows, hq, hv, i, m, rq, rk, rows_q, rows_k, H: tl.constexpr, HV: tl.constexpr,
            K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """l2norm's gradient: dq and dk of one head, less their parts along q and k."""
    for column in tl.range(0, K, BK):
        c = column + tl.arange(0, BK)
        inside = m[:, None] & (c < K)[None, :]
        out = (row + i)[:, None] * (HV * K) + hv * K + c[None, :]
        kh = load_rows(k + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rk[:, None]
        qh = load_rows(q + hq * K, row, rows, column, K, H * K, BT, BK).to(tl.float32) * rq[:, None]
        dqh = tl.load(dq + out, mask=inside, other=0.0).to(tl.float32)
        dkh = tl.load(dk + out, mask=inside, other=0.0).to(tl.float32)
        dqh = (dqh - qh * rows_q[:, None]) * rq[:, None]
        dkh = (dkh - kh * rows_k[:, None]) * rk[:, None]
        tl.store(dq + out, dqh.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + out, dkh.to(dk.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N", "NT", "tasks"])
def project_kernel(
    q, k, vectors, row_sums, dq, dk, scale_sums, cu_seqlens, chunk_indices, tasks, T, N, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What gradients by levels leave to whole rows: l2norm's projection of dq and dk, in place, and scale_sums."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    for step in tl.range(0, tasks - tl.program_id(0), tl.num_programs(0)):
        task = tl.program_id(0) + step
        slot = task // HV
        hv = task % HV
        at = slot.to(tl.int64) * HV + hv
        live = True
        if PACKED:
            live = tl.load(chunk_indices + 2 * slot.to(tl.int64)) >= 0
        if live:
            row, rows = locate_slot(slot, cu_seqlens, chunk_indices, T, NT, PACKED, BT)
            i = tl.arange(0, BT)
            rows_q = tl.zeros([BT], tl.float32)
            rows_k = tl.zeros([BT], tl.float32)
            rows_scale = tl.zeros([BT], tl.float32)
            for block in tl.range(0, BLOCKS):
                sums = row_sums + (at * BLOCKS + block) * (3 * BT) + i
                if L2NORM:
                    rows_q += tl.load(sums)
                    rows_k += tl.load(sums + BT)
                if SCALED:
                    rows_scale += tl.load(sums + 2 * BT)
            if SCALED:
                tl.store(scale_sums + at, tl.sum(rows_scale, 0))
            if L2NORM:
                rk = tl.load(vectors + at * (VECTORS * BT) + BT + i)
                rq = tl.load(vectors + at * (VECTORS * BT) + 3 * BT + i)
                project(q, k, dq, dk, row, rows, hv // (HV // H), hv, i, i < rows, rq, rk, rows_q, rows_k, H, HV, K, BT,
                        BK)  # fmt: skip
