"""``graphsafe explain``: what an error code, an error's text or a rule of this project means, and what to do.

Requirements
------------
1. Every explanation names its device, rule, category, meaning, remedy and source.
2. Exit code 0: explained; 1: nothing is known about it.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphsafe.explanations import Explanation, explanations_of
from graphsafe.rules import RULES, rule

__all__ = ["explain"]


def explain(
    problem: Annotated[list[str], typer.Argument(help="An error code, the text of an error, or a rule (GS101).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what an error means in code that captures graphs: its category, usual causes, and what to do."""
    text = " ".join(problem).strip()
    found = _rules(text) or explanations_of(int(text) if text.isdigit() else text)
    if as_json:
        typer.echo(json.dumps({"problem": text, "explanations": [_as_dict(name, row) for name, row in found]}))
    elif found:
        Console().print(_table(text, found))
    else:
        typer.echo(f"nothing is known about {text!r}; a rule, a code or a part of the error's own text is needed")
    if not found:
        raise typer.Exit(1)


def _rules(text: str) -> list[tuple[str, Explanation]]:
    """A rule of this project, asked for by its id or name."""
    named = next((r for r in RULES.values() if text.lower() in (r.id.lower(), r.name)), None)
    if named is None:
        return []
    return [("any", Explanation("", named.name, f"{named.demand} {named.why}", named.remedy, "graphsafe/rules.py"))]


def _as_dict(name: str, row: Explanation) -> dict[str, str]:
    broken = rule(row.rule)
    return {
        "device": name,
        "rule": broken.id,
        "name": broken.name,
        "category": str(broken.category),
        "meaning": row.meaning,
        "remedy": row.remedy,
        "source": getattr(row, "source", ""),
    }


def _table(problem: str, found: list[tuple[str, Explanation]]) -> Table:
    table = Table(title=Text(problem), title_justify="left", show_header=False, show_lines=True)
    table.add_column()
    table.add_column(overflow="fold")
    for name, row in found:
        told = _as_dict(name, row)
        table.add_row("device", told["device"])
        table.add_row("rule", f"{told['rule']} {told['name']} ({told['category']})")
        for key in ("meaning", "remedy", "source"):
            if told[key]:
                table.add_row(key, Text(told[key]))
    return table
