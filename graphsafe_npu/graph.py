"""NpuGraph: a captured ``torch.npu.NPUGraph`` with its figures.

Requirements
------------
1. ``launches`` counts what the capture recorded, as far as the host can see: operators that compute, and launches of
   triton kernels. torch_npu does not tell the tasks of a graph; one operator may be several.
2. A replay is refused once a tensor that the graph reads from outside has died or moved.
3. ``poison`` fills the graph's pool with NaN, so that leftovers cannot pass for results. Graphs that share the pool
   lose what they hold there until their next replay.
4. A graph whose owner dies inside a capture is kept until that has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphsafe._one_capture import one_capture
from graphsafe._operators import OperatorFacts
from graphsafe._outside import OutsideTensors
from graphsafe.base import BaseGraph
from graphsafe_npu.driver import fill_bytes

if TYPE_CHECKING:
    from graphsafe_npu.runtime import NpuRuntime

__all__ = ["NpuGraph", "forget_buried"]

_buried: list[Any] = []
"""torch_npu graphs whose owner died inside a capture; they are dropped after it."""


def forget_buried() -> None:
    """Drop the graphs that died inside a capture; called once none is running on the device."""
    _buried.clear()


class NpuGraph(BaseGraph):
    """See the module's requirements; made by ``runtime.capture()``."""

    def __init__(self, runtime: NpuRuntime, pool: Any) -> None:
        super().__init__(runtime)
        self._npu = runtime.npu
        self.raw: Any = self._npu.NPUGraph()
        # a handle of our own: torch_npu does not tell that of a capture that failed
        self.pool = pool if pool is not None else self._npu.graph_pool_handle()
        self.kernel_names: list[str] = []
        self.operator_names: list[str] = []
        self.outside = OutsideTensors()

    def record(
        self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Count an operator of the captured body (the protocol of a recorder)."""
        if not func.is_view and not facts.fills_nothing and not facts.changes_geometry:
            self.operator_names.append(facts.name)

    @property
    def launches(self) -> int:
        """Operators and triton kernels of one replay."""
        return len(self.operator_names) + len(self.kernel_names)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the allocator has reserved for the graph's pool; shared pools count once for each graph."""
        return sum(int(s["total_size"]) for s in self._segments())

    def _segments(self) -> list[Any]:
        pool = tuple(self.pool)
        return [s for s in self._npu.memory_snapshot() if tuple(s.get("segment_pool_id", ())) == pool]

    def replay(self) -> None:
        """Launch the graph on the current stream; one host call."""
        self._ready()
        self.outside.check(strict=self.strict)
        self.raw.replay()

    def poison(self) -> None:
        """Fill the pool with NaN."""
        self._ready()
        self._npu.synchronize(self.runtime.device)
        for segment in self._segments():
            fill_bytes(int(segment["address"]), 0xFF, int(segment["total_size"]))

    def discard(self) -> None:
        """Drop torch_npu's graph and with it the pool. It is reset first: a body that raised leaves a partial graph."""
        if self.raw is not None:
            self.raw.reset()
            self.raw = None

    def __del__(self) -> None:
        if getattr(self, "raw", None) is not None and one_capture.running:
            _buried.append(self.raw)

    def close(self) -> None:
        if self.state == "captured":
            self._npu.synchronize(self.runtime.device)
        self.discard()
        super().close()
        self.outside.forget()


def is_npu(generator: torch.Generator) -> bool:
    """Whether a generator is one of the device."""
    return generator.device.type == "npu"
