"""Providers on one scale: right first, then faster, where, and by how much."""

from __future__ import annotations

from typing import Any

import pytest
from bench_fakes import result

from graphsafe.bench.comparison import compare_providers, conformance, tally, worst_error
from graphsafe.bench.figures import figures
from graphsafe.bench.summary import GROUPS, findings, grouped_losses, table_of


def by(provider: str, times: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {**result(times=times, **changes), "provider": provider}


def test_providers_are_compared_on_right_results() -> None:
    ours = result(times={"eager-live": 100.0, "graph-live": 50.0})
    theirs = {**result(times={"eager-live": 150.0, "graph-live": 50.2}), "provider": "fla"}
    (row,) = compare_providers([ours, theirs], "graphsafe", "fla")
    assert row["arms"]["eager-live"]["faster"] == "graphsafe"
    assert row["arms"]["eager-live"]["ratio"] == pytest.approx(1.5)
    assert row["arms"]["graph-live"]["faster"] == "tie"


def test_a_wrong_provider_has_no_times_to_win_with() -> None:
    ours = result(times={"eager-live": 100.0})
    wrong = {**result(status="wrong", reason="eager-live: o differs"), "provider": "fla"}
    (row,) = compare_providers([ours, wrong], "graphsafe", "fla")
    assert row["arms"] == {}
    assert row["fla"]["status"] == "wrong"


def test_the_error_closest_to_its_bound_is_shown() -> None:
    checks = {"errors": {"o": 4e-3, "dg": 1e-2}, "bounds": {"o": 5e-3, "dg": 2e-2}}
    assert worst_error(result(checks=checks)) == {"name": "o", "error": 4e-3, "bound": 5e-3}
    nan = {"errors": {"o": 4e-3, "dg": None}, "bounds": {"o": 5e-3, "dg": 2e-2}}
    found = worst_error(result(checks=nan))
    assert found is not None
    assert found["name"] == "dg"


def test_a_tally_counts_wins_and_names_the_extremes() -> None:
    shapes = [{"tokens": 128}, {"tokens": 256}, {"tokens": 512}]
    ours = [by("graphsafe", {"graph-live": t}, case=s) for t, s in zip((50.0, 50.0, 50.0), shapes, strict=True)]
    theirs = [by("fla", {"graph-live": t}, case=s) for t, s in zip((100.0, 50.1, 25.0), shapes, strict=True)]
    found = tally(compare_providers([*ours, *theirs], "graphsafe", "fla"), "graphsafe", "fla")
    assert found["right"] == {"graphsafe": 3, "fla": 3}
    arm = found["arms"]["graph-live"]
    assert arm["wins"] == {"graphsafe": 1, "fla": 1, "tie": 1}
    assert arm["mean_ratio"] == pytest.approx(1.0, abs=0.01)
    assert arm["best"]["ratio"] == pytest.approx(2.0)
    assert "128x2" in arm["best"]["label"]
    assert arm["worst"]["ratio"] == pytest.approx(0.5)


def test_the_table_of_all_marks_whom_none_beats() -> None:
    members = [by("a", {"graph-live": 50.0}), by("b", {"graph-live": 50.2}), by("c", {"graph-live": 90.0})]
    wrong = by("d", {}, status="wrong", reason="o differs")
    (row,) = conformance([*members, wrong])
    assert row["fastest"] == {"graph-live": ["a", "b"]}
    assert row["providers"]["d"]["status"] == "wrong"
    assert row["providers"]["d"]["times"] == {}
    assert conformance(members[:1])[0]["fastest"] == {}


def test_what_was_found_is_said_in_sentences() -> None:
    ours = by("graphsafe", {"graph-live": 50.0, "graph-replay": 60.0}, figures={})
    ours["figures"] = figures(ours)
    wrong = by("fla", {}, status="wrong", reason="o differs")
    wrong["figures"] = figures(wrong)
    rows = compare_providers([ours, wrong], "graphsafe", "fla")
    compared = {"graphsafe against fla": {"rows": rows, "tally": tally(rows, "graphsafe", "fla")}}
    report: dict[str, Any] = {"results": [ours, wrong], "break_even": [], "comparison": compared}
    curve = {"label": "gdn", "provider": "graphsafe", "lengths": [64.0, 128.0, 256.0], "apart": [True] * 3,
             "verdict": "crossing", "tokens": 100.0}  # fmt: skip
    said = list(findings({**report, "break_even": [curve]}))
    assert said[-2] == "Break-even, gdn [graphsafe]: at 100 tokens."
    assert said[-1].startswith("Break-even is the length at which update and replay over an eager call")
    assert list(findings(report)) == [
        "graphsafe: 1 of 1 cases right.",
        "graphsafe: padding costs a replay +20 % at 50% fill: the bucket's over one captured at the batch's own size, "
        "medians of device time.",
        "fla: 0 of 1 cases right, 1 wrong.",
        "graphsafe against fla: right 1 and 0 of 1 cases.",
    ]


def test_what_was_not_measured_is_grouped_by_its_reason_and_errors_come_first() -> None:
    refused = [by("fla", {}, case={"tokens": n}, status="refused", reason="no backward") for n in (128, 256)]
    wrong = by("fla", {}, case={"tokens": 512}, status="wrong", reason="o differs")
    found = list(grouped_losses([*refused, wrong]))
    assert [(f["status"], len(f["labels"])) for f in found] == [("wrong", 1), ("refused", 2)]


def test_a_table_has_no_empty_row_or_column() -> None:
    one, other = (
        by("graphsafe", {"graph-live": 50.0, "graph-replay": 60.0, "update": 5.0}),
        by("fla", {"graph-live": 1.0}),
    )
    for r in (one, other):
        r["figures"] = figures(r)
    columns, rows = table_of(GROUPS[0], [one, other])
    assert columns == ("padding", "update, us")
    assert [row[0].split()[-1] for row in rows] == ["[graphsafe]"]
