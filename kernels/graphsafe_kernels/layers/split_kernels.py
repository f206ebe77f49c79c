"""The kernel that moves the columns of one matrix to several, or of several to one.

Requirements
------------
1. One launch for up to five parts. A task copies one tile of one part; its number says which.
2. Parts and whole have rows of their own, compile-time strides apart. Joined, a part that is absent is zero.
3. Offsets are 64-bit.
"""

import triton
import triton.language as tl

__all__ = ["columns_kernel"]


@triton.jit
def _tile(task, whole, part, rows, FIRST: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, HAS: tl.constexpr,
          BC: tl.constexpr, WHOLE: tl.constexpr, JOIN: tl.constexpr, ELEMENTS: tl.constexpr):
    BR: tl.constexpr = ELEMENTS // BC
    BLOCKS: tl.constexpr = (W + BC - 1) // BC
    row = (task // BLOCKS).to(tl.int64) * BR + tl.arange(0, BR)
    column = (task % BLOCKS) * BC + tl.arange(0, BC)
    keep = (row < rows)[:, None] & (column < W)[None, :]
    inside = whole + row[:, None] * WHOLE + (FIRST + column)[None, :]
    if JOIN:
        if HAS:
            v = tl.load(part + row[:, None] * ROW + column[None, :], mask=keep, other=0.0)
        else:
            v = tl.zeros([BR, BC], whole.dtype.element_ty)
        tl.store(inside, v, mask=keep)
    else:
        if HAS:
            v = tl.load(inside, mask=keep, other=0.0)
            tl.store(part + row[:, None] * ROW + column[None, :], v, mask=keep)


@triton.jit
def _tiles(rows, W: tl.constexpr, HAS: tl.constexpr, BC: tl.constexpr, JOIN: tl.constexpr, ELEMENTS: tl.constexpr):
    """The tiles of one part; none of a part that a split leaves out."""
    BR: tl.constexpr = ELEMENTS // BC
    BLOCKS: tl.constexpr = (W + BC - 1) // BC if HAS or JOIN else 0
    return (rows + (BR - 1)) // BR * BLOCKS


@triton.jit(do_not_specialize=["rows"])
def columns_kernel(whole, p0, p1, p2, p3, p4, rows,
                   F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, F4: tl.constexpr,
                   W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr, W4: tl.constexpr,
                   R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, R4: tl.constexpr,
                   H0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, H3: tl.constexpr, H4: tl.constexpr,
                   B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, B4: tl.constexpr,
                   WHOLE: tl.constexpr, JOIN: tl.constexpr, ELEMENTS: tl.constexpr):
    """Columns F .. F + W - 1 of ``whole`` from or to each part. R: a part's row stride; H: it is there; B: columns of a
    tile of ELEMENTS."""
    task = tl.program_id(0)
    n0 = _tiles(rows, W0, H0, B0, JOIN, ELEMENTS)
    n1 = n0 + _tiles(rows, W1, H1, B1, JOIN, ELEMENTS)
    n2 = n1 + _tiles(rows, W2, H2, B2, JOIN, ELEMENTS)
    n3 = n2 + _tiles(rows, W3, H3, B3, JOIN, ELEMENTS)
    if task < n0:
        _tile(task, whole, p0, rows, F0, W0, R0, H0, B0, WHOLE, JOIN, ELEMENTS)
    else:
        if task < n1:
            _tile(task - n0, whole, p1, rows, F1, W1, R1, H1, B1, WHOLE, JOIN, ELEMENTS)
        else:
            if task < n2:
                _tile(task - n1, whole, p2, rows, F2, W2, R2, H2, B2, WHOLE, JOIN, ELEMENTS)
            else:
                if task < n3:
                    _tile(task - n2, whole, p3, rows, F3, W3, R3, H3, B3, WHOLE, JOIN, ELEMENTS)
                else:
                    _tile(task - n3, whole, p4, rows, F4, W4, R4, H4, B4, WHOLE, JOIN, ELEMENTS)
