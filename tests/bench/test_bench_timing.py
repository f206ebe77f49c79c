"""The protocol of a time: interleaving, idle device, flushed cache, order statistics, whole rounds."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
from bench_fakes import FakeClock

from graphsafe.bench.timing import (
    Protocol,
    cache_flush,
    collector_spared,
    measure,
    median_interval,
    summary,
    timed_once,
)


def sampled(protocol: Protocol, **arms: float) -> tuple[FakeClock, dict[str, Any]]:
    clock = FakeClock()
    calls = {name: clock.arm(name, us) for name, us in arms.items()}
    return clock, measure(calls, clock, protocol, flush=clock.flush, now=clock.now)


def test_arms_are_interleaved_forward_and_back() -> None:
    clock, _ = sampled(Protocol(samples=4, warm=1), a=1, b=2, c=3)
    called = [entry for entry in clock.log if entry in "abc"]
    assert "".join(called) == "abc" + "abccba" * 2


def test_each_sample_starts_flushed_and_idle() -> None:
    clock, _ = sampled(Protocol(samples=2, warm=0), a=1)
    after_warm_up = clock.log[clock.log.index("flush") :]
    assert after_warm_up == ["flush", "synchronize", "a", "synchronize"] * 2


def test_the_three_times_are_apart() -> None:
    clock = FakeClock()
    work = clock.arm("a", 100)

    def slow_to_finish() -> None:
        clock.log.append("synchronize")
        if "a" in clock.log[-2:]:
            clock.at += 30e-6  # the device is busy after the call returned

    clock.synchronize = slow_to_finish  # type: ignore[method-assign]
    times = measure({"a": work}, clock, Protocol(samples=2, warm=0), now=clock.now)["a"]
    assert times.device == pytest.approx([100, 100])
    assert times.host == pytest.approx([100, 100])
    assert times.wall == pytest.approx([130, 130])


def test_sampling_stops_at_whole_rounds_within_the_budget() -> None:
    _, times = sampled(Protocol(samples=1000, warm=0, budget_s=1e-3, least=4), a=100, b=100)
    assert len(times["a"].wall) == len(times["b"].wall) == 6  # rounds of 400 us: the third passes the budget
    _, times = sampled(Protocol(samples=1000, warm=0, budget_s=0.0, least=4), a=100)
    assert len(times["a"].wall) == 4


def test_a_drift_of_the_machine_meets_both_arms_alike() -> None:
    clock = FakeClock()

    def drifting() -> None:
        clock.at += 100e-6 + 0.01 * clock.at

    times = measure({"a": drifting, "b": drifting}, clock, Protocol(samples=40, warm=0), now=clock.now)
    a, b = summary(times["a"].wall), summary(times["b"].wall)
    assert a.p50 / b.p50 == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("count", [6, 10, 14, 40, 101])
def test_the_median_interval_holds_95_percent(count: int) -> None:
    low, high = median_interval(count)
    assert low + high == count - 1

    def missed(index: int) -> float:
        """The probability that fewer than index + 1 samples lie below the true median, on either side."""
        return 2 * sum(math.comb(count, i) for i in range(index + 1)) / 2**count

    assert missed(low) <= 0.05 < missed(low + 1)


def test_few_samples_have_the_whole_range_as_interval() -> None:
    assert median_interval(1) == (0, 0)
    assert median_interval(4) == (0, 3)


def test_summary_is_order_statistics() -> None:
    found = summary([5.0, 1.0, 4.0, 2.0, 100.0, 3.0])
    assert (found.p50, found.p95, found.least, found.samples) == (3.5, 100.0, 1.0, 6)
    assert (found.low, found.high) == (1.0, 100.0)


def test_a_cpu_has_no_cache_to_flush() -> None:
    import torch

    cache_flush(torch.device("cpu"))()


def test_timed_once_waits_for_the_device() -> None:
    clock = FakeClock()
    assert timed_once(clock, clock.arm("a", 250), clock.now) == pytest.approx(250e-6)
    assert clock.log == ["synchronize", "a", "synchronize"]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_loaded_is_spared_by_the_collector_and_given_back(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()  # by the caller, whose it stays
    before = gc.get_freeze_count()
    loaded = [[number] for number in range(1000)]
    with collector_spared() as spare:
        first = gc.get_freeze_count()
        assert first >= before + 1000
        loaded += [[number] for number in range(1000)]
        spare()
        assert gc.get_freeze_count() >= first + 1000
    assert (gc.get_freeze_count() > 0) is frozen
    assert len(loaded) == 2000
