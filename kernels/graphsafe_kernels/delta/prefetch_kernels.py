"""Requests for memory that a program reads later: it then waits for the second level of cache, not for what is behind.

Requirements
------------
1. A hint: nothing that is computed depends on it, and no address is named that the program would not read. Rows that
   begin inside a line may lack their last one.
2. PREFETCH off (the interpreter, an Ascend): nothing is left of it in the kernel.
"""

import triton
import triton.language as tl

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes of a line of cache."""


@triton.jit
def request(pointers):
    """Ask for the lines that hold ``pointers``, of any shape."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def prefetch_rows(pointer, rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, PREFETCH: tl.constexpr):
    """``rows`` (1 to BT) rows of WIDTH elements, STRIDE apart."""
    if PREFETCH:
        EACH: tl.constexpr = LINE * 8 // pointer.dtype.element_ty.primitive_bitwidth
        i = tl.minimum(tl.arange(0, BT), rows - 1)
        for first in tl.static_range(0, WIDTH, 2 * EACH):
            c = tl.minimum(first + tl.arange(0, 2) * EACH, WIDTH - 1)
            request(pointer + i[:, None] * STRIDE + c[None, :])


@triton.jit
def prefetch_span(pointer, COUNT: tl.constexpr, PREFETCH: tl.constexpr):
    """COUNT neighbouring elements."""
    if PREFETCH:
        EACH: tl.constexpr = LINE * 8 // pointer.dtype.element_ty.primitive_bitwidth
        for first in tl.static_range(0, COUNT, 128 * EACH):
            request(pointer + tl.minimum(first + tl.arange(0, 128) * EACH, COUNT - 1))
