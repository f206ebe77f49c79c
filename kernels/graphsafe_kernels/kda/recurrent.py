"""KDA token by token on kernels: what ``fused_recurrent_kda`` calls where it runs on kernels.

Requirements
------------
1. Same arguments and results as the reference, in one launch. The longest sequence is not read on the host.
2. fp64 operands, and calls whose gradient is wanted, are served by the reference: decoding needs none.
3. What a launch needs is worked out once for each set of shapes and options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.kda.recurrent_kernels import recurrent_kernel
from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.policy import KINDS, device_kind, policy_for
from graphsafe_kernels.reference import recurrent as reference

__all__ = ["WARPS", "constants", "fused_recurrent_kda"]

WARPS = 1
"""Of a program: 8 rows of the state, 32 registers a thread at K = 128."""


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def constants(kind: str, dtypes: tuple[torch.dtype | None, ...], heads: int, value_heads: int, key: int, value: int,
              options: DeltaRuleOptions) -> dict[str, Any]:  # fmt: skip
    """Compile-time constants of :func:`recurrent_kernel`; of ``dtypes`` only the absence of the last four counts:
    A_log, dt_bias, the initial state, cu_seqlens."""
    *_, A_log, dt_bias, initial, cu_seqlens = dtypes
    gate = 0 if not options.gate_in_kernel else 1 if options.lower_bound is None else 2
    loop = KINDS[kind].cores > 0
    block = 8 if kind.startswith("sm_") else _power(value)
    if loop:
        block = min(block, 8192 // _power(key))  # a state's tile takes 32 KiB of the unified buffer
    return {
        "H": heads, "HV": value_heads, "K": key, "V": value, "BK": _power(key), "BV": block, "ROWS": 64,
        "LOOP": loop, "PACKED": cu_seqlens is not None, "INITIAL": initial is not None,
        "FINAL": options.output_final_state, "V_FIRST": options.state_v_first,
        "L2NORM": options.qk_l2norm, "GATE": gate, "SCALED": A_log is not None, "BIAS": dt_bias is not None,
        "SIGMOID": options.beta_scale is not None, "FACTOR": options.beta_scale or 1.0,
    }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], heads: int, value_heads: int, key: int,
            value: int, options: DeltaRuleOptions) -> PreparedLaunch:  # fmt: skip
    # each set of dtypes is a kernel of its own
    sizes = constants(device_kind(device), dtypes, heads, value_heads, key, value, options)
    return PreparedLaunch(recurrent_kernel, sizes, num_warps=WARPS)


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, dtypes: tuple[torch.dtype | None, ...], q: tuple[int, ...], v: tuple[int, ...],
          sequences: int | None, options: DeltaRuleOptions) -> Callable[..., None]:  # fmt: skip
    """The launch, a function of the kernel's pointers, for operands of shapes ``q`` and ``v``."""
    launch = _launch(device, dtypes, q[2], v[2], q[3], v[3], options)
    count = q[0] if sequences is None else sequences + 1
    programs = policy_for(device).programs(count * v[2] * -(-v[3] // launch.constants["BV"]))
    numbers = (options.scale, options.lower_bound or 0.0, q[1], q[0] if sequences is None else sequences)
    return launch.bind(device, programs, numbers)  # type: ignore[arg-type]


def fused_recurrent_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, options: DeltaRuleOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention on checked operands, shapes as in the public operator; (o, final states or None)."""
    operands = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if q.dtype == torch.float64 or differentiable:
        return reference.fused_recurrent_kda(*operands, cu_seqlens, options)
    pointers = [None if t is None else t.contiguous() for t in operands]
    dtypes = tuple(None if t is None else t.dtype for t in (*pointers, cu_seqlens))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    launch = _plan(q.device, dtypes, tuple(q.shape), tuple(v.shape), None if cu_seqlens is None else sequences, options)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    final = None
    if options.output_final_state:
        widths = (q.shape[3], v.shape[3])
        tail = widths[::-1] if options.state_v_first else widths
        final = torch.empty((sequences, v.shape[2], *tail), dtype=torch.float32, device=q.device)
    launch(*pointers, o, final, cu_seqlens)
    return o, final
