"""A watch that collects what is broken and lets the run go on.

Requirements
------------
1. Every refusal of the watch becomes a finding; what a refused function does inside is not judged again.
2. Each operator leaves a line of a trace: where, which, the shapes and Python values it was given, the shapes it gave.
3. Integer tables that come from sequence boundaries are followed. One that an earlier run made and this run reads as
   it is belongs to another layout.
4. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe._location import Location, caller
from graphsafe._operators import OperatorFacts, written
from graphsafe._storage import StorageRef, is_plain, key_of
from graphsafe._watch import Watch, argument_tensors
from graphsafe.contract import describe
from graphsafe.errors import error
from graphsafe.lint.report import Finding

__all__ = ["CollectingWatch", "Step", "Tables"]


@dataclass(frozen=True)
class Step:
    """One operator of a run."""

    where: Location | None
    name: str
    operands: tuple[Any, ...]
    values: tuple[Any, ...]
    results: tuple[Any, ...]


class Tables:
    """Storages that hold what was computed from sequence boundaries, with the line that made each."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageRef, Location | None]] = {}

    def add(self, t: torch.Tensor, where: Location | None) -> None:
        self._made[key_of(t)] = (StorageRef(t), where)

    def discard(self, key: int) -> None:
        self._made.pop(key, None)

    def __contains__(self, key: int) -> bool:
        return key in self._made and self._made[key][0].alive()

    def made_at(self, key: int) -> Location | None:
        return self._made[key][1]


class CollectingWatch(Watch):
    """``names``: arguments and parameters by storage; ``boundaries``: storages of sequence boundaries; ``earlier``:
    tables that earlier runs made; ``definition``: what a finding names where no line of the body is on the stack."""

    def __init__(
        self,
        *args: Any,
        names: Mapping[int, str],
        boundaries: set[int],
        earlier: Tables,
        definition: Location | None,
        **options: Any,
    ) -> None:
        self._outside = caller()
        self._definition = definition
        super().__init__(*args, check=True, **options)
        self.findings: list[Finding] = []
        self.trace: list[Step] = []
        self.tables = Tables()
        self._names = names
        self._boundaries = boundaries
        self._earlier = earlier
        self._excused = 0
        self._boundaries_on_the_host = False

    def where(self) -> Location | None:
        """The line of the body, never the line that called lint."""
        found = super().where()
        return self._definition if found is None or found == self._outside else found

    def refuse(self, rule: str, what: str, *, tensor: torch.Tensor | None = None, **details: Any) -> None:
        """Keep the finding and go on."""
        if self._excused:
            return
        problem = error(rule, what, **{"where": self.where(), **details})
        self.findings.append(Finding.of(problem, None if tensor is None else self._named(tensor)))
        if tensor is not None and rule == "host-read" and is_plain(tensor) and self._from_boundaries(key_of(tensor)):
            self._boundaries_on_the_host = True

    def read_anyway(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.excused():
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """What happens inside is part of something already judged."""
        self._excused += 1
        try:
            yield
        finally:
            self._excused -= 1

    def _named(self, t: torch.Tensor) -> str:
        if not is_plain(t):
            return describe(t)
        name = self._names.get(key_of(t))
        if name is not None:
            return f"{name}: {describe(t)}"
        ref, where, made = self.born.get(key_of(t), (None, None, ""))
        if ref is None or not ref.alive():
            return describe(t)
        return f"{describe(t)}, made by {made.split(' ')[0]}" + (f" at {where}" if where else "")

    def launched(self, kernel: str, values: dict[str, Any]) -> None:
        """A Triton kernel is launched: a step whose values are its grid, its scalars and its constexprs."""
        given = tuple((name, _text_of(value)) for name, value in values.items())
        self.trace.append(Step(self.where(), f"the triton kernel {kernel!r}", (), given, ()))

    # Tables.

    def _from_boundaries(self, key: int) -> bool:
        return key in self._boundaries or key in self.tables

    def before(self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().before(func, facts, args, kwargs)
        rewritten = {key_of(t) for t in written(facts, args, kwargs) if is_plain(t)}
        for t in argument_tensors((args, kwargs)):
            self._not_from_before(t, f"{facts.name} reads", rewritten)

    def returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the body returns is used too."""
        for t in argument_tensors(tensors):
            self._not_from_before(t, "the body returns", set())

    def _not_from_before(self, t: torch.Tensor, use: str, rewritten: set[int]) -> None:
        key = key_of(t)
        if key not in self._earlier:
            return
        if key not in rewritten:
            made = self._earlier.made_at(key)
            self.refuse(
                "tables",
                f"{use} a table that an earlier run made from sequence boundaries" + (f", at {made}" if made else ""),
                tensor=t,
                why="The boundaries have changed since; a table kept for its tensor, or for a size, is stale.",
                remedy="Build the table anew from cu_seqlens in each run; one build can serve all layers of it.",
            )
        self._earlier.discard(key)  # once is enough, and what was rewritten is new

    def after(
        self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        super().after(func, facts, args, kwargs, result)
        operands = list(argument_tensors((args, kwargs)))
        results = [t for t in argument_tensors([result]) if key_of(t) not in self._boundaries]
        if self._boundaries and results:
            made = [key_of(t) for t in operands]
            foreign = any(t.is_floating_point() and key_of(t) not in self.tables for t in operands)
            from_host = (
                self._boundaries_on_the_host
                and (not operands or facts.name.startswith("aten::lift_fresh"))
                and not any(t.is_floating_point() for t in results)
            )
            if from_host or (not foreign and any(self._from_boundaries(key) for key in made)):
                for t in results:
                    self.tables.add(t, self.where())
        if not self._excused:
            shapes = tuple(tuple(t.shape) for t in operands)
            given = tuple(tuple(t.shape) for t in argument_tensors([result]))
            self.trace.append(Step(self.where(), facts.name, shapes, _values((args, kwargs)), given))


def _text_of(value: Any) -> str:
    """A Python value of a launch in a comparable form, without the address of an object."""
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else str(value)


def _values(value: Any) -> tuple[Any, ...]:
    """The Python values among arguments, in a comparable form; tensors are left out."""
    if isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(v for item in value for v in _values(item))
    if isinstance(value, dict):
        return tuple((key, v) for key, item in value.items() for v in _values(item))
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return (repr(value),)
    return (str(value) if isinstance(value, (torch.dtype, torch.device)) else type(value).__name__,)
