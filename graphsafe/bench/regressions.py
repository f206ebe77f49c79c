"""A run against a stored one: what became slower, told apart from noise.

Requirements
------------
1. A case, provider and mode is slower if its median grew by more than the tolerance and the 95 % intervals of both
   medians are apart; faster likewise. Anything else is the same.
2. Eager modes are compared by wall clock, which is what a caller of the eager path waits for; graph modes by the
   device's events.
3. Runs of different devices, versions, settings or protocols are not compared: the fields that differ are named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphsafe.bench.environment import incomparable
from graphsafe.bench.modes import MODES
from graphsafe.errors import error

__all__ = ["compare_runs", "read_report", "require_comparable"]


def read_report(path: Path) -> dict[str, Any]:
    """A report that this command wrote; another file is refused."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise error("argument", f"{path.name} cannot be read as a report: {problem}") from problem
    if not isinstance(report, dict) or "results" not in report or "environment" not in report:
        raise error("argument", f"{path.name} is no report of graphsafe bench")
    return report


def require_comparable(environment: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise rule ``argument`` where times taken under ``environment`` cannot be compared with a stored report's."""
    differing = incomparable(dict(environment), dict(stored["environment"]))
    if differing:
        raise error(
            "argument",
            "the stored run was taken under other conditions: " + "; ".join(differing),
            why="A difference of times would be a difference of conditions.",
            remedy="Store a run under the present conditions, and compare with that.",
        )


def compare_runs(report: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """Rows of what both runs timed: ``label``, ``provider``, ``mode``, ``before`` and ``now`` in microseconds,
    ``change`` as a share, ``verdict`` slower, faster or same. Raises as :func:`require_comparable`."""
    require_comparable(report["environment"], stored)
    before = {(r["key"], r["provider"]): r for r in stored["results"]}
    rows = []
    for now in report["results"]:
        then = before.get((now["key"], now["provider"]))
        if then is None:
            continue
        for mode in MODES:
            clock = "wall" if mode.startswith("eager") else "device"
            pair = [r.get("times", {}).get(mode) for r in (then, now)]
            if None not in pair:
                rows.append(
                    {"label": now["label"], "provider": now["provider"], "mode": mode, "clock": clock}
                    | _verdict(pair[0][clock], pair[1][clock], tolerance)
                )
    return rows


def _verdict(then: Mapping[str, float], now: Mapping[str, float], tolerance: float) -> dict[str, Any]:
    change = now["p50"] / then["p50"] - 1
    verdict = "same"
    if change > tolerance and now["low"] > then["high"]:
        verdict = "slower"
    elif change < -tolerance and now["high"] < then["low"]:
        verdict = "faster"
    return {"before": then["p50"], "now": now["p50"], "change": change, "verdict": verdict}
