"""KDA token by token in one launch: any number of tokens, any lengths, the state in registers.

For each token of a sequence, in fp32, with b = beta and the l2norm, gate and sigmoid of the chunk form:

    S <- 2^gate S        e = v - S k        S <- S + b e k^T        o = scale S q

with S ``[V, K]`` transposed, a block of V rows a program: rows of S never meet, so blocks are independent.

Requirements
------------
1. One launch, whatever the lengths; nothing of a sequence is read before its first or behind its last token.
2. Padding rows of the output are cleared by programs of their own in the same launch.
3. The gate, the norm and beta are those of the chunk form's kernels, by the same functions.
4. A sequence without tokens hands its state through.
"""

# ruff: noqa: SIM102  (compile-time and run-time conditions do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.gate_kernels import activated_beta
from graphsafe_kernels.delta.row_kernels import clear_rows, load_state, locate_sequence, state_tile, store_state
from graphsafe_kernels.kda.gate_kernels import gate_factor, log_decay


@triton.jit
def load_normed(pointer, at, mask, L2NORM: tl.constexpr):
    """One token's row in fp32, of unit length with L2NORM."""
    x = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    if L2NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    return x


@triton.jit
def clear_behind(o, cu_seqlens, hv, i_v, T, N, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    """Write zero to every row of o behind the last token, in one head and block of columns."""
    live = tl.load(cu_seqlens + N).to(tl.int32)
    for first in tl.range(live, T, ROWS):
        clear_rows(o + hv * V, first, T, HV * V, i_v * BV, V, ROWS, BV)


@triton.jit
def run_sequence(
    n, hv, i_v, q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale, bound, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, L2NORM: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and block of BV columns."""
    start, length, _ = locate_sequence(n, cu_seqlens, cu_seqlens, T, 0, PACKED)
    hq = hv // (HV // H)
    ik = tl.arange(0, BK)
    iv = i_v * BV + tl.arange(0, BV)
    mk = ik < K
    mv = iv < V
    place, mask = state_tile(n, hv, i_v, HV, K, V, BK, BV, V_FIRST)
    if INITIAL:
        S = load_state(initial_state, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST).to(tl.float32)
    else:
        S = tl.zeros([BV, BK], tl.float32)
    factor = gate_factor(A_log, hv, SCALED)
    bias = tl.zeros([BK], tl.float32)
    if BIAS:
        bias = tl.load(dt_bias + hv * K + ik, mask=mk, other=0.0).to(tl.float32)
    for t in tl.range(0, length):
        row = start + t
        kt = load_normed(k, (row * H + hq) * K + ik, mk, L2NORM)
        qt = load_normed(q, (row * H + hq) * K + ik, mk, L2NORM)
        vt = tl.load(v + (row * HV + hv) * V + iv, mask=mv, other=0.0).to(tl.float32)
        z = tl.load(g + (row * HV + hv) * K + ik, mask=mk, other=0.0).to(tl.float32) + bias
        b = activated_beta(tl.load(beta + row * HV + hv), SIGMOID, FACTOR)
        S *= tl.exp2(log_decay(z, factor, bound, GATE))[None, :]
        e = (vt - tl.sum(S * kt[None, :], 1)) * b
        S += e[:, None] * kt[None, :]
        y = tl.sum(S * qt[None, :], 1) * scale
        tl.store(o + (row * HV + hv) * V + iv, y.to(o.dtype.element_ty), mask=mv)
    if FINAL:
        store_state(final_state, S, place, mask, n, hv, i_v, HV, K, V, BK, BV, V_FIRST)


@triton.jit(do_not_specialize=["scale", "bound", "T", "N"])
def recurrent_kernel(
    q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale, bound, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    L2NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    FACTOR: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """One task per sequence, value head and block of BV columns, blocks fastest; a packed batch has one sequence more,
    whose tasks clear the padding rows, ROWS at a time. A program has one task, or with LOOP walks them. q, k
    ``[tokens, H, K]``; v, o ``[tokens, HV, V]``; g ``[tokens, HV, K]``; beta ``[tokens, HV]``; A_log ``[HV]``; dt_bias
    ``[HV, K]``; states ``[N, HV, K, V]`` fp32."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if LOOP:
        sequences = N
        if PACKED:
            sequences = N + 1
        for task in tl.range(pid, sequences * (BLOCKS * HV), tl.num_programs(0)):
            n = task // (BLOCKS * HV)
            hv = task // BLOCKS % HV
            i_v = task % BLOCKS
            if n < N:
                run_sequence(n, hv, i_v, q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens,
                             scale, bound, T, H, HV, K, V, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, L2NORM, GATE,
                             SCALED, BIAS, SIGMOID, FACTOR)  # fmt: skip
            else:
                if PACKED:
                    clear_behind(o, cu_seqlens, hv, i_v, T, N, HV, V, BV, ROWS)
    else:
        i_v = pid % BLOCKS
        hv = pid // BLOCKS % HV
        n = pid // (BLOCKS * HV)
        if PACKED:
            if n == N:
                clear_behind(o, cu_seqlens, hv, i_v, T, N, HV, V, BV, ROWS)
                return
        run_sequence(n, hv, i_v, q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, cu_seqlens, scale,
                     bound, T, H, HV, K, V, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, L2NORM, GATE, SCALED, BIAS,
                     SIGMOID, FACTOR)  # fmt: skip
