"""Launches as torch's profiler tells them on an NVIDIA GPU, from events that a test makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.profiler
from torch.autograd.profiler_util import FunctionEvent, Interval
from torch.profiler import DeviceType

from graphsafe.bench.counts import launches_of
from graphsafe.bench.modes import Prepared

CUDA, CPU = DeviceType.CUDA, DeviceType.CPU


def event(name: str, device: DeviceType, microseconds: float, **more: Any) -> FunctionEvent:
    made = FunctionEvent(1, name, 0, 0.0, microseconds, device_type=device, use_device="cuda", **more)
    assert isinstance(made.time_range, Interval)
    return made


STEP = [
    event("aten::mul", CPU, 90.0),
    event("cudaLaunchKernel", CPU, 4.0),
    event("cuLaunchKernelEx", CPU, 4.0),
    event("cudaMemsetAsync", CPU, 4.0),
    event("cudaDeviceSynchronize", CPU, 50.0),
    event("mul_kernel", CUDA, 7.5),
    event("triton_kernel", CUDA, 10.0, is_async=True),
    event("Memset (Device)", CUDA, 1.5),
    event("Optimizer.step#AdamW.step", CUDA, 40.0, is_user_annotation=True),
]


def count(monkeypatch: pytest.MonkeyPatch, events: list[FunctionEvent]) -> tuple[dict[str, Any], dict[str, str]]:
    class Profile:
        def __init__(self, activities: Any, acc_events: bool) -> None:
            assert acc_events

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *problem: Any) -> None:
            pass

        def events(self) -> list[FunctionEvent]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    calls: list[str] = []
    runtime = SimpleNamespace(device=torch.device("cuda"), synchronize=lambda: calls.append("synchronize"))
    made = Prepared(arms={name: lambda: calls.append("call") for name in ("eager-live", "update", "graph-replay")})
    found, reasons = launches_of(made, runtime)
    assert calls == ["call", "synchronize"] * 4  # once before it is profiled, and the profile ends after the device
    return {name: launches.as_dict() for name, launches in found.items()}, reasons


def test_operations_of_host_and_device_are_counted_and_named_ranges_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, reasons = count(monkeypatch, STEP)
    step = {"host": 3, "device": 3, "busy_us": 19.0}
    assert found == {"eager-live": step, "graph-replay": step}
    assert reasons == {}


def test_a_profiler_that_saw_no_device_is_a_reason_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    found, reasons = count(monkeypatch, [e for e in STEP if e.device_type is CPU])
    assert found == {}
    assert set(reasons) == {"eager-live", "graph-replay"}
    assert "saw nothing of the device" in reasons["graph-replay"]
