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
    # The diagonal tiles, all at once: N <- -C + N (-diag(b) C). The entry (i, j) is final after i - j - 1 steps and
    # depends on final entries alone; the others are dropped before each step.
    Cd = tl.sum(tl.where(diagonal, tl.reshape(C, [NB, 16, NB, 16]), 0.0), axis=2)
    bd = tl.reshape(b, [NB, 16])
    Ad = (Cd * bd[:, :, None]).to(DT)
    distance = (r[:, None] - r[None, :])[None, :, :]
    N = Cd
    for step in tl.static_range(1, 15):
        N = tl.dot(tl.where(distance <= step, N, 0.0).to(DT), Ad, Cd, input_precision=PRECISION)
    if NB == 1:
        N = tl.reshape(N, [BT, BT])
    else:
        # Off the diagonal, with D = I + diag(b) N_d the inverse of the diagonal tiles, E = -C_off D:
        # N <- (N_d + E) + N (diag(b) E), one step for each block diagonal.
        Nd = tl.reshape(tl.where(diagonal, N[:, :, None, :], 0.0), [BT, BT])
        D = tl.where(i[:, None] == i[None, :], 1.0, b[:, None] * Nd)
        Co = tl.where((i // 16)[:, None] > (i // 16)[None, :], C, 0.0)
        E = tl.dot(Co.to(DT), D.to(DT), input_precision=PRECISION)
        B = (b[:, None] * E).to(DT)
        E += Nd
        N = E
        for _ in tl.static_range(NB - 1):
            N = tl.dot(N.to(DT), B, E, input_precision=PRECISION)
    return N
