"""The gated delta rule token by token on kernels: what the recurrent operator calls where it runs on kernels.

Requirements
------------
1. Same arguments and results as the reference, in one launch, without a read on the host.
2. Where a gradient is to be computed, and for fp64 operands, the reference serves: it is plain torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import triton

from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.gdn.launch import launch
from graphsafe_kernels.gdn.recurrent_kernels import recurrent_kernel
from graphsafe_kernels.policy import policy_for
from graphsafe_kernels.reference import recurrent as reference

__all__ = ["WARPS", "constants", "fused_recurrent_gated_delta_rule"]

STATE_TILE = 4096
"""Numbers of a state that a program holds, at most: 32 a thread."""

WARPS = 4


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def constants(heads: int, value_heads: int, key_width: int, value_width: int, options: DeltaRuleOptions,
              given: Collection[str], *, loop: bool) -> dict[str, Any]:  # fmt: skip
    """Compile-time constants of the kernel; ``given``: names of the operands that may be absent and are not."""
    key_block = _power(key_width)
    return {
        "H": heads, "HV": value_heads, "K": key_width, "V": value_width, "BK": key_block,
        "BV": min(_power(value_width), max(1, STATE_TILE // key_block)), "PACKED": "cu_seqlens" in given,
        "L2NORM": options.qk_l2norm, "GATE": options.gate_in_kernel, "BIAS": "dt_bias" in given,
        "SIGMOID": options.beta_scale is not None, "FACTOR": options.beta_scale or 1.0, "HAS_G": "g" in given,
        "HAS_GK": "gk" in given, "HAS_GV": "gv" in given, "INITIAL": "initial_state" in given,
        "FINAL": options.output_final_state, "V_FIRST": options.state_v_first, "LOOP": loop,
    }  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gk: torch.Tensor | None,
    gv: torch.Tensor | None, beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, options: DeltaRuleOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence on checked operands, shapes as in the public operator; (o, final states or None)."""
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state)
    if q.dtype == torch.float64 or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        return reference.fused_recurrent_gated_delta_rule(*tensors, cu_seqlens, options)
    operands = tuple(None if t is None else t.contiguous() for t in tensors)
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final_state = None
    if options.output_final_state:
        widths = (value_width, key_width) if options.state_v_first else (key_width, value_width)
        final_state = q.new_empty(sequences, value_heads, *widths, dtype=torch.float32)
    policy = policy_for(q.device)
    given = {"g": g, "gk": gk, "gv": gv, "dt_bias": dt_bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    sizes = constants(heads, value_heads, key_width, value_width, options,
                      {name for name, t in given.items() if t is not None}, loop=policy.cores > 0)  # fmt: skip
    launch(
        recurrent_kernel, policy.programs(sequences * value_heads * triton.cdiv(value_width, sizes["BV"])),
        (*operands, o, final_state, cu_seqlens), (options.scale, tokens, sequences), sizes, {"num_warps": WARPS},
    )  # fmt: skip
    return o, final_state
