"""KDA's kernels as a differentiable function: what the operator calls where it runs on kernels.

Requirements
------------
1. Same arguments and results as the reference, which serves fp64 operands, and on Ascend dense batches in chunks of 64.
2. Without a gradient to compute, no autograd node is made and nothing is kept.
3. What is launched is recorded once for the shapes, dtypes and options of a call (``graphsafe_kernels.programs``).
4. A ``cu_seqlens`` written to between forward and backward is refused; a second-order gradient is refused by name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.kda import launch
from graphsafe_kernels.kda.configurations import Problem
from graphsafe_kernels.policy import device_kind
from graphsafe_kernels.programs import Program, aligned, record
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


def _states(problem: Problem, slots: int, q: torch.Tensor,
            options: DeltaRuleOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Memory for the final states and the states at the start of every chunk, where they are wanted."""
    widths = (problem.key_width, problem.value_width)
    tail = (problem.value_heads, *(widths[::-1] if problem.state_v_first else widths))
    final = intermediates = None
    if options.output_final_state:
        final = q.new_empty((problem.sequences, *tail), dtype=torch.float32)
    if options.return_intermediate_states:
        intermediates = q.new_empty((problem.batch, slots // problem.batch, *tail), dtype=torch.float32)
    return final, intermediates


def _spec(t: torch.Tensor | None) -> Any:
    return None if t is None else (t.shape, t.dtype)


def _tables(index: tuple[torch.Tensor | None, ...], options: DeltaRuleOptions) -> ChunkTables | None:
    return None if index[0] is None else ChunkTables(*index, options.chunk_size)  # type: ignore[arg-type]


OPERANDS = len(launch.Operands._fields)


@functools.lru_cache(maxsize=1024)
def _forward(choose: Any, device: torch.device, options: DeltaRuleOptions, train: bool,
             specs: tuple[Any, ...]) -> Program:  # fmt: skip
    """The forward of operands and tables like ``specs``: o, final states, states of chunks, and to ``train`` what is
    kept."""

    def run(start: launch.Start, *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        x, tables = launch.Operands(*inputs[:OPERANDS]), _tables(inputs[OPERANDS:], options)
        problem = _problem(x.q, x.v, tables, options)
        slots = problem.batch * problem.chunks if tables is None else tables.slots
        final, intermediates = _states(problem, slots, x.q, options)
        o, kept = launch.forward(problem, tables, x, final, intermediates, options.disable_recompute if train else None,
                                 kind=device_kind(device), start=start)  # fmt: skip
        return (o, final, intermediates, *(kept if train else ()))

    return record(run, device, specs)


@functools.lru_cache(maxsize=1024)
def _backward(choose: Any, device: torch.device, options: DeltaRuleOptions, specs: tuple[Any, ...]) -> Program:
    """The backward of operands, tables, what is kept, o, and gradients of o and the final states, like ``specs``."""

    def run(start: launch.Start, *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        x, tables = launch.Operands(*inputs[:OPERANDS]), _tables(inputs[OPERANDS : OPERANDS + 3], options)
        *kept, o, do, dfinal = inputs[OPERANDS + 3 :]
        problem = _problem(x.q, x.v, tables, options)
        return launch.backward(problem, tables, x, launch.Kept(*kept), o, do, dfinal, kind=device_kind(device),
                               start=start)  # fmt: skip

    return record(run, device, specs)


def _index(tables: ChunkTables | None) -> tuple[torch.Tensor | None, ...]:
    return (None,) * 3 if tables is None else (tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets)


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: DeltaRuleOptions, tables: ChunkTables | None,
                *operands: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        inputs = (*operands, *_index(tables))
        program = _forward(launch.choose, operands[0].device, options, True, tuple(map(_spec, inputs)))
        o, final, _, *kept = program.run(inputs)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.tables = options, tables
        ctx.boundaries = None if tables is None else SavedBoundaries.of("chunk_kda", tables)
        ctx.save_for_backward(*operands, *kept, o if options.qk_l2norm else None)
        return o, final  # type: ignore[return-value]

    @staticmethod
    @first_order_only("chunk_kda")
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operands, kept = ctx.saved_tensors[:OPERANDS], ctx.saved_tensors[OPERANDS:]
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        do = torch.zeros_like(operands[2]) if do is None else aligned(do.contiguous())
        dfinal = None if dfinal is None else dfinal.contiguous()
        inputs = (*operands, *_index(ctx.tables), *kept, do, dfinal)
        program = _backward(launch.choose, do.device, ctx.options, tuple(map(_spec, inputs)))
        return (None, None, *program.run(inputs))


def chunk_kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
              A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
              tables: ChunkTables | None, options: DeltaRuleOptions) -> tuple[torch.Tensor | None, ...]:
    """The chunk form on checked operands, shapes as in the public operator.

    Returns (o, final states or None), and with ``return_intermediate_states`` the states at the start of every chunk.
    """
    # The Ascend compiler's plan of the preparation of a dense batch does not fit its buffer in chunks of 64.
    if q.dtype == torch.float64 or (tables is None and q.device.type == "npu" and options.chunk_size > 32):
        return reference.chunk_kda(q, k, v, g, beta, A_log, dt_bias, initial_state, tables, options)
    given = (q, k, aligned(v), g, beta, A_log, dt_bias, initial_state)
    operands = [None if t is None else t.contiguous() for t in given]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        result: tuple[torch.Tensor | None, ...] = _ChunkKda.apply(options, tables, *operands)
        return result
    inputs = (*operands, *_index(tables))
    program = _forward(launch.choose, q.device, options, False, tuple(map(_spec, inputs)))
    o, final, intermediates = program.run(inputs)
    return (o, final, intermediates) if options.return_intermediate_states else (o, final)
