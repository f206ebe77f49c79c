"""Segments of a sequence side by side: the state at each segment's start, and its gradient at each segment's end.

A chunk's step is affine in the state, so a segment of SPAN chunks takes the state S at its start to ``A S + E``, and
the gradient D behind it to ``A^T D + F``. One launch runs the state alone through every segment that has a successor:

    ends         E of each; of the first segment from the initial state, so that it is the state itself
    transitions  A and A^T of each but the first, from the columns of the identity with v = 0
    dends        F of each but the first; of the last one from the final state's gradient, so it is the gradient itself

and a chain starts with the few products that are left: ``S_2 = A_1 S_1 + E_1`` and so on.

Requirements
------------
1. Segments are counted from a sequence's start and hold SPAN chunks: a bucket's number. What a sequence has no tokens
   for is neither written nor used.
2. A sequence with one segment costs what it does without them.
"""

# ruff: noqa: SIM102  (a compile-time condition and a run-time one do not combine in a kernel)
import triton
import triton.language as tl

from graphsafe_kernels.delta.overlap_kernels import follow
from graphsafe_kernels.delta.row_kernels import IN_ORDER, locate_sequence, state_offsets
from graphsafe_kernels.gdn.step_kernels import forward_step, reverse_step
from graphsafe_kernels.masks import spread

ONE_SOURCE: tl.constexpr = IN_ORDER
"""Whether a load has one source: the Ascend compiler takes no pointer that is chosen out of two at run time."""


@triton.jit
def carry(S, at, ends, mask, matrix, row, transitions_tiles, BK: tl.constexpr, TILES: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """S^T through one segment: its own part, and S^T times the transposed matrix in rows [row, row + BK)."""
    own = tl.load(ends + at, mask=mask, other=0.0)
    if TILES:
        A = transitions_tiles.load([row, 0])
        # 10 bits of mantissa, where the steps' operands have 7 or 10
        return tl.dot(S, tl.trans(A), own, input_precision="tf32")
    i = tl.arange(0, BK)
    A = tl.load(matrix + row.to(tl.int64) * BK + i[:, None] * BK + i[None, :])
    return tl.dot(S, tl.trans(A), own, input_precision=PRECISION)


@triton.jit
def segment_state(segment, n, hv, at, mask, initial_state, ends, transitions, transitions_tiles, HV: tl.constexpr,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, INITIAL: tl.constexpr, TILES: tl.constexpr,
                  SEGMENTS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The transposed state at a segment's start, where ``mask`` says it is there."""
    own = n.to(tl.int64) * (SEGMENTS - 1) * HV + hv
    source = ends + own * (K * V)
    given = segment > 0
    if ONE_SOURCE:
        S = tl.load(source + at, mask=mask & spread(given), other=0.0)
        if INITIAL:
            state = initial_state + (n.to(tl.int64) * HV + hv) * (K * V)
            S += tl.load(state + at, mask=mask & spread(segment == 0), other=0.0)
    else:
        if INITIAL:
            if segment == 0:
                source = initial_state + (n.to(tl.int64) * HV + hv) * (K * V)
                given = segment >= 0
        S = tl.load(source + at, mask=mask & spread(given), other=0.0)
    if SEGMENTS > 2:
        for t in tl.range(1, segment, num_stages=1):
            row = ((n * (SEGMENTS - 1) + t) * HV + hv) * (2 * BK)
            S = carry(S, at, ends + (own + t * HV) * (K * V), mask, transitions, row, transitions_tiles, BK, TILES,
                      PRECISION)  # fmt: skip
    return S


@triton.jit
def segment_gradient(segment, last, n, hv, at, mask, dfinal_state, dends, transitions, transitions_tiles,
                     HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, FINAL: tl.constexpr,
                     TILES: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The transposed gradient of the state behind a segment, where ``mask`` says it is there; ``last``: the sequence's
    last segment."""
    own = n.to(tl.int64) * (SEGMENTS - 1) * HV + hv
    source = dends + (own + tl.maximum(last - 1, 0) * HV) * (K * V)
    given = segment < last
    if ONE_SOURCE:
        D = tl.load(source + at, mask=mask & spread(given), other=0.0)
        if FINAL:
            state = dfinal_state + (n.to(tl.int64) * HV + hv) * (K * V)
            D += tl.load(state + at, mask=mask & spread(segment == last), other=0.0)
    else:
        if FINAL:
            if segment == last:
                source = dfinal_state + (n.to(tl.int64) * HV + hv) * (K * V)
                given = segment >= 0
        D = tl.load(source + at, mask=mask & spread(given), other=0.0)
    if SEGMENTS > 2:
        for r in tl.range(1, last - segment, num_stages=1):
            t = last - r
            row = ((n * (SEGMENTS - 1) + t) * HV + hv) * (2 * BK) + BK
            D = carry(D, at, dends + (own + (t - 1) * HV) * (K * V), mask, transitions, row, transitions_tiles, BK,
                      TILES, PRECISION)  # fmt: skip
    return D


@triton.jit(do_not_specialize=["T", "N", "NT", "span"])
def segment_states_kernel(
    q, k, v, correction, scores, vectors, decay, initial_state, ends, transitions,
    k_tiles, v_tiles, correction_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, segment but the last, value head, and block of BV columns of V, then of the identity.

    ends ``[N, SEGMENTS - 1, HV]`` states, fp32, in the layout of ``initial_state``; transitions
    ``[N, SEGMENTS - 1, HV, 2, BK, BK]`` fp32, A and its transpose.
    """
    follow(OVERLAP)
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
            S, start + step * BT, length - step * BT, slot + step, hv, i_v, q, k, v, correction, scores, vectors, decay,
            ends, ends, ends, k_tiles, k_tiles, v_tiles, correction_tiles, correction_tiles, k_tiles, k_tiles, None, H,
            HV, K, V, BT, BK, BV, False, False, TILES, TILES, False, PRECISION, valued,
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
    q, k, do, correction, scores, vectors, decay, dfinal_state, dends,
    q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, cu_seqlens, chunk_offsets, T, N, NT, span,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, V_FIRST: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, segment but the first, value head and block of BV columns.

    dends ``[N, SEGMENTS - 1, HV]`` states, fp32: entry s is the gradient behind segment s.
    """
    follow(OVERLAP)
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
    chunks = length // BT if TILES else tl.cdiv(length, BT)
    if TILES:
        if (chunks * BT < length) & (chunks // span == segment):
            D = reverse_step(
                D, start + chunks * BT, length - chunks * BT, slot + chunks, hv, i_v, q, k, do, correction, scores,
                vectors, decay, dends, dends, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, k_tiles,
                None, H, HV, K, V, BT, BK, BV, False, True, False, False, PRECISION,
            )  # fmt: skip
    end = tl.minimum(chunks, first + span)
    for r in tl.range(0, end - first, num_stages=STAGES):
        c = end - 1 - r
        D = reverse_step(
            D, start + c * BT, length - c * BT, slot + c, hv, i_v, q, k, do, correction, scores, vectors, decay, dends,
            dends, q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, k_tiles, None, H, HV, K, V, BT, BK, BV,
            False, TILES, TILES, False, PRECISION,
        )  # fmt: skip
    own = (n.to(tl.int64) * (SEGMENTS - 1) + segment - 1) * HV + hv
    tl.store(dends + own * (K * V) + at, D, mask=mask)
