"""What the figures depend on: versions, device, driver, commit, settings.

Requirements
------------
1. Enough to tell whether two runs can be compared, and nothing that names a machine, a user or a path.
2. What cannot be found out is null, never guessed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import graphsafe
from graphsafe._revision import commit
from graphsafe.bench.timing import Protocol

__all__ = ["COMPARABLE", "CPU_NOTE", "environment", "incomparable", "not_resumable"]

COMPARABLE = ("runtime", "device", "threads", "torch", "triton", "driver", "python", "interpreted", "protocol")
"""Fields that two runs share if their times are to be compared."""

CPU_NOTE = (
    "On a CPU these times show the cost of Python and of the PyTorch reference. They cannot say what a graph saves or "
    "what a kernel costs on a device: a CPU replays its record operator by operator, and launches nothing. Host "
    "launches, bytes, slot use, bit-equality and errors against fp64 are exact here."
)

SIMULATED_NOTE = (
    "This device is simulated: its times are those of the CPU that stands in for it, and say nothing about hardware. "
    "Launches, bytes asked for, slot use, bit-equality and errors against fp64 are exact."
)


def environment(runtime: Any, protocol: Protocol, distributions: Iterable[str] = ()) -> dict[str, Any]:
    """The record of this run, for JSON."""
    versions = {name: _version(name) for name in sorted({"triton", *distributions})}
    return {
        "graphsafe": graphsafe.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "runtime": runtime.name,
        "device": _device(runtime),
        "driver": runtime.environment().get("driver"),
        "host": None if runtime.device.type == "cpu" else f"{_processor()} ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": versions.pop("triton"),
        "packages": {name: version for name, version in versions.items() if version is not None},
        "threads": torch.get_num_threads() if runtime.device.type == "cpu" else None,
        "interpreted": _served_by(torch.device("cpu"))["build_tables"] == "triton",
        "served_by": _served_by(runtime.device),
        "cache_flush": "none" if runtime.device.type == "cpu" else "256 MiB written before each sample",
        "peaks": None,
        "protocol": {"samples": protocol.samples, "warm": protocol.warm, "least": protocol.least},
        "note": _note(runtime),
    }


def _note(runtime: Any) -> str | None:
    if runtime.device.type == "cpu":
        return CPU_NOTE
    return SIMULATED_NOTE if getattr(runtime, "simulated", False) else None


def incomparable(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """``field: this against that`` for each field in which two runs differ so that their times cannot be compared."""
    return _differing(one, other, COMPARABLE)


def not_resumable(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The same, for two parts of one report: the commit and the providers' libraries have to be the same too."""
    mine, theirs = one["packages"], other["packages"]
    return [*_differing(one, other, (*COMPARABLE, "commit")), *_differing(mine, theirs, mine.keys() & theirs.keys())]


def _differing(one: dict[str, Any], other: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{name}: {one.get(name)} against {other.get(name)}" for name in names if one.get(name) != other.get(name)]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _served_by(device: torch.device) -> dict[str, str]:
    """Which implementation of this project serves each operator that has providers: its kernels or its reference."""
    from graphsafe_kernels.backend import implementation
    from graphsafe_kernels.providers.service import OPERATORS

    return {operator: str(implementation(operator, device)) for operator in OPERATORS}


def _device(runtime: Any) -> str:
    if runtime.device.type == "cpu":
        return f"{_processor()} ({platform.machine()})"
    module = torch.get_device_module(runtime.device)
    return str(module.get_device_name(runtime.device))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"
