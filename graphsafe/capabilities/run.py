"""Probe what a runtime can do, each capability in a process of its own.

Requirements
------------
1. Each probe runs in a process of its own with a time limit, since a failed capture can poison a process. One that
   crashes or does not end in time is a failed row that says how.
2. The asking process starts no device and imports no adapter, where the runtime is named.
3. ``require`` returns silently or raises one error that names every row that is not supported, with its reason.
   What was probed is remembered for the life of the process.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from typing import IO, Any, cast

from graphsafe.capabilities.matrix import FAILED, SUPPORTED, Matrix, Row
from graphsafe.capabilities.probe import Probe, probes
from graphsafe.capabilities.probes.operators import OPERATORS
from graphsafe.errors import error
from graphsafe.explanations import explanations_of
from graphsafe.rules import rule
from graphsafe.runtime import get_runtime, known_runtimes

__all__ = ["capabilities", "require", "selected"]

_SETTINGS = ("CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET")
"""Variables that would change what is probed; a probe that needs one sets it itself."""


def capabilities(
    name: str | None = None,
    *,
    rows: Iterable[str] = (),
    time_limit: float = 120.0,
    jobs: int | None = None,
    on_row: Callable[[Matrix, Row], None] | None = None,
) -> Matrix:
    """Probe the runtime ``name`` ("cpu", "cuda", "npu"; the best one here without a name) and return the matrix.

    ``rows``: names, groups or patterns (``"metadata.*"``); all without any. ``time_limit``: seconds for each row.
    ``jobs``: processes at a time; half the processors if not given. ``on_row``: called as each row is known, with
    the matrix so far.

    Raises ``ArgumentError`` for a pattern that fits no row, ``RuntimeMissingError`` where the runtime cannot be used.
    """
    chosen = selected(rows)
    runtime = name if name is not None else get_runtime().name
    if runtime not in known_runtimes():
        get_runtime(runtime)  # raises, with what is known and how to install it
    order = {asked.name: place for place, asked in enumerate(chosen)}
    matrix, early = Matrix(runtime), list[Row]()
    names = ["environment", *_in_turn(order)]
    with contextlib.closing(_ask(runtime, names, time_limit, jobs or max((os.cpu_count() or 2) // 2, 1))) as answers:
        for answer in answers:
            if answer["row"] == "environment":
                matrix.environment = _environment(runtime, answer)
            else:
                early.append(_row(chosen[order[answer["row"]]], answer))
            while matrix.environment and early:
                row = early.pop(0)
                matrix.rows.append(row)
                matrix.rows.sort(key=lambda row: order[row.name])
                if on_row is not None:
                    on_row(matrix, row)
    return matrix


def _in_turn(rows: Iterable[str]) -> list[str]:
    """The order in which rows begin: those that compile what others share, or much of their own; then, by turns, rows
    of operators, which compile, and the rest, which wait for a device to start."""
    first, compiling, others = list[str](), list[str](), list[str]()
    for row in rows:
        group, _, name = row.partition(".")
        (first if name == "packed" or group == "layers" else compiling if group in OPERATORS else others).append(row)
    woven = itertools.chain.from_iterable(itertools.zip_longest(compiling, others))
    return [*first, *(row for row in woven if row is not None)]


_known: dict[tuple[str, str], Row] = {}


def require(*names: str, runtime: str | None = None, time_limit: float = 120.0) -> None:
    """Raise ``UnsupportedError`` (GS106) unless every row in ``names`` is supported here, by ``runtime``.

    ``graphsafe.require("capture.replay", "dtypes.bfloat16", runtime="cuda")`` at the start of a program.
    """
    if not names:
        raise error("argument", "require() was called without a row", remedy="Name rows of graphsafe doctor --list.")
    chosen = runtime if runtime is not None else get_runtime().name
    wanted = [p.name for p in selected(names)]
    missing = [n for n in wanted if (chosen, n) not in _known]
    if missing:
        for row in capabilities(chosen, rows=missing, time_limit=time_limit):
            _known[chosen, row.name] = row
    lacking = [_known[chosen, n] for n in wanted if _known[chosen, n].status != SUPPORTED]
    if lacking:
        lines = [f"  {r.name}: {r.result}: {' '.join(r.text.split())}" for r in lacking]
        raise error(
            "unsupported",
            f"the runtime {chosen!r} lacks what this program requires:\n" + "\n".join(lines),
            remedy=f"graphsafe doctor --device {chosen} shows the whole matrix; use another runtime, or do without.",
        )


def selected(patterns: Iterable[str]) -> list[Probe]:
    """The probes that any of the patterns names, in the order of the matrix; all if there is no pattern."""
    known = probes()
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    wanted: set[str] = set()
    for pattern in patterns:
        fits = [n for n in known if pattern in (n, n.partition(".")[0]) or fnmatch.fnmatchcase(n, pattern)]
        if not fits:
            close = difflib.get_close_matches(pattern, known, 3) or dict.fromkeys(n.partition(".")[0] for n in known)
            remedy = f"Perhaps {', '.join(close)}; graphsafe doctor --list shows all."
            raise error("argument", f"no row {pattern!r}", remedy=remedy)
        wanted.update(fits)
    return [p for n, p in known.items() if not patterns or n in wanted]


def _ask(runtime: str, rows: list[str], time_limit: float, jobs: int) -> Generator[dict[str, Any], None, None]:
    """The answers of :mod:`graphsafe.capabilities.nursery`, in a process of its own, to the end or until closed."""
    environment = {k: v for k, v in os.environ.items() if k not in _SETTINGS}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # probes run side by side
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "graphsafe.capabilities.nursery", str(write)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write], env=environment, text=True,
    )  # fmt: skip
    os.close(write)
    missing = dict.fromkeys(rows)
    try:
        with os.fdopen(read, encoding="utf-8") as told, contextlib.suppress(BrokenPipeError):
            request = {"runtime": runtime, "rows": rows, "time_limit": time_limit, "jobs": jobs}
            cast(IO[str], process.stdin).write(json.dumps(request) + "\n")
            cast(IO[str], process.stdin).flush()
            for line in told:
                answer = json.loads(line)
                del missing[answer["row"]]
                yield answer
    finally:
        if missing:
            process.terminate()
        process.wait()
        cast(IO[str], process.stdin).close()
    for row in missing:
        yield {"row": row, "seconds": 0.0, "ended": "the process that starts probes has ended"}


def _environment(runtime: str, answer: dict[str, Any]) -> dict[str, str | None]:
    if "found" not in answer:
        raise error("runtime-missing", f"the runtime {runtime!r} cannot be used here: {answer['ended']}")
    found = answer["found"]
    if "missing" in found:
        raise error("runtime-missing", found["missing"], remedy=found["remedy"])
    told: dict[str, str | None] = found["environment"]
    return told


def _row(asked: Probe, answer: dict[str, Any]) -> Row:
    seconds = answer["seconds"]
    if "found" in answer:
        return Row(asked.name, asked.what, seconds=seconds, **answer["found"])
    problem = answer["ended"]
    known = explanations_of(problem)
    named = rule(known[0][1].rule if known else "eager-failed")
    meaning = known[0][1].meaning if known else None
    return Row(asked.name, asked.what, FAILED, problem, named.id, str(named.category), meaning, seconds=seconds)
