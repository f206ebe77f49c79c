"""The gated delta rule token by token, in one launch: decoding, and short sequences.

Per sequence, value head and block of V columns, with S ``[K, BV]`` fp32 in registers, for each token

    S <- decay S         decay = exp(g) exp(gk)[:, None] exp(gv)[None, :], what is given of them
    e = v - S^T k        S <- S + (beta k) e^T        o = scale S^T q

Requirements
------------
1. All arithmetic in fp32, whatever the operands' dtype; the state is read once and written once.
2. Padding rows are not read, and those of the output are zero: the last sequence's programs clear them.
3. A sequence without tokens hands its state through.
"""

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import activated_beta, log_gate
from graphsafe_kernels.delta.row_kernels import IN_ORDER, clear_rows, locate_sequence, state_tile
from graphsafe_kernels.gdn.task_kernels import turns


@triton.jit
def recurrent_task(
    task, q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    FACTOR: tl.constexpr, HAS_G: tl.constexpr, HAS_GK: tl.constexpr, HAS_GV: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and block of BV columns."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v = task % BLOCKS
    hv = task // BLOCKS % HV
    n = task // (BLOCKS * HV)
    start, length, _ = locate_sequence(n, cu_seqlens, cu_seqlens, T, 0, PACKED)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    mk = ik < K
    mv = iv < V
    at = (n.to(tl.int64) * HV + hv) * (K * V)
    at += ik[:, None] * (1 if V_FIRST else V) + iv[None, :] * (K if V_FIRST else 1)
    mask = mk[:, None] & mv[None, :]
    if INITIAL and (IN_ORDER and V_FIRST):
        place, inside = state_tile(n, hv, i_v, HV, K, V, BK, BV, True)
        S = tl.trans(tl.load(initial_state + place, mask=inside, other=0.0))
    elif INITIAL:
        S = tl.load(initial_state + at, mask=mask, other=0.0)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    keys = start * (H * K) + hv // (HV // H) * K
    token = start * HV + hv
    for _ in tl.range(0, length):
        kt = tl.load(k + keys + ik, mask=mk, other=0.0).to(tl.float32)
        qt = tl.load(q + keys + ik, mask=mk, other=0.0).to(tl.float32)
        vt = tl.load(v + token * V + iv, mask=mv, other=0.0).to(tl.float32)
        if L2NORM:
            kt *= tl.rsqrt(tl.sum(kt * kt, 0) + 1e-6)
            qt *= tl.rsqrt(tl.sum(qt * qt, 0) + 1e-6)
        b = activated_beta(tl.load(beta + token), SIGMOID, FACTOR)
        if HAS_G:
            S *= tl.exp(log_gate(tl.load(g + token).to(tl.float32), A_log, dt_bias, hv, GATE, BIAS))
        if HAS_GK:
            S *= tl.exp(tl.load(gk + token * K + ik, mask=mk, other=0.0).to(tl.float32))[:, None]
        if HAS_GV:
            S *= tl.exp(tl.load(gv + token * V + iv, mask=mv, other=0.0).to(tl.float32))[None, :]
        e = vt - tl.sum(S * kt[:, None], 0)
        S += (b * kt)[:, None] * e[None, :]
        y = tl.sum(S * qt[:, None], 0) * scale
        tl.store(o + token * V + iv, y.to(o.dtype.element_ty), mask=mv)
        keys += H * K
        token += HV
    if FINAL and (IN_ORDER and V_FIRST):
        place, inside = state_tile(n, hv, i_v, HV, K, V, BK, BV, True)
        tl.store(final_state + place, tl.trans(S), mask=inside)
    elif FINAL:
        tl.store(final_state + at, S, mask=mask)
    if PACKED:
        if n == N - 1:
            for row in tl.range(tl.load(cu_seqlens + N).to(tl.int32), T, 16):
                clear_rows(o + hv * V, row, T, HV * V, i_v * BV, V, 16, BV)


@triton.jit(do_not_specialize=["scale", "T", "N"])
def recurrent_kernel(
    q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    FACTOR: tl.constexpr, HAS_G: tl.constexpr, HAS_GK: tl.constexpr, HAS_GV: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, V_FIRST: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and block of BV columns, blocks fastest; with LOOP a program
    walks them. q, k ``[tokens, H, K]``; v, o
    ``[tokens, HV, V]``; g, beta ``[tokens, HV]``; gk ``[tokens, HV, K]``; gv ``[tokens, HV, V]``; states
    ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with V_FIRST, fp32."""
    pid = tl.program_id(0)
    if LOOP:
        for turn in tl.range(0, turns(pid, N * HV * ((V + BV - 1) // BV))):
            task = pid + turn * tl.num_programs(0)
            recurrent_task(task, q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens,
                           scale, T, N, H, HV, K, V, BK, BV, PACKED, L2NORM, GATE, BIAS, SIGMOID, FACTOR, HAS_G,
                           HAS_GK, HAS_GV, INITIAL, FINAL, V_FIRST)  # fmt: skip
    else:
        recurrent_task(pid, q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale,
                       T, N, H, HV, K, V, BK, BV, PACKED, L2NORM, GATE, BIAS, SIGMOID, FACTOR, HAS_G, HAS_GK, HAS_GV,
                       INITIAL, FINAL, V_FIRST)  # fmt: skip
