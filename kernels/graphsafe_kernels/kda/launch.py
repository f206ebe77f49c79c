"""The launches of KDA: shapes, intermediates and configurations of each kernel.

Requirements
------------
1. Grids and configurations follow from shapes, dtypes and the device alone, never from data.
2. Forward: 2 launches. Backward: the preparation's tiles (where they were not kept), the chains, the products, the
   gradients, and where value heads or gate parameters are summed one more: 5 at most. Where few long sequences are cut
   into segments, one more each.
3. Everything is allocated here, at each call, by the framework's allocator: in a capture it belongs to the graph.
4. A launch goes through ``start``, so that it can be recorded instead (``graphsafe_kernels.kda.shipped``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphsafe.metadata import ChunkTables
from graphsafe_kernels import _interpreter
from graphsafe_kernels.kda.chain_kernels import backward_chains_kernel, forward_chain_kernel
from graphsafe_kernels.kda.configurations import Configuration, Problem, choose
from graphsafe_kernels.kda.decay_kernels import TILE
from graphsafe_kernels.kda.finish_kernels import finish_kernel
from graphsafe_kernels.kda.gradient_kernels import gradients_kernel
from graphsafe_kernels.kda.prepare_kernels import VECTORS, prepare_kernel
from graphsafe_kernels.kda.product_kernels import OWN_ROWS, products_kernel
from graphsafe_kernels.kda.project_kernels import project_kernel
from graphsafe_kernels.kda.segment_kernels import segment_gradients_kernel, segment_states_kernel
from graphsafe_kernels.policy import device_kind

__all__ = ["Gradients", "Kept", "Operands", "Start", "backward", "forward", "start"]

_interpreter.prepare()

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
Start = Callable[..., None]
Index = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def start(kernel: Any, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int,
          stages: int = 1, **more: Any) -> None:  # fmt: skip
    """Launch ``grid`` programs of a kernel: its run-time arguments in order, then its compile-time constants; ``more``:
    other options of Triton's."""
    if grid:
        kernel[(grid,)](*arguments, **constants, num_warps=warps, num_stages=stages, **more)


class Operands(NamedTuple):
    """A call's operands, contiguous; shapes as in the public operator."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


class Kept(NamedTuple):
    """What a forward leaves for its backward. ``kg`` to ``residuals`` are None where the backward makes them
    again, ``ends`` and ``transitions`` where sequences are not cut into segments.

    With S slots: ``correction``, ``scores`` ``[S, HV, BT, BT]``; ``vectors`` ``[S, HV, 4, BT]``, ``tile_decays`` ``[S,
    HV, BT / 16, K']``, ``decay`` ``[S, HV, K]`` fp32 (K' is K in whole
    blocks of columns); ``kg``, ``qg``, ``kd`` ``[S, HV, BT, K]``; ``states`` ``[S, HV, V,
    K]``; ``residuals`` ``[S, HV, V, BT]``; ``ends``, ``transitions`` as in ``segment_kernels``.
    """

    correction: torch.Tensor
    scores: torch.Tensor
    vectors: torch.Tensor
    tile_decays: torch.Tensor
    decay: torch.Tensor
    kg: torch.Tensor | None
    qg: torch.Tensor | None
    kd: torch.Tensor | None
    states: torch.Tensor | None
    residuals: torch.Tensor | None
    ends: torch.Tensor | None
    transitions: torch.Tensor | None


class Gradients(NamedTuple):
    """The gradients of one call, in the order of its operands; None where there is no such operand."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def _slots(problem: Problem, tables: ChunkTables | None) -> int:
    return problem.batch * problem.chunks if tables is None else tables.slots


def _index(tables: ChunkTables | None) -> Index:
    return (None, None, None) if tables is None else (tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets)


def _sizes(problem: Problem, tables: ChunkTables | None) -> dict[str, Any]:
    return {"HV": problem.value_heads, "K": problem.key_width, "BT": problem.chunk_size, "PACKED": tables is not None}


def _layout(problem: Problem) -> tuple[int, int, int]:
    return problem.tokens, problem.sequences, problem.chunks


def _gate(problem: Problem, x: Operands, c: Configuration) -> dict[str, Any]:
    return {"L2NORM": problem.qk_l2norm, "GATE": problem.gate, "SCALED": x.A_log is not None,
            "BIAS": x.dt_bias is not None, "SAFE": c.safe, "PAIRS": _TYPES[c.pairs],
            "PRECISION": c.precision}  # fmt: skip


def _beta(problem: Problem) -> dict[str, Any]:
    return {"SIGMOID": problem.beta_scale is not None, "FACTOR": problem.beta_scale or 1.0}


def _early(c: Configuration) -> dict[str, Any]:
    """How a launch whose kernel waits for what is before it (``overlap_kernels``) is made to come early."""
    return {"launch_pdl": True} if c.overlap else {}


def _tile(tensor: torch.Tensor | None, width: int, block: tuple[int, int]) -> Any:
    """A descriptor of ``tensor`` as a matrix with rows of ``width`` and tiles of ``block``."""
    if tensor is None:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], list(block))


def _prepare(problem: Problem, tables: ChunkTables | None, c: Configuration, start: Start, x: Operands,
             kept: Kept | None, o: torch.Tensor | None, intermediates: torch.Tensor | None) -> Kept:  # fmt: skip
    """The preparation; with ``kept`` only kg, qg, kd, the rest being taken from there."""
    slots, bt, hv, width = _slots(problem, tables), problem.chunk_size, problem.value_heads, problem.key_width
    kg, qg, kd = (x.q.new_empty((slots, hv, bt, width)) for _ in range(3))
    if kept is None:
        whole = 0 if c.levels else triton.cdiv(width, c.column_block) * c.column_block
        fp32 = ((slots, hv, VECTORS.value, bt), (slots, hv, bt // TILE.value, whole), (slots, hv, width))
        kept = Kept(x.q.new_empty((slots, hv, bt, bt)), x.q.new_empty((slots, hv, bt, bt)),
                    *(x.q.new_empty(shape, dtype=torch.float32) for shape in fp32), *(None,) * 7)  # fmt: skip
        scores = True
    else:
        scores = False
    constants = {
        **_sizes(problem, tables), "H": problem.heads, "V": problem.value_width,
        "BK": c.column_block, "BV": c.clear_block, **_gate(problem, x, c),
        **_beta(problem), "SCORES": scores, "INTERMEDIATES": intermediates is not None,
        "INVERSE": tl.float16 if c.half_inverse else tl.float32,
        "REFINE": c.half_inverse and problem.beta_scale != 1.0, "LEVELS": c.levels,
        "OVERLAP": c.overlap, "PREFETCH": c.prefetch and c.safe and scores,
    }  # fmt: skip
    start(
        prepare_kernel, c.programs(slots * hv),
        (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, kg, qg, kd, *kept[:5], o, intermediates, *_index(tables),
         slots * hv if c.levels else None, problem.scale, problem.lower_bound, *_layout(problem)),
        constants, warps=c.prepare_warps, **_early(c),
    )  # fmt: skip
    return kept._replace(kg=kg, qg=qg, kd=kd)


def _with_states(problem: Problem, kept: Kept, slots: int, like: torch.Tensor) -> Kept:
    """``kept`` with memory for states and residuals."""
    hv, width = problem.value_heads, problem.value_width
    return kept._replace(states=like.new_empty((slots, hv, width, problem.key_width)),
                         residuals=like.new_empty((slots, hv, width, problem.chunk_size)))  # fmt: skip


def _chain_tiles(problem: Problem, c: Configuration, use: bool, kept: Kept, values: tuple[torch.Tensor, ...],
                 block: tuple[int, int], dstates: tuple[torch.Tensor, ...] = ()) -> list[Any]:  # fmt: skip
    """The chains' descriptors: kg, qg, kd, ``values`` (rows of V), correction, scores, states, residuals, dstates.
    ``block``: of a state's columns of V and of K."""
    if not use:
        return [None] * (7 + len(values) + len(dstates))
    bt, kw = problem.chunk_size, problem.key_width
    keys = [_tile(t, kw, (bt, c.key_block)) for t in (kept.kg, kept.qg, kept.kd)]
    rows = [_tile(t, problem.value_heads * problem.value_width, (bt, block[0])) for t in values]
    squares = [_tile(t, bt, (bt, bt)) for t in (kept.correction, kept.scores)]
    states = [_tile(t, kw, block) for t in (kept.states, *dstates)]
    return [*keys, *rows, *squares, states[0], _tile(kept.residuals, bt, (block[0], bt)), *states[1:]]


def _segments(problem: Problem, span: int) -> int:
    """Segments of the longest possible sequence."""
    return -(-problem.chunks // span) if span else 1


def _segment_states(problem: Problem, tables: ChunkTables | None, c: Configuration, start: Start, x: Operands,
                    kept: Kept) -> Kept:  # fmt: skip
    """``kept`` with the states at the segments' ends, where sequences are cut."""
    segments, hv, kw, vw = _segments(problem, c.span), problem.value_heads, problem.key_width, problem.value_width
    if segments == 1:
        return kept
    lead = (problem.sequences, segments - 1, hv)
    ends = x.q.new_empty((*lead, kw * vw), dtype=torch.float32)
    transitions = None
    if segments > 2:
        transitions = x.q.new_empty((*lead, 2, c.key_block, c.key_block), dtype=torch.float32)
    use = c.tiles and problem.rows > 0
    parts = triton.cdiv(vw, c.chain_block) + (triton.cdiv(c.key_block, c.chain_block) if segments > 2 else 0)
    kg, _, kd, v, correction, *_ = _chain_tiles(problem, c, use, kept, (x.v,), (c.chain_block, c.key_block))
    start(
        segment_states_kernel, problem.sequences * (segments - 1) * hv * parts,
        (kept.kg, kept.kd, x.v, kept.correction, kept.vectors, kept.decay, x.initial_state, ends, transitions, kg, kd,
         v, correction, *_index(tables)[::2], *_layout(problem), c.span),
        {**_sizes(problem, tables), "V": vw, "BK": c.key_block, "BV": c.chain_block,
         "INITIAL": x.initial_state is not None, "V_FIRST": problem.state_v_first, "TILES": use,
         "STAGES": c.save_stages, "SEGMENTS": segments, "PRECISION": c.precision},
        warps=c.chain_warps, stages=c.save_stages,
    )  # fmt: skip
    return kept._replace(ends=ends, transitions=transitions)


def _segment_gradients(problem: Problem, tables: ChunkTables | None, c: Configuration, start: Start, x: Operands,
                       kept: Kept, do: torch.Tensor,
                       dfinal_state: torch.Tensor | None) -> torch.Tensor | None:  # fmt: skip
    """The gradients behind the segments, where sequences are cut."""
    segments, hv, kw, vw = _segments(problem, c.span), problem.value_heads, problem.key_width, problem.value_width
    if segments == 1:
        return None
    dends = x.q.new_empty((problem.sequences, segments - 1, hv, kw * vw), dtype=torch.float32)
    use = c.tiles and problem.rows > 0
    start(
        segment_gradients_kernel, problem.sequences * (segments - 1) * hv * triton.cdiv(vw, c.reverse_block),
        (kept.kg, kept.qg, kept.kd, do, kept.correction, kept.scores, kept.vectors, kept.decay, dfinal_state, dends,
         *_chain_tiles(problem, c, use, kept, (do,), (c.reverse_block, c.store_block))[:6], *_index(tables)[::2],
         *_layout(problem), c.span),
        {**_sizes(problem, tables), "V": vw, "BK": c.key_block, "BV": c.reverse_block,
         "FINAL": dfinal_state is not None, "V_FIRST": problem.state_v_first, "TILES": use, "STAGES": c.reverse_stages,
         "SEGMENTS": segments, "PRECISION": c.precision},
        warps=c.reverse_warps, stages=c.reverse_stages,
    )  # fmt: skip
    return dends


def _transition_tiles(c: Configuration, use: bool, transitions: torch.Tensor | None) -> Any:
    return _tile(transitions, c.key_block, (c.key_block, c.key_block)) if use else None


def forward(problem: Problem, tables: ChunkTables | None, x: Operands, final_state: torch.Tensor | None,
            intermediates: torch.Tensor | None, keep: bool | None, *, kind: str | None = None,
            start: Start = start) -> tuple[torch.Tensor, Kept]:  # fmt: skip
    """o like v, and what a backward needs; writes ``final_state`` and ``intermediates`` where they are given.

    ``keep``: also leave the tiles, states and residuals that a backward would otherwise make again; None: there will be
    no backward. ``kind``: configure for a device of this kind instead of the operands'.
    """
    c = choose(problem, kind or device_kind(x.q.device), x.q.dtype)
    keep_tiles = keep is not None and (keep or c.keep_tiles)
    keep = bool(keep)
    slots, hv = _slots(problem, tables), problem.value_heads
    o = torch.empty_like(x.v)
    kept = _prepare(problem, tables, c, start, x, None, o, intermediates)
    kept = _segment_states(problem, tables, c, start, x, kept)
    if keep:
        kept = _with_states(problem, kept, slots, x.q)
    cu_seqlens, _, chunk_offsets = _index(tables)
    use = c.tiles and slots > 0 and problem.rows > 0
    segments = _segments(problem, c.span)
    stages = c.save_stages if keep else c.chain_stages
    constants = {
        **_sizes(problem, tables), "V": problem.value_width, "BK": c.key_block, "BV": c.chain_block,
        "INITIAL": x.initial_state is not None, "FINAL": final_state is not None, "V_FIRST": problem.state_v_first,
        "SAVE": keep, "INTERMEDIATES": intermediates is not None, "TILES": use, "STAGES": stages, "SEGMENTS": segments,
        "PRECISION": c.precision, "LOOP": c.cores > 0, "OVERLAP": c.overlap,
    }  # fmt: skip
    start(
        forward_chain_kernel,
        c.programs(problem.sequences * segments * hv * triton.cdiv(problem.value_width, c.chain_block)),
        (kept.kg, kept.qg, kept.kd, x.v, kept.correction, kept.scores, kept.vectors, kept.decay, o, kept.states,
         kept.residuals, intermediates, x.initial_state, final_state, kept.ends, kept.transitions,
         *_chain_tiles(problem, c, use, kept, (x.v,), (c.chain_block, c.key_block)),
         _transition_tiles(c, use, kept.transitions), cu_seqlens, chunk_offsets, *_layout(problem), c.span),
        constants, warps=c.chain_warps, stages=stages, **_early(c),
    )  # fmt: skip
    return o, kept if keep_tiles else kept._replace(kg=None, qg=None, kd=None)


def backward(problem: Problem, tables: ChunkTables | None, x: Operands, kept: Kept, o: torch.Tensor | None,
             do: torch.Tensor, dfinal_state: torch.Tensor | None, *, kind: str | None = None,
             start: Start = start) -> Gradients:  # fmt: skip
    """The gradients of every operand from o, which only l2norm needs, its gradient and, where it was returned, the
    final state's. All contiguous."""
    c = choose(problem, kind or device_kind(x.q.device), x.q.dtype)
    slots, hv, bt, kw = _slots(problem, tables), problem.value_heads, problem.chunk_size, problem.key_width
    index, layout, sizes = _index(tables), _layout(problem), _sizes(problem, tables)
    if kept.kg is None:
        kept = _prepare(problem, tables, c, start, x, kept, None, None)
    recompute = kept.states is None
    if recompute:
        kept = _with_states(problem, kept, slots, x.q)
    dends = _segment_gradients(problem, tables, c, start, x, kept, do, dfinal_state)
    segments = _segments(problem, c.span)
    dstates = x.q.new_empty((slots, hv, problem.value_width, kw))
    dv = torch.empty_like(x.v)
    dinitial_state = None if x.initial_state is None else torch.empty_like(x.initial_state)
    use = c.tiles and slots > 0 and problem.rows > 0
    constants = {
        **sizes, "V": problem.value_width, "BK": c.key_block, "BV": c.reverse_block,
        "INITIAL": x.initial_state is not None, "FINAL": dfinal_state is not None, "V_FIRST": problem.state_v_first,
        "RECOMPUTE": recompute, "TILES": use, "STAGES": c.reverse_stages, "SEGMENTS": segments,
        "PRECISION": c.precision, "LOOP": c.cores > 0,
    }  # fmt: skip
    blocks = triton.cdiv(problem.value_width, c.reverse_block)
    start(
        backward_chains_kernel, c.programs((2 if recompute else 1) * problem.sequences * segments * hv * blocks),
        (kept.kg, kept.qg, kept.kd, x.v, do, kept.correction, kept.scores, kept.vectors, kept.decay, kept.states,
         kept.residuals, dstates, dv, x.initial_state, dfinal_state, dinitial_state, kept.ends, kept.transitions, dends,
         *_chain_tiles(problem, c, use, kept, (x.v, do), (c.reverse_block, c.store_block), (dstates,)),
         _transition_tiles(c, use, kept.transitions), index[0], index[2], *layout, c.span),
        constants, warps=c.reverse_warps, stages=c.reverse_stages,
    )  # fmt: skip
    dbeta = torch.empty_like(x.beta)
    pairs = x.q.new_empty((slots, hv, 2, bt, bt), dtype=c.pairs)
    own_rows = 2 if c.cores else OWN_ROWS.value + c.fine * triton.cdiv(kw, c.product_block)
    own = x.q.new_empty((slots, hv, own_rows, bt), dtype=torch.float32)
    products = x.q.new_empty((slots, hv, 3, bt, kw))
    inner = x.q.new_empty((slots, hv, kw), dtype=torch.float32)
    start(
        products_kernel, c.programs(slots * hv),
        (x.v, o, do, dv, kept.vectors, kept.decay, kept.states, dstates, kept.residuals, pairs, own, products, inner,
         dbeta, *index, slots * hv if c.cores else None, problem.scale, *layout),
        {**sizes, "V": problem.value_width, "BK": c.product_block, "BV": c.clear_block, **_beta(problem),
         "L2NORM": problem.qk_l2norm and not c.cores, "EXACT": c.exact_beta, "FINE": c.fine, "PRECISION": c.precision,
         "LOOP": c.cores > 0},
        warps=c.product_warps,
    )  # fmt: skip
    whole = hv == problem.heads
    dq, dk, dg = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.g)
    parts = [dq, dk] if whole else [x.q.new_empty((*x.q.shape[:2], hv, kw)) for _ in range(2)]
    dA_log, ddt_bias = (None if t is None else torch.empty_like(t) for t in (x.A_log, x.dt_bias))
    scale_sums = None if dA_log is None else x.q.new_empty((slots, hv), dtype=torch.float32)
    bias_sums = None if ddt_bias is None else x.q.new_empty((slots, hv, kw), dtype=torch.float32)
    bias_tiles = torch.empty_like(kept.tile_decays) if ddt_bias is not None and not c.levels else None
    row_sums, blocks = None, 1
    if c.levels:
        blocks = triton.cdiv(kw, c.column_block)
        row_sums = x.q.new_empty((slots, hv, blocks, 3, bt), dtype=torch.float32)
    start(
        gradients_kernel, c.programs(slots * hv * blocks),
        (x.q, x.k, x.g, x.A_log, x.dt_bias, kept.vectors, kept.tile_decays, pairs, own, products, inner,
         *parts, dg, dbeta, scale_sums, bias_sums, bias_tiles, row_sums, *index,
         slots * hv * blocks if c.levels else None, problem.lower_bound, *layout),
        {**sizes, "H": problem.heads, "BK": c.column_block, "WHOLE": whole, "LEVELS": c.levels,
         "PREFETCH": c.prefetch, "LATE": c.late, "EXACT": c.exact_beta, "FINE": c.fine, "BP": c.product_block,
         **_beta(problem), **_gate(problem, x, c)},
        warps=c.gradient_warps,
    )  # fmt: skip
    if row_sums is not None and (problem.qk_l2norm or dA_log is not None):
        start(
            project_kernel, c.programs(slots * hv),
            (x.q, x.k, kept.vectors, row_sums, *parts, scale_sums, *index[:2], slots * hv, *layout),
            {**sizes, "H": problem.heads, "BK": c.column_block, "L2NORM": problem.qk_l2norm,
             "SCALED": problem.gate > 0 and dA_log is not None},
            warps=c.gradient_warps,
        )  # fmt: skip
    row_programs = triton.cdiv(problem.rows * problem.heads, c.finish_rows)
    sums = {"SCALED": dA_log is not None, "BIAS": ddt_bias is not None}
    start(
        finish_kernel, c.programs((0 if whole else 2 * row_programs) + (hv if any(sums.values()) else 0)),
        (*parts, dq, dk, scale_sums, bias_sums, dA_log, ddt_bias, index[0], index[2], problem.rows, problem.sequences,
         slots, row_programs),
        {**sizes, **sums, "H": problem.heads, "BK": c.key_block, "ROWS": c.finish_rows, "PARTS": not whole, "SUMS": 32,
         "LOOP": c.cores > 0},
        warps=4,
    )  # fmt: skip
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state)
