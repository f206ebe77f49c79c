"""What follows from times and bytes: each figure by its definition."""

from __future__ import annotations

from typing import Any

import pytest
from bench_fakes import result

from graphsafe.bench.figures import break_even, crossing, figures
from graphsafe.bench.text import verdict_text

GRAPH = {
    "warm_up_s": 2e-3,
    "capture_s": 1e-3,
    "launches": 7,
    "arena_bytes": 600,
    "price_bytes": 500,
    "pool_bytes": 400,
}


def test_figures_by_their_definitions() -> None:
    times = {
        "eager-live": 100.0,
        "eager-fixed": 150.0,
        "graph-replay": 40.0,
        "graph-update-replay": 50.0,
        "graph-live": 32.0,
        "update": 12.0,
        "eager-off": 101.0,
        "eager-on": 103.0,
    }
    launches = {"graph-replay": {"busy_us": 30.0}, "graph-live": {"busy_us": 20.0}}
    one = result(times=times, graph=GRAPH, live_bytes=300, peak_bytes={"eager-live": 200}, launches=launches)
    one["floor"] = {"us": 20.0}
    found = figures(one)
    want = {
        "speedup": 2.0,
        "padding_cost_graph": 0.25,
        "padding_cost_certain": True,
        "padding_cost_busy": 0.5,
        "padding_cost_eager": 0.5,
        "update_us": 12.0,
        "update_overhead": 0.25,
        "update_overhead_certain": True,
        "switch_cost": 0.03,
        "switch_cost_certain": True,
        "switch_noise": 0.01,
        "switch_noise_certain": False,
        "replays_to_pay": 60,  # 3 ms over 50 us saved each
        "floor_us": 20.0,
        "floor_share": 0.5,
        "floor_share_busy": pytest.approx(2 / 3),
        "graph_bytes": 1000,
        "eager_peak_bytes": 500,
        "memory_overhead_bytes": 500,
        "arena_over_price": 0.2,
    }
    assert {k: pytest.approx(v) for k, v in want.items()} == found


def test_missing_parts_give_null_not_zero() -> None:
    found = figures(result(times={"eager-live": 100.0}))
    assert set(found.values()) == {None}


def test_a_graph_that_saves_nothing_never_pays() -> None:
    found = figures(result(times={"eager-live": 50.0, "graph-update-replay": 50.0}, graph=GRAPH))
    assert found["replays_to_pay"] is None


def test_a_padding_cost_within_the_intervals_is_not_certain() -> None:
    close = {"graph-replay": 41.0, "graph-live": 40.0}
    assert figures(result(times=close, spread=0.05))["padding_cost_certain"] is False
    assert figures(result(times=close, spread=0.005))["padding_cost_certain"] is True


def test_crossing_interpolates_in_log_length() -> None:
    # eager grows with the length, the graph's advantage halves with each doubling: 2, 1.41, ... meets 1 at 2x
    assert crossing([100, 400], [2.0, 0.5]) == pytest.approx(200)
    assert crossing([100, 200, 400, 800], [4.0, 2.0, 0.5, 0.25]) == pytest.approx(200 * 2**0.5)
    assert crossing([100, 200], [2.0, 1.5]) is None
    assert crossing([100, 200], [1.0, 0.5]) == pytest.approx(100)


def curve(eager: list[float], graph: list[float]) -> list[dict[str, Any]]:
    lengths = [128 * 2**i for i in range(len(eager))]
    return break_even(
        [
            result(case={"tokens": n, "sequences": 1, "fill": 1.0}, times={"eager-live": e, "graph-update-replay": g})
            for n, e, g in zip(lengths, eager, graph, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("eager", "graph", "verdict"),
    [
        ([100, 100, 100], [50, 80, 160], "crossing"),
        ([100, 100, 100], [50, 60, 70], "always"),
        ([100, 100, 100], [150, 160, 170], "never"),
        ([100, 100, 100], [150, 80, 70], "unsteady"),
    ],
)
def test_break_even_verdicts(eager: list[float], graph: list[float], verdict: str) -> None:
    (found,) = curve(eager, graph)
    assert found["verdict"] == verdict
    assert (found["tokens"] is not None) == (verdict == "crossing")
    if verdict == "crossing":
        assert 256 < found["tokens"] < 512


def test_a_verdict_says_where_it_is_noise() -> None:
    (found,) = curve([100, 100, 100], [99.5, 60, 70])
    assert found["apart"] == [False, True, True]
    assert verdict_text(found) == "the graph is ahead at every length measured (128 to 512); within the noise at 128"
    (found,) = curve([100, 100, 100], [99.5, 100, 100.5])
    assert (found["verdict"], found["tokens"]) == ("noise", None)
    assert verdict_text(found) == "within the noise at every length measured (128 to 512)"


def test_two_lengths_are_no_curve() -> None:
    assert curve([100, 100], [50, 200]) == []


def test_series_differ_in_the_length_alone() -> None:
    a = result(case={"tokens": 128}, times={"eager-live": 1.0, "graph-update-replay": 1.0})
    b = result(case={"tokens": 256}, times={"eager-live": 1.0, "graph-update-replay": 1.0})
    c = result(case={"tokens": 512, "heads": 2, "value_heads": 2})
    assert a["series"] == b["series"] != c["series"]
    assert break_even([a, b, c]) == []
