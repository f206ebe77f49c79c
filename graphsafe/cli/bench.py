"""``graphsafe bench``: measure, compare, report.

Requirements
------------
1. Exit code 0: everything measured is right and nothing became slower; 1: a result is wrong or failed, or a regression
   was found; 2: the command cannot be run as asked; 130: interrupted.
2. Progress and notes go to stderr, tables or JSON to stdout, report and journal to the output folder. Progress is a bar
   on a terminal, else a line as each case begins, with the seconds since the first did.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphsafe.errors import error
from graphsafe.runtime import get_runtime

if TYPE_CHECKING:
    from graphsafe.bench.cases import Case
    from graphsafe.bench.run import Bench
    from graphsafe.bench.timing import Protocol

__all__ = ["app", "bench"]

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def bench(
    preset: Annotated[
        list[str] | None, typer.Option(help="Cases by name; may be given more than once. --list shows them.")
    ] = None,
    cases: Annotated[Path | None, typer.Option(help="A JSON list of your own cases.", exists=True)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, few samples: a minute on a CPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Keep cases whose label contains this; may repeat.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu; the best one present if not given.")] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="Whose kernels are measured, graphsafe's by default; may repeat.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two providers, side by side; with --provider, more. The first meets each.", metavar="A B"),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask this provider for cases alone whose label contains the text; may repeat.", metavar="PROVIDER=TEXT"
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="A stored report.json: find what became slower.", exists=True)
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="The share by which a time may grow.")] = 0.05,
    samples: Annotated[int | None, typer.Option(min=2, help="Samples of each arm.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check results, gradients and replays, and take no times.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of report.json, report.html, journal.")] = Path("bench-report"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the journal of an interrupted run.")] = False,
    html: Annotated[bool, typer.Option(help="Write the page too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON in place of tables.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show presets and providers, and measure nothing.")] = False,
) -> None:
    """Measure operators, layers and training steps, eager and captured: times, launches, bytes and errors.

    Without a preset or a file, a CPU runs the preset quick and a device the preset rfc.
    """
    if listing:
        _list(Console())
        return
    runtime: Any = get_runtime(device)
    quick = quick or (runtime.device.type == "cpu" and not preset and cases is None)
    chosen = _chosen(preset or [], cases, quick, only or [])
    from graphsafe.bench.report import print_report, write_json
    from graphsafe_kernels.providers import DEFAULT

    providers = [*(compare or ()), *(provider or ())] or [DEFAULT]
    limits = _limits(limit or [], providers)
    run = _bench(runtime, chosen, providers, limits, _protocol(quick, samples, check), out, resume)
    if against is not None:
        from graphsafe.bench.regressions import compare_runs, read_report, require_comparable

        stored = read_report(against)
        require_comparable(run.environment, stored)
    out.mkdir(parents=True, exist_ok=True)
    report = _run(run, quiet=as_json)
    if len(providers) > 1:
        report |= _compared(report["results"], providers)
    if against is not None:
        report["regressions"] = compare_runs(report, stored, tolerance)
    write_json(report, out / "report.json")
    if html:
        from graphsafe.bench.html import write_html

        write_html(report, out / "report.html")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report, Console())
        written = "report.json and report.html are" if html else "report.json is"
        Console(stderr=True).print(f"{written} in {escape(str(out))}", highlight=False)
    _exit(report)


def _chosen(presets: Sequence[str], file: Path | None, quick: bool, only: Sequence[str]) -> list[Case]:
    from graphsafe.bench.cases import read_cases
    from graphsafe.bench.presets import preset as cases_of

    listed = [case for name in presets for case in cases_of(name)]
    if file is not None:
        listed += read_cases(file)
    if not listed:
        listed = cases_of("quick" if quick else "rfc")
    kept = list({case.key: case for case in listed if all(text in case.label for text in only)}.values())
    if not kept:
        raise error("argument", f"no case of {len(listed)} has a label with {' and '.join(map(repr, only))}")
    return kept


def _protocol(quick: bool, samples: int | None, check: bool) -> Protocol:
    from graphsafe.bench.timing import Protocol

    if check:
        return Protocol(samples=0, warm=0, least=0)
    return Protocol(samples or 14, warm=1, budget_s=8.0, least=6) if quick else Protocol(samples or 40)


def _limits(named: Sequence[str], providers: Sequence[str]) -> dict[str, list[str]]:
    """Provider -> the texts of which its cases' labels have one."""
    found: dict[str, list[str]] = {}
    for text in named:
        provider, equals, label = text.partition("=")
        if not equals or not label or provider not in providers:
            raise error("argument", f"--limit {text}: PROVIDER=TEXT is needed, of {', '.join(providers)}")
        found.setdefault(provider, []).append(label)
    return found


def _bench(
    runtime: Any,
    cases: Sequence[Case],
    providers: Sequence[str],
    limits: Mapping[str, Sequence[str]],
    protocol: Protocol,
    out: Path,
    resume: bool,
) -> Bench:
    import torch

    from graphsafe.bench.run import Bench

    if len(set(providers)) < len(providers):
        raise error("argument", f"each provider is named once; got {', '.join(providers)}")
    if runtime.device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other would be measured in place of the work
    return Bench(runtime, cases, providers, protocol, out / "journal.jsonl", resume, limits)


def _run(run: Bench, *, quiet: bool) -> dict[str, Any]:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    drawn = console.is_terminal and not quiet
    with Progress(*columns, console=console, disable=not drawn, transient=True) as progress:
        task = progress.add_task("", total=len(run.cases))
        begun: set[int] = set()
        began = time.perf_counter()

        def show(done: int, total: int, label: str, stage: str) -> None:
            progress.update(task, completed=done, description=escape(f"{label}: {stage}"))
            if not drawn and not quiet and done not in begun:
                begun.add(done)
                typer.echo(f"{done + 1}/{total} {time.perf_counter() - began:.0f} s: {label}", err=True)

        run.progress = show
        with _ended_by_sigterm():
            return run.run()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM, as a time limit sends it, ends a run as Ctrl-C does: with a report of what there is."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compared(results: Sequence[Mapping[str, Any]], providers: Sequence[str]) -> dict[str, Any]:
    """The table of all providers, and the first of them against each of the others."""
    from graphsafe.bench.comparison import compare_providers, conformance, tally

    one, *others = providers
    comparison = {}
    for other in others:
        rows = compare_providers(results, one, other)
        comparison[f"{one} against {other}"] = {"rows": rows, "tally": tally(rows, one, other)}
    return {"conformance": conformance(results), "comparison": comparison}


def _list(console: Console) -> None:
    from rich import box
    from rich.table import Table

    from graphsafe.bench.presets import PRESETS, preset
    from graphsafe_kernels.providers import get_provider, known_providers

    looks: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    presets = Table("preset", "cases", "operators", title="Presets", **looks)
    for name in PRESETS:
        listed = preset(name)
        presets.add_row(name, str(len(listed)), ", ".join(dict.fromkeys(case.operator for case in listed)))
    console.print(presets)
    providers = Table("provider", "operators (* graph-safe)", "here", title="Providers", **looks)
    for name in known_providers():
        provider = get_provider(name)
        missing = provider.missing()
        serves = [f"{operator}{'*' if s.graph_safe else ''}" for operator, s in provider.services.items()]
        here = "usable" if missing is None else f"{missing}. {provider.install}"
        providers.add_row(name, "\n".join(serves), escape(here))
    console.print(providers)


def _exit(report: Mapping[str, Any]) -> None:
    if not report["complete"]:
        raise typer.Exit(130)
    bad = any(result["status"] in ("wrong", "failed") for result in report["results"])
    if bad or any(row["verdict"] == "slower" for row in report.get("regressions", ())):
        raise typer.Exit(1)
