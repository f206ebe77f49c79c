"""Programmatic dependent launch: a kernel's programs are placed while the previous kernel's last ones still run.

Requirements
------------
1. A kernel launched so waits before it touches memory, in every program, sentinels included: then each launch follows
   all earlier ones, as on a plain stream.
2. Off (another device, the interpreter, a Triton without it), nothing is left of it in the kernel.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    AVAILABLE = True
except ImportError:  # Triton-Ascend and old versions: nobody may ask for it there
    gdc_launch_dependents = gdc_wait = None
    AVAILABLE = False

__all__ = ["AVAILABLE", "follow"]


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until everything before this launch is done and visible. OVERLAP 2: first let the next launch's programs
    come, 1: they come when this launch's are done, 0: the launch is an ordinary one."""
    if OVERLAP == 2:
        gdc_launch_dependents()
    if OVERLAP > 0:
        gdc_wait()
