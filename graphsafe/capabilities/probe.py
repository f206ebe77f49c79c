"""What a probe is, the registry of all, and what probes share.

Requirements
------------
1. A probe is a function of the runtime that returns, perhaps with a note, if the capability is there. It raises
   ``Missing`` if what it needs is not here, ``Wrong`` for a wrong result, and lets every other error out.
2. Listing the probes imports torch and nothing that a device or a kernel needs.
3. A captured body counts as working only if replays with new data in the same memory equal eager bit for bit, after all
   memory of the graph was poisoned.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.verify import verify_replay

__all__ = ["Missing", "Probe", "Wrong", "check", "data", "probe", "probes", "replays"]


class Missing(Exception):
    """What the probe needs is not on this machine."""


class Wrong(Exception):
    """The device did it, and the result is wrong."""


@dataclass(frozen=True)
class Probe:
    """``name``: ``group.what``; ``what``: in words."""

    name: str
    what: str
    run: Callable[[Any], str | None]


_PROBES: dict[str, Probe] = {}


def probe(name: str, what: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register the probe of a capability."""

    def register(run: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        assert name not in _PROBES, name
        _PROBES[name] = Probe(name, what, run)
        return run

    return register


def probes() -> dict[str, Probe]:
    """All probes by name, in the order of the matrix."""
    importlib.import_module("graphsafe.capabilities.probes")
    return dict(_PROBES)


def check(holds: bool, otherwise: str) -> None:
    """A result that does not hold is wrong."""
    if not holds:
        raise Wrong(otherwise)


def data(runtime: Any, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same normal numbers on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(runtime.device)


def replays(runtime: Any, body: Callable[[], Any], updates: Sequence[Callable[[], Any]] = ()) -> tuple[Any, Any]:
    """Warm up, capture, and prove a replay after each update; returns (graph, result)."""
    runtime.warm_up(body)
    with runtime.capture() as graph:
        result = graph.outputs(body())
    for update in (lambda: None, *updates):
        update()
        verify_replay(runtime, graph, body, result)
        graph.replay()
        runtime.synchronize()
    return graph, result
