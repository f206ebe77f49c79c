"""The second stage of the convolution's weight gradients: partial sums added in a fixed order.

Requirements
------------
1. Live slots alone are added, in an order given by their number: the bits do not depend on how much padding there is.
2. How many slots are live is read on the device; a dense batch's all are.
"""

import triton
import triton.language as tl

__all__ = ["conv_reduce_kernel"]


@triton.jit
def _reduce_task(task, partials, dweight, dbias, chunk_offsets, sequences, slots, D: tl.constexpr, W: tl.constexpr,
                 BD: tl.constexpr, BS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr):
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    age = task // BLOCKS
    channel = (task % BLOCKS) * BD + tl.arange(0, BD)
    keep = channel < D
    live = slots
    if PACKED:
        live = tl.load(chunk_offsets + sequences).to(tl.int32)
    lane = tl.arange(0, BS)
    p = partials + lane.to(tl.int64)[:, None] * ((W + 1) * D) + (age * D + channel)[None, :]
    sums = tl.zeros([BS, BD], tl.float32)
    for s in range(0, live, BS):
        sums += tl.load(p, mask=(s + lane < live)[:, None] & keep[None, :], other=0.0)
        p += BS * (W + 1) * D
    total = tl.sum(sums, 0)
    if age < W:
        tl.store(dweight + channel * W + (W - 1 - age), total.to(dweight.dtype.element_ty), mask=keep)
    else:
        if HAS_BIAS:
            tl.store(dbias + channel, total.to(dbias.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["sequences", "slots", "tasks"])
def conv_reduce_kernel(partials, dweight, dbias, chunk_offsets, sequences, slots, tasks,
                       D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, HAS_BIAS: tl.constexpr,
                       PACKED: tl.constexpr, LOOP: tl.constexpr):
    """dweight ``[D, W]`` and dbias ``[D]`` from the live slots' partials: BS running sums, slot s into sum s mod BS."""
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _reduce_task(task, partials, dweight, dbias, chunk_offsets, sequences, slots, D, W, BD, BS, HAS_BIAS,
                         PACKED)
    else:
        _reduce_task(pid, partials, dweight, dbias, chunk_offsets, sequences, slots, D, W, BD, BS, HAS_BIAS, PACKED)
