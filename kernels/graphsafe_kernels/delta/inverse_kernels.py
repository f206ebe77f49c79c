"""The triangular system of one chunk: the correction matrix of the delta rule, in tiles of 16 rows.

A chunk's residuals e (value minus prediction) and its inputs x (value minus the prediction of the chunk's first state)
obey ``(I + C diag(b)) e = x`` with C strictly lower (gated key products) and b = beta. The kernels use

    e = x + N (b x)             N = -(I + C diag(b))^-1 C,  strictly lower

Requirements
------------
1. Nothing is divided by beta: beta exactly zero is an ordinary value, forward and backward (the adjoint uses N as well:
   dw = dv + N^T (b dv), with w = b e the written values).
2. No intermediate is larger than a few entries of the answer: the iteration inside a tile keeps final entries alone,
   so half precision does not overflow for keys of unit length, where those of the answer are at most 2.
3. Half precision is as good as the operands' rounding where beta is at most 1. Beyond, keys that are alike make entries
   alternate, sums cancel, and :func:`refine_tile` makes up for it.
4. Where keys are alike, what is made of N are sums over its rows and columns in which entries cancel, while each was
   rounded by itself: :func:`even_tile` rounds so that such sums keep what their entries lose.
"""

import triton
import triton.language as tl
from triton.backends import backends

BY_LEVELS: tl.constexpr = tl.constexpr("ascend" in backends)
"""Whether the system is solved by levels on whole matrices: the Ascend compiler pads a batch of tiles past its memory,
and its time grows with the square of what is unrolled."""

ALIKE: tl.constexpr = tl.constexpr(0.92)
"""Product of neighbouring unit keys, times the gate between them, from which on they count as alike."""


@triton.jit
def batched_inverse(C, b, BT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """(I - diag(b) C)^-1 of the diagonal tiles of 16 rows, as ``[BT, BT]`` of type DT with zeros elsewhere."""
    NB: tl.constexpr = BT // 16
    block = tl.arange(0, NB)
    r = tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    distance = (r[:, None] - r[None, :])[None, :, :]
    # All at once. First their tiles of 8 rows: X <- I + X diag(b) C. The entry (i, j) is final after i - j steps and
    # depends on final entries alone; the others are dropped before each step. Then X <- X + X (diag(b) C X) with what
    # lies between the two tiles of 8.
    Ad = tl.sum(tl.where(diagonal, tl.reshape(b[:, None] * C, [NB, 16, NB, 16]), 0.0), axis=2)
    eye = tl.where(distance == 0, 1.0, tl.zeros([NB, 16, 16], tl.float32))
    near = (r[:, None] // 8 == r[None, :] // 8)[None, :, :]
    A8 = tl.where(near, Ad, 0.0)
    X = eye + A8
    A8 = A8.to(DT)
    for step in tl.static_range(1, 7):
        X = tl.dot(tl.where(distance <= step, X, 0.0).to(DT), A8, eye, input_precision=PRECISION)
    between = tl.dot(tl.where(near, 0.0, Ad).to(DT), X.to(DT), input_precision=PRECISION)
    X = tl.dot(X.to(DT), between.to(DT), X, input_precision=PRECISION)
    return tl.reshape(tl.where(diagonal, X.to(DT)[:, :, None, :], 0.0), [BT, BT])


@triton.jit
def level_inverse(C, b, BT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """(I - diag(b) C)^-1 of the whole chunk, ``[BT, BT]`` fp32: the inverses of blocks of 2^l rows, from l = 0 up, give
    those of blocks of twice as many, X <- X + X diag(b) C X with what lies between two blocks alone."""
    LEVELS: tl.constexpr = 7 if BT == 128 else 6 if BT == 64 else 5 if BT == 32 else 4
    i = tl.arange(0, BT)
    A = b[:, None] * C
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.range(0, LEVELS):
        r = i[:, None] >> level
        c = i[None, :] >> level
        between = tl.where(((r & 1) == 1) & (r == c + 1), A, 0.0).to(DT)
        half = tl.dot(X.to(DT), between, input_precision=PRECISION)
        X = tl.dot(half.to(DT), X.to(DT), X, input_precision=PRECISION)
    return X


@triton.jit
def correction_tile(C, b, BT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """N ``[BT, BT]`` fp32 from C ``[BT, BT]`` fp32 (entries on and above the diagonal are ignored) and b ``[BT]`` fp32.

    DT is the type of the dots' operands; PRECISION their mode where DT is fp32.
    """
    NB: tl.constexpr = BT // 16
    i = tl.arange(0, BT)
    C = tl.where(i[:, None] > i[None, :], -C, 0.0)
    if BY_LEVELS:
        N = tl.dot(C.to(DT), level_inverse(C, b, BT, DT, PRECISION).to(DT), input_precision=PRECISION)
    else:
        X = batched_inverse(C, b, BT, DT, PRECISION)
        # N = -C (I + diag(b) C)^-1; with the diagonal tiles alone in the inverse this is F = -C X. One block diagonal
        # after the other: N <- F + N (diag(b) F off the diagonal tiles).
        F = tl.dot(C.to(DT), X, input_precision=PRECISION)
        N = F
        if NB > 1:
            B = tl.where((i // 16)[:, None] > (i // 16)[None, :], b[:, None] * F, 0.0).to(DT)
            for _ in tl.static_range(NB - 1):
                N = tl.dot(N.to(DT), B, F, input_precision=PRECISION)
    return N


@triton.jit
def refine_tile(rounded, C, b, BT: tl.constexpr):
    """One Newton step on N of :func:`correction_tile`, given in fp16, from the same C and b; N in fp32.

    The residual of ``N (I + diag(b) C) = -C`` is formed with the products of both halves of diag(b) C, so that it is
    exact to fp32 for the rounded N; its correction by the inverse, ``I + diag(b) N``, leaves an error of second order.
    """
    i = tl.arange(0, BT)
    C = tl.where(i[:, None] > i[None, :], C, 0.0)
    A = b[:, None] * C
    high = A.to(tl.float16)
    low = (A - high.to(tl.float32)).to(tl.float16)
    N = rounded.to(tl.float32)
    residual = tl.dot(rounded, low, tl.dot(rounded, high, C + N))
    N -= residual
    return tl.dot((0.0 - residual).to(tl.float16), (b[:, None] * N).to(tl.float16), N)


@triton.jit
def alike_rows(N, BT: tl.constexpr):
    """Whether each row's key and those before it in the chunk are all alike, each to the one before, gates included:
    next to the diagonal N is -C."""
    i = tl.arange(0, BT)
    before = 0.0 - tl.sum(tl.where(i[:, None] == i[None, :] + 1, N, 0.0), 1)
    return tl.cumsum(tl.where((i > 0) & (before < ALIKE), 1, 0), 0) == 0


@triton.jit
def even_tile(N, rows, BT: tl.constexpr, DT: tl.constexpr):
    """N in half precision DT: each entry rounded by itself, and in ``rows`` then moved by whole steps so that no sum
    over leading rows and columns is off by more than half a step, and none over leading rows of a column, or columns of
    a row, by more than one. The sums of what rounding lost are rounded to whole steps, and an entry takes their mixed
    difference. Entries are at most 2, exact in steps up to 1; a row depends on no later one."""
    STEP: tl.constexpr = 2.0**-8 if DT == tl.bfloat16 else 2.0**-11
    i = tl.arange(0, BT)
    rounded = N.to(DT)
    lost = tl.where(rows[:, None], (N - rounded.to(tl.float32)) * (1.0 / STEP), 0.0)
    lower = tl.where(i[:, None] >= i[None, :], 1.0, 0.0).to(tl.float16)
    upper = tl.where(i[:, None] <= i[None, :], 1.0, 0.0).to(tl.float16)
    sums = tl.dot(tl.dot(lower, lost.to(tl.float16)).to(tl.float16), upper)
    steps = tl.floor(sums + 0.5).to(tl.float16)
    # differences of neighbouring rows, then of columns; whole numbers below 2048 are exact in fp16
    down = tl.where(i[:, None] == i[None, :], 1.0, tl.where(i[:, None] == i[None, :] + 1, -1.0, 0.0)).to(tl.float16)
    right = tl.where(i[:, None] == i[None, :], 1.0, tl.where(i[:, None] + 1 == i[None, :], -1.0, 0.0)).to(tl.float16)
    steps = tl.dot(tl.dot(down, steps).to(tl.float16), right)
    return (rounded.to(tl.float32) + STEP * steps).to(DT)
