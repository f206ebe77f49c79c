"""The triangular system of one chunk: the correction matrix of the delta rule, in tiles of 16 rows.

A chunk's residuals e (value minus prediction) and its inputs x (value minus the prediction of the chunk's first state)
obey ``(I + C diag(b)) e = x`` with C strictly lower (gated key products) and b = beta. The kernels use

    e = x + N (b x)             N = -(I + C diag(b))^-1 C,  strictly lower

Requirements
------------
1. Nothing is divided by beta: beta exactly zero is an ordinary value, forward and backward (the adjoint uses N as well:
   dw = dv + N^T (b dv), with w = b e the written values).
2. No intermediate is larger than an entry of the answer: the iteration inside a 16-row tile only keeps entries that
   are already final, so half precision cannot overflow where the answer does not.
"""

import triton
import triton.language as tl


@triton.jit
def correction_tile(C, b, BT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """N ``[BT, BT]`` fp32 from C ``[BT, BT]`` fp32 (entries on and above the diagonal are ignored) and b ``[BT]`` fp32.

    DT is the type of the dots' operands; PRECISION their mode where DT is fp32.
    """
    NB: tl.constexpr = BT // 16
    i = tl.arange(0, BT)
    C = tl.where(i[:, None] > i[None, :], -C, 0.0)
    block = tl.arange(0, NB)
    r = tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    distance = (r[:, None] - r[None, :])[None, :, :]
    # X = (I + diag(b) C)^-1 of the diagonal tiles, all at once: X <- I - X diag(b) C. The entry (i, j) is final after
    # i - j steps and depends on final entries alone; the others are dropped before each step.
    Ad = tl.sum(tl.where(diagonal, tl.reshape(b[:, None] * C, [NB, 16, NB, 16]), 0.0), axis=2)
    eye = tl.where(distance == 0, 1.0, tl.zeros([NB, 16, 16], tl.float32))
    X = eye + Ad
    Ad = Ad.to(DT)
    for step in tl.static_range(1, 15):
        X = tl.dot(tl.where(distance <= step, X, 0.0).to(DT), Ad, eye, input_precision=PRECISION)
    X = tl.reshape(tl.where(diagonal, X.to(DT)[:, :, None, :], 0.0), [BT, BT])
    # N = -C (I + diag(b) C)^-1; with the diagonal tiles alone in the inverse this is F = -C X. One block diagonal after
    # the other: N <- F + N (diag(b) F off the diagonal tiles).
    F = tl.dot(C.to(DT), X, input_precision=PRECISION)
    N = F
    if NB > 1:
        B = tl.where((i // 16)[:, None] > (i // 16)[None, :], b[:, None] * F, 0.0).to(DT)
        for _ in tl.static_range(NB - 1):
            N = tl.dot(N.to(DT), B, F, input_precision=PRECISION)
    return N
