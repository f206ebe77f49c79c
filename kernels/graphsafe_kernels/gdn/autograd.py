"""The gated delta rule's kernels as a differentiable function: what the operator calls where it runs on kernels.

Requirements
------------
1. Same arguments and results as the reference. fp64 operands are served by the reference, which is plain torch.
2. Without a gradient to compute, no autograd node is made and nothing is kept.
3. A ``cu_seqlens`` written to between forward and backward is refused; a second-order gradient is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.gdn.backward import backward
from graphsafe_kernels.gdn.forward import forward
from graphsafe_kernels.gdn.problem import Operands, Prepared, Problem
from graphsafe_kernels.reference import gated_delta_rule as reference
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries

__all__ = ["chunk_gated_delta_rule"]

def _problem(q: torch.Tensor, v: torch.Tensor, tables: ChunkTables | None, options: DeltaRuleOptions) -> Problem:
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    sequences = batch if tables is None else tables.max_num_seqs
    return Problem(
        batch, tokens, heads, value_heads, key_width, value_width, sequences, options.chunk_size, options.scale,
        options.qk_l2norm, options.gate_in_kernel, options.beta_scale, options.state_v_first,
    )  # fmt: skip


def _final_state(problem: Problem, q: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    if not wanted:
        return None
    widths = (problem.key_width, problem.value_width)
    shape = (problem.sequences, problem.value_heads, *(widths[::-1] if problem.state_v_first else widths))
    return torch.empty(shape, dtype=torch.float32, device=q.device)


class _ChunkGatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: DeltaRuleOptions, tables: ChunkTables | None,
                *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        x = Operands(*tensors)
        problem = _problem(x.q, x.v, tables, options)
        final_state = _final_state(problem, x.q, options.output_final_state)
        o, prepared = forward(problem, tables, x, final_state, keep=True)
        ctx.set_materialize_grads(False)
        ctx.problem, ctx.tables = problem, tables
        ctx.boundaries = None if tables is None else SavedBoundaries.of("chunk_gated_delta_rule", tables)
        ctx.save_for_backward(*x, *prepared)
        return o, final_state

    @staticmethod
    @first_order_only("chunk_gated_delta_rule")
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        x = Operands(*saved[: len(Operands._fields)])
        prepared = Prepared(*saved[len(Operands._fields) :])
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        do = torch.zeros_like(x.v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        return (None, None, *backward(ctx.problem, ctx.tables, x, prepared, do, dfinal))


def chunk_gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                           A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                           initial_state: torch.Tensor | None, tables: ChunkTables | None,
                           options: DeltaRuleOptions) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The chunk form on checked operands, shapes as in the public operator; returns (o, final states or None)."""
    if q.dtype == torch.float64:
        return reference.chunk_gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, initial_state, tables, options)
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    operands = Operands(*(None if t is None else t.contiguous() for t in tensors))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _ChunkGatedDeltaRule.apply(options, tables, *operands)
    problem = _problem(q, v, tables, options)
    final_state = _final_state(problem, q, options.output_final_state)
    return forward(problem, tables, operands, final_state, keep=False)[0], final_state
