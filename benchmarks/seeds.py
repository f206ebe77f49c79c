"""Errors of several arms over several seeds, so that a difference of percents can be told from chance.

Requirements
------------
1. Every arm gets the same inputs, compared with fp64; a ratio is of this project's error to a peer's at one seed.
2. What is printed: per arm and result the mean error, and per peer the geometric mean of the ratios, with its standard
   error (of the mean over seeds, as a share). ``above`` names the results in which the ratio is above one by more than
   two standard errors, or is no number.
3. The input "alike family" draws beta anew for each seed, from 1.7 to 2: the rounding of a product of two numbers that
   every pair of tokens shares is an input's own, so one beta says nothing of the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

Relative = Callable[[list[Any], list[Any]], dict[str, float]]


def mean_errors(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Arm -> result -> mean over the seeds."""
    return {arm: {name: statistics.fmean(e[name] for e in runs) for name in runs[0]} for arm, runs in found.items()}


def ratios(own: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Result -> (geometric mean of own error over theirs, its standard error as a share); needs two seeds."""
    log = lambda error: math.log(max(error, 1e-30))  # noqa: E731
    logs = {name: [log(a[name]) - log(b[name]) for a, b in zip(own, theirs, strict=True)] for name in own[0]}
    return {name: (math.exp(statistics.fmean(x)), _standard_error(x)) for name, x in logs.items()}


def _standard_error(x: list[float]) -> float:
    """Of the mean; what is not finite is no number, which ``stdev`` does not take."""
    if not all(map(math.isfinite, x)):
        return math.nan
    return statistics.stdev(x) / math.sqrt(len(x)) if len(x) > 1 else math.inf


def above(found: dict[str, tuple[float, float]]) -> list[str]:
    """Results in which a ratio is above one by more than two standard errors."""
    return [name for name, (ratio, error) in found.items() if not math.log(ratio) <= 2 * error]


def compare(make: Callable[[int], Any], arms: dict[str, Callable[..., Any]], exact: Callable[[Any], list[Any]],
            relative: Relative, seeds: int, note: Callable[..., None], **what: Any) -> None:  # fmt: skip
    """Compare ``arms`` (this project's is "graphsafe") on ``make(seed)`` for each seed, and note what was found; an arm
    that fails at a seed is left out, and says so."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for seed in range(seeds):
        case = make(seed)
        reference = exact(case)
        for name in list(found):
            try:
                found[name].append(relative(case.call(arms[name], grad=True), reference))
            except Exception as e:  # a peer that cannot run a shape is a figure too
                if name == "graphsafe":
                    raise
                note(**what, arm=name, seed=seed, failed=repr(e)[:300])
                del found[name]
    for name, errors in mean_errors(found).items():
        note(**what, seeds=seeds, arm=name, mean_errors=" ".join(f"{n} {e:.2e}" for n, e in errors.items()))
    own = found.pop("graphsafe")
    for name, runs in found.items():
        r = ratios(own, runs)
        told = " ".join(f"{n} {ratio:.3f}+-{error:.3f}" for n, (ratio, error) in r.items())
        note(**what, seeds=seeds, against=name, ratio=told, above=" ".join(above(r)) or "nothing")
