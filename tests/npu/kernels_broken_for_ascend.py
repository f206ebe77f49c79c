"""Kernels each broken for Ascend in one way, and their sound twins."""

import triton
import triton.language as tl


@triton.jit
def stop_at_a_sentinel(x, y, slots, tasks, D: tl.constexpr):
    """Returns inside the loop over tasks."""
    i = tl.arange(0, D)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.load(slots + task)
        if row < 0:
            return
        tl.store(y + row * D + i, tl.load(x + row * D + i) * 2)


@triton.jit
def stop_before_the_loop(x, y, slots, tasks, D: tl.constexpr):
    """Returns for a sentinel in the first of its tasks, and so leaves the others undone."""
    i = tl.arange(0, D)
    if tl.load(slots + tl.program_id(0)) < 0:
        return
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.load(slots + task)
        if row >= 0:
            tl.store(y + row * D + i, tl.load(x + row * D + i) * 2)


@triton.jit
def skip_sentinels(x, y, slots, tasks, D: tl.constexpr):
    """The sound twin of both: skips the task and goes on."""
    i = tl.arange(0, D)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.load(slots + task)
        if row >= 0:
            tl.store(y + row * D + i, tl.load(x + row * D + i) * 2)


@triton.jit
def one_program_each(x, n):
    tl.store(x + tl.program_id(0), tl.program_id(0))


@triton.jit
def square_tile(x, D: tl.constexpr):
    """A tile of D x D fp32: with D = 256, 256 KiB."""
    i = tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(x + i, tl.sqrt(tl.load(x + i)))


@triton.jit
def compare_and_swap(x):
    """The Ascend compiler makes this atomic of locks."""
    tl.atomic_cas(x, 0, 1)


@triton.jit
def product(x, D: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(x + i, tl.dot(tl.load(x + i), tl.load(x + i), input_precision=PRECISION))
