"""The command ``graphsafe``: its sub-commands live in one module each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphsafe.errors import GraphSafeError

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. A typed error is printed and ends with code 2."""
    import sys

    from graphsafe.cli.app import app
    from graphsafe.errors import GraphSafeError

    try:
        app()
    except GraphSafeError as problem:
        print(f"graphsafe: {_said(problem)}", file=sys.stderr)
        sys.exit(2)


def _said(problem: GraphSafeError) -> str:
    """An error as it is; where what was typed is wrong, without the lines that speak of the command's own source."""
    from pathlib import Path

    if problem.where is None or Path(__file__).parents[1] not in Path(problem.where.file).parents:
        return str(problem)
    return problem.what if problem.remedy == problem.rule.remedy else f"{problem.what}\n{problem.remedy}"
