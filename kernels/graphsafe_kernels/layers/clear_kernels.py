"""The kernel that copies a packed batch with zeros in its padding rows.

Requirements
------------
1. What padding rows hold is not read. How many rows are live is read on the device.
2. Offsets are 64-bit.
"""

import triton
import triton.language as tl

__all__ = ["clear_padding_kernel"]


@triton.jit
def _clear_task(task, x, y, cu_seqlens, elements, sequences, D: tl.constexpr, BLOCK: tl.constexpr):
    at = task.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(cu_seqlens + sequences).to(tl.int64) * D
    tl.store(y + at, tl.load(x + at, mask=at < live, other=0.0), mask=at < elements)


@triton.jit(do_not_specialize=["elements", "sequences", "tasks"])
def clear_padding_kernel(x, y, cu_seqlens, elements, sequences, tasks, D: tl.constexpr, BLOCK: tl.constexpr,
                         LOOP: tl.constexpr):
    """y, contiguous rows of D like x: the first ``cu_seqlens[N]`` rows of x, then zeros; BLOCK elements a task."""
    pid = tl.program_id(0)
    if LOOP:
        for task in range(pid, tasks, tl.num_programs(0)):
            _clear_task(task, x, y, cu_seqlens, elements, sequences, D, BLOCK)
    else:
        _clear_task(pid, x, y, cu_seqlens, elements, sequences, D, BLOCK)
