"""The serial chains of the gated delta rule: the state from chunk to chunk, and its gradient back.

What a step computes, and how the state is held: ``step_kernels``.

Requirements
------------
1. Full chunks go through one pipelined loop without masks; the rest of a sequence, whose block loads take along rows of
   the next one, is one masked step behind it. Without descriptors every step is masked.
2. A sequence without tokens hands its state through, and its state's gradient back.
3. The only rows of o or dw written are the sequence's own.
4. A sequence may be cut into segments of SPAN chunks, counted from its start, that run side by side: each starts from
   the state that ``segment_kernels`` made for it. Where a segment ends does not depend on the data.
"""

# ruff: noqa: SIM102  (a compile-time condition and a run-time one do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.row_kernels import locate_sequence, state_offsets
from graphsafe_kernels.gdn.segment_kernels import segment_gradient, segment_state
from graphsafe_kernels.gdn.step_kernels import forward_step, reverse_rest, reverse_step
from graphsafe_kernels.gdn.task_kernels import load_state_tile, store_state_tile, turns
from graphsafe_kernels.masks import spread


@triton.jit
def forward_chain(
    n, segment, hv, i_v, q, k, v, correction, scores, vectors, decay, o, states, residuals, initial_state, final_state,
    ends, transitions,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, o_tiles,
    transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The chain of one sequence, segment, value head and block of V columns."""
    # Two stages let two programs share a multiprocessor; the buffers of stores would not.
    STORE: tl.constexpr = TILES and STAGES > 2
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    base = (n.to(tl.int64) * HV + hv) * (K * V)
    first = 0
    chunks = length // BT if TILES else tl.cdiv(length, BT)
    rest = chunks * BT < length
    whole = chunks
    if SEGMENTS == 1:
        if INITIAL:
            S = load_state_tile(initial_state + base, at, mask, i_v, K, V, BK, BV, V_FIRST).to(tl.float32)
        else:
            S = tl.zeros([BV, BK], tl.float32)
    else:
        first = segment * span
        whole = tl.minimum(chunks, first + span)
        rest &= chunks // span == segment
        live = (segment == 0) | (first * BT < length)
        S = segment_state(tl.where(live, segment, 0), n, hv, at, mask & spread(live), initial_state, ends, transitions,
                          transitions_tiles, HV, K, V, BK, INITIAL, TILES, SEGMENTS, PRECISION)  # fmt: skip
    for c in tl.range(first, whole, num_stages=STAGES):
        S = forward_step(
            S, start + c * BT, length - c * BT, slot + c, hv, i_v, q, k, v, correction, scores, vectors, decay, o,
            states, residuals, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles,
            residuals_tiles, o_tiles, H, HV, K, V, BT, BK, BV, OUTPUT, SAVE, TILES, TILES, STORE, PRECISION,
        )  # fmt: skip
    if TILES:
        if rest:
            S = forward_step(
                S, start + chunks * BT, length - chunks * BT, slot + chunks, hv, i_v, q, k, v, correction, scores,
                vectors, decay, o, states, residuals, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles,
                states_tiles, residuals_tiles, o_tiles, H, HV, K, V, BT, BK, BV, OUTPUT, SAVE, True, False, STORE,
                PRECISION,
            )  # fmt: skip
    if FINAL:
        if SEGMENTS == 1:
            store_state_tile(final_state + base, S, at, mask, i_v, K, V, BK, BV, V_FIRST)
        else:
            if segment == tl.maximum(length - 1, 0) // BT // span:
                store_state_tile(final_state + base, S, at, mask, i_v, K, V, BK, BV, V_FIRST)


@triton.jit
def reverse_chain(
    n, segment, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates, dfinal_state, dinitial_state,
    dends, transitions,
    q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, dw_tiles, transitions_tiles,
    cu_seqlens, chunk_offsets, T, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse chain of one sequence, segment, value head and block of V columns."""
    # Two stages let two programs share a multiprocessor; the buffers of stores would not.
    STORE: tl.constexpr = TILES and STAGES > 2
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    base = (n.to(tl.int64) * HV + hv) * (K * V)
    chunks = length // BT if TILES else tl.cdiv(length, BT)
    rest = chunks * BT < length
    count = chunks
    end = chunks
    if SEGMENTS == 1:
        if FINAL:
            D = load_state_tile(dfinal_state + base, at, mask, i_v, K, V, BK, BV, V_FIRST).to(tl.float32)
        else:
            D = tl.zeros([BV, BK], tl.float32)
    else:
        end = tl.minimum(chunks, (segment + 1) * span)
        count = tl.maximum(end - segment * span, 0)
        rest &= chunks // span == segment
        last = tl.maximum(length - 1, 0) // BT // span
        D = segment_gradient(segment, last, n, hv, at, mask & spread(segment <= last), dfinal_state, dends, transitions,
                             transitions_tiles, HV, K, V, BK, FINAL, TILES, SEGMENTS, PRECISION)  # fmt: skip
    if TILES:
        if rest:
            D = reverse_step(
                D, start + chunks * BT, length - chunks * BT, slot + chunks, hv, i_v, q, k, do, correction, scores,
                vectors, decay, dw, dstates, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles,
                dstates_tiles, dw_tiles, H, HV, K, V, BT, BK, BV, True, True, False, STORE, PRECISION,
            )  # fmt: skip
    for r in tl.range(0, count, num_stages=STAGES):
        c = end - 1 - r
        D = reverse_step(
            D, start + c * BT, length - c * BT, slot + c, hv, i_v, q, k, do, correction, scores, vectors, decay, dw,
            dstates, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, dw_tiles, H, HV, K, V,
            BT, BK, BV, True, TILES, TILES, STORE, PRECISION,
        )  # fmt: skip
    if INITIAL:
        if segment == 0:
            if q.dtype.element_ty != tl.float32:
                if length > 0:
                    D = reverse_rest(D, start, length, slot, hv, i_v, q, do, vectors, H, HV, K, V, BT, BK, BV,
                                     PRECISION)  # fmt: skip
            store_state_tile(dinitial_state + base, D, at, mask, i_v, K, V, BK, BV, V_FIRST)


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def forward_chain_kernel(
    q, k, v, correction, scores, vectors, decay, o, states, residuals, initial_state, final_state, ends, transitions,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, o_tiles,
    transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    SAVE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr, LOOP: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and final state. One program per sequence, segment, value head and block of BV columns, blocks fastest.

    q, k ``[tokens, H, K]``; v, o ``[tokens, HV, V]``; states ``[slots, HV, V, K]``, V and K rounded up to whole blocks
    and zero there, and residuals ``[slots, HV, V, BT]`` are written with SAVE. ``*_tiles`` are descriptors of the same
    tensors, used with TILES. ends and transitions: see ``segment_kernels``; used with more SEGMENTS than one.
    """
    follow(OVERLAP)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if LOOP:
        for turn in tl.range(0, turns(pid, N * SEGMENTS * HV * BLOCKS)):
            at = pid + turn * tl.num_programs(0)
            task = at // (BLOCKS * HV)
            forward_chain(
                task // SEGMENTS, task % SEGMENTS, at // BLOCKS % HV, at % BLOCKS, q, k, v, correction, scores, vectors,
                decay, o, states, residuals, initial_state, final_state, ends, transitions, q_tiles, k_tiles, v_tiles,
                correction_tiles, scores_tiles, states_tiles, residuals_tiles, o_tiles, transitions_tiles, cu_seqlens,
                chunk_offsets, T, NT, span, H, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, True, SAVE, TILES,
                STAGES, SEGMENTS, PRECISION,
            )  # fmt: skip
    else:
        task = pid // (BLOCKS * HV)
        forward_chain(
            task // SEGMENTS, task % SEGMENTS, pid // BLOCKS % HV, pid % BLOCKS, q, k, v, correction, scores, vectors,
            decay, o, states, residuals, initial_state, final_state, ends, transitions, q_tiles, k_tiles, v_tiles,
            correction_tiles, scores_tiles, states_tiles, residuals_tiles, o_tiles, transitions_tiles, cu_seqlens,
            chunk_offsets, T, NT, span, H, HV, K, V, BT, BK, BV, PACKED, INITIAL, FINAL, V_FIRST, True, SAVE, TILES,
            STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip


@triton.jit
def backward_chains(
    program, q, k, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state, ends, transitions, dends,
    q_tiles, k_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles,
    dw_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    RECOMPUTE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, STATE_STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one program of ``backward_chains_kernel`` does, or one task."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v = program % BLOCKS
    task = program // BLOCKS
    state = 0
    if RECOMPUTE:
        state = task % 2
        task = task // 2
    hv = task % HV
    task = task // HV
    segment = task % SEGMENTS
    n = task // SEGMENTS
    if state == 0:
        reverse_chain(
            n, segment, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates, dfinal_state,
            dinitial_state, dends, transitions, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles,
            dstates_tiles, dw_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, H, HV, K, V, BT, BK,
            BV, PACKED, INITIAL, FINAL, V_FIRST, TILES, STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip
    if RECOMPUTE:
        if state == 1:
            forward_chain(
                n, segment, hv, i_v, q, k, v, correction, scores, vectors, decay, dw, states, residuals, initial_state,
                dinitial_state, ends, transitions, q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles,
                states_tiles, residuals_tiles, dw_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, NT, span, H,
                HV, K, V, BT, BK, BV, PACKED, INITIAL, False, V_FIRST, False, True, TILES, STATE_STAGES, SEGMENTS,
                PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def backward_chains_kernel(
    q, k, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
    initial_state, dfinal_state, dinitial_state, ends, transitions, dends,
    q_tiles, k_tiles, v_tiles, do_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles,
    dw_tiles, transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    RECOMPUTE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, STATE_STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, LOOP: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both chains of the backward in one launch: the reverse chain, and with RECOMPUTE the state chain beside it.

    Grid: (RECOMPUTE + 1) programs per sequence, segment, value head and block. Writes dstates (the gradient of the
    state behind each chunk, laid out like states), dw ``[tokens, HV, V]``, dinitial_state, and with RECOMPUTE the
    states before each chunk and the residuals, as :func:`forward_chain_kernel` does.
    """
    follow(OVERLAP)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    if LOOP:
        for turn in tl.range(0, turns(pid, (2 if RECOMPUTE else 1) * N * SEGMENTS * HV * BLOCKS)):
            task = pid + turn * tl.num_programs(0)
            backward_chains(
                task, q, k, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw, initial_state,
                dfinal_state, dinitial_state, ends, transitions, dends, q_tiles, k_tiles, v_tiles, do_tiles,
                correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles, dw_tiles,
                transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span, H, HV, K, V, BT, BK, BV, PACKED, INITIAL,
                FINAL, V_FIRST, RECOMPUTE, TILES, STAGES, STATE_STAGES, SEGMENTS, PRECISION,
            )  # fmt: skip
    else:
        backward_chains(
            pid, q, k, v, do, correction, scores, vectors, decay, states, residuals, dstates, dw,
            initial_state, dfinal_state, dinitial_state, ends, transitions, dends, q_tiles, k_tiles, v_tiles, do_tiles,
            correction_tiles, scores_tiles, states_tiles, residuals_tiles, dstates_tiles, dw_tiles,
            transitions_tiles, cu_seqlens, chunk_offsets, T, N, NT, span, H, HV, K, V, BT, BK, BV, PACKED, INITIAL,
            FINAL, V_FIRST, RECOMPUTE, TILES, STAGES, STATE_STAGES, SEGMENTS, PRECISION,
        )  # fmt: skip
