"""Figures of a graphed callable: what happened, how often, at what cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CaptureFigures", "Stats"]


@dataclass(frozen=True)
class CaptureFigures:
    """One capture. ``launches``: device operations of one replay. Bytes: ``arena_bytes`` static memory as priced in
    ``price_bytes``, ``pool_bytes`` memory born inside. Seconds: ``warm_up_s``, ``capture_s``."""

    bucket: str
    launches: int
    arena_bytes: int
    price_bytes: int
    pool_bytes: int
    warm_up_s: float
    capture_s: float


@dataclass
class Stats:
    """Counts since the callable was made. ``overflows`` counts eager calls by reason; ``tokens_used`` and
    ``tokens_held`` (and the same for sequences) sum over replays, so that their quotient is the utilisation."""

    captures: int = 0
    replays: int = 0
    overflows: Counter[str] = field(default_factory=Counter)
    tokens_used: int = 0
    tokens_held: int = 0
    sequences_used: int = 0
    sequences_held: int = 0
    graphs: list[CaptureFigures] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Device operations of one replay of the largest graph."""
        return max((g.launches for g in self.graphs), default=0)

    @property
    def arena_bytes(self) -> int:
        return sum(g.arena_bytes for g in self.graphs)

    @property
    def pool_bytes(self) -> int:
        return sum(g.pool_bytes for g in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        return {
            **asdict(self),
            "overflows": dict(self.overflows),
            "launches": self.launches,
            "arena_bytes": self.arena_bytes,
            "pool_bytes": self.pool_bytes,
        }
