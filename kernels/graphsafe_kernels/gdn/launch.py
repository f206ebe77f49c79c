"""The launches of the gated delta rule: shapes, intermediates and configurations of each kernel.

Requirements
------------
1. Grids and configurations follow from shapes, dtypes and the device alone, never from data.
2. Forward: 2 launches, 3 where sequences are cut into segments. Backward: the chains, the gradients, and where there
   are sums over heads or tokens or a projection a third; with segments one more.
3. Everything is allocated here, at each call, by the framework's allocator: inside a capture it belongs to the graph.
4. Descriptors are used where the device has them and every tile is whole; else the same kernels load by pointers.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.gdn.chain_kernels import backward_chains_kernel, forward_chain_kernel
from graphsafe_kernels.gdn.configurations import Configuration, configuration
from graphsafe_kernels.gdn.parallel_kernels import finish_kernel, gradients_kernel
from graphsafe_kernels.gdn.prepare_kernels import VECTORS, prepare_kernel
from graphsafe_kernels.gdn.segment_kernels import segment_gradients_kernel, segment_states_kernel
from graphsafe_kernels.launch import PreparedLaunch

__all__ = ["Gradients", "Operands", "Prepared", "Problem", "backward", "forward"]


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


class Prepared(NamedTuple):
    """What the forward leaves for the backward: the preparation, and the chain's states where they are kept."""

    correction: torch.Tensor
    scores: torch.Tensor
    vectors: torch.Tensor
    decay: torch.Tensor
    states: torch.Tensor | None = None
    residuals: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    transitions: torch.Tensor | None = None


class Gradients(NamedTuple):
    """The gradients of one call; None where there is no such input."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


class Operands(NamedTuple):
    """The inputs of one call, contiguous: shapes as in the public operator."""

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


def _boundaries(tables: ChunkTables | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if tables is None:
        return None, None, None
    return tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets


def _sizes(problem: Problem) -> dict[str, int]:
    return {"H": problem.heads, "HV": problem.value_heads, "K": problem.key_width, "V": problem.value_width,
            "BT": problem.chunk_size}  # fmt: skip


def _gates(problem: Problem, bias: bool) -> dict[str, Any]:
    return {"GATE": problem.gate_in_kernel, "BIAS": bias, "SIGMOID": problem.beta_scale is not None,
            "FACTOR": problem.beta_scale or 1.0}  # fmt: skip


def _overlap(c: Configuration, name: str) -> int:
    """How a launch overlaps with its neighbours: see :mod:`graphsafe_kernels.delta.overlap_kernels`."""
    return 0 if not c.overlap else 2 if name in c.early else 1


def prepare_constants(p: Problem, c: Configuration, packed: bool, bias: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`prepare_kernel`."""
    inverse = "fp16" if c.half_inverse and p.qk_l2norm else "fp32"
    return {**_sizes(p), "BK": c.prepare_block, "BV": c.clear_block, "PACKED": packed, "L2NORM": p.qk_l2norm,
            **_gates(p, bias), "TILES": c.tiles, "INVERSE": inverse, "REFINE": p.beta_scale != 1.0,
            "STAGES": c.prepare_stages, "OVERLAP": _overlap(c, "prepare"), "PRECISION": c.precision}  # fmt: skip


def chain_constants(p: Problem, c: Configuration, packed: bool, initial: bool, final: bool,
                    save: bool) -> dict[str, Any]:  # fmt: skip
    """Compile-time constants of :func:`forward_chain_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.chain_block, "PACKED": packed, "INITIAL": initial, "FINAL": final,
            "V_FIRST": p.state_v_first, "SAVE": save, "TILES": c.tiles,
            "STAGES": c.keep_stages if save else c.chain_stages, "SEGMENTS": segments(p, c.span),
            "OVERLAP": _overlap(c, "chain"), "PRECISION": c.precision}  # fmt: skip


def segment_states_constants(p: Problem, c: Configuration, packed: bool, initial: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`segment_states_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.chain_block, "PACKED": packed, "INITIAL": initial,
            "V_FIRST": p.state_v_first, "TILES": c.tiles, "STAGES": c.keep_stages, "SEGMENTS": segments(p, c.span),
            "OVERLAP": _overlap(c, "segment_states"), "PRECISION": c.precision}  # fmt: skip


def segment_gradients_constants(p: Problem, c: Configuration, packed: bool, final: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`segment_gradients_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.reverse_block, "PACKED": packed, "FINAL": final,
            "V_FIRST": p.state_v_first, "TILES": c.tiles, "STAGES": c.reverse_stages,
            "SEGMENTS": segments(p, c.reverse_span), "OVERLAP": _overlap(c, "segment_gradients"),
            "PRECISION": c.precision}  # fmt: skip


def reverse_constants(p: Problem, c: Configuration, packed: bool, initial: bool, final: bool,
                      recompute: bool) -> dict[str, Any]:  # fmt: skip
    """Compile-time constants of :func:`backward_chains_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.reverse_block, "PACKED": packed, "INITIAL": initial, "FINAL": final,
            "V_FIRST": p.state_v_first, "RECOMPUTE": recompute, "TILES": c.tiles, "STAGES": c.reverse_stages,
            "STATE_STAGES": c.state_stages, "SEGMENTS": segments(p, c.reverse_span), "OVERLAP": _overlap(c, "chains"),
            "PRECISION": c.precision}  # fmt: skip


def gradients_constants(p: Problem, c: Configuration, packed: bool, bias: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`gradients_kernel`."""
    return {**_sizes(p), "BK": c.gradient_key_block, "BV": c.gradient_value_block, "KEY": c.key_block,
            "PACKED": packed, "L2NORM": p.qk_l2norm, **_gates(p, bias), "TILES": c.state_tiles,
            "STAGES": c.gradient_stages, "WHOLE": not parted(p), "PREFETCH": c.gradient_prefetch,
            "OVERLAP": _overlap(c, "gradients"), "PRECISION": c.precision}  # fmt: skip


def finish_constants(p: Problem, c: Configuration, packed: bool, bias: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`finish_kernel`."""
    return {"H": p.heads, "HV": p.value_heads, "K": p.key_width, "BK": c.key_block, "ROWS": c.finish_rows,
            "PACKED": packed, "L2NORM": p.qk_l2norm, "GATE": p.gate_in_kernel, "BIAS": bias,
            "PARTS": parted(p), "SUMS": 256, "OVERLAP": _overlap(c, "finish")}  # fmt: skip


def parted(p: Problem) -> bool:
    """Whether dq and dk come in parts, to be summed over value heads or projected."""
    return p.value_heads != p.heads or p.qk_l2norm


def segments(p: Problem, span: int) -> int:
    """Segments of the longest sequence that fits, ``span`` chunks each; 1 where sequences are not cut (span 0)."""
    return -(-p.chunks // span) if span else 1


def _options(c: Configuration, warps: int, stages: int) -> dict[str, Any]:
    """How Triton compiles and launches a kernel."""
    return {"num_warps": warps, "num_stages": stages, **({"launch_pdl": True} if c.overlap else {})}


def _tile(tensor: torch.Tensor | None, width: int, block: tuple[int, int], use: bool) -> Any:
    """A descriptor of ``tensor`` as a matrix with rows of ``width`` and tiles of ``block``; the tensor if not used."""
    if tensor is None or not use or not tensor.numel():
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], list(block))


def _kind(argument: Any) -> Any:
    """What a kernel's parameter is compiled for."""
    if argument is None or isinstance(argument, torch.Tensor):
        return argument if argument is None else argument.dtype
    return argument.base.dtype, *argument.block_shape


@functools.lru_cache(maxsize=1024)
def _prepared(kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...], options: tuple[Any, ...]
              ) -> PreparedLaunch:  # fmt: skip
    """A launch with its compile-time constants in the kernel's order; ``kinds`` tells apart what is compiled apart."""
    values = dict(constants)
    ordered = {name: values.pop(name) for name in inspect.signature(kernel.fn).parameters if name in values}
    assert not values, f"{kernel.fn.__name__} has no parameters {sorted(values)}"
    return PreparedLaunch(kernel, ordered, **dict(options))


@functools.lru_cache(maxsize=4096)
def _bound(prepared: PreparedLaunch, device: torch.device, programs: int, numbers: tuple[int | float, ...]) -> Any:
    return prepared.bind(device, programs, numbers)


def launch(kernel: Any, programs: int, pointers: tuple[Any, ...], numbers: tuple[int | float, ...],
           constants: dict[str, Any], options: dict[str, Any]) -> None:  # fmt: skip
    """Launch so many programs of a kernel whose parameters are pointers and descriptors, numbers, and constants."""
    kinds = tuple(_kind(p) for p in pointers)
    prepared = _prepared(kernel, kinds, tuple(constants.items()), tuple(options.items()))
    _bound(prepared, pointers[0].device, programs, numbers)(*pointers)


def prepare(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, o: torch.Tensor) -> Prepared:
    """Launch the preparation; padding rows of ``o`` become zero."""
    slots, bt, hv = _slots(problem, tables), problem.chunk_size, problem.value_heads
    prepared = Prepared(x.q.new_empty(slots, hv, bt, bt), x.q.new_empty(slots, hv, bt, bt),
                        x.q.new_empty(slots, hv, VECTORS.value, bt, dtype=torch.float32),
                        x.q.new_empty(slots, hv, dtype=torch.float32))  # fmt: skip
    width, block = problem.heads * problem.key_width, (bt, c.prepare_block)
    limit = {"maxnreg": c.prepare_registers} if c.prepare_registers else {}
    launch(
        prepare_kernel, slots * hv,
        (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, prepared.correction, prepared.scores, prepared.vectors,
         prepared.decay, o, _tile(x.q, width, block, c.tiles), _tile(x.k, width, block, c.tiles), *_boundaries(tables)),
        (problem.scale, problem.tokens, problem.sequences, problem.chunks),
        prepare_constants(problem, c, tables is not None, x.dt_bias is not None),
        _options(c, c.prepare_warps, 1) | limit,
    )  # fmt: skip
    return prepared


def segment_states(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands,
                   prepared: Prepared) -> Prepared:  # fmt: skip
    """Launch the states at the segments' ends, where sequences are cut."""
    cuts = segments(problem, c.span) - 1
    if not cuts:
        return prepared
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.chain_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    ends = x.q.new_empty(problem.sequences, cuts, hv, kw * vw, dtype=torch.float32)
    transitions = None
    parts = triton.cdiv(vw, bv)
    if cuts > 1:
        transitions = x.q.new_empty(problem.sequences, cuts, hv, 2, bk, bk, dtype=torch.float32)
        parts += triton.cdiv(bk, bv)
    constants = segment_states_constants(problem, c, tables is not None, x.initial_state is not None)
    cu_seqlens, _, chunk_offsets = _boundaries(tables)
    launch(
        segment_states_kernel, problem.sequences * cuts * hv * parts,
        (x.q, x.k, x.v, *prepared[:4], x.initial_state, ends, transitions,
         _tile(x.k, problem.heads * kw, (bt, bk), tiles), _tile(x.v, hv * vw, (bt, bv), tiles),
         _tile(prepared.correction, bt, (bt, bt), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.span), constants,
        _options(c, c.chain_warps, constants["STAGES"]),
    )  # fmt: skip
    return prepared._replace(ends=ends, transitions=transitions)


def chain(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
          o: torch.Tensor, final_state: torch.Tensor | None) -> None:  # fmt: skip
    """Launch the forward chain: live rows of ``o``, ``final_state`` if given, and the states ``prepared`` keeps."""
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.chain_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    constants = chain_constants(problem, c, tables is not None, x.initial_state is not None, final_state is not None,
                                prepared.states is not None)  # fmt: skip
    # Where two stages let two programs share a multiprocessor, the buffer of a store would not.
    rows = c.row_stores and constants["STAGES"] > 2
    cu_seqlens, _, chunk_offsets = _boundaries(tables)
    launch(
        forward_chain_kernel, problem.sequences * constants["SEGMENTS"] * hv * triton.cdiv(vw, bv),
        (x.q, x.k, x.v, *prepared[:4], o, prepared.states, prepared.residuals, x.initial_state, final_state,
         prepared.ends, prepared.transitions,
        _tile(x.q, problem.heads * kw, (bt, bk), tiles), _tile(x.k, problem.heads * kw, (bt, bk), tiles),
        _tile(x.v, hv * vw, (bt, bv), tiles), _tile(prepared.correction, bt, (bt, bt), tiles),
        _tile(prepared.scores, bt, (bt, bt), tiles), _tile(prepared.states, bk, (bv, bk), tiles),
        _tile(prepared.residuals, bt, (bv, bt), tiles), _tile(o, hv * vw, (bt, bv), True) if rows else None,
        _tile(prepared.transitions, bk, (bk, bk), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.span), constants,
        _options(c, c.chain_warps, constants["STAGES"]),
    )  # fmt: skip


def forward(problem: Problem, tables: ChunkTables | None, x: Operands, final_state: torch.Tensor | None,
            keep: bool) -> tuple[torch.Tensor, Prepared]:  # fmt: skip
    """o like v, and what a backward needs; writes ``final_state`` if given. ``keep``: a backward will follow."""
    c = configuration(problem, x.q.device, x.q.dtype)
    o = torch.empty_like(x.v)
    prepared = prepare(problem, tables, c, x, o)
    if keep and c.keep_states:
        prepared = prepared._replace(**_state_buffers(problem, tables, c, x.q))
    prepared = segment_states(problem, tables, c, x, prepared)
    chain(problem, tables, c, x, prepared, o, final_state)
    return o, prepared


def _state_buffers(problem: Problem, tables: ChunkTables | None, c: Configuration,
                   q: torch.Tensor) -> dict[str, torch.Tensor]:  # fmt: skip
    slots, hv, width = _slots(problem, tables), problem.value_heads, problem.value_width
    rows = triton.cdiv(width, c.chain_block) * c.chain_block
    return {"states": q.new_empty(slots, hv, rows, c.key_block),
            "residuals": q.new_empty(slots, hv, width, problem.chunk_size)}  # fmt: skip


class Work(NamedTuple):
    """What a backward writes: intermediates, then gradients, dq and dk in parts (see :func:`parted`)."""

    dstates: torch.Tensor
    dends: torch.Tensor | None
    gate_sums: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dinitial_state: torch.Tensor | None


def work(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, states: torch.Tensor) -> Work:
    """The memory of a backward."""
    slots, hv, kw, vw = _slots(problem, tables), problem.value_heads, problem.key_width, problem.value_width
    cuts = segments(problem, c.reverse_span) - 1
    return Work(
        torch.empty_like(states),
        x.q.new_empty(problem.sequences, cuts, hv, kw * vw, dtype=torch.float32) if cuts else None,
        x.q.new_empty(slots, hv, 2, dtype=torch.float32) if problem.gate_in_kernel else None,
        x.q.new_empty(*x.v.shape[:3], kw), x.q.new_empty(*x.v.shape[:3], kw),
        torch.empty_like(x.v), torch.empty_like(x.g), torch.empty_like(x.beta),
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
    constants = segment_gradients_constants(problem, c, tables is not None, dfinal_state is not None)
    cu_seqlens, _, chunk_offsets = _boundaries(tables)
    launch(
        segment_gradients_kernel, problem.sequences * cuts * hv * triton.cdiv(vw, bv),
        (x.q, x.k, do, *prepared[:4], dfinal_state, w.dends,
        _tile(x.q, problem.heads * kw, (bt, bk), tiles), _tile(x.k, problem.heads * kw, (bt, bk), tiles),
        _tile(do, hv * vw, (bt, bv), tiles), _tile(prepared.correction, bt, (bt, bt), tiles),
        _tile(prepared.scores, bt, (bt, bt), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.reverse_span), constants,
        _options(c, c.reverse_warps, constants["STAGES"]),
    )  # fmt: skip


def chains(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
           do: torch.Tensor, dfinal_state: torch.Tensor | None, w: Work, *, recompute: bool) -> None:  # fmt: skip
    """Launch the backward's chains."""
    bt, bk, bv, tiles = problem.chunk_size, c.key_block, c.reverse_block, c.tiles
    hv, kw, vw = problem.value_heads, problem.key_width, problem.value_width
    constants = reverse_constants(problem, c, tables is not None, x.initial_state is not None,
                                  dfinal_state is not None, recompute)  # fmt: skip
    cu_seqlens, _, chunk_offsets = _boundaries(tables)
    programs = (1 + recompute) * problem.sequences * constants["SEGMENTS"] * hv * triton.cdiv(vw, bv)
    launch(
        backward_chains_kernel, programs,
        (x.q, x.k, x.v, do, *prepared[:6], w.dstates, w.dv, x.initial_state, dfinal_state, w.dinitial_state,
        prepared.ends, prepared.transitions, w.dends,
        _tile(x.q, problem.heads * kw, (bt, bk), tiles), _tile(x.k, problem.heads * kw, (bt, bk), tiles),
        _tile(x.v, hv * vw, (bt, bv), tiles), _tile(do, hv * vw, (bt, bv), tiles),
        _tile(prepared.correction, bt, (bt, bt), tiles), _tile(prepared.scores, bt, (bt, bt), tiles),
        _tile(prepared.states, bk, (bv, bk), tiles), _tile(prepared.residuals, bt, (bv, bt), tiles),
        _tile(w.dstates, bk, (bv, bk), tiles), _tile(w.dv, hv * vw, (bt, bv), True) if c.row_stores else None,
        _tile(prepared.transitions, bk, (bk, bk), tiles), cu_seqlens, chunk_offsets),
        (problem.tokens, problem.sequences, problem.chunks, c.reverse_span), constants,
        _options(c, c.reverse_warps, c.reverse_stages),
    )  # fmt: skip


def gradients(problem: Problem, tables: ChunkTables | None, c: Configuration, x: Operands, prepared: Prepared,
              do: torch.Tensor, w: Work) -> None:  # fmt: skip
    """Launch the parallel half. What was dw in dv becomes dv."""
    block = (c.gradient_value_block, c.gradient_key_block)
    launch(
        gradients_kernel, _slots(problem, tables) * problem.value_heads,
        (x.q, x.k, do, w.dv, x.g, x.beta, x.A_log, x.dt_bias, prepared.scores, prepared.vectors, prepared.states,
         w.dstates, prepared.residuals, w.dq, w.dk, w.dg, w.dbeta, w.gate_sums,
         _tile(prepared.states, c.key_block, block, c.state_tiles),
         _tile(w.dstates, c.key_block, block, c.state_tiles), *_boundaries(tables)),
        (problem.scale, problem.tokens, problem.sequences, problem.chunks),
        gradients_constants(problem, c, tables is not None, x.dt_bias is not None),
        _options(c, c.gradient_warps, c.gradient_stages),
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
    cu_seqlens, _, chunk_offsets = _boundaries(tables)
    launch(
        finish_kernel, programs,
        (x.q, x.k, w.dq, w.dk, dq, dk, w.gate_sums, dA_log, ddt_bias, cu_seqlens, chunk_offsets),
        (problem.rows, problem.sequences, _slots(problem, tables), row_programs),
        finish_constants(problem, c, tables is not None, x.dt_bias is not None), _options(c, 4, 1),
    )  # fmt: skip
    return dq, dk, dA_log, ddt_bias


def backward(problem: Problem, tables: ChunkTables | None, x: Operands, prepared: Prepared, do: torch.Tensor,
             dfinal_state: torch.Tensor | None) -> Gradients:  # fmt: skip
    """The gradients of every input from those of o and, where it was returned, the final state. All contiguous."""
    c = configuration(problem, x.q.device, x.q.dtype)
    recompute = prepared.states is None
    if recompute:
        prepared = prepared._replace(**_state_buffers(problem, tables, c, x.q))
    w = work(problem, tables, c, x, prepared.states)
    segment_gradients(problem, tables, c, x, prepared, do, dfinal_state, w)
    chains(problem, tables, c, x, prepared, do, dfinal_state, w, recompute=recompute)
    gradients(problem, tables, c, x, prepared, do, w)
    dq, dk, dA_log, ddt_bias = finish(problem, tables, c, x, w)
    return Gradients(dq, dk, w.dv, w.dg, w.dbeta, dA_log, ddt_bias, w.dinitial_state)
