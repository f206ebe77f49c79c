"""GraphRuntime: the device, as the core sees it; and the registry that finds one.

Requirements
------------
1. The core knows no adapter. Adapters register under the entry-point group ``graphsafe.runtimes``; none is imported
   before it is asked for.
2. ``get_runtime`` never chooses in place of what was asked: an unknown or unusable name raises an error that lists
   what is known, what is usable here, and how to install the rest.
3. Without a name the best runtime present is taken: npu, cuda, then cpu; others only by name.
4. One runtime object per name and process, so that its lock, generators and figures are shared.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from graphsafe.arena import StaticArena
from graphsafe.bucket import Bucket
from graphsafe.errors import error
from graphsafe.metadata import BoundTables

__all__ = [
    "ENTRY_POINTS",
    "CaptureGuard",
    "Event",
    "Graph",
    "GraphRuntime",
    "MemoryFigures",
    "get_runtime",
    "known_runtimes",
]

ENTRY_POINTS = "graphsafe.runtimes"
_PREFERENCE = ("npu", "cuda", "cpu")
_INSTALL = {
    "cpu": "pip install graphsafe",
    "cuda": "pip install 'graphsafe[cuda]' with a CUDA build of torch, on a machine with an NVIDIA GPU",
    "npu": "pip install 'graphsafe[npu]' on a machine with CANN and an Ascend NPU",
}


@runtime_checkable
class Event(Protocol):
    """A moment of the device: ``a.record()``, ``b.record()``, then ``a.elapsed_time(b)`` in milliseconds."""

    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes on the device: ``held`` by live tensors now, ``peak`` since the last reset."""

    held: int
    peak: int


@runtime_checkable
class Graph(Protocol):
    """What a capture leaves: something to replay."""

    @property
    def launches(self) -> int:
        """Device operations or kernels that one replay runs."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes of the memory the graph holds for what was born inside it."""
        ...

    def outputs(self, *values: Any) -> Any:
        """Declare what the caller keeps of the capture; returns it as static tensors."""
        ...

    def replay(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class CaptureGuard(Protocol):
    """The rules of one capture: watches it and names the caller's line that breaks one."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any: ...


@runtime_checkable
class GraphRuntime(Protocol):
    """A device that can capture and replay. Adapters derive from :class:`graphsafe.base.BaseRuntime`."""

    name: str
    device: torch.device

    def arena(self, bucket: Bucket, *, canaries: bool = False) -> StaticArena: ...

    def tables(self, bucket: Bucket) -> BoundTables: ...

    def warm_up(self, body: Callable[[], Any], *, iterations: int = 1) -> Any: ...

    def capture(self, *, pool: Any = None) -> AbstractContextManager[Graph]: ...

    @property
    def capturing(self) -> bool: ...

    def guard(self) -> CaptureGuard: ...

    def register_generator(self, generator: torch.Generator) -> None: ...

    def event(self) -> Event: ...

    def synchronize(self) -> None: ...

    def memory(self) -> MemoryFigures: ...

    def explain(self, problem: BaseException | str | int) -> str: ...


_runtimes: dict[str, GraphRuntime] = {}


def known_runtimes() -> dict[str, importlib.metadata.EntryPoint]:
    """Registered runtimes by name; nothing is imported."""
    return {e.name: e for e in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _load(entry: importlib.metadata.EntryPoint) -> GraphRuntime:
    runtime = entry.load()()
    if not isinstance(runtime, GraphRuntime):
        missing = [m for m in dir(GraphRuntime) if not m.startswith("_") and not hasattr(runtime, m)]
        raise error("runtime-missing", f"{entry.value} is no GraphRuntime; it lacks {', '.join(missing)}")
    return runtime


def get_runtime(name: str | None = None) -> GraphRuntime:
    """The runtime called ``name`` (``"cpu"``, ``"cuda"``, ``"npu"``, or another that is registered), or the best here.

    Raises :class:`graphsafe.errors.RuntimeMissingError` with what is known, what is usable and how to install the rest.
    """
    if name is not None and name in _runtimes:
        return _runtimes[name]
    known = known_runtimes()
    wanted = [name] if name is not None else [n for n in _PREFERENCE if n in known]
    failures: dict[str, str] = {}
    for candidate in wanted:
        if candidate in _runtimes:
            return _runtimes[candidate]
        if candidate not in known:
            break
        try:
            _runtimes[candidate] = _load(known[candidate])
            return _runtimes[candidate]
        except Exception as problem:
            failures[candidate] = _first_line(problem)
            if name is not None:
                raise _missing(name, known, failures) from problem
    raise _missing(name, known, failures)


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().split("\n")[0] or type(problem).__name__


def _missing(name: str | None, known: dict[str, Any], failures: dict[str, str]) -> Exception:
    usable = []
    for candidate in sorted(known):
        if candidate in failures:
            continue
        try:
            _runtimes.setdefault(candidate, _load(known[candidate]))
            usable.append(candidate)
        except Exception as problem:
            failures[candidate] = _first_line(problem)
    what = f"no runtime {name!r}" if name is not None else "no runtime can be used here"
    if name in failures:
        what = f"the runtime {name!r} cannot be used here: {failures[name]}"
    lines = [f"{what}; known: {', '.join(sorted(known)) or 'none'}; usable here: {', '.join(usable) or 'none'}"]
    lines += [f"  {n}: {text}" for n, text in sorted(failures.items()) if n != name]
    rest = [f"{n}: {_INSTALL.get(n, 'see its own documentation')}" for n in sorted(known) if n not in usable]
    remedy = "; ".join(rest) if rest else f"Use one of {', '.join(usable)}."
    return error("runtime-missing", "\n".join(lines), remedy=remedy)
