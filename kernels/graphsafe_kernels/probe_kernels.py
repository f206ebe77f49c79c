"""Small Triton kernels that the capability probes launch (``graphsafe.capabilities``)."""

import triton
import triton.language as tl


@triton.jit
def double_rows(x, y, rows, width, BLOCK: tl.constexpr):
    """y[r] = 2 x[r] for each row r in the table ``rows``; a slot with a sentinel reads and writes nothing."""
    row = tl.load(rows + tl.program_id(0))
    if row >= 0:
        i = tl.arange(0, BLOCK)
        tl.store(y + row * width + i, tl.load(x + row * width + i, mask=i < width) * 2, mask=i < width)


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
