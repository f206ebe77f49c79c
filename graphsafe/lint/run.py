"""Run a function under the guard's modes on the CPU and report everything it does that a graph cannot hold.

Requirements
------------
1. The function runs as it is, on the tensors given; it need not know this project. It runs three times: once to warm
   up, which is judged only for failing, then twice, the second time with another layout in the same boundary tensors.
   In these two ``torch.cuda.is_current_stream_capturing()`` says yes.
2. What the runs write in place, gradients and generators are put back.
3. A function that fails eagerly is no finding: rule ``eager-failed`` is raised.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from graphsafe._capturing import answering
from graphsafe._escape import escapes
from graphsafe._launches import traced_launches
from graphsafe._location import Location
from graphsafe._one_capture import one_capture
from graphsafe._state import Generators, SavedState, host_random_state
from graphsafe._storage import is_plain, key_of
from graphsafe.base import BaseRuntime, _where_raised
from graphsafe.contract import describe
from graphsafe.errors import GraphSafeError, error
from graphsafe.graphed import GraphedCallable
from graphsafe.lint.allowances import apply
from graphsafe.lint.collect import CollectingWatch, Tables
from graphsafe.lint.differences import differences
from graphsafe.lint.layouts import boundaries_among, other_layout
from graphsafe.lint.report import Finding, Report
from graphsafe.runtime import get_runtime
from graphsafe.tree import leaves, map_leaves, tensors

__all__ = ["lint"]


def lint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run ``fn(*args, **kwargs)`` on the CPU and report every broken rule, each once a line.

    ``fn``: a function or a ``torch.nn.Module``, forward alone or with its backward. Tensor arguments are on the CPU and
    small; those called ``cu_seqlens`` are given a second layout of the same size (``graphsafe.lint.layouts``). Raises
    ``ArgumentError`` for a tensor on a device and ``BackendError`` (GS501) if the function fails on its own.
    """
    if isinstance(fn, GraphedCallable):
        raise error("argument", "lint takes the function that is captured", remedy="Pass its .function to lint.")
    return _Lint(fn, args, kwargs).report()


class _NoGraph:
    """Lint has no graph that could hold what a run made."""

    def private_holders(self, key: int) -> int:
        return 0

    def is_private(self, t: torch.Tensor) -> bool:
        return False


class _Lint:
    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.runtime = cast(BaseRuntime, get_runtime("cpu"))
        self.inputs = {p: v for p, v in _named_leaves(fn, args, kwargs) if isinstance(v, torch.Tensor)}
        for path, t in self.inputs.items():
            if t.device.type != "cpu":
                raise error("argument", f"argument {path!r} is {describe(t)}; lint runs on small tensors of the CPU")
        self._with_own_boundaries()
        self.names = dict(_names(fn, self.inputs))
        self.definition = _definition(fn)
        self.earlier = Tables()

    def _with_own_boundaries(self) -> None:
        """Boundaries are new tensors: the caller's stay as they are, and no table is known for them already."""
        given = boundaries_among(self.inputs)
        own = {id(t): t.detach().clone() for t in given.values()}
        self.boundaries = {path: own[id(t)] for path, t in given.items()}
        self.inputs.update(self.boundaries)
        if own:
            self.args, self.kwargs = map_leaves(lambda _, leaf: own.get(id(leaf), leaf), (self.args, self.kwargs))

    def report(self) -> Report:
        if one_capture.running_here:
            raise error("out-of-order", "lint inside a capture", remedy="Lint before the capture.")
        other = {path: other_layout(t) for path, t in self.boundaries.items()}
        changed = {path: t for path, t in other.items() if t is not None}
        findings: dict[tuple[str, str, int], Finding] = {}
        self._run(capturing=False)
        first = self._run()
        _merge(findings, first.findings)
        _write(self.boundaries, changed)
        try:
            second = self._run()
        except GraphSafeError as problem:
            if problem.rule.name != "eager-failed" or not changed:
                raise
            what = f"the body runs with one layout and fails with another of the same size: {problem.what}"
            _merge(findings, [Finding.of(error("tables", what, where=problem.where))])
        else:
            between = "with another layout in cu_seqlens" if changed else "with the same arguments"
            _merge(findings, second.findings)
            _merge(findings, differences(first.trace, second.trace, between))
        files = {s.where.file for s in first.trace if s.where} | {f.where.file for f in findings.values() if f.where}
        files |= {self.definition.file} if self.definition else set()
        standing, allowed = apply(findings.values(), files)
        return Report(_target(self.fn), _sorted(standing), _sorted(allowed), 2 if changed else 1, first.operators)

    def _run(self, *, capturing: bool = True) -> CollectingWatch:
        """One run of the body; everything but what Python keeps is put back."""
        generators = Generators(self.runtime.generators)
        saved = SavedState()
        watch = CollectingWatch(
            self.runtime.device,
            saved=saved,
            generators=self.runtime.generators,
            copied_inputs={key_of(t): p for p, t in self.inputs.items() if is_plain(t) and not _owned(t)},
            names=self.names,
            boundaries={key_of(t) for t in self.boundaries.values()},
            earlier=self.earlier,
            definition=self.definition,
        )
        host_random = host_random_state()
        try:
            with contextlib.ExitStack() as active:
                active.enter_context(watch.active())
                active.enter_context(self.runtime._also_watching(watch, None))
                active.enter_context(answering(capturing))
                active.enter_context(traced_launches(watch.launched))
                result = self.fn(*self.args, **self.kwargs)
            watch.returned(tensors(result))
            watch.generators_untouched()
            drew = any(f.rule.name == "host-randomness" for f in watch.findings)
            if host_random_state() != host_random and not drew and not watch.other_threads_drew:
                watch.refuse("host-randomness", "the body drew from random or numpy.random on the host")
            watch.findings += _escaped(watch, tensors(result))
        except GraphSafeError:
            raise
        except Exception as problem:
            what = f"the body failed eagerly: {type(problem).__name__}: {problem}"
            raise error("eager-failed", what, where=_where_raised(problem)) from problem
        finally:
            saved.restore()
            generators.restore()
        self.earlier = watch.tables
        return watch


def _escaped(watch: CollectingWatch, kept: list[torch.Tensor]) -> list[Finding]:
    found = list(escapes(watch, kept, _NoGraph()))
    if found:
        found.clear()
        gc.collect()  # garbage keeps nothing
        found = list(escapes(watch, kept, _NoGraph()))
    return [Finding.of(problem, made) for made, problem in found]


def _merge(into: dict[tuple[str, str, int], Finding], run: Iterable[Finding]) -> None:
    """Add a run's findings; a line that breaks a rule in both runs counts as often as in the run that broke it most."""
    counted: dict[tuple[str, str, int], Finding] = {}
    for finding in run:
        if finding.key in counted:
            counted[finding.key].count += 1
        else:
            counted[finding.key] = finding
    for key, finding in counted.items():
        if key in into:
            into[key].count = max(into[key].count, finding.count)
        else:
            into[key] = finding


def _sorted(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (f.where.file, f.where.line, f.rule.id) if f.where else ("", 0, f.rule.id))


def _write(boundaries: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """New values in the same memory, as an update of a graph's inputs does it."""
    with torch.no_grad():
        for path, value in values.items():
            boundaries[path].copy_(value)


def _owned(t: torch.Tensor) -> bool:
    """Parameters are the model's memory, not an input that a graph copies."""
    return isinstance(t, torch.nn.Parameter)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):  # a builtin tells no signature
        return None


def _named_leaves(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The leaves of a call by the path that its function gives them."""
    signature = _signature(fn)
    named: dict[str, Any] = {**{f"args[{i}]": v for i, v in enumerate(args)}, **kwargs}
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as problem:
            raise error("argument", f"the arguments do not fit {_target(fn)}: {problem}") from problem
        named = dict(bound.arguments)
    return [leaf for name, value in named.items() for leaf in leaves(value, name)]


def _names(fn: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> Iterable[tuple[int, str]]:
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        for kind, members in (("parameter", owner.named_parameters()), ("buffer", owner.named_buffers())):
            yield from ((key_of(t), f"{kind} {name!r}") for name, t in members if is_plain(t))
    yield from ((key_of(t), f"argument {path!r}") for path, t in inputs.items() if is_plain(t))


def _target(fn: Callable[..., Any]) -> str:
    kind = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{kind.__module__}:{kind.__qualname__}"


def _definition(fn: Callable[..., Any]) -> Location | None:
    """Where the function is defined, or None for what has no source of its own."""
    code = getattr(inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn), "__code__", None)
    return None if code is None else Location(code.co_filename, code.co_firstlineno, code.co_name)
