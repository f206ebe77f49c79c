"""Numbers as a person reads them; the same in the terminal and on the page.

Requirements
------------
1. What is missing is a dash, never a zero.
2. Three significant digits are enough for a time; counts are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "byte_size",
    "cost",
    "count",
    "difference",
    "error_text",
    "microseconds",
    "percent",
    "ratio",
    "samples",
    "seconds",
    "some_of",
    "spread",
    "standing_text",
    "tally_lines",
    "verdict_text",
]

DASH = "-"


def microseconds(value: float | None) -> str:
    """``12.3``, ``1,230``: microseconds without their unit."""
    if value is None:
        return DASH
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """``1.25 s``; milliseconds below one second."""
    if value is None:
        return DASH
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def percent(value: float | None, *, signed: bool = True) -> str:
    """A share as percent; ``+12 %`` where it is a change."""
    if value is None:
        return DASH
    digits = 0 if abs(value) >= 0.0995 else 1
    return f"{value * 100:+.{digits}f} %" if signed else f"{value * 100:.{digits}f} %"


def samples(protocol: Mapping[str, Any]) -> str:
    """``40 samples an arm``, or that nothing was timed."""
    return f"{protocol['samples']} samples an arm" if protocol["samples"] else "checked, not timed"


def spread(values: Sequence[float]) -> str:
    """``+3.0 % to +12 %``; nothing where all are zero."""
    low, high = (percent(value) if value else "nothing" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def cost(value: float | None, certain: bool | None) -> str:
    """A cost that was measured, or "noise" where the medians' intervals overlap."""
    return percent(value) if value is None or certain else "noise"


def ratio(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def difference(value: float | None) -> str:
    """``0`` for the same bits, else ``3.1e-03``."""
    return DASH if value is None else "0" if value == 0 else f"{value:.1e}"


def byte_size(value: float | None) -> str:
    """``1.5 MiB``; whole bytes below 1 KiB."""
    if value is None:
        return DASH
    if value == 0:
        return "0 B"
    step = min(3, int(math.log(abs(value), 1024))) if abs(value) >= 1 else 0
    return f"{value:.0f} B" if step == 0 else f"{value / 1024**step:.1f} {('KiB', 'MiB', 'GiB')[step - 1]}"


def error_text(found: Mapping[str, Any] | None) -> str:
    """The error that comes closest to its bound: ``1.6e-07 / 1e-04``; a bound of 0 asks for the same bits."""
    if found is None:
        return DASH
    if found["error"] is None:
        return "not finite"
    if not found["bound"]:
        return "exact" if not found["error"] else f"{found['error']:.0f} wrong"
    return f"{found['error']:.1e} / {found['bound']:.0e}"


def verdict_text(curve: Mapping[str, Any]) -> str:
    """What a break-even curve says, and at which lengths its sides are within the noise of each other."""
    first, last = int(curve["lengths"][0]), int(curve["lengths"][-1])
    said = {
        "crossing": f"at {curve['tokens'] or 0:,.0f} tokens",
        "always": f"the graph is ahead at every length measured ({first:,} to {last:,})",
        "never": f"eager is ahead at every length measured ({first:,} to {last:,})",
        "unsteady": f"the advantage changes sign more than once between {first:,} and {last:,} tokens",
        "noise": f"within the noise at every length measured ({first:,} to {last:,})",
    }[curve["verdict"]]
    if curve["verdict"] == "noise":
        return said
    noisy = [f"{int(n):,}" for n, sure in zip(curve["lengths"], curve["apart"], strict=True) if not sure]
    return f"{said}; within the noise at {', '.join(noisy)}" if noisy else said


def standing_text(found: Mapping[str, Any]) -> str:
    """``right: 1.6e-03 / 5e-03``, or ``refused``, ``wrong``, ``failed``; the reasons have a table of their own."""
    return f"right: {error_text(found['error'])}" if found["status"] == "ok" else str(found["status"])


def some_of(labels: Sequence[str], most: int = 3) -> str:
    """The first labels, and how many more there are."""
    more = len(labels) - most
    return "; ".join(labels[:most]) + (f"; and {more} more" if more > 0 else "")


def tally_lines(pair: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What a comparison comes to, a sentence for each arm."""
    one, other = pair.split(" against ")
    right = found["right"]
    yield f"{pair}: right {right[one]} and {right[other]} of {found['cases']} cases."
    for arm, sums in found["arms"].items():
        wins = sums["wins"]
        yield (
            f"{pair}, {arm}, {sums['cases']} cases timed: {one} faster in {wins[one]}, {other} in {wins[other]}, "
            f"ties {wins['tie']}. {other} takes {ratio(sums['mean_ratio'])} {one}'s time in the geometric mean, "
            f"at most {ratio(sums['best']['ratio'])} ({sums['best']['label']}), at least "
            f"{ratio(sums['worst']['ratio'])} ({sums['worst']['label']})."
        )
