"""Put Python work on a stream of the simulated device: it runs at once, or is recorded while the stream captures.

Requirements
------------
1. A job works on raw addresses. As on a device, a recorded job keeps no tensor alive.
2. An error of a job is raised where it ran: by ``submit`` when it ran at once, else by the replay, as CANN's code for a
   kernel that failed, after its traceback was printed.
3. A job is forgotten when it ran, or when the graph that recorded it is reset.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
import traceback
from collections.abc import Callable

import torch

from graphsafe_npu.sim import library

__all__ = ["current_handle", "install", "recorded", "submit"]

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_jobs: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_local = threading.local()


def _run(number: int) -> None:
    try:
        _jobs[number]()
    except BaseException as problem:  # may not cross the frames of C: submit() raises it, a replay reports it
        _local.problem = problem
        if not getattr(_local, "submitting", False):
            traceback.print_exc()
        simulated = library()
        assert simulated is not None
        simulated.sim_fail()


def _drop(number: int) -> None:
    _jobs.pop(number, None)


_run_function, _drop_function = _HostFunction(_run), _HostFunction(_drop)


def current_handle() -> int:
    """The raw handle of the current stream; asking for it also drains torch_npu's task queue, which keeps the order."""
    return int(torch.npu.current_stream().npu_stream)  # type: ignore[attr-defined]


def submit(job: Callable[[], None], handle: int) -> None:
    """Enqueue a job on the stream with this raw handle."""
    number = next(_numbers)
    _jobs[number] = job
    _local.problem, _local.submitting = None, True
    simulated = library()
    assert simulated is not None
    try:
        simulated.sim_enqueue(ctypes.c_void_p(handle), _run_function, ctypes.c_void_p(number), _drop_function)
    finally:
        _local.submitting = False
    problem, _local.problem = _local.problem, None
    if problem is not None:
        raise problem


def recorded() -> int:
    """How many jobs live graphs hold."""
    return len(_jobs)


def install() -> None:
    """Stop calling into Python when the interpreter goes away."""
    simulated = library()
    assert simulated is not None
    atexit.register(simulated.sim_close)
