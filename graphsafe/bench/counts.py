"""Launches and bytes of one call, counted and not timed.

Requirements
------------
1. Host launches are the device operations that the host issues; device kernels are those that run. On an NVIDIA GPU
   both come from torch's profiler; elsewhere from a capture of the same call, whose graph knows its own operations.
   A range that somebody named on the device (an optimizer's step) is no operation. A profiler that saw nothing of the
   device counted nothing: that is said, and no zero is.
2. Peak bytes are what the call holds above what was held before it. Where the device's allocator keeps a peak it is
   asked; on a CPU every storage born in the call is followed until it dies. Both are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe._storage import StorageRef, key_of
from graphsafe.bench.modes import Prepared, reason_of
from graphsafe.errors import error
from graphsafe.tree import tensors

__all__ = ["Launches", "launches_of", "peak_bytes"]

_HOST_CALLS = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch", "cuGraphLaunch")
_REPLAYS = ("graph-replay", "graph-live", "graph-update-replay")
_NOT_SHOWN = ("update", "eager-off", "eager-on")
"""Arms that no table counts: a profile of each would cost a second of every case."""


@dataclass(frozen=True)
class Launches:
    """``host`` calls that reach the device, ``device`` operations that run, and their ``busy_us`` where it is known."""

    host: int
    device: int
    busy_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def launches_of(prepared: Prepared, runtime: Any) -> tuple[dict[str, Launches], dict[str, str]]:
    """Launches by arm, and the reasons of arms that could not be counted."""
    count = _profiled if runtime.device.type == "cuda" else _captured
    found: dict[str, Launches] = {}
    reasons: dict[str, str] = {}
    for name, call in prepared.arms.items():
        if name in (_REPLAYS if count is _captured else _NOT_SHOWN):
            continue
        try:
            found[name] = count(call, runtime)
        except Exception as problem:  # a body that cannot be captured or profiled; the reason is reported
            reasons[name] = reason_of(problem)
    if count is _captured and prepared.facts is not None and "graph-replay" in prepared.arms:
        device = prepared.facts.launches
        copies = found["update"].host if "update" in found else 0
        found["graph-replay"] = Launches(1, device)
        found["graph-update-replay"] = Launches(1 + copies, device + copies)
    return found, reasons


def _captured(call: Callable[[], Any], runtime: Any) -> Launches:
    with runtime.capture() as graph:
        call()
    count = int(graph.launches)
    graph.close()
    return Launches(count, count)


def _profiled(call: Callable[[], Any], runtime: Any) -> Launches:
    from torch.profiler import ProfilerActivity, profile

    call()
    runtime.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        runtime.synchronize()
    events = record.events() or []
    device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    if not device:
        raise error("unsupported", "torch's profiler saw nothing of the device")
    host = [e for e in events if e.device_type == DeviceType.CPU and e.name.startswith(_HOST_CALLS)]
    return Launches(len(host), len(device), sum(float(e.time_range.elapsed_us()) for e in device))


def peak_bytes(call: Callable[[], Any], runtime: Any) -> int:
    """Bytes that ``call`` holds at its peak, above what was held before it."""
    module = torch.get_device_module(runtime.device)
    reset = getattr(module, "reset_peak_memory_stats", None)
    if reset is None:
        return _followed(call)
    runtime.synchronize()
    reset(runtime.device)
    before = runtime.memory().held
    call()
    runtime.synchronize()
    return max(0, int(runtime.memory().peak) - int(before))


def _followed(call: Callable[[], Any]) -> int:
    follower = _Follower()
    with follower:
        result = call()
    del result
    return follower.peak


class _Follower(TorchDispatchMode):
    """Sums the storages born under it that live, after each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, StorageRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {key_of(t) for t in tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for t in tensors(result):
            key = key_of(t)
            if key not in known and key not in self._alive:
                self._alive[key] = StorageRef(t)
        self._alive = {key: ref for key, ref in self._alive.items() if ref.alive()}
        self.peak = max(self.peak, sum(ref.nbytes for ref in self._alive.values()))
        return result
