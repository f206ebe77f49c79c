"""``graphsafe lint``: run a function on the CPU and list everything in it that a graph cannot hold.

Requirements
------------
1. The target is ``pkg.mod:name``: a function or a module called with what ``--arguments pkg.mod:function`` returns (a
   tuple of positional arguments, or a dict of keyword arguments), or without arguments. Packages of the working
   directory are found.
2. Exit code 0: clean; 1: findings; 2: it could not be run.
3. With ``--json`` one JSON object is all that standard output gets; what the target prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphsafe.errors import Location, error
from graphsafe.lint import Report
from graphsafe.lint import lint as run_lint

__all__ = ["lint"]


def lint(
    target: Annotated[str, typer.Argument(help="The function or module, as pkg.mod:name.")],
    arguments: Annotated[
        str | None,
        typer.Option(help="Makes the arguments, a tuple or a dict: pkg.mod:function, or a name beside the target."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report every rule that a function breaks, on the CPU, before a device does. Exit code 1 if there are findings."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):
        fn = _load(target)
        args, kwargs = _arguments(target, arguments)
        report = run_lint(fn, *args, **kwargs)
    report.target = target
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _print(report)
    if not report.clean:
        raise typer.Exit(1)


def _load(target: str) -> Any:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise error("argument", f"target {target!r}: MODULE:NAME is needed, pkg.mod:fn for example")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as problem:
        raise error("argument", f"{module_name!r} cannot be imported: {type(problem).__name__}: {problem}") from problem
    for part in name.split("."):
        if not hasattr(found, part):
            raise error("argument", f"{module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise error("argument", f"{target!r} is a {type(found).__name__}, which cannot be called")
    return found


def _arguments(target: str, maker: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if maker is None:
        return (), {}
    made = _load(maker if ":" in maker else f"{target.partition(':')[0]}:{maker}")()
    if isinstance(made, dict):
        return (), made
    if isinstance(made, (tuple, list)):
        return tuple(made), {}
    raise error("argument", f"{maker} returned a {type(made).__name__}; a tuple or a dict of arguments is needed")


def _print(report: Report) -> None:
    console = Console()
    if report.findings:
        table = Table(title=report.target, title_justify="left")
        for name in ("where", "rule", "what, and what to do"):
            table.add_column(name, overflow="fold")
        for f in report.findings:
            times = f" ({f.count} times)" if f.count > 1 else ""
            text = Text(f"{f.what}{times}")
            if f.tensor is not None:
                text.append(f"\n{f.tensor}", style="dim")
            text.append(f"\n{f.remedy}")
            table.add_row(_short(f.where), f"{f.rule.id} {f.rule.name}\n{f.rule.category}", text)
        console.print(table)
    for f in report.allowed:
        console.print(Text(f"{_short(f.where)}: {f.rule} allowed: {f.allowed}", style="dim"))
    console.print(
        f"{len(report.findings)} findings, {len(report.allowed)} allowed; {report.operators} operators a run, "
        f"{report.layouts} layout{'s' if report.layouts > 1 else ''}",
        highlight=False,
    )


def _short(where: Location | None) -> str:
    if where is None:
        return "-"
    path = Path(where.file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{where.line}"
