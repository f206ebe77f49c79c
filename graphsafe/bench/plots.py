"""The plots of the page, drawn by matplotlib as SVG.

Requirements
------------
1. Every plot is one SVG element with its text as text, so that the page needs no other file and can be searched.
2. Colours tell modes apart for colour-blind readers too, markers do without colour, and a mode has the same colour in
   every plot.
3. A plot without data is not drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot, ticker

from graphsafe.bench.modes import MODES

__all__ = ["draw_plots"]

Result = Mapping[str, Any]
_COLOURS = dict(zip(MODES, ("#0072b2", "#56b4e9", "#009e73", "#d55e00"), strict=True))
_PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#000000")
_MARKERS = dict(zip(MODES, "os^D", strict=True))
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "graphsafe",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def draw_plots(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """``(title, caption, svg)`` of each plot that has data."""
    with pyplot.rc_context(_STYLE):
        results = [r for r in report["results"] if r["status"] == "ok" and r["times"]]
        for curve in report["break_even"]:
            yield _lengths(curve, results)
        yield from _providers(report)
        own = [r for r in results if r["provider"] == results[0]["provider"]]
        for group, members in _by_group(own):
            yield _modes(group, members)
        yield from _utilisation(own)
        for group, members in _by_group([r for r in own if r["graph"] is not None]):
            yield _memory(group, members)


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = file.getvalue()
    return re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", text[text.index("<svg") :], count=1)


def _by_group(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The results of one provider by the group of their cases: a plot each, so that none is taller than a page."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["case"]["group"], []).append(result)
    yield from groups.items()


def _providers(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Every provider of a group's cases on one scale, by the graph that each can have."""
    names = list(report["environment"]["providers"])
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in report.get("conformance", ()):
        if any("graph-live" in found["times"] for found in row["providers"].values()):
            groups.setdefault(row["group"], []).append(row)
    for group, rows in groups.items():
        figure, axes = pyplot.subplots(figsize=(8.6, 0.9 + 0.34 * len(rows)))
        for number, name in enumerate(names):
            points = [
                (row["providers"][name]["times"]["graph-live"], place)
                for place, row in enumerate(rows)
                if "graph-live" in row["providers"].get(name, {}).get("times", {})
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, ls="", marker="os^Dvp"[number % 6], color=_PALETTE[number % 6], ms=6, label=name)
        axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
        axes.set(xscale="log", xlabel="microseconds, device events, median")
        _plain_numbers(axes.xaxis)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.legend(frameon=False, ncols=len(names), loc="lower center", bbox_to_anchor=(0.4, 1.0))
        caption = "graph-live: a graph captured at the batch's own size, which every provider can have; left is faster."
        yield f"Providers side by side: {group}", caption, _svg(figure)


def _lengths(curve: Mapping[str, Any], results: Sequence[Result]) -> tuple[str, str, str]:
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
    members = [r for r in results if r["provider"] == curve["provider"] and _belongs(r, curve)]
    members.sort(key=lambda r: r["case"]["tokens"])
    for mode in MODES:
        points = [(r["case"]["tokens"], r["times"][mode]["wall"]) for r in members if mode in r["times"]]
        if not points:
            continue
        lengths = [t for t, _ in points]
        colour = _COLOURS[mode]
        axes.plot(lengths, [w["p50"] for _, w in points], marker=_MARKERS[mode], color=colour, label=mode, ms=4)
        low, high = ([w[end] for _, w in points] for end in ("low", "high"))
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds, wall clock, median")
    axes.set_xticks(curve["lengths"], [f"{int(n):,}" for n in curve["lengths"]])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    _plain_numbers(axes.yaxis)
    if curve["verdict"] == "crossing":
        axes.axvline(curve["tokens"], color="0.4", ls="--", lw=1)
        axes.annotate(
            f"break-even {curve['tokens']:,.0f}",
            (curve["tokens"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color="0.3",
        )
    axes.legend(frameon=False)
    caption = "Median wall clock by length; the bands are the 95 % intervals of the medians."
    return f"Latency against length: {curve['label']} [{curve['provider']}]", caption, _svg(figure)


def _plain_numbers(axis: Any) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, written out."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _belongs(result: Result, curve: Mapping[str, Any]) -> bool:
    return float(result["case"]["tokens"]) in curve["lengths"] and bool(result["series"] == curve["series"])


def _modes(group: str, results: Sequence[Result]) -> tuple[str, str, str]:
    figure, axes = pyplot.subplots(figsize=(8.6, 0.9 + 0.42 * len(results)))
    for row, result in enumerate(results):
        for mode in MODES:
            if mode in result["times"]:
                wall = result["times"][mode]["wall"]
                axes.plot([wall["p50"], wall["p95"]], [row, row], color=_COLOURS[mode], lw=1.2, alpha=0.6)
                axes.plot(wall["p50"], row, marker=_MARKERS[mode], color=_COLOURS[mode], ms=6, ls="")
    axes.set_yticks(range(len(results)), [r["label"] for r in results])
    axes.set(xscale="log", xlabel="microseconds, wall clock: mark at the median, line to the 95th percentile")
    _plain_numbers(axes.xaxis)
    axes.set_ylim(len(results) - 0.4, -0.6)
    handles = [axes.plot([], [], marker=_MARKERS[m], color=_COLOURS[m], ls="", label=m)[0] for m in MODES]
    axes.legend(handles=handles, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    caption = "Each row is one case; all its arms were sampled in the same interleaved rounds."
    return f"The four modes: {group}", caption, _svg(figure)


def _utilisation(results: Sequence[Result]) -> Iterator[tuple[str, str, str]]:
    points = [r for r in results if r["figures"]["padding_cost_graph"] is not None]
    if not points:
        return
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
    operators = sorted({r["case"]["operator"] for r in points})
    for number, operator in enumerate(operators):
        for certain in (True, False):
            mine = [
                (100 * r["utilisation"]["slots"], 100 * r["figures"]["padding_cost_graph"])
                for r in points
                if r["case"]["operator"] == operator and bool(r["figures"]["padding_cost_certain"]) == certain
            ]
            colour = f"C{number}"
            axes.plot(
                [x for x, _ in mine],
                [y for _, y in mine],
                ls="",
                marker="os^Dvphd"[number % 8],
                color=colour,
                mfc=colour if certain else "none",
                label=operator if certain else None,
            )
    axes.axhline(0, color="0.4", lw=1)
    axes.set(xlabel="slots used, percent", ylabel="padding cost of a replay, percent")
    axes.legend(frameon=False)
    caption = (
        "How much longer a replay of the bucket takes than a replay captured at the batch's own size. Hollow: within "
        "the noise, the intervals of both medians overlap."
    )
    yield "Padding cost against utilisation", caption, _svg(figure)


def _memory(group: str, shown: Sequence[Result]) -> tuple[str, str, str]:
    figure, axes = pyplot.subplots(figsize=(8.6, 0.9 + 0.42 * len(shown)))
    scale = 2**20
    rows = range(len(shown))
    arena = [r["graph"]["arena_bytes"] / scale for r in shown]
    pool = [r["graph"]["pool_bytes"] / scale for r in shown]
    axes.barh(rows, arena, height=0.36, color="#009e73", label="arena")
    axes.barh(rows, pool, left=arena, height=0.36, color="#a6d854", label="graph pool")
    eager = [(r["figures"]["eager_peak_bytes"] or 0) / scale for r in shown]
    axes.barh([row + 0.38 for row in rows], eager, height=0.3, color="#0072b2", label="eager-live at its peak")
    price = [r["graph"]["price_bytes"] / scale for r in shown]
    axes.plot(price, rows, marker="|", ms=12, mew=2, color="black", ls="", label="price of the arena")
    axes.set_yticks([row + 0.19 for row in rows], [r["label"] for r in shown])
    axes.set(xlabel="MiB")
    axes.set_ylim(len(shown) - 0.2, -0.5)
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    caption = "What a graph holds for as long as it lives, beside what an eager call holds at its peak."
    return f"Memory: {group}", caption, _svg(figure)
