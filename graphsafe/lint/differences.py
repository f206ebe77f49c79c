"""What differs between the traces of two runs that should be the same: it would be frozen into a graph.

Requirements
------------
1. A Python value that differs is named at the operator that receives it; a shape that differs where all operands are
   equal, at the operator that makes it. What follows from either is not named again.
2. Where the runs take different paths, the first step that differs is named and nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphsafe.errors import error
from graphsafe.lint.collect import Step
from graphsafe.lint.report import Finding

__all__ = ["differences"]


def differences(first: Sequence[Step], second: Sequence[Step], between: str) -> Iterator[Finding]:
    """Findings about what changed from one run to the next; ``between`` says what the runs differ in."""
    for a, b in zip(first, second, strict=False):
        if (a.name, a.where) != (b.name, b.where):
            what = f"the body takes another path {between}: {a.name} at {a.where} in one run, {b.name} here in the next"
            yield Finding.of(error("frozen-scalar", what, where=b.where, remedy=_PATH_REMEDY))
            return
        if a.operands != b.operands:
            continue
        if a.values != b.values:
            old, new = next((x, y) for x, y in zip((*a.values, "-"), (*b.values, "-"), strict=False) if x != y)
            what = f"{a.name} is given the Python value {_text(old)} in one run and {_text(new)} in the next, {between}"
            yield Finding.of(error("frozen-scalar", what, where=b.where, remedy=_VALUE_REMEDY))
        elif a.results != b.results:
            what = f"{a.name} makes shapes {_shapes(a)} in one run and {_shapes(b)} in the next, {between}"
            yield Finding.of(error("data-dependent-shape", what, where=b.where))
    if len(first) != len(second):
        longer = first if len(first) > len(second) else second
        step = longer[min(len(first), len(second))]
        what = f"the body runs {len(first)} operators in one run and {len(second)} in the next, {between}"
        yield Finding.of(error("frozen-scalar", what, where=step.where, remedy=_PATH_REMEDY))


def _text(value: object) -> str:
    return f"{value[0]}={value[1]}" if isinstance(value, tuple) else str(value)


def _shapes(step: Step) -> str:
    return ", ".join(str(list(shape)) for shape in step.results)


_VALUE_REMEDY = "Keep the value in a tensor on the device, or in the bucket's fixed sizes."
_PATH_REMEDY = "Do the same work in every run, with a mask over what is not live (torch.where), not a branch or a loop."
