"""The protocol of every time: how samples are taken, and what is said about them.

Requirements
------------
1. Three times per sample, apart: ``device`` between two events around the call; ``host`` until the call returns;
   ``wall`` until the device has done it all. On an eager arm the device time includes its waiting for the host.
2. Before a sample the device's L2 is overwritten (where it has one) and the device is idle.
3. Arms are interleaved, forward and back: A B C C B A, so that a drift of the machine meets all of them alike.
4. Medians and order statistics are reported, never means. A median comes with the interval that holds the true one
   with at least 95 % confidence, from the binomial distribution, without an assumption about the samples'.
5. Sampling stops at whole rounds: when there are enough samples, or when the budget of seconds is spent and at least
   ``least`` samples were taken; the number taken is reported.
6. What is loaded is set apart from Python's collector while cases run: a collection, with which every capture begins
   and which can fall into a sample, would go through all of torch and the libraries, a quarter of a second each time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = [
    "Protocol",
    "Summary",
    "Times",
    "cache_flush",
    "collector_spared",
    "measure",
    "median_interval",
    "summary",
    "timed_once",
]

_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Protocol:
    """``samples`` per arm (an even number is taken; with 0 results are checked and nothing is timed or counted),
    ``warm`` untimed calls before, ``budget_s`` seconds for a case's arms together, at least ``least`` samples."""

    samples: int = 40
    warm: int = 3
    budget_s: float = 60.0
    least: int = 10


@dataclass(frozen=True)
class Summary:
    """Microseconds: median and 95th percentile, the 95 % interval of the median, the least, and how many samples."""

    p50: float
    p95: float
    low: float
    high: float
    least: float
    samples: int


@dataclass
class Times:
    """The samples of one arm in microseconds."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def summaries(self) -> dict[str, dict[str, float]]:
        return {name: asdict(summary(getattr(self, name))) for name in ("device", "host", "wall")}


def median_interval(count: int) -> tuple[int, int]:
    """Indices (low, high) into ``count`` sorted samples that enclose the true median with 95 % confidence.

    ``P(X <= low) <= 2.5 %`` for X binomial(count, 1/2); with fewer than six samples, the whole range.
    """
    total, index = 0.0, -1
    while total + math.comb(count, index + 1) / 2**count <= 0.025:
        index += 1
        total += math.comb(count, index) / 2**count
    low = max(index, 0)
    return low, count - 1 - low


def summary(samples: Sequence[float]) -> Summary:
    """The order statistics of some samples."""
    ordered = sorted(samples)
    n = len(ordered)
    low, high = median_interval(n)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    p95 = ordered[min(n - 1, math.ceil(0.95 * n) - 1)]
    return Summary(middle, p95, ordered[low], ordered[high], ordered[0], n)


def cache_flush(device: torch.device) -> Callable[[], None]:
    """What overwrites the device's L2: a fill larger than any; nothing on a CPU, whose caches no call empties."""
    if device.type == "cpu":
        return lambda: None
    buffer = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def flush() -> None:
        buffer.zero_()

    return flush


@contextlib.contextmanager
def collector_spared() -> Iterator[Callable[[], None]]:
    """Sets apart what is alive now, and again at each call of what it gives; see requirement 6."""

    def spare() -> None:
        gc.collect()
        gc.freeze()

    frozen = gc.get_freeze_count()
    spare()
    try:
        yield spare
    finally:
        if not frozen:  # else the caller's own would be given back with it
            gc.unfreeze()


def timed_once(runtime: Any, call: Callable[[], Any], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, the device included."""
    runtime.synchronize()
    begin = now()
    call()
    runtime.synchronize()
    return now() - begin


def measure(
    arms: Mapping[str, Callable[[], Any]],
    runtime: Any,
    protocol: Protocol,
    *,
    flush: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Sample all ``arms``, interleaved. ``tick`` is called after each round, for progress."""
    for call in arms.values():
        for _ in range(protocol.warm):
            call()
    runtime.synchronize()
    times = {name: Times() for name in arms}
    order = list(arms)
    started = now()
    taken = 0
    while taken < protocol.samples:
        for name in (*order, *reversed(order)):
            _sample(arms[name], times[name], runtime, flush, now)
        taken += 2
        tick()
        if taken >= protocol.least and now() - started > protocol.budget_s:
            break
    return times


def _sample(
    call: Callable[[], Any], into: Times, runtime: Any, flush: Callable[[], None], now: Callable[[], float]
) -> None:
    first, last = runtime.event(), runtime.event()
    flush()
    runtime.synchronize()
    begin = now()
    first.record()
    call()
    last.record()
    returned = now()
    runtime.synchronize()
    done = now()
    into.device.append(first.elapsed_time(last) * 1e3)
    into.host.append((returned - begin) * 1e6)
    into.wall.append((done - begin) * 1e6)
