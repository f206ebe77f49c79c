"""Lines of memory asked for ahead of their use: a load that waits for the L2 waits a third of what DRAM takes.

Requirements
------------
1. Nothing is computed from what is asked for: results do not depend on it.
2. Off (another device, the interpreter), nothing is left of it in the kernel.
"""

import triton
import triton.language as tl

__all__ = ["prefetch_lines", "prefetch_rows"]


@triton.jit
def prefetch(at):
    """Bring the line of each address into the L2."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_lines(pointer, ELEMENTS: tl.constexpr):
    """Bring so many consecutive elements of 2 bytes, a power of two of at least 64, into the L2."""
    prefetch(pointer + tl.arange(0, ELEMENTS // 64) * 64)


@triton.jit
def prefetch_rows(pointer, row, rows, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BT: tl.constexpr):
    """Bring WIDTH elements of 2 bytes, a multiple of 64, of each of the first ``rows`` rows of BT into the L2."""
    i = tl.minimum(tl.arange(0, BT), rows - 1)
    line = tl.arange(0, WIDTH // 64) * 64
    prefetch(pointer + row * STRIDE + i[:, None] * STRIDE + line[None, :])
