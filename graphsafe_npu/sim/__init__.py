"""A simulated Ascend: torch_npu, NPUGraph and Triton-Ascend kernels on a machine that has no NPU and no CANN.

Everything that runs under it is simulated, whatever it says of itself: see README.md beside this file.

Requirements
------------
1. ``present()`` tells whether this process runs on simulated CANN libraries; it never loads anything.
2. ``activate()`` warns, names the device "simulated", and gives torch operators and Triton kernels on device ``npu``
   something to run on, once. The runtime of ``graphsafe.get_runtime("npu")`` calls it; without that runtime call it
   after ``import torch``.
3. On real CANN both leave the process alone: ``present()`` is false, and ``activate()`` refuses.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch

from graphsafe.errors import error

__all__ = ["NOTICE", "REPLACED", "SimulatedDeviceWarning", "activate", "library", "present"]

NOTICE = "the NPU of this process is simulated: no time, no memory figure and no rounding is that of a device"


class SimulatedDeviceWarning(UserWarning):
    """Given once by each process that runs on a simulated Ascend."""


REPLACED = {
    "CANN runtime": "device memory is host memory; a task runs when it is enqueued; a captured model is a task list",
    "legality of captures": "codes as CANN's, from rules written for the simulator",
    "torch operators": "torch's CPU kernels on the same bytes",
    "random numbers": "torch's CPU generator, seeded from the NPU generator's seed and offset",
    "Triton kernels": "what Triton-Ascend's front end made of them, run on the CPU, one program after the other",
    "last step of the Ascend compiler": "no device code is made",
}
"""What is simulated and how. The rest (torch_npu, Triton-Ascend, the Ascend compiler up to its last step) is real."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The simulated CANN library that this process has loaded, or None."""
    try:
        found = ctypes.CDLL("libascendcl.so", mode=_NO_LOAD)
    except OSError:
        return None
    return found if hasattr(found, "sim_enqueue") else None


_NO_LOAD = 4  # RTLD_NOLOAD on Linux: succeed only if it is loaded already


def present() -> bool:
    """Whether this process runs on a simulated Ascend."""
    return library() is not None


@functools.cache
def activate() -> None:
    """Install the simulated operators and the simulated launcher of Triton kernels."""
    if not present():
        raise error(
            "runtime-missing",
            "this process has no simulated CANN libraries",
            remedy="Make an environment with graphsafe_npu/sim/set_up.py FOLDER and run its Python.",
        )
    from graphsafe_npu.sim import kernels, operators, streams

    warnings.warn(NOTICE, SimulatedDeviceWarning, stacklevel=2)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    name_of = npu.get_device_name
    npu.get_device_name = lambda *args, **kwargs: f"{name_of(*args, **kwargs)} (simulated)"
    streams.install()
    operators.install()
    kernels.install()
