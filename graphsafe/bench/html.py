"""The report as one HTML file that needs nothing else.

Requirements
------------
1. No script, no font, no style and no image from elsewhere: the page reads the same in ten years, offline.
2. It shows the losses as it shows the gains: wrong, refused and failed results are listed with their reasons.
3. What was measured is quoted escaped; nothing in a report can become markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphsafe.bench import text
from graphsafe.bench.modes import MODES
from graphsafe.bench.summary import (
    GROUPS,
    absent_arms,
    clocks_of,
    findings,
    grouped_losses,
    naming,
    table_of,
    with_modes,
)
from graphsafe.errors import error

__all__ = ["render", "write_html"]

_TEMPLATE = "page.html.j2"


def write_html(report: Mapping[str, Any], path: Path) -> None:
    """Write the page; raises rule ``argument`` where the extra ``bench`` is not installed."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    try:
        import jinja2

        from graphsafe.bench.plots import draw_plots
    except ImportError as problem:
        raise error(
            "argument",
            f"the HTML report cannot be drawn: {problem}",
            why="Plots and page are made by matplotlib and jinja2, which the benchmark alone needs.",
            remedy="pip install 'graphsafe[bench]', or leave the page out with --no-html.",
        ) from problem
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    templates.filters |= {
        "us": text.microseconds,
        "share": text.percent,
        "ratio": text.ratio,
        "error": text.error_text,
        "standing": text.standing_text,
    }
    return templates.get_template(_TEMPLATE).render(
        report=report,
        environment=report["environment"],
        results=report["results"],
        clocks=clocks_of(report["environment"]),
        modes=MODES,
        who=naming(report["results"]),
        with_modes=with_modes(report["results"]),
        losses=list(grouped_losses(report["results"])),
        absent=list(absent_arms(report["results"])),
        some_of=text.some_of,
        findings=list(findings(report)),
        groups=[(group, *table_of(group, report["results"])) for group in GROUPS],
        plots=list(draw_plots(report)),
    )
