"""``graphsafe doctor``: what this machine can do, probed.

Requirements
------------
1. The matrix goes to standard output, as a table, as one JSON object or as a Markdown page; progress goes to standard
   error. A file given by ``--out`` has the page (or JSON, by its name) of the rows so far at any time.
2. Exit code 0: nothing failed; 1: a row failed; 2: the runtime cannot be used, or no such row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from graphsafe.capabilities.matrix import FAILED, SUPPORTED, UNSUPPORTED, Matrix, Row
from graphsafe.capabilities.run import capabilities, selected

__all__ = ["doctor"]

_STYLES = {SUPPORTED: "green", UNSUPPORTED: "yellow", FAILED: "bold red"}


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu; the best one present if not given.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="Rows, groups or patterns ('metadata.*'); may be given more than once.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the matrix there, anew after each row: .json, else Markdown.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds for each row.")] = 120.0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Rows at a time; half the processors if not given.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the rows and probe nothing.")] = False,
) -> None:
    """Probe what a runtime can do here: each capability in a process of its own. Exit code 1 if one failed."""
    chosen = selected(rows or ())
    if listing:
        for asked in chosen:
            typer.echo(f"{asked.name}: {asked.what}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("probing", total=len(chosen))

        def told(matrix: Matrix, row: Row) -> None:
            progress.update(task, advance=1, description=row.name)
            if not console.is_terminal:
                typer.echo(f"{len(matrix.rows)}/{len(chosen)} {row.name}: {row.result}, {row.seconds:.1f} s", err=True)
            if out is not None:
                text = json.dumps(matrix.as_dict()) if out.suffix == ".json" else matrix.markdown()
                out.write_text(text, encoding="utf-8")

        matrix = capabilities(device, rows=rows or (), time_limit=time_limit, jobs=jobs, on_row=told)
    if as_json:
        typer.echo(json.dumps(matrix.as_dict()))
    elif as_markdown:
        typer.echo(matrix.markdown(), nl=False)
    else:
        _print(matrix)
    if matrix.counts()[FAILED]:
        raise typer.Exit(1)


def _print(matrix: Matrix) -> None:
    console = Console()
    simulated = ", simulated" if matrix.simulated else ""
    table = Table(title=f"capabilities of {matrix.runtime}{simulated}", title_justify="left")
    for name in ("row", "result", "what, and why not"):
        table.add_column(name, overflow="fold")
    for rows in matrix.groups().values():
        for row in rows:
            text = Text(row.what)
            why = " ".join(filter(None, (row.rule, row.category and f"{row.category}:", row.text)))
            if why:
                text.append(f"\n{why}", style="dim")
            if row.explanation:
                text.append(f"\n{row.explanation}")
            table.add_row(row.name, Text(row.result, style=_STYLES[row.status]), text)
        table.add_section()
    console.print(table)
    for name, value in matrix.environment.items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(", ".join(f"{number} {status}" for status, number in matrix.counts().items()), highlight=False)
