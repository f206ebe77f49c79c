"""``graphsafe demo``: the main job on real text, as a table for people or JSON for scripts."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from graphsafe.demo import DemoFigures, run_demo
from graphsafe.demo.run import StepFigures

__all__ = ["demo"]

_ROWS = 10


class Layer(str, Enum):
    gdn = "gdn"
    kda = "kda"


def demo(
    layer: Annotated[Layer, typer.Option(help="The linear-attention layer of the model.")] = Layer.gdn,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu; the best one present if not given.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the parameters and of the order of the text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a small byte-level language model on the standard library's functions: every step one captured graph,
    next to the same model eager. Ends with code 1 if their losses or parameters differ by a bit."""
    figures = _run(layer.value, device, steps, seed, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(figures.as_dict()))
    else:
        _print(figures)
    if not (figures.losses_bitwise_equal and figures.parameters_bitwise_equal):
        raise typer.Exit(1)


def _run(layer: str, device: str | None, steps: int, seed: int, *, quiet: bool) -> DemoFigures:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(f"warm up and capture ({layer})", total=steps)

        def show(number: int, step: StepFigures) -> None:
            progress.update(task, advance=1, description=f"step {number + 1}: loss {step.loss_captured:.3f}")

        return run_demo(layer, device, steps, seed, progress=show)


def _print(figures: DemoFigures) -> None:
    console = Console()
    console.print(_losses(figures))
    console.print(_summary(figures))
    if figures.device == "cpu":
        console.print(
            "A CPU replays the recorded operators one by one, so these times cannot show what a graph saves: on a "
            "device a replay is one launch, and the host calls go away. Losses, host calls and bytes are exact.",
            style="dim",
        )


def _losses(figures: DemoFigures) -> Table:
    table = Table(title=f"{figures.layer} on {figures.device}: loss by step (nats per byte)")
    for name in ("step", "tokens", "sequences", "slots", "captured", "eager", "same bits"):
        table.add_column(name, justify="right")
    every = max(1, len(figures.steps) // _ROWS)
    shown = [i for i in range(len(figures.steps)) if i % every == 0 or i == len(figures.steps) - 1]
    for i in shown:
        s = figures.steps[i]
        table.add_row(
            str(i + 1),
            str(s.tokens),
            str(s.sequences),
            str(s.slots),
            f"{s.loss_captured:.6f}",
            f"{s.loss_eager:.6f}",
            "yes" if s.loss_captured == s.loss_eager else "NO",
        )
    return table


def _summary(figures: DemoFigures) -> Table:
    def per_step(values: list[int], room: int) -> str:
        mean = sum(values) / len(values)
        return f"{mean:.1f} of {room} ({mean / room:.0%})"

    def times(arm: str) -> str:
        return f"{figures.percentile(arm, 50) * 1e3:.1f} / {figures.percentile(arm, 95) * 1e3:.1f} ms"

    same = figures.losses_bitwise_equal and figures.parameters_bitwise_equal
    rows = [
        ("losses and parameters", "bitwise equal in every step" if same else "DIFFERENT"),
        ("layouts replayed", f"{figures.layouts} different, {figures.text_bytes:,} bytes of text"),
        ("captures", str(figures.captures)),
        ("host calls a step, eager", f"{figures.host_calls_eager:,}"),
        ("host calls a step, replayed", f"{figures.host_calls_replayed:,}, one of them the replay"),
        ("operations inside the graph", f"{figures.operations_in_graph:,}"),
        ("time a step, eager (p50 / p95)", times("eager")),
        ("time a step, replayed (p50 / p95)", times("captured")),
        ("warm-up, capture", f"{figures.warm_up_seconds:.2f} s, {figures.capture_seconds:.2f} s"),
        ("static memory, price", f"{figures.arena_bytes:,} bytes, {figures.price_bytes:,} bytes"),
        ("memory born in the graph", f"{figures.pool_bytes:,} bytes"),
        ("tokens used", per_step([s.tokens for s in figures.steps], figures.bucket_tokens)),
        ("sequences used", per_step([s.sequences for s in figures.steps], figures.bucket_sequences)),
        ("slots used", per_step([s.slots for s in figures.steps], figures.bucket_slots)),
    ]
    table = Table(title=f"{len(figures.steps)} steps, {figures.parameters:,} parameters", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for row in rows:
        table.add_row(*row)
    return table
