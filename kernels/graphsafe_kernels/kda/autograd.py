"""KDA's kernels as a differentiable function: what the operator calls where it runs on kernels.

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
from graphsafe_kernels.kda import launch
from graphsafe_kernels.kda.configurations import Problem
from graphsafe_kernels.reference import kda as reference
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries

__all__ = ["chunk_kda"]


def _problem(q: torch.Tensor, v: torch.Tensor, tables: ChunkTables | None, options: DeltaRuleOptions) -> Problem:
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    gate = 0 if not options.gate_in_kernel else 1 if options.lower_bound is None else 2
    return Problem(
        batch, tokens, heads, value_heads, key_width, value_width,
        sequences=batch if tables is None else tables.max_num_seqs, chunk_size=options.chunk_size, scale=options.scale,
        qk_l2norm=options.qk_l2norm, gate=gate, lower_bound=options.lower_bound or 0.0, beta_scale=options.beta_scale,
        state_v_first=options.state_v_first, safe_gate=options.safe_gate,
    )  # fmt: skip


def _states(problem: Problem, tables: ChunkTables | None, q: torch.Tensor,
            options: DeltaRuleOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Memory for the final states and the states at the start of every chunk, where they are wanted."""
    widths = (problem.key_width, problem.value_width)
    tail = (problem.value_heads, *(widths[::-1] if problem.state_v_first else widths))
    chunks = problem.chunks if tables is None else tables.slots
    final = intermediates = None
    if options.output_final_state:
        final = q.new_empty((problem.sequences, *tail), dtype=torch.float32)
    if options.return_intermediate_states:
        intermediates = q.new_empty((problem.batch, chunks, *tail), dtype=torch.float32)
    return final, intermediates


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: DeltaRuleOptions, tables: ChunkTables | None,
                *operands: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        x = launch.Operands(*operands)
        problem = _problem(x.q, x.v, tables, options)
        final, _ = _states(problem, tables, x.q, options)
        o, kept = launch.forward(problem, tables, x, final, None, options.disable_recompute)
        ctx.set_materialize_grads(False)
        ctx.problem, ctx.tables = problem, tables
        ctx.boundaries = None if tables is None else SavedBoundaries.of("chunk_kda", tables)
        ctx.save_for_backward(*x, *kept)
        return o, final

    @staticmethod
    @first_order_only("chunk_kda")
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        count = len(launch.Operands._fields)
        x, kept = launch.Operands(*ctx.saved_tensors[:count]), launch.Kept(*ctx.saved_tensors[count:])
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        do = torch.zeros_like(x.v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        return (None, None, *launch.backward(ctx.problem, ctx.tables, x, kept, do, dfinal))


def chunk_kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
              A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
              tables: ChunkTables | None, options: DeltaRuleOptions) -> tuple[torch.Tensor | None, ...]:
    """The chunk form on checked operands, shapes as in the public operator.

    Returns (o, final states or None), and with ``return_intermediate_states`` the states at the start of every chunk.
    """
    if q.dtype == torch.float64:
        return reference.chunk_kda(q, k, v, g, beta, A_log, dt_bias, initial_state, tables, options)
    operands = [None if t is None else t.contiguous() for t in (q, k, v, g, beta, A_log, dt_bias, initial_state)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        result: tuple[torch.Tensor | None, ...] = _ChunkKda.apply(options, tables, *operands)
        return result
    x = launch.Operands(*operands)  # type: ignore[arg-type]
    problem = _problem(x.q, x.v, tables, options)
    final, intermediates = _states(problem, tables, x.q, options)
    o, _ = launch.forward(problem, tables, x, final, intermediates, None)
    return (o, final, intermediates) if options.return_intermediate_states else (o, final)
