"""The typer application behind ``graphsafe``."""

from __future__ import annotations

from typing import Annotated

import typer

import graphsafe
from graphsafe.cli.bench import bench
from graphsafe.cli.demo import demo
from graphsafe.cli.doctor import doctor
from graphsafe.cli.explain import explain
from graphsafe.cli.lint import lint
from graphsafe.cli.price import price

__all__ = ["app"]

app = typer.Typer(
    name="graphsafe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Capture device work once, replay it for any batch that fits.",
)
app.command()(demo)
app.command()(bench)
app.command()(doctor)
app.command()(price)
app.command()(lint)
app.command()(explain)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphsafe {graphsafe.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""
