"""Tables for people and JSON for scripts.

Requirements
------------
1. A result that is wrong, refused or failed is listed first, with its reason; no time of it is shown.
2. The wall clock and the device's events have tables of their own; on a CPU, where they are one clock, only the first.
3. The JSON holds everything that was found, in plain values, and is what other runs are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphsafe.bench import text
from graphsafe.bench.modes import MODES
from graphsafe.bench.summary import GROUPS, clocks_of, findings, grouped_losses, naming, table_of, with_modes

__all__ = ["print_report", "write_json"]


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """The whole report, as strict JSON: a line for each result, so that two reports can be compared by eye."""
    head = {name: value for name, value in report.items() if name != "results"}
    results = ",\n".join(json.dumps(result, allow_nan=False) for result in report["results"])
    path.write_text(f'{json.dumps(head, allow_nan=False)[:-1]}, "results": [\n{results}\n]}}\n', encoding="utf-8")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Every table that has rows."""
    environment = report["environment"]
    console.print(
        f"graphsafe {environment['graphsafe']} ({environment['commit'] or 'installed'}) on {environment['device']}, "
        f"torch {environment['torch']}, triton {environment['triton'] or 'absent'}, "
        f"{text.samples(environment['protocol'])}",
        highlight=False,
    )
    served = ", ".join(f"{operator} by {kind}" for operator, kind in environment["served_by"].items())
    console.print(f"this project's operators here: {served}", highlight=False)
    if any(result["status"] != "ok" for result in report["results"]):
        _print(console, _lost(report["results"]))
    for clock in clocks_of(environment):
        _print(console, _times(report["results"], clock))
    for table in _summary(report["results"]):
        _print(console, table)
    if report.get("conformance"):
        _print(console, _conformance(report["conformance"], list(environment["providers"])))
    for pair, found in report.get("comparison", {}).items():
        if any(row["arms"] for row in found["rows"]):
            _print(console, _comparison(pair, found["rows"]))
    if "regressions" in report:
        _print(console, _regressions(report["regressions"]))
    console.print("In short", style="bold")
    for line in findings(report):
        console.print(f"- {line}", highlight=False, markup=False)
    if environment["note"]:
        console.print(environment["note"], style="dim")
    if not report["complete"]:
        console.print("Interrupted: run again with --resume for the rest.", style="bold yellow")


def _print(console: Console, table: Table) -> None:
    """A table under its title, which a narrow table would fold; the title alone where there are no rows."""
    title, table.title = table.title, None
    console.print(title, style="bold", highlight=False)
    if table.row_count:
        console.print(table)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Columns of text, which fold between words, and of numbers, which never break: only their headers do."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def _times(results: Sequence[Mapping[str, Any]], clock: str) -> Table:
    what = {"wall": "wall clock", "device": "device events"}[clock]
    headers = [mode.replace("-", " ") for mode in MODES]
    headers += ["speed-up"] if clock == "wall" else []
    table = _table(f"Time of a call by {what}, us: median, below it the 95th percentile", ["case"], headers)
    who = naming(results)
    for result in with_modes(results):
        cells = [_time_cell(result, mode, clock) for mode in MODES]
        cells += [text.ratio(result["figures"]["speedup"])] if clock == "wall" else []
        table.add_row(escape(who(result)), *cells)
    return table


def _lost(results: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Not measured", ["provider", "why", "cases"], [])
    for lost in grouped_losses(results):
        style = "yellow" if lost["status"] == "refused" else "bold red"
        why = f"[{style}]{lost['status']}[/]: {escape(lost['reason'])}"
        table.add_row(escape(lost["provider"]), why, escape(text.some_of(lost["labels"])))
    return table


def _time_cell(result: Mapping[str, Any], mode: str, clock: str) -> str:
    taken = result["times"].get(mode)
    if taken is None:
        return "refused" if mode in result["refusals"] else text.DASH
    return f"{text.microseconds(taken[clock]['p50'])}\n[dim]{text.microseconds(taken[clock]['p95'])}[/]"


def _summary(results: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    for group in GROUPS:
        columns, rows = table_of(group, results)
        table = _table(group.title, ["case"], columns)
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            yield table


def _conformance(rows: Sequence[Mapping[str, Any]], providers: Sequence[str]) -> Table:
    table = _table("All providers: who is right, and who is fastest (*), us", ["case"], providers)
    for row in rows:
        cells = (_provider_cell(row, name) for name in providers)
        table.add_row(escape(row["label"]), *cells)
    return table


def _provider_cell(row: Mapping[str, Any], name: str) -> str:
    found = row["providers"].get(name)
    if found is None:
        return text.DASH
    if found["status"] != "ok":
        style = "yellow" if found["status"] == "refused" else "bold red"
        return f"[{style}]{found['status']}[/]"
    lines = [f"right: {text.error_text(found['error'])}"]
    for arm, time in found["times"].items():
        best = "*" if name in row["fastest"].get(arm, ()) else ""
        lines.append(f"{arm} {text.microseconds(time)}{best}")
    return "\n".join(lines)


def _comparison(pair: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    one, other = pair.split(" against ")
    arms = sorted({arm for row in rows for arm in row["arms"]})
    table = _table(f"{pair}: who is right, who is faster, us", ["case"], arms)
    for row in rows:
        right = [name for name in (one, other) if row[name]["status"] == "ok"]
        cells = [_duel_cell(row["arms"].get(arm), one, other) for arm in arms]
        if len(right) < 2 or not cells:
            cells = [f"right: {', '.join(right) or 'neither'}", *[text.DASH] * (len(arms) - 1)][: len(arms)]
        table.add_row(escape(row["label"]), *cells)
    return table


def _duel_cell(duel: Mapping[str, Any] | None, one: str, other: str) -> str:
    if duel is None:
        return text.DASH
    times = f"{text.microseconds(duel[one])} | {text.microseconds(duel[other])}"
    return f"{times}\n{duel['faster']} {text.ratio(max(duel['ratio'], 1 / duel['ratio']))}"


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
