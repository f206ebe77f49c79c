"""The backward's launches: gradients behind the segments, chains, the parallel half, the last sums.

Requirements
------------
1. Grids and configurations follow from shapes, dtypes and the device alone, never from data.
2. The chains, the gradients, and where there are sums over heads or tokens or a projection a third launch; one more
   where sequences are cut into segments.
3. Everything is allocated here, at each call, by the framework's allocator: inside a capture it belongs to the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.gdn import configurations, constants
from graphsafe_kernels.gdn.chain_kernels import backward_chains_kernel
from graphsafe_kernels.gdn.configurations import Configuration
from graphsafe_kernels.gdn.forward import state_buffers
from graphsafe_kernels.gdn.launch import grid, heads_first, launch, options, tile
from graphsafe_kernels.gdn.parallel_kernels import finish_kernel, gradients_kernel
from graphsafe_kernels.gdn.problem import (
    Gradients,
    Operands,
    Prepared,
    Problem,
    boundaries,
    parted,
    segments,
    slot_count,
)
from graphsafe_kernels.gdn.segment_kernels import segment_gradients_kernel

__all__ = ["Work", "backward", "chains", "finish", "gradients", "segment_gradients", "work"]


class Work(NamedTuple):
    """What a backward writes: intermediates, then gradients, dq and dk in parts (see :func:`parted`)."""

    dstates: torch.Tensor
    dends: torch.Tensor | None
    gate_sums: torch.Tensor | None
    beta_sums: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dinitial_state: torch.Tensor | None


def work(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, states: torch.Tensor) -> Work:
    """The memory of a backward."""
    slots, hv, kw, vw = slot_count(problem, tables), problem.value_heads, problem.key_width, problem.value_width
    cuts = segments(problem, c.reverse_span) - 1
    return Work(
        torch.empty_like(states),
        x.q.new_empty(problem.sequences, cuts, hv, kw * vw, dtype=torch.float32) if cuts else None,
        x.q.new_empty(slots, hv, 2, dtype=torch.float32) if problem.gate_in_kernel else None,
        x.q.new_empty(slots, hv, 2, problem.chunk_size, dtype=torch.float32) if c.exact_beta else None,
        x.q.new_empty(*x.v.shape[:3], kw), x.q.new_empty(*x.v.shape[:3], kw),
        torch.empty_like(x.v), *(t.new_empty(t.mT.shape if c.heads_first else t.shape) for t in (x.g, x.beta)),
        None if x.initial_state is None else torch.empty_like(x.initial_state),
    )  # fmt: skip


def segment_gradients(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
                      do: torch.Tensor, dfinal_state: torch.Tensor | None, w: Work) -> None:  # fmt: skip
    """Launch the gradients behind the segments, where sequences are cut."""
    cuts = segments(problem, c.reverse_span) - 1
    if not cuts:
        return
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.reverse_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    fixed = constants.segment_gradients(problem, c, tables is not None, dfinal_state is not None)
    cu_seqlens, _, chunk_offsets = boundaries(tables)
    launch(
        segment_gradients_kernel, problem.sequences * cuts * hv * triton.cdiv(vw, bv),
        (x.q, x.k, do, *prepared[:4], dfinal_state, w.dends,
        tile(x.q, problem.heads * kw, (bt, bk), tiles), tile(x.k, problem.heads * kw, (bt, bk), tiles),
        tile(do, hv * vw, (bt, bv), tiles), tile(prepared.correction, bt, (bt, bt), tiles),
        tile(prepared.scores, bt, (bt, bt), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.reverse_span), fixed,
        options(c, c.reverse_warps, fixed["STAGES"]),
    )  # fmt: skip


def chains(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
           do: torch.Tensor, dfinal_state: torch.Tensor | None, w: Work, *, recompute: bool) -> None:  # fmt: skip
    """Launch the backward's chains."""
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.reverse_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    fixed = constants.reverse(problem, c, tables is not None, x.initial_state is not None,
                                  dfinal_state is not None, recompute)  # fmt: skip
    cu_seqlens, _, chunk_offsets = boundaries(tables)
    programs = (1 + recompute) * problem.sequences * fixed["SEGMENTS"] * hv * triton.cdiv(vw, bv)
    launch(
        backward_chains_kernel, grid(c, programs),
        (x.q, x.k, x.v, do, *prepared[:6], w.dstates, w.dv, x.initial_state, dfinal_state, w.dinitial_state,
        prepared.ends, prepared.transitions, w.dends,
        tile(x.q, problem.heads * kw, (bt, bk), tiles), tile(x.k, problem.heads * kw, (bt, bk), tiles),
        tile(x.v, hv * vw, (bt, bv), tiles), tile(do, hv * vw, (bt, bv), tiles),
        tile(prepared.correction, bt, (bt, bt), tiles), tile(prepared.scores, bt, (bt, bt), tiles),
        tile(prepared.states, bk, (bv, bk), tiles), tile(prepared.residuals, bt, (bv, bt), tiles),
        tile(w.dstates, bk, (bv, bk), tiles), tile(w.dv, hv * vw, (bt, bv), tiles),
        tile(prepared.transitions, bk, (bk, bk), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.reverse_span), fixed,
        options(c, c.reverse_warps, c.reverse_stages),
    )  # fmt: skip


def gradients(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
              do: torch.Tensor, w: Work) -> None:  # fmt: skip
    """Launch the parallel half. What was dw in dv becomes dv."""
    block = (c.gradient_value_block, c.gradient_key_block)
    g = heads_first(x.g, c) if problem.gate_in_kernel else x.g  # read for the slope alone
    launch(
        gradients_kernel, grid(c, slot_count(problem, tables) * problem.value_heads),
        (x.q, x.k, x.v, do, w.dv, g, x.beta, x.A_log, x.dt_bias, prepared.scores, prepared.vectors, prepared.states,
         w.dstates, prepared.residuals, w.dq, w.dk, w.dg, w.dbeta, w.gate_sums,
         w.beta_sums, tile(prepared.states, c.key_block, block, c.state_tiles),
         tile(w.dstates, c.key_block, block, c.state_tiles), *boundaries(tables)),
        (problem.scale, problem.tokens, problem.sequences, problem.chunks),
        constants.gradients(problem, c, tables is not None, x.dt_bias is not None),
        options(c, c.gradient_warps, c.gradient_stages),
    )  # fmt: skip


def finish(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, w: Work
           ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Launch the last sums, where there are any; (dq, dk, dA_log, ddt_bias)."""
    dA_log = None if x.A_log is None else torch.empty_like(x.A_log)
    ddt_bias = None if x.dt_bias is None else torch.empty_like(x.dt_bias)
    parts = parted(problem)
    dq, dk = (torch.empty_like(x.q), torch.empty_like(x.k)) if parts else (w.dq, w.dk)
    row_programs = triton.cdiv(problem.rows * problem.heads, c.finish_rows) if parts else 0
    programs = 2 * row_programs + problem.value_heads * problem.gate_in_kernel
    cu_seqlens, _, chunk_offsets = boundaries(tables)
    launch(
        finish_kernel, grid(c, programs, 1),
        (x.q, x.k, w.dq, w.dk, dq, dk, w.gate_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets),
        (problem.rows, problem.sequences, slot_count(problem, tables), row_programs),
        constants.finish(problem, c, tables is not None, x.dt_bias is not None), options(c, 4, 1),
    )  # fmt: skip
    return dq, dk, dA_log, ddt_bias


def backward(problem: Problem, tables: ChunkTables | None, x: Operands, prepared: Prepared, do: torch.Tensor,
             dfinal_state: torch.Tensor | None) -> Gradients:  # fmt: skip
    """The gradients of every input from those of o and, where it was returned, the final state. All contiguous."""
    c = configurations.configuration(problem, x.q.device, x.q.dtype)
    recompute = prepared.states is None
    if recompute:
        prepared = prepared._replace(**state_buffers(problem, tables, c, x.q))
    w = work(problem, tables, c, x, prepared.states)
    segment_gradients(problem, tables, c, x, prepared, do, dfinal_state, w)
    chains(problem, tables, c, x, prepared, do, dfinal_state, w, recompute=recompute)
    gradients(problem, tables, c, x, prepared, do, w)
    dq, dk, dA_log, ddt_bias = finish(problem, tables, c, x, w)
    dg, dbeta = (heads_first(t, c) for t in (w.dg, w.dbeta))
    return Gradients(dq, dk, w.dv, dg, dbeta, dA_log, ddt_bias, w.dinitial_state)
