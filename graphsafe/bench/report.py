"""Tables for people and JSON for scripts.

Requirements
------------
1. A result that is wrong, refused or failed is listed first, with its reason; no time of it is shown.
2. The wall clock and the device's events have tables of their own; on a CPU, where they are one clock, only the first.
3. The JSON holds everything that was found, in plain values, and is what other runs are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphsafe.bench import text
from graphsafe.bench.figures import worst_error
from graphsafe.bench.modes import MODES

__all__ = ["bits_text", "print_report", "summary_rows", "write_json"]

Row = tuple[str, ...]


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """The whole report, as strict JSON."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Every table that has rows."""
    environment = report["environment"]
    console.print(
        f"graphsafe {environment['graphsafe']} ({environment['commit'] or 'installed'}) on {environment['device']}, "
        f"torch {environment['torch']}, triton {environment['triton'] or 'absent'}, "
        f"{environment['protocol']['samples']} samples an arm",
        highlight=False,
    )
    served = ", ".join(f"{operator} by {kind}" for operator, kind in environment["served_by"].items())
    console.print(f"this project's operators here: {served}", highlight=False)
    if any(result["status"] != "ok" for result in report["results"]):
        console.print(_lost(report["results"]))
    clocks = ("wall",) if environment["runtime"] == "cpu" else ("wall", "device")
    for clock in clocks:
        console.print(_times(report["results"], clock))
    for table in _summary(report["results"]):
        console.print(table)
    if report["break_even"]:
        console.print(_break_even(report["break_even"]))
    for pair, rows in report.get("comparison", {}).items():
        console.print(_comparison(pair, rows))
    if "regressions" in report:
        console.print(_regressions(report["regressions"]))
    if environment["note"]:
        console.print(environment["note"], style="dim")
    if not report["complete"]:
        console.print("Interrupted: run again with --resume for the rest.", style="bold yellow")


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _who(results: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """A result's name: with its provider where several are in the report."""
    several = len({r["provider"] for r in results}) > 1
    return lambda r: f"{r['label']} [{r['provider']}]" if several else str(r["label"])


def _times(results: Sequence[Mapping[str, Any]], clock: str) -> Table:
    what = {"wall": "wall clock", "device": "device events"}[clock]
    headers = [mode.replace("-", " ") for mode in MODES]  # they may wrap between words
    headers += ["speed-up"] if clock == "wall" else []
    table = _table(f"Time of a call by {what}, us: median (95th percentile)", ["case"], headers)
    who = _who(results)
    for result in results:
        if result["status"] == "ok":
            cells = [_time_cell(result, mode, clock) for mode in MODES]
            cells += [text.ratio(result["figures"]["speedup"])] if clock == "wall" else []
            table.add_row(escape(who(result)), *cells)
    return table


def _lost(results: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Not measured", ["case", "why"], [])
    for result in results:
        if result["status"] != "ok":
            style = "yellow" if result["status"] == "refused" else "bold red"
            why = f"[{style}]{result['status']}[/]: {escape(result['reason'])}"
            table.add_row(escape(f"{result['label']} [{result['provider']}]"), why)
    return table


def _time_cell(result: Mapping[str, Any], mode: str, clock: str) -> str:
    taken = result["times"].get(mode)
    if taken is None:
        return "refused" if mode in result["refusals"] else text.DASH
    return f"{text.microseconds(taken[clock]['p50'])} ({text.microseconds(taken[clock]['p95'])})"


SUMMARY_COLUMNS = (
    "case",
    "slots",
    "padding",
    "by kernels",
    "update, us",
    "pays after",
    "eager launches",
    "replay launches",
    "graph holds",
    "eager peak",
    "error / bound",
    "replay",
)
_COSTS = 6
"""How many of the columns the first of the terminal's two tables takes."""


def summary_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """The derived figures of each right result, as text, in the order of ``SUMMARY_COLUMNS``."""
    who = _who(results)
    for result in results:
        if result["status"] != "ok":
            continue
        f, use, launches = result["figures"], result["utilisation"], result["launches"]
        eager, replay = launches.get("eager-live"), launches.get("graph-replay")
        yield (
            who(result),
            f"{use['live_slots']}/{use['slots_held']}",
            text.cost(f["padding_cost_graph"], f["padding_cost_certain"]),
            text.percent(f["padding_cost_busy"]),
            text.microseconds(f["update_us"]),
            text.count(f["replays_to_pay"]),
            text.count(eager and eager["host"]),
            text.DASH if replay is None else f"{text.count(replay['host'])} ({text.count(replay['device'])})",
            text.byte_size(f["graph_bytes"]),
            text.byte_size(f["eager_peak_bytes"]),
            text.error_text(worst_error(result)),
            bits_text(result),
        )


def bits_text(result: Mapping[str, Any]) -> str:
    """Whether a replay gave eager's bits on two layouts."""
    replay = (result["checks"] or {}).get("replay")
    return text.DASH if replay is None else "same bits" if replay else "DIFFERS"


def _summary(results: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    first, *rest = SUMMARY_COLUMNS
    costs = _table("What follows from the times", [first], rest[: _COSTS - 1])
    counts = _table("Launches, bytes, correctness", [first], rest[_COSTS - 1 :])
    for row in summary_rows(results):
        name, *cells = (escape(cell) for cell in row)
        costs.add_row(name, *cells[: _COSTS - 1])
        counts.add_row(name, *cells[_COSTS - 1 :])
    yield costs
    yield counts


def _break_even(curves: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Break-even length: update and replay against eager-live, wall clock", ["series", "break-even"], [])
    for curve in curves:
        table.add_row(escape(f"{curve['label']} [{curve['provider']}]"), text.verdict_text(curve))
    return table


def _comparison(pair: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    one, other = pair.split(" against ")
    arms = sorted({arm for row in rows for arm in row["arms"]})
    table = _table(f"{pair}: who is right, who is faster", ["case", one, other], arms)
    for row in rows:
        cells = []
        for arm in arms:
            duel = row["arms"].get(arm)
            if duel is None:
                cells.append(text.DASH)
            else:
                times = f"{text.microseconds(duel[one])} | {text.microseconds(duel[other])}"
                cells.append(f"{times}\n{duel['faster']} {text.ratio(max(duel['ratio'], 1 / duel['ratio']))}")
        table.add_row(escape(row["label"]), *(_standing(row[name]) for name in (one, other)), *cells)
    return table


def _standing(found: Mapping[str, Any]) -> str:
    if found["status"] == "ok":
        return escape(f"right: {text.error_text(found['error'])}")
    return escape(f"{found['status']}: {found['reason']}")


def _regressions(rows: Sequence[Mapping[str, Any]]) -> Table:
    slower = sum(r["verdict"] == "slower" for r in rows)
    faster = sum(r["verdict"] == "faster" for r in rows)
    title = f"Against the stored run: {slower} slower, {faster} faster, {len(rows) - slower - faster} the same"
    table = _table(title, ["case", "mode"], ["before, us", "now, us", "change", "verdict"])
    for row in rows:
        if row["verdict"] != "same":
            table.add_row(
                escape(f"{row['label']} [{row['provider']}]"),
                f"{row['mode']} ({row['clock']})",
                text.microseconds(row["before"]),
                text.microseconds(row["now"]),
                text.percent(row["change"]),
                row["verdict"],
                style="bold red" if row["verdict"] == "slower" else "green",
            )
    return table
