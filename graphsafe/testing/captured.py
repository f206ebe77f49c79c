"""The marker ``graphsafe_captured``: a test that returns a function is captured and replayed over many layouts.

Requirements
------------
1. The test returns ``(function, batch)``. ``function`` is what :func:`graphsafe.graphed` takes, or a
   :class:`~graphsafe.TrainStep`; ``batch(lengths)`` makes the arguments of one packed batch: a tuple by position, a
   dict by keyword, for a TrainStep its one batch.
2. It is captured once, with the first layout; a plain function under the strict guard. Each replay is held against
   eager bit for bit, after NaN in all memory of the graph, a plain function also with NaN in the padding of its inputs.
   The corners of the bucket come first.
3. More than one graph, or an eager call in place of a replay, is a failure: one capture serves all layouts.
4. An error that has no line in the test's own code names the function that the test returned.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphsafe.bucket import Bucket
from graphsafe.errors import GraphSafeError, Location, error
from graphsafe.graphed import GraphedCallable
from graphsafe.testing.layouts import layouts as layouts_of
from graphsafe.train import TrainStep

__all__ = ["MARKER", "replay_over_layouts"]

MARKER = "graphsafe_captured"


def replay_over_layouts(runtime: Any, bucket: Bucket, returned: Any, *, layouts: int = 20, seed: int = 0) -> None:
    """Capture what a test returned and prove it over ``layouts`` layouts of ``bucket``; raises what broke."""
    function, batch = _checked(returned)
    call = function
    if not isinstance(function, (GraphedCallable, TrainStep)):
        call = GraphedCallable(function, runtime, [bucket], "error", {}, (), 1, guard="strict")
    try:
        for number, lengths in enumerate(layouts_of(layouts, bucket.tokens, bucket.sequences, seed)):
            try:
                _prove(call, batch(lengths))
            except Exception as problem:
                _place(problem, function)
                _add_note(problem, f"layout {number} of {layouts}: {lengths}")
                raise
        figures = call.stats
        if figures.captures != 1 or figures.replays != layouts or figures.overflows:
            raise error(
                "replay-differs",
                f"{layouts} layouts were served by {figures.captures} captures, {figures.replays} replays and "
                f"{sum(figures.overflows.values())} eager calls; 1 capture and {layouts} replays are needed",
            )
    finally:
        call.close()


def _checked(returned: Any) -> tuple[Any, Callable[[list[int]], Any]]:
    if isinstance(returned, tuple) and len(returned) == 2 and all(callable(part) for part in returned):
        return returned
    raise error(
        "argument",
        f"a test marked {MARKER} returned a {type(returned).__name__}; (function, batch) is needed",
        remedy="Return the function to capture and a function that makes the arguments from a list of lengths.",
    )


def _prove(call: Any, arguments: Any) -> None:
    """The strict guard proves a call by itself."""
    for use in (call,) if call.guard == "strict" else (call.verify, call):
        if isinstance(call, TrainStep):
            use(arguments)
        elif isinstance(arguments, dict):
            use(**arguments)
        else:
            use(*arguments)


def _place(problem: Exception, function: Any) -> None:
    """The error of a comparison arises in this package: the function that was compared is to blame."""
    code = getattr(function, "__code__", None)
    if code is None or not isinstance(problem, GraphSafeError) or problem.where is None:
        return
    if Path(__file__).parent in Path(problem.where.file).parents:
        problem.place(Location(code.co_filename, code.co_firstlineno, code.co_name))


def _add_note(problem: Exception, note: str) -> None:
    """Say which layout it was; before Python 3.11 an exception takes no notes."""
    if hasattr(problem, "add_note"):
        problem.add_note(note)
