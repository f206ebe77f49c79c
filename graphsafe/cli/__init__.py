"""The command ``graphsafe``: its sub-commands live in one module each."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. A typed error is printed as it is and ends with code 2."""
    import sys

    from graphsafe.cli.app import app
    from graphsafe.errors import GraphSafeError

    try:
        app()
    except GraphSafeError as problem:
        print(f"graphsafe: {problem}", file=sys.stderr)
        sys.exit(2)
