"""Prove that a replay writes what eager writes, bit for bit.

Requirements
------------
1. The same inputs, the same random numbers and the same state for both runs; eager gets its inputs in other tensors at
   other addresses, so that what a body keeps by identity or address cannot serve both.
2. All memory born in the graph, results included, is filled with NaN between them, so that leftovers cannot pass.
3. Results and every tensor the body writes in place are compared, not results alone.
4. Generators end where eager leaves them: a replay that draws the same numbers again is found.
5. On demand all padding of the inputs is spoiled with NaN and the graph replayed once more: what padding holds may
   change no live result and no state.
6. Afterwards state and generators are what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe._state import Generators, SavedState
from graphsafe._watch import Watch
from graphsafe.compare import differences
from graphsafe.errors import error
from graphsafe.tree import map_leaves, tensors

__all__ = ["Verification", "check_padding", "verify_replay"]


@dataclass(frozen=True)
class Verification:
    """What was compared: ``results`` tensors returned and ``state`` storages written in place, ``bytes`` in all."""

    results: int
    state: int
    bytes: int


def verify_replay(
    runtime: Any,
    graph: Any,
    body: Callable[[], Any],
    result: Any,
    *,
    spoil: Callable[[], bool] | None = None,
    live: Callable[[Any], Any] = lambda result: result,
) -> Verification:
    """Compare eager (``body`` on copies of the static inputs) with a replay of ``graph``, whose results are ``result``.

    ``spoil``: fills the padding of the static inputs with NaN and says whether there was any; ``live`` cuts a result to
    its live rows. Padding stays spoiled afterwards. Raises PaddingError that names the first difference: rule
    replay-differs, or padding-read where it takes spoiled padding to see one.
    """
    saved = SavedState()
    generators = Generators(runtime.generators)
    watch = Watch(runtime.device, check=False, saved=saved)
    try:
        with watch.active(), runtime._also_watching(watch, None):
            eager = body()
        want = map_leaves(
            lambda _, leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, eager, "output"
        )
        del eager
        want_state = saved.present()
        ended = Generators(runtime.generators)
        saved.restore_and_keep()
        generators.restore()
        graph.poison()
        graph.replay()
        runtime.synchronize()
        found = differences(result, want, "output")
        got_state = saved.present()
        found += differences(got_state, want_state, "state")
        if found:
            raise error(
                "replay-differs",
                f"replay differs from eager: {found[0]}"
                + (f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""),
            )
        elsewhere = ended.elsewhere()
        if elsewhere is not None:
            what = f"the generator on {elsewhere.device} is in another state after a replay than after eager"
            raise error("replay-differs", what, why="Replays would draw the same numbers again, or skip some.")
        if spoil is not None and spoil():
            saved.restore_and_keep()
            generators.restore()
            graph.replay()
            runtime.synchronize()
            found = differences(live(result), live(want), "output") + differences(saved.present(), want_state, "state")
            if found:
                raise error("padding-read", f"what the inputs' padding holds changes a result: {found[0]}")
        compared = [*tensors(want), *want_state.values()]
        return Verification(len(tensors(want)), len(want_state), sum(t.numel() * t.element_size() for t in compared))
    finally:
        saved.restore()
        generators.restore()


def check_padding(name: str, t: torch.Tensor, live: int, dim: int = 1) -> None:
    """Raise PaddingError (rule padding-nonzero) unless all rows of ``dim`` from ``live`` on are exactly zero.

    Reads the device: call it after a replay and a synchronisation, not inside a capture.
    """
    rest = t.narrow(dim, live, t.shape[dim] - live)
    wrong = int((rest != 0).sum())
    if wrong:
        place = [int(i) for i in (rest != 0).nonzero()[0]]
        value = rest[tuple(place)].item()
        place[dim] += live
        raise error(
            "padding-nonzero",
            f"{wrong} elements of {name} beyond its {live} live rows are not zero: {name}{place} is {value}",
        )
