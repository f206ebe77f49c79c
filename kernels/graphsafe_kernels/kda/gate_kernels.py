"""The per-channel gate of KDA: its log in base 2, its derivative, and the terms of its parameters' gradients; and the
gate as an operator of its own, forward and backward.

Sources: mathematics of the operators, options ``use_gate_in_kernel`` (both forms), ``A_log`` omitted, ``lower_bound``.

Requirements
------------
1. ``GATE`` is 0 for a given log gate, 1 for ``-exp(A_log) softplus(x + b)``, 2 for ``lb sigmoid(exp(A_log) (x + b))``.
   An omitted ``A_log`` is a factor of exactly 1, an omitted bias one of exactly 0.
2. Saturated gates, and their gradients, are finite: the factor stops at the largest finite number, the log gate at
   ``LOWEST``, where a decay is exactly zero.
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import LOG2E, softplus
from graphsafe_kernels.delta.row_kernels import load_rows

LOWEST: tl.constexpr = tl.constexpr(-160.0)
"""The least log gate in base 2: 2^-160 is zero in fp32, and sums over a chunk stay small enough to be exact enough."""
GATE_LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""The least natural log gate that is written out, as in the reference."""
LARGEST: tl.constexpr = tl.constexpr(2.3e38)
"""The largest factor exp(A_log): finite in fp32, also times log2(e)."""


@triton.jit
def scaled_sigmoid(x, factor):
    """1 / (1 + exp(-factor x)) with its limits, to 3e-7: a square of an inverse root takes no division."""
    r = tl.rsqrt(1.0 + tl.exp2(x * (factor * (0.0 - LOG2E))))
    return r * r


@triton.jit
def gate_factor(A_log, hv, SCALED: tl.constexpr):
    """exp(A_log) of one head, finite; 1 without ``A_log``."""
    factor = 1.0
    if SCALED:
        factor = tl.minimum(tl.exp(tl.load(A_log + hv).to(tl.float32)), LARGEST)
    return factor


@triton.jit
def log_decay(z, factor, bound, GATE: tl.constexpr):
    """The log gate in base 2 of z (fp32): the gate's input with its bias, or the log gate itself."""
    if GATE == 0:
        z *= LOG2E
    if GATE == 1:
        z = softplus(z) * (factor * (0.0 - LOG2E))
    if GATE == 2:
        z = scaled_sigmoid(z, factor) * (bound * LOG2E)
    return tl.where(z < LOWEST, LOWEST, z)


@triton.jit
def gate_gradient(z, dg, factor, bound, GATE: tl.constexpr):
    """(dx, dA) of the gate's input with its bias z and the gradient dg of the natural log gate."""
    if GATE == 1:
        dx = dg * (-factor * scaled_sigmoid(z, 1.0))
        dA = dg * tl.maximum(-factor * softplus(z), -LARGEST)
    else:
        s = scaled_sigmoid(z, factor)
        dx = dg * (bound * s * (1.0 - s)) * factor
        dA = dx * z
    return dx, dA


@triton.jit
def load_bias(dt_bias, hv, column, K: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr):
    """The bias of one head's channels from ``column``, ``[BK]`` fp32; zero without ``dt_bias``."""
    c = column + tl.arange(0, BK)
    bias = tl.zeros([BK], tl.float32)
    if BIAS:
        bias = tl.load(dt_bias + hv * K + c, mask=c < K, other=0.0).to(tl.float32)
    return bias


@triton.jit
def load_gates(g, dt_bias, row, rows, hv, column, factor, bound, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
               BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The log gates in base 2 of one head's channels from ``column``, ``[BT, BK]``; zero outside."""
    z = load_rows(g + hv * K, row, rows, column, K, HV * K, BT, BK).to(tl.float32)
    z += load_bias(dt_bias, hv, column, K, BK, BIAS)[None, :]
    inside = (tl.arange(0, BT) < rows)[:, None] & (column + tl.arange(0, BK) < K)[None, :]
    return tl.where(inside, log_decay(z, factor, bound, GATE), 0.0)


@triton.jit
def load_tile(pointer, i, hv, c, mask, HV: tl.constexpr, K: tl.constexpr):
    """Rows ``i`` (int64) and channels ``c`` of one head of a tensor [rows, HV, K], in fp32."""
    at = pointer + (i * HV + hv)[:, None] * K + c[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gate_task(
    task, g, A_log, dt_bias, y, bound, rows, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The gate of ROWS rows of a head."""
    hv = task % HV
    i = (task // HV).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BK)
    mask = (i < rows)[:, None] & (c < K)[None, :]
    z = load_tile(g, i, hv, c, mask, HV, K)
    if BIAS:
        z += tl.load(dt_bias + hv * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    factor = gate_factor(A_log, hv, SCALED)
    if GATE == 1:
        x = softplus(z) * (0.0 - factor)
        x = tl.where(x < GATE_LOWEST, GATE_LOWEST, x)
    else:
        x = scaled_sigmoid(z, factor) * bound
    tl.store(y + (i * HV + hv)[:, None] * K + c[None, :], x.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bound", "rows"])
def gate_kernel(
    g, A_log, dt_bias, y, bound, rows, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The natural log gate y of its input g, both ``[rows, HV, K]``. A task is ROWS rows of a head, heads fastest; a
    program has one, or with LOOP walks them."""
    pid = tl.program_id(0)
    if LOOP:
        for task in tl.range(pid, tl.cdiv(rows, ROWS) * HV, tl.num_programs(0)):
            gate_task(task, g, A_log, dt_bias, y, bound, rows, HV, K, BK, ROWS, GATE, SCALED, BIAS)
    else:
        gate_task(pid, g, A_log, dt_bias, y, bound, rows, HV, K, BK, ROWS, GATE, SCALED, BIAS)


@triton.jit
def gate_backward_task(
    task, g, A_log, dt_bias, dy, dg, scale_sums, bias_sums, bound, rows, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The gate's gradient in ROWS rows of a head, and their part of its parameters' sums."""
    hv = task % HV
    i = (task // HV).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BK)
    mask = (i < rows)[:, None] & (c < K)[None, :]
    z = load_tile(g, i, hv, c, mask, HV, K)
    d = load_tile(dy, i, hv, c, mask, HV, K)
    if BIAS:
        z += tl.load(dt_bias + hv * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    dx, dA = gate_gradient(z, d, gate_factor(A_log, hv, SCALED), bound, GATE)
    dx = tl.where(d == 0, 0.0, dx)
    tl.store(dg + (i * HV + hv)[:, None] * K + c[None, :], dx.to(dg.dtype.element_ty), mask=mask)
    if SCALED:
        tl.store(scale_sums + task, tl.sum(tl.sum(tl.where(d == 0, 0.0, dA), 1), 0))
    if BIAS:
        tl.store(bias_sums + task.to(tl.int64) * K + c, tl.sum(dx, 0), mask=c < K)


@triton.jit(do_not_specialize=["bound", "rows"])
def gate_backward_kernel(
    g, A_log, dt_bias, dy, dg, scale_sums, bias_sums, bound, rows, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """dg like g from dy, and the gate parameters' sums over each block of rows: scale_sums ``[blocks, HV]``, bias_sums
    ``[blocks, HV, K]`` fp32. Where dy is zero everything is, whatever g holds. Tasks as in :func:`gate_kernel`."""
    pid = tl.program_id(0)
    if LOOP:
        for task in tl.range(pid, tl.cdiv(rows, ROWS) * HV, tl.num_programs(0)):
            gate_backward_task(task, g, A_log, dt_bias, dy, dg, scale_sums, bias_sums, bound, rows, HV, K, BK, ROWS,
                               GATE, SCALED, BIAS)  # fmt: skip
    else:
        gate_backward_task(pid, g, A_log, dt_bias, dy, dg, scale_sums, bias_sums, bound, rows, HV, K, BK, ROWS, GATE,
                           SCALED, BIAS)  # fmt: skip
