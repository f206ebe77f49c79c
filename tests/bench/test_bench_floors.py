"""The floor of a case: the least work over what a device can do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bench_fakes import FakeClock, small

from graphsafe import get_runtime
from graphsafe.bench.cases import KDA_GATE, Case
from graphsafe.bench.floors import device_peaks, floor_us, work_of

PEAKS = {"bytes_per_s": 4.3e12, "flop_per_s": 790e12}


@pytest.mark.parametrize(
    ("operator", "tokens", "sequences", "microseconds"),
    [
        # counted by hand for bf16, K = V = 128, BT 64, states on; the larger of bytes and products
        ("gdn", 4096, 1, 25),
        ("gdn", 4096, 32, 55),
        ("gdn", 8192, 1, 50),
        ("kda", 4096, 1, 40),
        ("kda", 4096, 32, 70),
        ("kda", 8192, 1, 79),
    ],
)
def test_forward_floors_of_the_delta_rules(operator: str, tokens: int, sequences: int, microseconds: float) -> None:
    heads = 16 if operator == "gdn" else 32
    options = {} if operator == "gdn" else KDA_GATE
    case = Case(operator, tokens, sequences, heads=heads, options=options)
    assert floor_us(case, PEAKS) == pytest.approx(microseconds, abs=0.8)


def test_a_convolution_moves_ten_bytes_an_element() -> None:
    case = Case("conv", 4096, direction="forward+backward", states=False)
    assert sum(w.bytes for w in work_of(case)) == 10 * 4096 * 8192
    assert floor_us(case, PEAKS) == pytest.approx(78, abs=0.5)


def test_a_backward_of_kda_takes_475_thousand_operations_a_row() -> None:
    forward, backward = work_of(Case("kda", 4096, heads=32, direction="forward+backward"))
    assert backward.flop / (4096 * 32) == pytest.approx(475e3, rel=1e-3)
    assert forward.flop < backward.flop


def test_only_live_work_counts() -> None:
    full, half = (work_of(Case("gdn", 4096, 32, fill=fill))[0] for fill in (1.0, 0.5))
    assert half.flop == full.flop / 2
    assert half.bytes == full.bytes / 2


@pytest.mark.parametrize("case", [small(), Case("tables", 256), Case("gdn-layer", 256)], ids=lambda c: c.operator)
def test_no_floor_is_stated_where_it_would_mean_nothing(case: Case) -> None:
    assert floor_us(case, PEAKS) is None
    assert floor_us(Case("gdn", 256), None) is None


def test_a_cpu_and_a_simulated_device_have_no_peaks() -> None:
    assert device_peaks(get_runtime("cpu")) is None
    assert device_peaks(SimpleNamespace(device=torch.device("meta"), simulated=True)) is None


def test_peaks_are_those_of_the_fastest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphsafe.bench import floors

    clock = FakeClock()
    clock.device = torch.device("meta")  # type: ignore[assignment]
    durations = iter([9e-3, 2e-3, 1e-3, 3e-3, 2e-3, 2e-3] * 2)

    def fastest(runtime: object, call: object) -> float:
        def timed() -> None:
            clock.at += next(durations)

        return real(runtime, timed)

    real = floors._fastest
    monkeypatch.setattr(floors, "_fastest", fastest)
    found = device_peaks(clock)
    assert found is not None
    assert found["bytes_per_s"] == pytest.approx(2 * 2**30 / 1e-3)
    assert found["flop_per_s"] == pytest.approx(2 * 8192**3 / 1e-3)
