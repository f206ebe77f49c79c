"""A device and a clock that a test controls, a provider with a planted fault, and small real cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from graphsafe.bench.cases import Case
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.providers.service import Provider, Service

SMALL: dict[str, Any] = {
    "operator": "gdn",
    "tokens": 128,
    "sequences": 2,
    "fill": 0.5,
    "dtype": "float32",
    "heads": 1,
    "value_heads": 1,
    "key_dim": 16,
    "value_dim": 16,
}


def small(**changes: Any) -> Case:
    """A case that runs in about a second on a CPU."""
    return Case(**{**SMALL, **changes})


class FakeClock:
    """A host clock and a device whose events read it; time passes only when an arm says so."""

    device = None

    def __init__(self) -> None:
        self.at = 0.0
        self.log: list[str] = []

    def now(self) -> float:
        return self.at

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def flush(self) -> None:
        self.log.append("flush")

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def arm(self, name: str, microseconds: float, *, jitter: float = 0.0, seed: int = 0) -> Callable[[], None]:
        """A call that takes ``microseconds``, give or take a share ``jitter``."""
        numbers = random.Random(seed)

        def call() -> None:
            self.log.append(name)
            self.at += microseconds * 1e-6 * (1 + jitter * numbers.uniform(-1, 1))

        return call


class FakeEvent:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.at

    def elapsed_time(self, end_event: Any) -> float:
        return (end_event.at - self.at) * 1e3


class Planted(Provider):
    """GDN with a fault of the test's choice."""

    name = "planted"

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor], **declared: Any) -> None:
        self.fault = fault
        self.services = {"chunk_gated_delta_rule": Service(("cpu",), (torch.float32,), **declared)}

    def missing(self) -> str | None:
        return None

    def function(self, operator: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            o, state = chunk_gated_delta_rule(**arguments)
            return self.fault(o), state

        return call


def result(**changes: Any) -> dict[str, Any]:
    """A result as a run makes it, with times (p50 by mode, both clocks alike) given as ``times``."""
    case = small(**changes.pop("case", {}))
    spread = changes.pop("spread", 0.01)
    times = {
        mode: {clock: spread_around(p50, spread) for clock in ("device", "host", "wall")}
        for mode, p50 in changes.pop("times", {}).items()
    }
    return {
        "case": case.as_dict(),
        "key": case.key,
        "series": case.series,
        "label": case.label,
        "provider": "graphsafe",
        "status": "ok",
        "reason": None,
        "refusals": {},
        "checks": {"errors": {"o": 1e-7}, "bounds": {"o": 1e-4}, "replay": True, "problems": []},
        "times": times,
        "launches": {},
        "peak_bytes": {},
        "live_bytes": 0,
        "graph": None,
        "utilisation": {"tokens": 0.5, "sequences": 0.5, "slots": 0.5, "live_slots": 1, "slots_held": 2},
        "figures": {},
        **changes,
    }


def spread_around(p50: float, spread: float) -> dict[str, float]:
    return {
        "p50": p50,
        "p95": p50 * (1 + 2 * spread),
        "low": p50 * (1 - spread),
        "high": p50 * (1 + spread),
        "least": p50 * (1 - 2 * spread),
        "samples": 40,
    }
