"""Prove that a replay writes what eager writes, bit for bit.

Requirements
------------
1. The same inputs, the same random numbers and the same state for both runs; eager gets its inputs in other tensors at
   other addresses, so that what a body keeps by identity or address cannot serve both.
2. All memory born in the graph, results included, is filled with NaN between them, so that leftovers cannot pass.
3. Results and every tensor the body writes in place are compared, not results alone.
4. Afterwards state and generators are what they were.
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

__all__ = ["Verification", "verify_replay"]


@dataclass(frozen=True)
class Verification:
    """What was compared: ``results`` tensors returned and ``state`` storages written in place, ``bytes`` in all."""

    results: int
    state: int
    bytes: int


def verify_replay(runtime: Any, graph: Any, body: Callable[[], Any], result: Any) -> Verification:
    """Compare eager (``body`` on copies of the static inputs) with a replay of ``graph``, whose results are ``result``.

    Raises PaddingError (rule replay-differs) that names the first difference.
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
        compared = [*tensors(want), *want_state.values()]
        return Verification(len(tensors(want)), len(want_state), sum(t.numel() * t.element_size() for t in compared))
    finally:
        saved.restore()
        generators.restore()
