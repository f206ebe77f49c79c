"""What follows from the times, launches and bytes, as rows of text: the same in the terminal and on the page.

Requirements
------------
1. Each table has one row a right result.
2. A cell whose figure is missing holds a dash; a row or a column without a figure is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graphsafe.bench import text
from graphsafe.bench.comparison import worst_error

__all__ = [
    "GROUPS",
    "Group",
    "absent_arms",
    "clocks_of",
    "findings",
    "grouped_losses",
    "naming",
    "table_of",
    "with_modes",
]

Result = Mapping[str, Any]
Row = tuple[str, ...]


def naming(results: Sequence[Result]) -> Callable[[Result], str]:
    """A result's name: with its provider where several are in the report."""
    several = len({r["provider"] for r in results}) > 1
    return lambda r: f"{r['label']} [{r['provider']}]" if several else str(r["label"])


def clocks_of(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """The clocks that a run has a table for: on a CPU both are one, and a run that only checked has none."""
    if not environment["protocol"]["samples"]:
        return ()
    return ("wall",) if environment["runtime"] == "cpu" else ("wall", "device")


def with_modes(results: Sequence[Result]) -> list[Result]:
    """The right results for a table of modes. Where several providers are compared, those with a graph of the bucket:
    what the others have is in the table of all providers."""
    right = [r for r in results if r["status"] == "ok"]
    several = len({r["provider"] for r in results}) > 1
    return [r for r in right if not several or "graph-replay" in r["times"]]


def _costs(result: Result) -> Row:
    f = result["figures"]
    return (
        text.cost(f["padding_cost_graph"], f["padding_cost_certain"]),
        text.percent(f["padding_cost_busy"]),
        text.microseconds(f["update_us"]),
        text.cost(f["update_overhead"], f["update_overhead_certain"]),
        text.count(f["replays_to_pay"]),
    )


def _capture(result: Result) -> Row:
    graph, live = result["graph"], result["times"].get("graph-live")
    if graph is None:
        return (text.DASH,) * 6
    return (
        text.seconds(result.get("first_call_s")),
        text.seconds(graph["warm_up_s"]),
        text.seconds(graph["capture_s"]),
        text.microseconds(live and live["device"]["p50"]),
        text.byte_size(graph["arena_bytes"]),
        text.byte_size(graph["pool_bytes"]),
    )


def _floors(result: Result) -> Row:
    f = result["figures"]
    if f["floor_us"] is None:
        return (text.DASH,) * 3
    return (
        text.microseconds(f["floor_us"]),
        text.percent(f["floor_share"], signed=False),
        text.percent(f["floor_share_busy"], signed=False),
    )


def _use(result: Result) -> Row:
    use, launches = result["utilisation"], result["launches"]
    eager, replay = launches.get("eager-live"), launches.get("graph-replay") or launches.get("graph-live")
    return (
        text.percent(use["tokens"], signed=False),
        f"{use['live_slots']}/{use['slots_held']}",
        _launches(eager),
        _launches(replay),
    )


def _holdings(result: Result) -> Row:
    f = result["figures"]
    return (
        text.byte_size(f["eager_peak_bytes"]),
        text.byte_size(f["graph_bytes"]),
        text.byte_size(f["memory_overhead_bytes"]),
        text.percent(f["arena_over_price"]),
    )


def _launches(found: Mapping[str, Any] | None) -> str:
    return text.DASH if found is None else f"{text.count(found['host'])} / {text.count(found['device'])}"


def _rightness(result: Result) -> Row:
    checks, f = result["checks"] or {}, result["figures"]
    noise = text.cost(f["switch_noise"], f["switch_noise_certain"])
    replay, off = checks.get("replay"), (checks.get("same_bits") or {}).get("eager-off")
    return (
        text.error_text(worst_error(result)),
        text.difference(checks.get("live_difference")),
        _bits(replay),
        text.DASH if off is None else _bits(off) + (f", {noise}" if noise != text.DASH else ""),
        text.cost(f["switch_cost"], f["switch_cost_certain"]),
    )


def _bits(same: bool | None) -> str:
    return text.DASH if same is None else "same bits" if same else "DIFFERS"


class Group:
    """One table: its title, the columns after the case, what they mean, and how a result fills them."""

    def __init__(self, title: str, columns: Row, note: str, cells: Callable[[Result], Row]) -> None:
        self.title, self.columns, self.note, self.cells = title, columns, note, cells


GROUPS = (
    Group(
        "What a graph costs",
        ("padding", "padding by kernels", "update, us", "over replay", "pays after"),
        "Padding: a replay of the bucket over a replay captured at the batch's own size, by events and by the kernels' "
        "own times. Update: the copies alone, and how much longer update and replay take than a replay. Pays after: "
        "calls until the time saved is the time of warm-up and capture. Noise: the intervals of the medians overlap.",
        _costs,
    ),
    Group(
        "What a capture takes",
        ("first call", "warm-up", "capture", "graph-live, us", "arena", "pool"),
        "First call: eager, compiling included. Warm-up and capture: of the bucket's graph, once. Graph-live: a replay "
        "captured at the batch's own size, by device events. Arena: static operands; pool: memory born in the graph.",
        _capture,
    ),
    Group(
        "How far from the floor",
        ("floor, us", "reached", "by kernels"),
        "Floor: the least time of the live work on this device. Reached: the floor over a replay, by events, and by "
        "the kernels' own times, without the start of the graph.",
        _floors,
    ),
    Group(
        "What it uses",
        ("tokens", "slots", "eager launches", "replay launches"),
        "Tokens and slots: live, of the bucket's. Launches: calls of the host that reach the device / operations that "
        "run there.",
        _use,
    ),
    Group(
        "What it holds",
        ("eager peak", "graph holds", "overhead", "over price"),
        "Eager peak: operands, and what a call holds at most. Graph: arena and pool, as long as it lives; overhead: "
        "that less the eager peak. Over price: what the arena holds, against the price known before.",
        _holdings,
    ),
    Group(
        "How right it is",
        ("error / bound", "fixed - live", "replay", "switch off", "switch on"),
        "Error: against fp64, the one that comes closest to its bound. Fixed - live: the largest difference between "
        "eager results at the bucket's size and at the batch's own, on live rows. Replay: against eager on the same "
        "static memory, on two layouts, after the graph's memory was filled with NaN. Switch off, on: use_graph=False "
        "and True said, in eager calls, against left out; noise where the intervals of the medians overlap.",
        _rightness,
    ),
)


def table_of(group: Group, results: Sequence[Result]) -> tuple[Row, list[Row]]:
    """The columns after the case, and the rows, without rows and columns that hold no figure."""
    who = naming(results)
    rows = [(who(r), *group.cells(r)) for r in results if r["status"] == "ok"]
    rows = [row for row in rows if set(row[1:]) != {text.DASH}]
    kept = [i for i in range(len(group.columns)) if any(row[i + 1] != text.DASH for row in rows)]
    return tuple(group.columns[i] for i in kept), [(row[0], *(row[i + 1] for i in kept)) for row in rows]


def grouped_losses(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """What was not measured: ``provider``, ``status``, ``reason`` and the ``labels`` of the cases that share them."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result["status"] != "ok":
            found.setdefault((result["provider"], result["status"], result["reason"]), []).append(result["label"])
    for (provider, status, reason), labels in sorted(found.items(), key=lambda item: item[0][1] == "refused"):
        yield {"provider": provider, "status": status, "reason": reason, "labels": labels}


def absent_arms(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Arms that a right result does not have: ``provider``, ``arms``, ``reason`` and the ``labels`` that share them."""
    found: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for result in results:
        if result["status"] == "ok":
            reasons: dict[str, list[str]] = {}
            for arm, reason in result["refusals"].items():
                reasons.setdefault(reason, []).append(arm)
            for reason, arms in reasons.items():
                found.setdefault((result["provider"], tuple(arms), reason), []).append(result["label"])
    for (provider, arms_, reason), labels in found.items():
        yield {"provider": provider, "arms": ", ".join(arms_), "reason": reason, "labels": labels}


def findings(report: Mapping[str, Any]) -> Iterator[str]:
    """The report in sentences: what is right, what a graph saves and costs, who is faster, where eager catches up."""
    results = report["results"]
    for provider in dict.fromkeys(r["provider"] for r in results):
        mine = [r for r in results if r["provider"] == provider]
        states = {s: sum(r["status"] == s for r in mine) for s in ("ok", "wrong", "failed", "refused")}
        lost = ", ".join(f"{n} {s}" for s, n in states.items() if n and s != "ok")
        yield f"{provider}: {states['ok']} of {len(mine)} cases right{', ' + lost if lost else ''}."
        yield from _padding(provider, [r for r in mine if r["status"] == "ok"])
    for pair, found in report.get("comparison", {}).items():
        yield from text.tally_lines(pair, found["tally"])
    for curve in report["break_even"]:
        yield f"Break-even, {curve['label']} [{curve['provider']}]: {text.verdict_text(curve)}."
    if report["break_even"]:
        yield (
            "Break-even is the length at which update and replay over an eager call, medians of wall clock, last rises "
            "through 1, interpolated in log length between the two lengths measured beside it."
        )


def _padding(provider: str, results: Sequence[Result]) -> Iterator[str]:
    """The range of the padding cost by fill, where it is more than noise in any case."""
    fills: dict[float, list[float]] = {}
    for r in results:
        if r["case"]["fill"] < 1 and r["figures"]["padding_cost_graph"] is not None:
            cost = r["figures"]["padding_cost_graph"] if r["figures"]["padding_cost_certain"] else 0.0
            fills.setdefault(r["case"]["fill"], []).append(cost)
    parts = [f"{text.spread(found)} at {fill:.0%} fill" for fill, found in sorted(fills.items())]
    if parts:
        yield (
            f"{provider}: padding costs a replay {'; '.join(parts)}: the bucket's over one captured at the batch's own "
            "size, medians of device time."
        )
