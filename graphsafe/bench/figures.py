"""What follows from the times, launches and bytes of a result. Pure functions of plain values.

Requirements
------------
1. Each figure has one definition, written here and explained in ``docs/bench.md``; a figure whose parts are missing is
   null.
2. Ratios are formed from medians of arms that were sampled in the same interleaved rounds.
3. A break-even length is read off measured lengths only: between two of them by interpolation in log length, outside
   them as "at every length measured" or "at none".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphsafe.bench.cases import SHORT

__all__ = ["break_even", "crossing", "figures", "median"]

Result = Mapping[str, Any]


def median(result: Result, arm: str, clock: str) -> float | None:
    """p50 of ``arm`` in microseconds, by ``clock`` (device, host, wall); None where it was not timed."""
    times = result.get("times", {}).get(arm)
    return None if times is None else float(times[clock]["p50"])


def _excess(one: float | None, other: float | None) -> float | None:
    """How much more ``one`` is than ``other``, as a share of it."""
    return None if one is None or not other else one / other - 1


def apart(result: Result, one: str, other: str, clock: str) -> bool | None:
    """Whether the 95 % intervals of two arms' medians are apart: only then is their difference more than noise."""
    a, b = (result.get("times", {}).get(arm) for arm in (one, other))
    if a is None or b is None:
        return None
    return bool(a[clock]["high"] < b[clock]["low"] or b[clock]["high"] < a[clock]["low"])


def figures(result: Result) -> dict[str, Any]:
    """The derived figures of one result."""
    live, fixed = median(result, "eager-live", "wall"), median(result, "eager-fixed", "wall")
    replay, updated = median(result, "graph-replay", "wall"), median(result, "graph-update-replay", "wall")
    saved = None if live is None or updated is None else live - updated
    graph = result.get("graph")
    paid = None if graph is None else (graph["warm_up_s"] + graph["capture_s"]) * 1e6
    return {
        "speedup": None if live is None or not updated else live / updated,
        "padding_cost_graph": _excess(median(result, "graph-replay", "device"), median(result, "graph-live", "device")),
        "padding_cost_certain": apart(result, "graph-replay", "graph-live", "device"),
        "padding_cost_busy": _excess(_busy(result, "graph-replay"), _busy(result, "graph-live")),
        "padding_cost_eager": _excess(fixed, live),
        "update_us": median(result, "update", "wall"),
        "update_overhead": _excess(updated, replay),
        "update_overhead_certain": apart(result, "graph-update-replay", "graph-replay", "wall"),
        "switch_cost": _excess(median(result, "eager-on", "wall"), live),
        "switch_cost_certain": apart(result, "eager-on", "eager-live", "wall"),
        "switch_noise": _excess(median(result, "eager-off", "wall"), live),
        "switch_noise_certain": apart(result, "eager-off", "eager-live", "wall"),
        "replays_to_pay": math.ceil(paid / saved) if paid is not None and saved is not None and saved > 0 else None,
        **_floor(result),
        **_memory(result),
    }


def _floor(result: Result) -> dict[str, Any]:
    """How much of a replay's time is the floor: of the bucket's replay where there is one, else of graph-live's."""
    us = (result.get("floor") or {}).get("us")
    arm = "graph-replay" if "graph-replay" in result.get("times", {}) else "graph-live"
    time, busy = median(result, arm, "device"), _busy(result, arm)
    return {
        "floor_us": us,
        "floor_share": None if us is None or not time else us / time,
        "floor_share_busy": None if us is None or not busy else us / busy,
    }


def _busy(result: Result, arm: str) -> float | None:
    count = result.get("launches", {}).get(arm)
    return None if count is None else count["busy_us"]


def _memory(result: Result) -> dict[str, Any]:
    graph, peaks = result.get("graph"), result.get("peak_bytes", {})
    held = None if graph is None else graph["arena_bytes"] + graph["pool_bytes"]
    eager = result["live_bytes"] + peaks["eager-live"] if "eager-live" in peaks else None
    return {
        "graph_bytes": held,
        "eager_peak_bytes": eager,
        "memory_overhead_bytes": None if held is None or eager is None else held - eager,
        "arena_over_price": None if graph is None else _excess(graph["arena_bytes"], graph["price_bytes"]),
    }


def crossing(lengths: Sequence[float], advantage: Sequence[float]) -> float | None:
    """Where ``advantage`` (a ratio, 1 for a tie) last falls through 1 as the length grows; None if it never does.

    Between two measured lengths a and b, with ratios ra >= 1 > rb: ``a (b / a)^(log ra / (log ra - log rb))``.
    """
    found = None
    for (a, ra), (b, rb) in zip(
        zip(lengths, advantage, strict=True), list(zip(lengths, advantage, strict=True))[1:], strict=False
    ):
        if ra >= 1 > rb:
            share = math.log(ra) / (math.log(ra) - math.log(rb))
            found = a * (b / a) ** share
    return found


def break_even(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per series of cases that differ in their length alone: up to which length update and replay beat eager-live.

    ``verdict``: ``crossing`` with ``tokens``; ``always`` or ``never`` within the lengths measured; ``unsteady`` where
    the advantage changes sign in another way; ``noise`` where both sides' intervals overlap at every length.
    ``apart``: by length, whether both medians' intervals are.
    """
    series: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if median(result, "graph-update-replay", "wall") is not None:
            series.setdefault((result["series"], result["provider"]), []).append(result)
    found = []
    for (name, provider), members in series.items():
        members = sorted(members, key=lambda r: r["case"]["tokens"])
        lengths = [float(r["case"]["tokens"]) for r in members]
        if len(lengths) < 3:
            continue
        eager = [_known(median(r, "eager-live", "wall")) for r in members]
        graph = [_known(median(r, "graph-update-replay", "wall")) for r in members]
        advantage = [e / g for e, g in zip(eager, graph, strict=True)]
        at = crossing(lengths, advantage)
        ahead = [a >= 1 for a in advantage]
        certain = [apart(r, "graph-update-replay", "eager-live", "wall") for r in members]
        verdict = "always" if all(ahead) else "never" if not any(ahead) else "crossing" if at else "unsteady"
        if not any(certain):
            verdict, at = "noise", None
        case = json.loads(name)
        found.append(
            {
                "operator": case["operator"],
                "direction": case["direction"],
                "label": _series_label(case),
                "provider": provider,
                "series": name,
                "lengths": lengths,
                "eager_us": eager,
                "graph_us": graph,
                "apart": certain,
                "verdict": verdict,
                "tokens": at,
            }
        )
    return found


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _series_label(case: Mapping[str, Any]) -> str:
    sizes = f", {case['heads']}/{case['value_heads']}x{case['key_dim']}" if "heads" in case else ""
    packed = f", {case['sequences']} sequences" if case["sequences"] > 1 else ""
    return f"{case['operator']}{sizes}{packed}, {SHORT[case['direction']]}"
