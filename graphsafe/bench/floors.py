"""How fast a case could be: the least work it needs, over what the device can do.

Requirements
------------
1. The least work is counted from the case alone, for its live tokens and sequences: products of the chunked form, and
   every operand and result moved once a direction. ``docs/bench.md`` writes the formulas out.
2. What the device can do is measured at the start of a run: a copy, and a product of 16-bit matrices. Both are in the
   report, so that a floor can be formed again.
3. A floor is the larger of both times, summed over the directions. There is none where it would mean nothing: on a CPU
   or a simulated device, for fp32 operands, layers, steps and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.bench.cases import Case

__all__ = ["Work", "device_peaks", "floor_us", "work_of"]

_COPY_BYTES = 2**30
_SIDE = 8192
_REPEATS = 5
_STATE_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Operations (a product of two numbers and a sum are two) and bytes of one direction."""

    flop: float
    bytes: float


def work_of(case: Case) -> list[Work]:
    """The least work of each direction of a case; empty where no floor is stated."""
    if case.dtype == "float32" or case.operator not in ("gdn", "kda", "conv"):
        return []
    make = _convolution if case.operator == "conv" else _delta_rule
    return make(case)[: 2 if case.direction == "forward+backward" else 1]


def _convolution(case: Case) -> list[Work]:
    size, elements = 2, case.live_tokens * case.width
    state = case.live_sequences * case.width * case.taps * size if case.states else 0
    flop = 2.0 * elements * case.taps
    # forward: x, y and both states; backward: x, dy, dx, and the states' gradients
    return [Work(flop, 2 * size * elements + 2 * state), Work(2 * flop, 3 * size * elements + 2 * state)]


def _delta_rule(case: Case) -> list[Work]:
    size, bt, k, v = 2, case.chunk_size, case.key_dim, case.value_dim
    vector = case.operator == "kda"
    rows = case.live_tokens * case.value_heads
    shared = case.heads / case.value_heads  # q and k, and what is formed of them alone, are one for several value heads
    scores = 1.0 if vector else shared
    gate = (k if vector else 1) * (size if case.options.get("use_gate_in_kernel") else 4)
    state = case.live_sequences * case.value_heads * k * v * _STATE_BYTES if case.states else 0
    forward = Work(
        rows * (6 * k * v + 4 * bt * v + bt * bt + 4 * bt * k * scores),
        rows * (2 * size * k * shared + 2 * size * v + gate + size) + 2 * state,
    )
    backward = Work(
        rows * (16 * k * v + 10 * bt * v + 8 * bt * k + 4 * bt * bt + (6 if vector else 2 * shared) * bt * k),
        rows * (4 * size * k * shared + 3 * size * v + size * bt + 2 * (gate + size)) + 3 * state,
    )
    return [forward, backward]


def floor_us(case: Case, peaks: Mapping[str, float] | None) -> float | None:
    """The least time of a case in microseconds on a device of these ``peaks``; None where no floor is stated."""
    work = work_of(case)
    if peaks is None or not work:
        return None
    return sum(max(w.flop / peaks["flop_per_s"], w.bytes / peaks["bytes_per_s"]) for w in work) * 1e6


def device_peaks(runtime: Any) -> dict[str, float] | None:
    """``bytes_per_s`` of a copy (read and written) and ``flop_per_s`` of a product of bf16 matrices; None on a CPU
    and on a simulated device."""
    if runtime.device.type == "cpu" or getattr(runtime, "simulated", False):
        return None
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    copy_s = _fastest(runtime, lambda: target.copy_(source))
    a, b = (torch.randn(_SIDE, _SIDE, device=runtime.device).to(torch.bfloat16) for _ in range(2))
    product_s = _fastest(runtime, lambda: a @ b)
    return {"bytes_per_s": 2 * _COPY_BYTES / copy_s, "flop_per_s": 2 * _SIDE**3 / product_s}


def _fastest(runtime: Any, call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    call()
    taken: list[float] = []
    for _ in range(_REPEATS):
        first, last = runtime.event(), runtime.event()
        first.record()
        call()
        last.record()
        runtime.synchronize()
        taken.append(float(first.elapsed_time(last)) * 1e-3)
    return min(taken)
