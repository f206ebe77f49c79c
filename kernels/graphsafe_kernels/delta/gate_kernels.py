"""Element-wise pieces of the delta rules: the softplus gate, beta, and their derivatives.

Sources: mathematics of the operators, options ``use_gate_in_kernel`` and ``use_beta_sigmoid_in_kernel``.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + exp(x)); linear from 20 up, and a series where exp(x) would vanish beside 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 1e-3, e * (1.0 - e * (0.5 - e * 0.3333333333)), tl.log(1.0 + e)))


@triton.jit
def log_gate(x, A_log, dt_bias, head, GATE: tl.constexpr, BIAS: tl.constexpr):
    """The log gate of raw gate inputs x (fp32) for one head: x itself, or -exp(A_log) softplus(x + dt_bias)."""
    if GATE:
        if BIAS:
            x += tl.load(dt_bias + head).to(tl.float32)
        x = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x)
    return x


@triton.jit
def log_gate_slope(x, A_log, dt_bias, head, BIAS: tl.constexpr):
    """The derivative of :func:`log_gate` by x where the gate is computed in the kernel."""
    if BIAS:
        x += tl.load(dt_bias + head).to(tl.float32)
    return -tl.exp(tl.load(A_log + head).to(tl.float32)) * tl.sigmoid(x)


@triton.jit
def activated_beta(x, SIGMOID: tl.constexpr, FACTOR: tl.constexpr):
    """beta (fp32) of raw inputs x: x itself, or FACTOR sigmoid(x)."""
    x = x.to(tl.float32)
    if SIGMOID:
        x = FACTOR * tl.sigmoid(x)
    return x
