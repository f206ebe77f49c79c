"""Providers of one operator on one scale: who is right, who is faster, where, by how much. Pure functions.

Requirements
------------
1. A time counts only where the result is right: a wrong provider has no times to win with.
2. "Faster" is said where the 95 % intervals of both medians are apart; otherwise it is a tie.
3. Eager calls are compared by wall clock, which is what a caller waits for; graphs by device events. ``graph-live`` is
   the one graph that every provider can have: captured at the batch's own size, good for one layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["COMPARED", "by_case", "compare_providers", "conformance", "tally", "worst_error"]

Result = Mapping[str, Any]
COMPARED = {"eager-live": "wall", "graph-live": "device", "graph-replay": "device"}
"""Arm -> the clock it is compared by."""


def by_case(results: Sequence[Result]) -> Iterator[dict[str, Result]]:
    """The results of each case by provider, in the order they were measured."""
    cases: dict[str, dict[str, Result]] = {}
    for result in results:
        cases.setdefault(result["key"], {})[result["provider"]] = result
    yield from cases.values()


def standing(result: Result) -> dict[str, Any]:
    """Whether a provider's result is right, and by how much: ``status``, ``reason``, ``error``."""
    return {"status": result["status"], "reason": result["reason"], "error": worst_error(result)}


def conformance(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row a case: every provider's standing and times, and for each arm the providers that none beats.

    ``fastest``: arm -> the provider with the least median and all whose intervals overlap its; empty where only one
    provider was timed.
    """
    rows = []
    for members in by_case(results):
        first = next(iter(members.values()))
        row: dict[str, Any] = {"label": first["label"], "group": first["case"]["group"], "providers": {}, "fastest": {}}
        for name, result in members.items():
            times = result.get("times", {})
            row["providers"][name] = standing(result) | {
                "times": {arm: times[arm][clock]["p50"] for arm, clock in COMPARED.items() if arm in times}
            }
        for arm, clock in COMPARED.items():
            timed = {n: r["times"][arm][clock] for n, r in members.items() if arm in r.get("times", {})}
            if len(timed) > 1:
                best = min(timed.values(), key=lambda t: t["p50"])
                row["fastest"][arm] = [n for n, t in timed.items() if t["low"] <= best["high"]]
        rows.append(row)
    return rows


def compare_providers(results: Sequence[Result], one: str, other: str) -> list[dict[str, Any]]:
    """Both providers case by case.

    ``ratio``: time of ``other`` over time of ``one``; ``faster``: a provider's name, or "tie".
    """
    rows = []
    for members in by_case(results):
        if one not in members or other not in members:
            continue
        a, b = members[one], members[other]
        row: dict[str, Any] = {"label": a["label"], "group": a["case"]["group"], "arms": {}}
        for name, result in ((one, a), (other, b)):
            row[name] = standing(result)
        for arm, clock in COMPARED.items():
            times = [r.get("times", {}).get(arm) for r in (a, b)]
            if None not in times:
                row["arms"][arm] = _duel(one, other, times[0][clock], times[1][clock]) | {"clock": clock}
        rows.append(row)
    return rows


def tally(rows: Sequence[Mapping[str, Any]], one: str, other: str) -> dict[str, Any]:
    """What a comparison comes to: ``right`` by provider, ``cases``, and for each arm the wins, the ties, the geometric
    mean of the ratios, and the cases with the largest and the least."""
    arms = {}
    for arm in COMPARED:
        duels = [(row["label"], row["arms"][arm]) for row in rows if arm in row["arms"]]
        if duels:
            ratios = {label: duel["ratio"] for label, duel in duels}
            best, worst = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
            arms[arm] = {
                "cases": len(duels),
                "wins": {name: sum(duel["faster"] == name for _, duel in duels) for name in (one, other, "tie")},
                "mean_ratio": math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
                "best": {"label": best, "ratio": ratios[best]},
                "worst": {"label": worst, "ratio": ratios[worst]},
            }
    right = {name: sum(row[name]["status"] == "ok" for row in rows) for name in (one, other)}
    return {"cases": len(rows), "right": right, "arms": arms}


def _duel(one: str, other: str, a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Any]:
    faster = "tie"
    if a["high"] < b["low"]:
        faster = one
    elif b["high"] < a["low"]:
        faster = other
    return {one: a["p50"], other: b["p50"], "ratio": b["p50"] / a["p50"], "faster": faster}


def worst_error(result: Result) -> dict[str, Any] | None:
    """The result whose error comes closest to its bound: its name, error and bound."""
    checks = result.get("checks")
    if not checks or not checks["errors"]:
        return None

    def share(name: str) -> float:
        error, bound = checks["errors"][name], checks["bounds"][name]
        if error is None:  # not finite
            return math.inf
        return error / bound if bound else (math.inf if error else 0.0)

    name = max(checks["errors"], key=share)
    return {"name": name, "error": checks["errors"][name], "bound": checks["bounds"][name]}
