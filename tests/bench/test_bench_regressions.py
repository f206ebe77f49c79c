"""A run against a stored one: a planted slowdown is caught, noise is not, other conditions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeClock, result

from graphsafe.bench.environment import COMPARABLE, incomparable
from graphsafe.bench.modes import MODES
from graphsafe.bench.regressions import compare_runs, read_report
from graphsafe.bench.timing import Protocol, measure
from graphsafe.errors import ArgumentError

TOLERANCE = 0.05


def report(slower: dict[str, float], seed: int, jitter: float = 0.03) -> dict[str, Any]:
    """A run of synthetic arms of 100 us, some of them ``slower`` by a share, with noise."""
    clock = FakeClock()
    arms = {m: clock.arm(m, 100 * (1 + slower.get(m, 0)), jitter=jitter, seed=seed + i) for i, m in enumerate(MODES)}
    times = measure(arms, clock, Protocol(samples=40), now=clock.now)
    taken = {mode: times[mode].summaries() for mode in MODES}
    return {"environment": {}, "results": [{**result(), "times": taken}]}


def verdicts(slower: dict[str, float], tolerance: float = TOLERANCE) -> dict[str, str]:
    rows = compare_runs(report(slower, seed=100), report({}, seed=1), tolerance)
    return {row["mode"]: row["verdict"] for row in rows}


@pytest.mark.parametrize("mode", MODES)
def test_a_planted_slowdown_of_ten_percent_is_caught(mode: str) -> None:
    assert verdicts({mode: 0.10}) == {m: "slower" if m == mode else "same" for m in MODES}


def test_noise_is_no_regression() -> None:
    for seed in range(20):
        rows = compare_runs(report({}, seed=1000 + seed), report({}, seed=seed), TOLERANCE)
        assert {row["verdict"] for row in rows} == {"same"}, f"seed {seed}"


def test_a_gain_is_called_one() -> None:
    assert verdicts({"graph-replay": -0.2})["graph-replay"] == "faster"


def test_a_growth_below_the_tolerance_is_the_same() -> None:
    assert verdicts({"eager-live": 0.10}, tolerance=0.15)["eager-live"] == "same"


def test_a_growth_inside_the_noise_is_the_same() -> None:
    rows = compare_runs(report({"eager-live": 0.06}, seed=9, jitter=0.9), report({}, seed=1, jitter=0.9), TOLERANCE)
    assert rows[0]["mode"] == "eager-live"
    assert rows[0]["verdict"] == "same"


@pytest.mark.parametrize("field", COMPARABLE)
def test_other_conditions_are_refused_by_name(field: str) -> None:
    stored = report({}, seed=1)
    stored["environment"][field] = "something else"
    with pytest.raises(ArgumentError, match=f"other conditions: {field}"):
        compare_runs(report({}, seed=2), stored, TOLERANCE)


def test_another_commit_or_date_is_what_a_comparison_is_for() -> None:
    assert incomparable({"commit": "a", "date": "x"}, {"commit": "b", "date": "y"}) == []


def test_cases_of_one_run_only_are_left_out() -> None:
    other = report({}, seed=3)
    other["results"][0]["key"] = "another case"
    assert compare_runs(report({}, seed=2), other, TOLERANCE) == []


@pytest.mark.parametrize("text", ["no json", "[1]", json.dumps({"results": []})])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "stored.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"stored\.json"):
        read_report(path)
