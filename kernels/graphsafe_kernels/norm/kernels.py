"""The kernels of the RMS norm, plain and gated, forward and backward.

Requirements
------------
1. A row is a token's head: row r of ``tokens * H`` is head r mod H of token r div H. One program holds it whole, so
   nothing about it depends on where it lies. Operands are read where they are: a token and a head are compile-time
   strides apart, channels one element.
2. Rows beyond the live total are written as zeros and never read; a program without a live row reads no operand.
3. The weight's gradient: a program adds the live rows of its own ROWS, a number that the layer's sizes fix; a second
   stage adds the programs that have a live row in an order given by their number. Its bits do not depend on T.
4. fp32 inside. Offsets from a tensor's start are 64-bit.
"""

# ruff: noqa: SIM108 - a compile-time if is not a choice of values

import triton
import triton.language as tl

__all__ = ["norm_backward_kernel", "norm_forward_kernel", "norm_reduce_kernel"]


@triton.jit
def _live_rows(cu_seqlens, tokens, sequences, H: tl.constexpr, PACKED: tl.constexpr):
    """The live rows, int64."""
    if PACKED:
        live = tl.load(cu_seqlens + sequences).to(tl.int64) * H
    else:
        live = tokens.to(tl.int64) * H
    return live


@triton.jit
def _offsets(row, channel, H: tl.constexpr, TOKEN: tl.constexpr, HEAD: tl.constexpr):
    """Offsets ``[BR, BD]`` of rows in an operand whose tokens and heads are TOKEN and HEAD elements apart."""
    return ((row // H) * TOKEN + (row % H) * HEAD)[:, None] + channel[None, :]


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _forward_task(task, x, g, weight, y, cu_seqlens, eps, tokens, sequences, D: tl.constexpr, H: tl.constexpr,
                  BD: tl.constexpr, BR: tl.constexpr, X_TOKEN: tl.constexpr, X_HEAD: tl.constexpr,
                  G_TOKEN: tl.constexpr, G_HEAD: tl.constexpr, GATED: tl.constexpr, SWISH: tl.constexpr,
                  WEIGHTED: tl.constexpr, PACKED: tl.constexpr):
    live = _live_rows(cu_seqlens, tokens, sequences, H, PACKED)
    row = task.to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BD)
    held = channel < D
    out = row[:, None] * D + channel[None, :]
    inside = (row < tokens.to(tl.int64) * H)[:, None] & held[None, :]
    if task.to(tl.int64) * BR < live:
        keep = (row < live)[:, None] & held[None, :]
        v = tl.load(x + _offsets(row, channel, H, X_TOKEN, X_HEAD), mask=keep, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(v * v, 1) * (1.0 / D) + eps)
        v = v * inverse[:, None]
        if WEIGHTED:
            v = v * tl.load(weight + channel, mask=held, other=0.0).to(tl.float32)[None, :]
        if GATED:
            z = tl.load(g + _offsets(row, channel, H, G_TOKEN, G_HEAD), mask=keep, other=0.0).to(tl.float32)
            if SWISH:
                v = v * z * _sigmoid(z)
            else:
                v = v * _sigmoid(z)
        # with eps 0 a masked row is 0 times infinity
        tl.store(y + out, tl.where(keep, v, 0.0).to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(y + out, tl.zeros([BR, BD], y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "tokens", "sequences", "tasks"])
def norm_forward_kernel(x, g, weight, y, cu_seqlens, eps, tokens, sequences, tasks, D: tl.constexpr, H: tl.constexpr,
                        BD: tl.constexpr, BR: tl.constexpr, X_TOKEN: tl.constexpr, X_HEAD: tl.constexpr,
                        G_TOKEN: tl.constexpr, G_HEAD: tl.constexpr, GATED: tl.constexpr, SWISH: tl.constexpr,
                        WEIGHTED: tl.constexpr, PACKED: tl.constexpr, LOOP: tl.constexpr):
    """y ``[tokens, H, D]``, contiguous: BR rows a task. BD: D rounded up to a power of two."""
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _forward_task(task, x, g, weight, y, cu_seqlens, eps, tokens, sequences, D, H, BD, BR, X_TOKEN, X_HEAD,
                          G_TOKEN, G_HEAD, GATED, SWISH, WEIGHTED, PACKED)
    else:
        _forward_task(pid, x, g, weight, y, cu_seqlens, eps, tokens, sequences, D, H, BD, BR, X_TOKEN, X_HEAD,
                      G_TOKEN, G_HEAD, GATED, SWISH, WEIGHTED, PACKED)


@triton.jit
def _backward_task(task, dy, x, g, weight, dx, dg, partials, cu_seqlens, eps, tokens, sequences, D: tl.constexpr,
                   H: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr, X_TOKEN: tl.constexpr,
                   X_HEAD: tl.constexpr, G_TOKEN: tl.constexpr, G_HEAD: tl.constexpr, DY_TOKEN: tl.constexpr,
                   DY_HEAD: tl.constexpr, GATED: tl.constexpr, SWISH: tl.constexpr, WEIGHTED: tl.constexpr,
                   DX: tl.constexpr, DG: tl.constexpr, DW: tl.constexpr, PACKED: tl.constexpr):
    live = _live_rows(cu_seqlens, tokens, sequences, H, PACKED)
    total = tokens.to(tl.int64) * H
    first = task.to(tl.int64) * ROWS
    channel = tl.arange(0, BD)
    held = channel < D
    if WEIGHTED:
        w = tl.load(weight + channel, mask=held, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BR, BD], tl.float32)
    for step in range(0, ROWS, BR):
        row = first + step + tl.arange(0, BR)
        out = row[:, None] * D + channel[None, :]
        inside = (row < total)[:, None] & held[None, :]
        if first + step < live:
            keep = (row < live)[:, None] & held[None, :]
            v = tl.load(x + _offsets(row, channel, H, X_TOKEN, X_HEAD), mask=keep, other=0.0).to(tl.float32)
            d = tl.load(dy + _offsets(row, channel, H, DY_TOKEN, DY_HEAD), mask=keep, other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(v * v, 1) * (1.0 / D) + eps)[:, None]
            v = v * inverse
            if GATED:
                z = tl.load(g + _offsets(row, channel, H, G_TOKEN, G_HEAD), mask=keep, other=0.0).to(tl.float32)
                s = _sigmoid(z)
                if DG:
                    dz = d * v
                    if WEIGHTED:
                        dz = dz * w
                    if SWISH:
                        dz = dz * (s * (1.0 + z * (1.0 - s)))
                    else:
                        dz = dz * (s * (1.0 - s))
                    tl.store(dg + out, tl.where(keep, dz, 0.0).to(dg.dtype.element_ty), mask=inside)
                if SWISH:
                    d = d * (z * s)
                else:
                    d = d * s
            if DW:
                sums += tl.where(keep, d * v, 0.0)
            if DX:
                if WEIGHTED:
                    d = d * w
                d = (d - v * (tl.sum(d * v, 1) * (1.0 / D))[:, None]) * inverse
                tl.store(dx + out, tl.where(keep, d, 0.0).to(dx.dtype.element_ty), mask=inside)
        else:
            zero = tl.zeros([BR, BD], tl.float32)
            if DX:
                tl.store(dx + out, zero.to(dx.dtype.element_ty), mask=inside)
            if GATED and DG:
                tl.store(dg + out, zero.to(dg.dtype.element_ty), mask=inside)
    if DW:
        tl.store(partials + task.to(tl.int64) * D + channel, tl.sum(sums, 0), mask=held)


@triton.jit(do_not_specialize=["eps", "tokens", "sequences", "tasks"])
def norm_backward_kernel(dy, x, g, weight, dx, dg, partials, cu_seqlens, eps, tokens, sequences, tasks,
                         D: tl.constexpr, H: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr,
                         X_TOKEN: tl.constexpr, X_HEAD: tl.constexpr, G_TOKEN: tl.constexpr, G_HEAD: tl.constexpr,
                         DY_TOKEN: tl.constexpr, DY_HEAD: tl.constexpr, GATED: tl.constexpr, SWISH: tl.constexpr,
                         WEIGHTED: tl.constexpr, DX: tl.constexpr, DG: tl.constexpr, DW: tl.constexpr,
                         PACKED: tl.constexpr, LOOP: tl.constexpr):
    """dx and dg ``[tokens, H, D]``, contiguous, and partials ``[tasks, D]``: ROWS rows a task, BR at a time."""
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _backward_task(task, dy, x, g, weight, dx, dg, partials, cu_seqlens, eps, tokens, sequences, D, H, BD, BR,
                           ROWS, X_TOKEN, X_HEAD, G_TOKEN, G_HEAD, DY_TOKEN, DY_HEAD, GATED, SWISH, WEIGHTED, DX, DG,
                           DW, PACKED)
    else:
        _backward_task(pid, dy, x, g, weight, dx, dg, partials, cu_seqlens, eps, tokens, sequences, D, H, BD, BR,
                       ROWS, X_TOKEN, X_HEAD, G_TOKEN, G_HEAD, DY_TOKEN, DY_HEAD, GATED, SWISH, WEIGHTED, DX, DG,
                       DW, PACKED)


@triton.jit
def _reduce_task(task, partials, dweight, cu_seqlens, tokens, sequences, D: tl.constexpr, H: tl.constexpr,
                 BD: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr):
    live = _live_rows(cu_seqlens, tokens, sequences, H, PACKED)
    programs = ((live + (ROWS - 1)) // ROWS).to(tl.int32)
    channel = task * BD + tl.arange(0, BD)
    keep = channel < D
    lane = tl.arange(0, SUMS)
    p = partials + lane.to(tl.int64)[:, None] * D + channel[None, :]
    sums = tl.zeros([SUMS, BD], tl.float32)
    for s in range(0, programs, SUMS):
        sums += tl.load(p, mask=(s + lane < programs)[:, None] & keep[None, :], other=0.0)
        p += SUMS * D
    tl.store(dweight + channel, tl.sum(sums, 0).to(dweight.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens", "sequences", "tasks"])
def norm_reduce_kernel(partials, dweight, cu_seqlens, tokens, sequences, tasks, D: tl.constexpr, H: tl.constexpr,
                       BD: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
                       LOOP: tl.constexpr):
    """dweight ``[D]`` from the partials of programs with a live row: SUMS running sums, program p into p mod SUMS."""
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _reduce_task(task, partials, dweight, cu_seqlens, tokens, sequences, D, H, BD, SUMS, ROWS, PACKED)
    else:
        _reduce_task(pid, partials, dweight, cu_seqlens, tokens, sequences, D, H, BD, SUMS, ROWS, PACKED)
