"""The launches of the gated delta rule: shapes, intermediates and configurations of each kernel.

Requirements
------------
1. Grids and configurations follow from shapes, dtypes and the device alone, never from data.
2. Forward: 2 launches. Backward: the chains, the gradients, and where parts or gate parameters are summed a third.
3. Everything is allocated here, at each call, by the framework's allocator: inside a capture it belongs to the graph.
4. Descriptors are used where the device has them and every tile is whole; else the same kernels load by pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.gdn.chain_kernels import backward_chains_kernel, forward_chain_kernel
from graphsafe_kernels.gdn.configurations import Configuration, configuration
from graphsafe_kernels.gdn.parallel_kernels import finish_kernel, gradients_kernel
from graphsafe_kernels.gdn.prepare_kernels import VECTORS, prepare_kernel

__all__ = ["Problem", "backward", "forward"]


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a call. ``tokens`` is T of each sequence (dense) or the capacity (packed)."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    sequences: int
    chunk_size: int
    scale: float
    qk_l2norm: bool = False
    gate_in_kernel: bool = False
    beta_scale: float | None = None
    state_v_first: bool = False

    @property
    def rows(self) -> int:
        """Token rows of q, k and v taken together."""
        return self.batch * self.tokens

    @property
    def chunks(self) -> int:
        """Chunks of a dense sequence."""
        return -(-self.tokens // self.chunk_size)


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare_kernel` writes."""

    correction: torch.Tensor
    scores: torch.Tensor
    vectors: torch.Tensor
    decay: torch.Tensor


def _slots(problem: Problem, tables: ChunkTables | None) -> int:
    return problem.batch * problem.chunks if tables is None else tables.slots


def _tables(tables: ChunkTables | None) -> dict[str, torch.Tensor | None]:
    if tables is None:
        return {"cu_seqlens": None, "chunk_indices": None, "chunk_offsets": None}
    return {"cu_seqlens": tables.cu_seqlens, "chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets}


def _sizes(problem: Problem) -> dict[str, int]:
    return {"H": problem.heads, "HV": problem.value_heads, "K": problem.key_width, "V": problem.value_width,
            "BT": problem.chunk_size}  # fmt: skip


def _gates(problem: Problem, dt_bias: torch.Tensor | None) -> dict[str, Any]:
    return {"GATE": problem.gate_in_kernel, "BIAS": dt_bias is not None, "SIGMOID": problem.beta_scale is not None,
            "FACTOR": problem.beta_scale or 1.0}  # fmt: skip


def _tile(tensor: torch.Tensor, width: int, block: tuple[int, int], use: bool) -> Any:
    """A descriptor of ``tensor`` as a matrix with rows of ``width`` and tiles of ``block``; the tensor if not used."""
    if not use:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], list(block))


def _prepare(problem: Problem, tables: ChunkTables | None, c: Configuration, q: torch.Tensor, k: torch.Tensor,
             g: torch.Tensor, beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
             o: torch.Tensor) -> Prepared:  # fmt: skip
    slots, bt, hv = _slots(problem, tables), problem.chunk_size, problem.value_heads
    tile = (slots, hv, bt, bt)
    prepared = Prepared(q.new_empty(tile), q.new_empty(tile),
                        q.new_empty((slots, hv, VECTORS.value, bt), dtype=torch.float32),
                        q.new_empty((slots, hv), dtype=torch.float32))  # fmt: skip
    if slots:
        prepare_kernel[(slots * hv,)](
            q, k, g, beta, A_log, dt_bias, prepared.correction, prepared.scores, prepared.vectors, prepared.decay, o,
            **_tables(tables), scale=problem.scale, T=problem.tokens, N=problem.sequences, NT=problem.chunks,
            **_sizes(problem), BK=c.prepare_block, BV=c.clear_block, PACKED=tables is not None,
            L2NORM=problem.qk_l2norm, **_gates(problem, dt_bias),
            INVERSE="fp16" if c.half_inverse and problem.qk_l2norm else "fp32", PRECISION=c.precision,
            num_warps=c.prepare_warps, num_stages=1,
        )  # fmt: skip
    return prepared


def forward(problem: Problem, tables: ChunkTables | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            g: torch.Tensor, beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
            initial_state: torch.Tensor | None, final_state: torch.Tensor | None) -> tuple[torch.Tensor, Prepared]:  # fmt: skip
    """o like v, and the preparation for a backward; writes ``final_state`` where it is given. All contiguous."""
    c = configuration(problem, q.device, q.dtype)
    o = torch.empty_like(v)
    prepared = _prepare(problem, tables, c, q, k, g, beta, A_log, dt_bias, o)
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.chain_block, c.tiles
    operands = [q, k, v, prepared.correction, prepared.scores]
    blocks = triton.cdiv(problem.value_width, bv)
    forward_chain_kernel[(problem.sequences * problem.value_heads * blocks,)](
        *operands, prepared.vectors, prepared.decay, o, None, None, initial_state, final_state,
        _tile(q, problem.heads * problem.key_width, (bt, bk), tiles),
        _tile(k, problem.heads * problem.key_width, (bt, bk), tiles),
        _tile(v, problem.value_heads * problem.value_width, (bt, bv), tiles),
        _tile(prepared.correction, bt, (bt, bt), tiles), _tile(prepared.scores, bt, (bt, bt), tiles), None, None,
        _tables(tables)["cu_seqlens"], _tables(tables)["chunk_offsets"], problem.tokens, problem.sequences,
        problem.chunks, **_sizes(problem), BK=bk, BV=bv, PACKED=tables is not None,
        INITIAL=initial_state is not None, FINAL=final_state is not None, V_FIRST=problem.state_v_first, SAVE=False,
        TILES=tiles, STAGES=c.chain_stages, PRECISION=c.precision, num_warps=c.chain_warps, num_stages=c.chain_stages,
    )  # fmt: skip
    return o, prepared


@dataclass(frozen=True)
class Gradients:
    """The gradients of one call; None where there is no such input."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def backward(problem: Problem, tables: ChunkTables | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             g: torch.Tensor, beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
             initial_state: torch.Tensor | None, prepared: Prepared, do: torch.Tensor,
             dfinal_state: torch.Tensor | None) -> Gradients:  # fmt: skip
    """The gradients of every input from those of o and, where it was returned, the final state. All contiguous."""
    c = configuration(problem, q.device, q.dtype)
    slots, bt, bk, bv = _slots(problem, tables), problem.chunk_size, c.key_block, c.reverse_block
    hv, kw, vw, tiles = problem.value_heads, problem.key_width, problem.value_width, c.tiles
    table = _tables(tables)
    packed = tables is not None
    states, dstates = q.new_empty((slots, hv, vw, kw)), q.new_empty((slots, hv, vw, kw))
    residuals = q.new_empty((slots, hv, vw, bt))
    dv = torch.empty_like(v)
    dinitial_state = None if initial_state is None else torch.empty_like(initial_state)
    blocks = triton.cdiv(vw, bv)
    backward_chains_kernel[(2 * problem.sequences * hv * blocks,)](
        q, k, v, do, prepared.correction, prepared.scores, prepared.vectors, prepared.decay, states, residuals, dstates,
        dv, initial_state, dfinal_state, dinitial_state,
        _tile(q, problem.heads * kw, (bt, bk), tiles), _tile(k, problem.heads * kw, (bt, bk), tiles),
        _tile(v, hv * vw, (bt, bv), tiles), _tile(do, hv * vw, (bt, bv), tiles),
        _tile(prepared.correction, bt, (bt, bt), tiles), _tile(prepared.scores, bt, (bt, bt), tiles),
        _tile(states, kw, (bv, bk), tiles), _tile(residuals, bt, (bv, bt), tiles), _tile(dstates, kw, (bv, bk), tiles),
        table["cu_seqlens"], table["chunk_offsets"], problem.tokens, problem.sequences, problem.chunks,
        **_sizes(problem), BK=bk, BV=bv, PACKED=packed, INITIAL=initial_state is not None,
        FINAL=dfinal_state is not None, V_FIRST=problem.state_v_first, RECOMPUTE=True, TILES=tiles,
        STAGES=c.reverse_stages, STATE_STAGES=c.state_stages, PRECISION=c.precision, num_warps=c.reverse_warps,
        num_stages=c.reverse_stages,
    )  # fmt: skip
    whole = hv == problem.heads and not problem.qk_l2norm
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    parts_shape = (*q.shape[:2], hv, kw)
    dq_parts, dk_parts = (dq, dk) if whole else (q.new_empty(parts_shape), q.new_empty(parts_shape))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    gate_sums = q.new_empty((slots, hv, 2), dtype=torch.float32) if problem.gate_in_kernel else None
    if slots:
        gradients_kernel[(slots * hv,)](
            q, k, do, dv, g, beta, A_log, dt_bias, prepared.scores, prepared.vectors, states, dstates, residuals,
            dq_parts, dk_parts, dg, dbeta, gate_sums,
            _tile(states, kw, (c.gradient_value_block, c.gradient_key_block), tiles),
            _tile(dstates, kw, (c.gradient_value_block, c.gradient_key_block), tiles), **table, scale=problem.scale, T=problem.tokens,
            N=problem.sequences, NT=problem.chunks, **_sizes(problem), BK=c.gradient_key_block,
            BV=c.gradient_value_block, KEY=bk, TILES=tiles, PACKED=packed, WHOLE=whole, **_gates(problem, dt_bias),
            STAGES=c.gradient_stages, PRECISION=c.precision, num_warps=c.gradient_warps,
            num_stages=c.gradient_stages,
        )  # fmt: skip
    dA_log = None if A_log is None else torch.empty_like(A_log)
    ddt_bias = None if dt_bias is None else torch.empty_like(dt_bias)
    row_programs = triton.cdiv(problem.rows * problem.heads, c.finish_rows)
    programs = (0 if whole else 2 * row_programs) + (hv if problem.gate_in_kernel else 0)
    if programs:
        finish_kernel[(programs,)](
            q, k, dq_parts, dk_parts, dq, dk, gate_sums, dA_log, ddt_bias, table["cu_seqlens"], table["chunk_offsets"],
            problem.rows, problem.sequences, slots, row_programs, H=problem.heads, HV=hv, K=kw, BK=bk,
            ROWS=c.finish_rows, PACKED=packed, L2NORM=problem.qk_l2norm, GATE=problem.gate_in_kernel,
            BIAS=dt_bias is not None, PARTS=not whole, SUMS=256, num_warps=4, num_stages=1,
        )  # fmt: skip
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state)
