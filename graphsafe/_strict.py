"""What the strict guard does beyond the normal one.

Requirements
------------
1. Two layouts: the body runs with two layouts of the same bucket before it is captured; an operator, a Python value, a
   grid or a constexpr that differs between them would be frozen into the graph, and is refused at its line.
2. Leftovers: what a failed capture made and something still holds is named; its bytes do not come back. What the frames
   of the error alone hold is none: where it would look like one, their locals are dropped first.
3. What these runs change is put back, as after a warm-up.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from graphsafe._escape import holder_of
from graphsafe._launches import traced_launches
from graphsafe._state import Generators, SavedState
from graphsafe._watch import Watch
from graphsafe.errors import GraphSafeError, error

if TYPE_CHECKING:
    from graphsafe.lint.collect import Step

__all__ = ["leftover", "refuse_layout_dependence"]


def refuse_layout_dependence(runtime: Any, body: Callable[[], Any], boundaries: Mapping[str, torch.Tensor]) -> None:
    """Run ``body`` with the layout that ``boundaries`` hold and with another of the same size; compare what it does.

    Raises MetadataError (frozen-scalar) or UnsupportedError (data-dependent-shape) for the first difference. Reads the
    boundaries on the host. Nothing is compared where no other layout has the same total and number of sequences.
    """
    from graphsafe.lint.differences import differences
    from graphsafe.lint.layouts import other_layout

    before = {name: t.clone() for name, t in boundaries.items()}
    other = {name: made for name, t in before.items() if (made := other_layout(t.cpu())) is not None}
    if not other:
        return
    first = _trace(runtime, body)
    try:
        for name, made in other.items():
            boundaries[name].copy_(made)
        second = _trace(runtime, body)
    finally:
        for name, t in before.items():
            boundaries[name].copy_(t)
    for found in differences(first, second, "with another layout in cu_seqlens"):
        raise error(found.rule.name, found.what, where=found.where, remedy=found.remedy)


def _trace(runtime: Any, body: Callable[[], Any]) -> list[Step]:
    from graphsafe.lint.collect import CollectingWatch, Tables

    generators, saved = Generators(runtime.generators), SavedState()
    watch = CollectingWatch(
        runtime.device, saved=saved, generators=runtime.generators, names={}, boundaries=set(), earlier=Tables(),
        definition=None,
    )  # fmt: skip
    try:
        with ExitStack() as active:
            active.enter_context(watch.active())
            active.enter_context(runtime._also_watching(watch, None))
            active.enter_context(traced_launches(watch.launched))
            runtime._run_warm(body)
    finally:
        saved.restore()
        generators.restore()
    return watch.trace


def leftover(watch: Watch, graph: Any, cause: BaseException) -> GraphSafeError | None:
    """The error for the first tensor of a failed capture that a gradient, a global, an attribute, a list or a closure
    still holds, or None."""
    if next(_leftovers(watch, graph, cause), None) is None:
        return None
    _drop_locals(cause)
    gc.collect()
    return next(_leftovers(watch, graph, cause), None)


def _drop_locals(problem: BaseException) -> None:
    """Drop what the ended frames of an error, and of those it came from, hold."""
    chain: list[BaseException | None] = [problem]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]


def _leftovers(watch: Watch, graph: Any, cause: BaseException) -> Iterator[GraphSafeError]:
    for key, (ref, where, made) in watch.born.items():
        if ref.holders() <= graph.private_holders(key):
            continue
        holder = holder_of(key, graph)
        if holder is not None:
            yield error(
                "capture-leftover",
                f"the capture failed ({_first_line(cause)}), and a tensor born inside it ({made}) is kept by {holder}",
                where=where,
                why="The graph's memory cannot be given back while something holds a part of it.",
                remedy="Drop what the body stored when it fails, or return it instead of storing it.",
            )


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
