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
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, cast

from graphsafe.capabilities.matrix import FAILED, SUPPORTED, Matrix, Row
from graphsafe.capabilities.probe import Probe, probes
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
    width = min(jobs or max((os.cpu_count() or 2) // 2, 1), len(chosen))
    order = {asked.name: place for place, asked in enumerate(chosen)}
    known = threading.Lock()
    nurseries: queue.SimpleQueue[_Nursery] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(width):
            nurseries.put(stack.enter_context(contextlib.closing(_Nursery())))

        def one(asked: Probe) -> None:
            nursery = nurseries.get()
            try:
                row = _probe(nursery, runtime, asked, time_limit)
            finally:
                nurseries.put(nursery)
            with known:
                matrix.rows.append(row)
                matrix.rows.sort(key=lambda row: order[row.name])
                if on_row is not None:
                    on_row(matrix, row)

        first = nurseries.get()
        matrix = Matrix(runtime, _environment(first, runtime, time_limit))
        nurseries.put(first)
        with ThreadPoolExecutor(width) as pool:
            # the first compile the kernels that the other rows of an operator share
            list(pool.map(one, sorted(chosen, key=lambda asked: not asked.name.endswith(".packed"))))
    return matrix


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


class _Nursery:
    """A process that forks one child for each probe."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in _SETTINGS}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # probes run side by side
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graphsafe.capabilities.nursery", str(write)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write], env=environment, text=True,
        )  # fmt: skip
        os.close(write)
        self._input, self._output = cast(IO[str], self._process.stdin), os.fdopen(read, encoding="utf-8")

    def ask(self, runtime: str, row: str, time_limit: float) -> tuple[dict[str, Any] | None, str]:
        """What a process of its own found, or None and how it ended."""
        try:
            self._input.write(json.dumps({"runtime": runtime, "row": row, "time_limit": time_limit}) + "\n")
            self._input.flush()
        except BrokenPipeError:
            return None, "the process that starts probes has ended"
        answer = self._output.readline()
        if not answer:
            return None, "the process that starts probes has ended"
        told = json.loads(answer)
        return told.get("found"), told.get("ended", "")

    def close(self) -> None:
        self._input.close()
        self._process.wait()
        self._output.close()


def _environment(nursery: _Nursery, runtime: str, time_limit: float) -> dict[str, str | None]:
    found, problem = nursery.ask(runtime, "environment", time_limit)
    if found is None:
        raise error("runtime-missing", f"the runtime {runtime!r} cannot be used here: {problem}")
    told: dict[str, str | None] = found["environment"]
    return told


def _probe(nursery: _Nursery, runtime: str, asked: Probe, time_limit: float) -> Row:
    begin = time.monotonic()
    found, problem = nursery.ask(runtime, asked.name, time_limit)
    seconds = time.monotonic() - begin
    if found is not None:
        return Row(asked.name, asked.what, seconds=seconds, **found)
    known = explanations_of(problem)
    named = rule(known[0][1].rule if known else "eager-failed")
    meaning = known[0][1].meaning if known else None
    return Row(asked.name, asked.what, FAILED, problem, named.id, str(named.category), meaning, seconds=seconds)
