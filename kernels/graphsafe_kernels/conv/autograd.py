"""The convolution's kernels as a differentiable function: what the operator calls where it runs on kernels.

Requirements
------------
1. Same arguments and results as the reference. fp64 operands are served by the reference, which is plain torch.
2. Without a gradient to compute, no autograd node is made.
3. Boundaries or tables written to between forward and backward are refused.
4. First-order: a second backward is refused by name (rule ``unsupported``).
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.conv import launch
from graphsafe_kernels.reference import conv as reference
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries
from graphsafe_kernels.tables import build_tables

__all__ = ["causal_conv1d"]


def _adjacent(t: torch.Tensor) -> torch.Tensor:
    """``t`` with its channels one element apart: itself for a slice of a fused projection, else a copy."""
    return t if t.stride(-1) == 1 else t.contiguous()


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                residual: torch.Tensor | None, initial_state: torch.Tensor | None,
                options: tuple[bool, bool, ChunkTables | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        # one argument for all that is no tensor: each argument of a node costs host time
        _, ctx.activate, ctx.tables = options
        tables = ctx.tables
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, initial_state)
        ctx.boundaries = None if tables is None else SavedBoundaries.of("causal_conv1d", tables)
        ctx.residual = None if residual is None else residual.dtype
        (y,), final = launch.forward(x, weight, bias, residual, initial_state, *options)
        return y, final

    @staticmethod
    @first_order_only("causal_conv1d")
    def backward(ctx: Any, dy: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, initial_state = ctx.saved_tensors
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if dy is None else _adjacent(dy)
        dfinal = None if dfinal is None else dfinal.contiguous()
        residual = ctx.residual if ctx.needs_input_grad[3] else None
        g = launch.backward([dy], dfinal, x, weight, bias, residual, initial_state, ctx.activate, ctx.tables)
        dresidual = g.residual if g.residual is not None or residual is None else dy.to(residual)
        return g.x, g.weight, g.bias, dresidual, g.initial_state, None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
                  initial_state: torch.Tensor | None, *, output_final_state: bool, activate: bool,
                  cu_seqlens: torch.Tensor | None, tables: ChunkTables | None, chunk_size: int,
                  use_graph: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution on checked operands: x, residual ``[B, T, D]`` -> y ``[B, T, D]``, state ``[N, D, W]`` or None.

    Arguments as in :func:`graphsafe_kernels.reference.conv.causal_conv1d`; ``weight`` ``[D, W]`` with W at most 8. A
    packed batch without ``tables`` gets them here, in one more launch. There is one path, whatever ``use_graph`` says.
    """
    if x.dtype == torch.float64:
        served: tuple[torch.Tensor, torch.Tensor | None] = reference.causal_conv1d(
            x, weight, bias, residual, initial_state, output_final_state=output_final_state, activate=activate,
            cu_seqlens=cu_seqlens, tables=tables, chunk_size=chunk_size, use_graph=use_graph,
        )
        return served
    taps = weight.shape[1]
    if taps > launch.MAX_TAPS:
        raise error("unsupported", f"causal_conv1d has {taps} taps; the kernels serve up to {launch.MAX_TAPS}",
                    why="A program keeps the last W - 1 rows in registers.",
                    remedy="Use a shorter convolution, or fp64 or CPU operands, which the reference serves.")
    if cu_seqlens is not None and tables is None:
        tables = build_tables(cu_seqlens, x.shape[1], chunk_size)
    x, weight = _adjacent(x), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else _adjacent(residual)
    initial_state = None if initial_state is None else initial_state.contiguous()
    operands = (x, weight, bias, residual, initial_state)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
    ):
        node: Any = _CausalConv1d.apply
        result: tuple[torch.Tensor, torch.Tensor | None] = node(*operands, (output_final_state, activate, tables))
        return result
    (y,), final = launch.forward(*operands, output_final_state, activate, tables)
    return y, final
