"""One chunk of the serial chains of the gated delta rule: the state to the next chunk, and its gradient back.

The state is held transposed, S^T ``[BV, K]`` fp32 in registers, so that every left operand of the serial products is a
register tile that was never transposed after a product. Per chunk, in the names of ``prepare_kernels``:

    x = v - a (k S)          e = x + N (b x)          w = b e
    o = c (q S) + P w        S <- decay S + k^T (d w)

and backward, with D the gradient of the state behind the chunk:

    dw = y + N^T (b y),  y = P^T do + d (k D)
    D <- decay D + q^T (c do) - k^T (a b dw)
"""

import triton
import triton.language as tl

from graphsafe_kernels.delta.row_kernels import load_rows
from graphsafe_kernels.gdn.prepare_kernels import VECTORS

PART: tl.constexpr = tl.constexpr(4096)
"""Bytes of a tile that pass through shared memory at a time."""


@triton.jit
def halves(X, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(X, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@triton.jit
def store_part(pointer, X, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Store X ``[ROWS, COLUMNS]`` with rows STRIDE apart."""
    tl.store(pointer + tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, COLUMNS)[None, :], X)


@triton.jit
def store_half(pointer, X, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """One half of :func:`store_tile`."""
    if ROWS * COLUMNS * 2 > BYTES:
        left, right = halves(X, ROWS, COLUMNS)
        store_part(pointer, left, ROWS, COLUMNS // 2, STRIDE)
        store_part(pointer + COLUMNS // 2, right, ROWS, COLUMNS // 2, STRIDE)
    else:
        store_part(pointer, X, ROWS, COLUMNS, STRIDE)


@triton.jit
def store_tile(pointer, X, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Store X ``[ROWS, COLUMNS]`` with rows STRIDE apart, in up to four parts of at most so many bytes of 2-byte
    numbers (0: as a whole): the shared memory they pass through leaves room for a second program."""
    # two functions, since Triton 3.2 takes none that calls itself
    if BYTES > 0 and ROWS * COLUMNS * 2 > BYTES:
        left, right = halves(X, ROWS, COLUMNS)
        store_half(pointer, left, ROWS, COLUMNS // 2, STRIDE, BYTES)
        store_half(pointer + COLUMNS // 2, right, ROWS, COLUMNS // 2, STRIDE, BYTES)
    else:
        store_part(pointer, X, ROWS, COLUMNS, STRIDE)


@triton.jit
def store_state(states, tiles, X, at, i_v, ROWS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
                TILES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Store a block of V of a state in slot layout, ``[slots * HV, ROWS, BK]``, with TILES by descriptor."""
    if TILES:
        tiles.store([at.to(tl.int32) * ROWS + i_v * BV, 0], X)
    else:
        store_tile(states + at * (ROWS * BK) + i_v * (BV * BK), X, BV, BK, BK, PART if WHOLE else 0)


@triton.jit
def forward_step(
    S, row, left, slot, hv, i_v, q, k, v, correction, scores, vectors, decay, o, states, residuals,
    q_tiles, k_tiles, v_tiles, correction_tiles, scores_tiles, states_tiles, residuals_tiles, o_tiles,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    STORE: tl.constexpr, PRECISION: tl.constexpr, valued=True,
):  # fmt: skip
    """One chunk of the forward chain; returns the next state. valued: v counts, else it is taken for zero. TILES: tiles
    by descriptors; not WHOLE: token rows by masked loads all the same, because the chunk's block loads would take along
    another sequence's rows. STORE: a whole chunk is stored by descriptors too, which takes a buffer for each."""
    DT: tl.constexpr = k.dtype.element_ty
    ROWS: tl.constexpr = (V + BV - 1) // BV * BV
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    iv = i_v * BV + tl.arange(0, BV)
    at = slot.to(tl.int64) * HV + hv
    if TILES:
        # Loads in a row: neighbours share one barrier of the pipeline.
        nt = correction_tiles.load([(slot * HV + hv) * BT, 0])
        if OUTPUT:
            pt = scores_tiles.load([(slot * HV + hv) * BT, 0])
    else:
        nt = tl.load(correction + at * (BT * BT) + i[:, None] * BT + i[None, :])
        if OUTPUT:
            pt = tl.load(scores + at * (BT * BT) + i[:, None] * BT + i[None, :])
    if WHOLE:
        kt = k_tiles.load([row.to(tl.int32), hq * K])
        vt = v_tiles.load([row.to(tl.int32), hv * V + i_v * BV])
        if OUTPUT:
            qt = q_tiles.load([row.to(tl.int32), hq * K])
    else:
        kt = load_rows(k + hq * K, row, left, 0, K, H * K, BT, BK)
        vt = load_rows(v + hv * V, row, left, i_v * BV, V, HV * V, BT, BV)
        if OUTPUT:
            qt = load_rows(q + hq * K, row, left, 0, K, H * K, BT, BK)
    # Vectors are loaded where they are used: each takes 16 registers for as long as it lives.
    vec = vectors + at * (VECTORS * BT) + i
    Sb = S.to(DT)
    if SAVE and not WHOLE:
        store_state(states, states_tiles, Sb, at, i_v, ROWS, BV, BK, TILES, WHOLE)
    vT = tl.trans(vt).to(tl.float32)
    if not OUTPUT and not SAVE:
        vT = tl.where(valued, vT, 0.0)
    x = vT - tl.dot(Sb, tl.trans(kt), input_precision=PRECISION) * tl.load(vec)[None, :]
    b = tl.load(vec + BT)[None, :]
    e = tl.dot((x * b).to(DT), tl.trans(nt), x, input_precision=PRECISION)
    if SAVE and WHOLE:
        # Here, when the copies of vectors that the last chunk began have landed: a store's fence waits for them.
        store_state(states, states_tiles, Sb, at, i_v, ROWS, BV, BK, STORE, WHOLE)
    w = e * b
    if OUTPUT:
        c = tl.load(vec + 2 * BT)[None, :]
        y = tl.dot(Sb, tl.trans(qt), input_precision=PRECISION) * c
        y = tl.dot(w.to(DT), tl.trans(pt), y, input_precision=PRECISION)
        if WHOLE and STORE:
            o_tiles.store([row.to(tl.int32), hv * V + i_v * BV], tl.trans(y.to(DT)))
        else:
            mask = (i < left)[:, None] & (iv < V)[None, :]
            tl.store(o + hv * V + row * (HV * V) + i[:, None] * (HV * V) + iv[None, :], tl.trans(y).to(DT), mask=mask)
    if SAVE:
        if TILES and (STORE or not WHOLE):
            residuals_tiles.store([(slot * HV + hv) * V + i_v * BV, 0], e.to(DT))
        else:
            # a whole chunk's tiles are whole in V too
            if WHOLE:
                store_tile(residuals + at * (BT * V) + i_v * (BV * BT), e.to(DT), BV, BT, BT, PART)
            else:
                tl.store(residuals + at * (BT * V) + iv[:, None] * BT + i[None, :], e.to(DT), mask=(iv < V)[:, None])
    d = tl.load(vec + 3 * BT)[None, :]
    return tl.dot((w * d).to(DT), kt, S * tl.load(decay + at), input_precision=PRECISION)


@triton.jit
def reverse_step(
    D, row, left, slot, hv, i_v, q, k, do, correction, scores, vectors, decay, dw, dstates,
    q_tiles, k_tiles, do_tiles, correction_tiles, scores_tiles, dstates_tiles, dw_tiles,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SAVE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of the reverse chain; with SAVE stores D and dw; returns the gradient of the chunk's first state.
    TILES, WHOLE and STORE as in :func:`forward_step`."""
    DT: tl.constexpr = k.dtype.element_ty
    ROWS: tl.constexpr = (V + BV - 1) // BV * BV
    hq = hv // (HV // H)
    i = tl.arange(0, BT)
    iv = i_v * BV + tl.arange(0, BV)
    at = slot.to(tl.int64) * HV + hv
    if TILES:
        pt = scores_tiles.load([(slot * HV + hv) * BT, 0])
        nt = correction_tiles.load([(slot * HV + hv) * BT, 0])
    else:
        pt = tl.load(scores + at * (BT * BT) + i[:, None] * BT + i[None, :])
        nt = tl.load(correction + at * (BT * BT) + i[:, None] * BT + i[None, :])
    if WHOLE:
        kt = k_tiles.load([row.to(tl.int32), hq * K])
        dt = do_tiles.load([row.to(tl.int32), hv * V + i_v * BV])
        qt = q_tiles.load([row.to(tl.int32), hq * K])
    else:
        kt = load_rows(k + hq * K, row, left, 0, K, H * K, BT, BK)
        dt = load_rows(do + hv * V, row, left, i_v * BV, V, HV * V, BT, BV)
        qt = load_rows(q + hq * K, row, left, 0, K, H * K, BT, BK)
    vec = vectors + at * (VECTORS * BT) + i
    Db = D.to(DT)
    if SAVE and not WHOLE:
        store_state(dstates, dstates_tiles, Db, at, i_v, ROWS, BV, BK, TILES, WHOLE)
    dT = tl.trans(dt)
    y = tl.dot(Db, tl.trans(kt), input_precision=PRECISION) * tl.load(vec + 3 * BT)[None, :]
    y = tl.dot(dT, pt, y, input_precision=PRECISION)
    b = tl.load(vec + BT)[None, :]
    y = tl.dot((y * b).to(DT), nt, y, input_precision=PRECISION)
    if SAVE and WHOLE:
        # Here, when the copies of vectors that the last chunk began have landed: a store's fence waits for them.
        store_state(dstates, dstates_tiles, Db, at, i_v, ROWS, BV, BK, STORE, WHOLE)
    # b again rather than kept, and dw stored between the products: what lives at once just fits the registers.
    a = tl.load(vec)[None, :]
    b = tl.load(vec + BT)[None, :]
    D = tl.dot((y * (0.0 - a * b)).to(DT), kt, D * tl.load(decay + at), input_precision=PRECISION)
    if SAVE:
        if WHOLE and STORE:
            dw_tiles.store([row.to(tl.int32), hv * V + i_v * BV], tl.trans(y.to(DT)))
        else:
            mask = (i < left)[:, None] & (iv < V)[None, :]
            tl.store(dw + hv * V + row * (HV * V) + i[:, None] * (HV * V) + iv[None, :], tl.trans(y).to(DT), mask=mask)
    c = tl.load(vec + 2 * BT)[None, :]
    return tl.dot((dT.to(tl.float32) * c).to(DT), qt, D, input_precision=PRECISION)


@triton.jit
def reverse_rest(D, row, left, slot, hv, i_v, q, do, vectors, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                 V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """D ``[BV, BK]``, the gradient of a chunk's first state, with what c do lost when :func:`reverse_step` rounded it:
    nearly all of D's error where a state is forgotten within the chunk."""
    DT: tl.constexpr = q.dtype.element_ty
    # By rows and not by descriptors: once a chain, and the addresses that descriptors keep would spill.
    qt = load_rows(q + hv // (HV // H) * K, row, left, 0, K, H * K, BT, BK)
    dt = load_rows(do + hv * V, row, left, i_v * BV, V, HV * V, BT, BV)
    vec = vectors + (slot.to(tl.int64) * HV + hv) * (VECTORS * BT) + 2 * BT + tl.arange(0, BT)
    x = tl.trans(dt).to(tl.float32) * tl.load(vec)[None, :]
    return tl.dot((x - x.to(DT).to(tl.float32)).to(DT), qt, D, input_precision=PRECISION)
