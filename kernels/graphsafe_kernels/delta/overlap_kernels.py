"""Programmatic dependent launch: a kernel is launched while the previous one's last programs still finish.

Requirements
------------
1. A kernel launched so waits before it touches memory, in every program, sentinels included: then each launch follows
   all earlier ones, as on a plain stream.
2. Off (another device, the interpreter, a Triton without it), nothing is left of it in the kernel.
"""

import inspect

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_wait

    # Triton 3.4 has it, but cannot call it
    AVAILABLE = "_semantic" in inspect.signature(gdc_wait).parameters
except ImportError:  # Triton-Ascend: nobody may ask for it there
    gdc_wait = None
    AVAILABLE = False

__all__ = ["AVAILABLE", "follow"]


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until everything before this launch is done and visible.

    Nothing here lets the next launch come earlier than at this one's end: early programs of a chain would crowd on the
    first multiprocessors that are free, and run at half speed there.
    """
    if OVERLAP:
        gdc_wait()
