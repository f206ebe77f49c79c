"""The forward's launches: preparation, states at the segments' ends, chain.

Requirements
------------
1. Grids and configurations follow from shapes, dtypes and the device alone, never from data.
2. 2 launches, 3 where sequences are cut into segments, 4 where the states of the first segment's end are made beside
   the preparation of the second.
3. Everything is allocated here, at each call, by the framework's allocator: inside a capture it belongs to the graph.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.gdn import configurations, constants
from graphsafe_kernels.gdn.chain_kernels import forward_chain_kernel
from graphsafe_kernels.gdn.configurations import Configuration
from graphsafe_kernels.gdn.launch import grid, heads_first, launch, options, tile
from graphsafe_kernels.gdn.prepare_kernels import VECTORS, prepare_kernel
from graphsafe_kernels.gdn.problem import (
    Operands,
    Prepared,
    Problem,
    UnbuiltTables,
    boundaries,
    segments,
    slot_count,
)
from graphsafe_kernels.gdn.segment_kernels import segment_states_kernel

__all__ = [
    "chain", "forward", "prepare", "prepare_beside", "prepare_buffers", "segment_buffers", "segment_states",
    "state_buffers",
]  # fmt: skip


def prepare_buffers(problem: Problem, tables: ChunkTables | None, q: torch.Tensor) -> Prepared:
    """The memory of a preparation."""
    slots, bt, hv = slot_count(problem, tables), problem.chunk_size, problem.value_heads
    return Prepared(q.new_empty(slots, hv, bt, bt), q.new_empty(slots, hv, bt, bt),
                    q.new_empty(slots, hv, VECTORS.value, bt, dtype=torch.float32),
                    q.new_empty(slots, hv, dtype=torch.float32))  # fmt: skip


def prepare(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
            o: torch.Tensor, first: int = 0, end: int | None = None) -> None:  # fmt: skip
    """Launch the preparation of all slots, or of [first, end); their share of padding rows of ``o`` becomes zero."""
    slots = (slot_count(problem, tables) if end is None else end) - first
    width, block = problem.heads * problem.key_width, (problem.chunk_size, c.prepare_block)
    limit = {"maxnreg": c.prepare_registers} if c.prepare_registers else {}
    launch(
        prepare_kernel, grid(c, slots * problem.value_heads),
        (x.q, x.k, heads_first(x.g, c), heads_first(x.beta, c), x.A_log, x.dt_bias, *prepared[:4], o,
         tile(x.q, width, block, c.tiles), tile(x.k, width, block, c.tiles), *boundaries(tables)),
        (problem.scale, problem.tokens, problem.sequences, problem.chunks, first),
        constants.prepare(problem, c, tables is not None, x.dt_bias is not None,
                          tables.tile if isinstance(tables, UnbuiltTables) else 0),
        options(c, c.prepare_warps, 1) | limit,
    )  # fmt: skip


def segment_buffers(problem: Problem, c: Configuration, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """The memory of the states at the segments' ends; none where sequences are not cut."""
    cuts, hv, width = segments(problem, c.span) - 1, problem.value_heads, problem.key_width * problem.value_width
    found = {}
    if cuts:
        found["ends"] = q.new_empty(problem.sequences, cuts, hv, width, dtype=torch.float32)
    if cuts > 1:
        found["transitions"] = q.new_empty(problem.sequences, cuts, hv, 2, c.key_block, c.key_block,
                                           dtype=torch.float32)  # fmt: skip
    return found


def segment_states(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands,
                   prepared: Prepared) -> None:  # fmt: skip
    """Launch the states at the segments' ends, where sequences are cut."""
    cuts = segments(problem, c.span) - 1
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.chain_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    parts = triton.cdiv(vw, bv) + (triton.cdiv(bk, bv) if cuts > 1 else 0)
    fixed = constants.segment_states(problem, c, tables is not None, x.initial_state is not None)
    cu_seqlens, _, chunk_offsets = boundaries(tables)
    launch(
        segment_states_kernel, problem.sequences * cuts * hv * parts,
        (x.q, x.k, x.v, *prepared[:4], x.initial_state, prepared.ends, prepared.transitions,
         tile(x.k, problem.heads * kw, (bt, bk), tiles), tile(x.v, hv * vw, (bt, bv), tiles),
         tile(prepared.correction, bt, (bt, bt), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.span), fixed,
        options(c, c.chain_warps, fixed["STAGES"]),
    )  # fmt: skip


def chain(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
          o: torch.Tensor, final_state: torch.Tensor | None) -> None:  # fmt: skip
    """Launch the forward chain: live rows of ``o``, ``final_state`` if given, and the states ``prepared`` keeps."""
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.chain_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    fixed = constants.chain(problem, c, tables is not None, x.initial_state is not None, final_state is not None,
                                prepared.states is not None)  # fmt: skip
    cu_seqlens, _, chunk_offsets = boundaries(tables)
    launch(
        forward_chain_kernel, grid(c, problem.sequences * fixed["SEGMENTS"] * hv * triton.cdiv(vw, bv)),
        (x.q, x.k, x.v, *prepared[:4], o, prepared.states, prepared.residuals, x.initial_state, final_state,
         prepared.ends, prepared.transitions,
        tile(x.q, problem.heads * kw, (bt, bk), tiles), tile(x.k, problem.heads * kw, (bt, bk), tiles),
        tile(x.v, hv * vw, (bt, bv), tiles), tile(prepared.correction, bt, (bt, bt), tiles),
        tile(prepared.scores, bt, (bt, bt), tiles), tile(prepared.states, bk, (bv, bk), tiles),
        tile(prepared.residuals, bt, (bv, bt), tiles), tile(o, hv * vw, (bt, bv), tiles),
        tile(prepared.transitions, bk, (bk, bk), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.span), fixed,
        options(c, c.chain_warps, fixed["STAGES"]),
    )  # fmt: skip


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """A stream for what runs beside the current one, and finds room before it."""
    return torch.cuda.Stream(device, priority=-1)


def prepare_beside(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
                   o: torch.Tensor) -> None:  # fmt: skip
    """Prepare the first segment of a lone sequence, then its state's chain beside the rest of the preparation.

    The streams meet again before this returns, so memory and captures see one stream.
    """
    apart = dataclasses.replace(c, overlap=False)  # these follow launches of two streams
    prepare(problem, tables, c, x, prepared, o, 0, c.span)
    if x.q.device.type != "cuda":
        segment_states(problem, tables, apart, x, prepared)
        prepare(problem, tables, apart, x, prepared, o, c.span)
        return
    here, beside = torch.cuda.current_stream(x.q.device), _beside(x.q.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        segment_states(problem, tables, apart, x, prepared)
    prepare(problem, tables, apart, x, prepared, o, c.span)
    here.wait_stream(beside)


def forward(problem: Problem, tables: ChunkTables | None, x: Operands, final_state: torch.Tensor | None,
            keep: bool) -> tuple[torch.Tensor, Prepared]:  # fmt: skip
    """o like v, and what a backward needs; writes ``final_state`` if given. ``keep``: a backward will follow."""
    c = configurations.configuration(problem, x.q.device, x.q.dtype)
    o = torch.empty_like(x.v)
    prepared = prepare_buffers(problem, tables, x.q)._replace(**segment_buffers(problem, c, x.q))
    if keep and c.keep_states:
        prepared = prepared._replace(**state_buffers(problem, tables, c, x.q))
    if c.beside:
        prepare_beside(problem, tables, c, x, prepared, o)
        c = dataclasses.replace(c, overlap=False)
    else:
        prepare(problem, tables, c, x, prepared, o)
        if prepared.ends is not None:
            segment_states(problem, tables, c, x, prepared)
    chain(problem, tables, c, x, prepared, o, final_state)
    return o, prepared


def state_buffers(problem: Problem, tables: ChunkTables | None, c: Configuration,
                  q: torch.Tensor) -> dict[str, torch.Tensor]:  # fmt: skip
    """The memory of the states before each chunk and the residuals."""
    slots, hv, width = slot_count(problem, tables), problem.value_heads, problem.value_width
    rows = triton.cdiv(width, c.chain_block) * c.chain_block
    return {"states": q.new_empty(slots, hv, rows, c.key_block),
            "residuals": q.new_empty(slots, hv, width, problem.chunk_size)}  # fmt: skip
