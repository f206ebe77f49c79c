"""CudaGraph: a captured ``torch.cuda.CUDAGraph`` with its figures.

Requirements
------------
1. ``launches`` counts the kernels, copies and fills that one replay runs, from the graph itself.
2. A replay is refused once a tensor that the graph reads from outside has died or moved; while all live where they
   were, checking costs one address comparison each.
3. ``poison`` fills the graph's pool with NaN, so that leftovers cannot pass for results. Graphs that share the pool
   lose what they hold there until their next replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphsafe._one_capture import one_capture
from graphsafe._outside import OutsideTensors
from graphsafe._watch import Watch
from graphsafe.base import BaseGraph
from graphsafe_cuda import compat
from graphsafe_cuda.driver import fill_bytes, node_kinds

if TYPE_CHECKING:
    from graphsafe_cuda.runtime import CudaRuntime

__all__ = ["CudaGraph", "forget_buried"]

_buried: list[Any] = []
"""torch graphs whose owner died inside a capture; they are dropped after it."""


def forget_buried() -> None:
    """Drop the graphs that died inside a capture; called once none is running on the device."""
    _buried.clear()


class CudaGraph(BaseGraph):
    """See the module's requirements; made by ``runtime.capture()``."""

    def __init__(self, runtime: CudaRuntime, pool: Any) -> None:
        super().__init__(runtime)
        self.raw: Any = compat.new_graph()
        # a handle of our own: torch does not tell that of a capture that failed
        self.pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        self.kernel_names: list[str] = []
        self._launches = 0
        self._outside = OutsideTensors()

    def remember_outside(self, watch: Watch) -> None:
        """Watch what the captured body read from outside."""
        self._outside.remember(watch)

    def finish(self) -> None:
        """Count the nodes and make the executable graph; called once, after the capture."""
        raw_graph = getattr(self.raw, "raw_cuda_graph", None)
        if raw_graph is not None:
            self._launches = len(node_kinds(int(raw_graph())))
            self.raw.instantiate()
        else:
            self._launches = len(self.kernel_names)

    @property
    def launches(self) -> int:
        """Kernels, copies and fills of one replay."""
        return self._launches

    @property
    def pool_bytes(self) -> int:
        """Bytes that the allocator has reserved for the graph's pool; shared pools count once for each graph."""
        return sum(int(s["total_size"]) for s in self._segments())

    def _segments(self) -> list[Any]:
        pool = tuple(self.pool)
        return [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) == pool]

    def replay(self) -> None:
        """Launch the graph on the current stream; one host call."""
        self._ready()
        self._outside.check(strict=self.strict)
        self.raw.replay()

    def poison(self) -> None:
        """Fill the pool with NaN."""
        self._ready()
        torch.cuda.synchronize(self.runtime.device)
        for segment in self._segments():
            fill_bytes(int(segment["address"]), 0xFF, int(segment["total_size"]))
        torch.cuda.synchronize(self.runtime.device)

    def discard(self) -> None:
        """Drop torch's graph and with it the pool; the object itself holds generator tensors, so it goes too."""
        if self.raw is not None:
            self.raw.reset()
            self.raw = None

    def __del__(self) -> None:
        # a graph whose last name is rebound by "with runtime.capture() as graph" dies inside that capture, which the
        # driver would not survive
        if self.raw is not None and one_capture.running:
            _buried.append(self.raw)

    def close(self) -> None:
        if self.state == "captured":
            torch.cuda.synchronize(self.runtime.device)
        self.discard()
        super().close()
        self._outside.forget()
