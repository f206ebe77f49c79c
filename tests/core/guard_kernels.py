"""Small Triton kernels for the programs that break rules."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(x, y, factor, width, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * width + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=tl.arange(0, BLOCK) < width) * factor
    if TWICE:
        value = value * 2
    tl.store(y + i, value, mask=tl.arange(0, BLOCK) < width)


@triton.jit
def cold(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
