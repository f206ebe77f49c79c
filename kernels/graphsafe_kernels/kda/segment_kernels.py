"""Segments of a sequence side by side: KDA's state at each segment's start, and its gradient at each segment's end.

A chunk's step is affine in the state, so a segment of ``span`` chunks takes the state S at its start to ``A S + E``,
and the gradient D behind it to ``A^T D + F``. One launch runs the state alone through every segment that has a
successor:

    ends         E of each; of the first segment from the initial state, so that it is the state itself
    transitions  A and A^T of each but the first, from the columns of the identity with v = 0
    dends        F of each but the first; of the last one from the final state's gradient, so it is the gradient itself

and the chains start with the few products that are left.

Requirements
------------
1. Segments are counted from a sequence's start and hold ``span`` chunks, a number of the bucket's. What a sequence has
   no tokens for is neither written nor used.
2. A prefix's bits do not depend on what follows it.
"""

# ruff: noqa: SIM102  (a compile-time condition and a run-time one do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import locate_sequence, state_offsets
from graphsafe_kernels.kda.chain_kernels import forward_step, reverse_step


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def segment_states_kernel(
    kg, kd, v, correction, vectors, decay, initial_state, ends, transitions, kg_tiles, kd_tiles, v_tiles,
    correction_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, segment but the last, value head, and block of BV columns of V, then of the identity.

    ends ``[N, SEGMENTS - 1, HV]`` states, fp32, in the layout of ``initial_state``; transitions
    ``[N, SEGMENTS - 1, HV, 2, BK, BK]`` fp32, A and its transpose.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    PARTS: tl.constexpr = BLOCKS + ((BK + BV - 1) // BV if SEGMENTS > 2 else 0)
    pid = tl.program_id(0)
    part = pid % PARTS
    hv = pid // PARTS % HV
    task = pid // (PARTS * HV)
    segment = task % (SEGMENTS - 1)
    n = task // (SEGMENTS - 1)
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    first = segment * span
    valued = part < BLOCKS
    if (first + span) * BT >= length:  # the sequence's last segment
        return
    if SEGMENTS > 2:
        if (segment == 0) & (part >= BLOCKS):  # starts from a known state
            return
    i_v = tl.where(valued, part, 0)
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    j = (part - BLOCKS) * BV + tl.arange(0, BV)
    c = tl.arange(0, BK)
    S = tl.where((j[:, None] == c[None, :]) & (valued == 0), 1.0, tl.zeros([BV, BK], tl.float32))
    if INITIAL:
        if segment == 0:
            S = tl.load(initial_state + (n.to(tl.int64) * HV + hv) * (K * V) + at, mask=mask, other=0.0)
    for step in tl.range(first, first + span, num_stages=STAGES):
        S = forward_step(
            S, (slot + step).to(tl.int64) * HV + hv, start + step * BT, length - step * BT, hv, i_v, kg, kg, kd, v,
            correction, correction, vectors, decay, ends, ends, ends, kg_tiles, kg_tiles, kd_tiles, v_tiles,
            correction_tiles, correction_tiles, kg_tiles, kg_tiles, HV, K, V, BT, BK, BV, False, False, TILES,
            PRECISION, valued,
        )  # fmt: skip
    own = (n.to(tl.int64) * (SEGMENTS - 1) + segment) * HV + hv
    if valued:
        tl.store(ends + own * (K * V) + at, S, mask=mask)
    if SEGMENTS > 2:
        if part >= BLOCKS:
            matrix = transitions + own * (2 * BK * BK)
            inside = (j < BK)[:, None]
            tl.store(matrix + c[None, :] * BK + j[:, None], S, mask=inside)
            tl.store(matrix + BK * BK + j[:, None] * BK + c[None, :], S, mask=inside)


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def segment_gradients_kernel(
    kg, qg, kd, do, correction, scores, vectors, decay, dfinal_state, dends,
    kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles, scores_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, segment but the first, value head and block of BV columns.

    dends ``[N, SEGMENTS - 1, HV]`` states, fp32: entry s is the gradient behind segment s.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % BLOCKS
    hv = pid // BLOCKS % HV
    task = pid // (BLOCKS * HV)
    segment = task % (SEGMENTS - 1) + 1
    n = task // (SEGMENTS - 1)
    start, length, slot = locate_sequence(n, cu_seqlens, chunk_offsets, T, NT, PACKED)
    first = segment * span
    if first * BT >= length:
        return
    at, mask = state_offsets(i_v, K, V, BK, BV, V_FIRST)
    D = tl.zeros([BV, BK], tl.float32)
    if FINAL:
        if (first + span) * BT >= length:
            D = tl.load(dfinal_state + (n.to(tl.int64) * HV + hv) * (K * V) + at, mask=mask, other=0.0)
    end = tl.minimum(tl.cdiv(length, BT), first + span)
    for r in tl.range(0, end - first, num_stages=STAGES):
        c = end - 1 - r
        D = reverse_step(
            D, (slot + c).to(tl.int64) * HV + hv, start + c * BT, length - c * BT, hv, i_v, kg, qg, kd, do, correction,
            scores, vectors, decay, dends, dends, kg_tiles, qg_tiles, kd_tiles, do_tiles, correction_tiles,
            scores_tiles, kg_tiles, HV, K, V, BT, BK, BV, False, TILES, PRECISION,
        )  # fmt: skip
    own = (n.to(tl.int64) * (SEGMENTS - 1) + segment - 1) * HV + hv
    tl.store(dends + own * (K * V) + at, D, mask=mask)
