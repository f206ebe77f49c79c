"""Small triton kernels for the tests of the Ascend runtime."""

import triton
import triton.language as tl

import graphsafe

graphsafe.get_runtime("npu")  # triton.autotune asks for an active driver where it decorates


@triton.jit
def double_on_npu(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned_on_npu(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def rows_by_slot(x, y, slots, D: tl.constexpr):
    """Row r of the live slot that names it, doubled; a sentinel slot returns before any pointer."""
    row = tl.load(slots + tl.program_id(0))
    if row < 0:
        return
    i = row * D + tl.arange(0, D)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def scores(a, b, c, M: tl.constexpr):
    """exp(a b) b: a kernel of the cube and the vector units, so with a workspace."""
    i = tl.arange(0, M)
    at = i[:, None] * M + i[None, :]
    s = tl.exp(tl.dot(tl.load(a + at), tl.load(b + at)))
    tl.store(c + at, tl.dot(s.to(tl.float16), tl.load(b + at)))


@triton.jit
def too_large(x, B: tl.constexpr):
    i = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(x + i, tl.sqrt(tl.load(x + i)))
