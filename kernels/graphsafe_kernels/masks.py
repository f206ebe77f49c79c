"""One condition for a whole tile, as part of its mask."""

import triton
import triton.language as tl

__all__ = ["spread"]


@triton.jit
def spread(condition):
    """A scalar condition, boolean when it meets a tile: the interpreter gives a scalar comparison the type of what was
    compared, and from Triton 3.9 it takes no integers for a mask. Compilers drop the choice."""
    return tl.where(condition, True, False)
