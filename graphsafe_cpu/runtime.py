"""CpuRuntime: ``graphsafe.get_runtime("cpu")``.

Requirements
------------
1. A capture runs the body once, for real, records it on a :class:`~graphsafe_cpu.tape.Tape`, and undoes what it
   changed, so that a captured body has the effect that it has on a device: none.
2. Replay, poison and memory follow the contract of every runtime; nothing is simulated away.
3. Code that asks torch whether a stream is being captured takes the path that it takes on a device.
4. With Triton's interpreter (TRITON_INTERPRET=1) kernel launches on CPU tensors are recorded like operators.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch

from graphsafe._capturing import answering
from graphsafe._watch import Recorder, Watch
from graphsafe.base import BaseGraph, BaseRuntime
from graphsafe.errors import error
from graphsafe.runtime import MemoryFigures
from graphsafe_cpu.interpreted import interpreted_launches
from graphsafe_cpu.memory import live_bytes
from graphsafe_cpu.tape import Tape

__all__ = ["CpuGraph", "CpuRuntime"]


class CpuGraph(BaseGraph):
    """A recording that replays on the storages it was made with."""

    def __init__(self, runtime: CpuRuntime) -> None:
        super().__init__(runtime)
        self.tape = Tape()

    @property
    def launches(self) -> int:
        """Operators and interpreted kernels that one replay runs."""
        return self.tape.launches

    @property
    def pool_bytes(self) -> int:
        """Bytes of all memory born inside the capture."""
        return self.tape.pool_bytes

    def private_holders(self, key: int) -> int:
        return self.tape.private_holders(key)

    def is_private(self, t: torch.Tensor) -> bool:
        return self.tape.is_private(t)

    def replay(self) -> None:
        """Run the recording. Raises LifetimeError if something it reads died or was exchanged; nothing ran then."""
        self._ready()
        self.tape.replay()

    def poison(self) -> None:
        """Fill the pool (outputs and intermediates) with NaN."""
        self._ready()
        self.tape.poison()

    def close(self) -> None:
        super().close()
        self.tape.clear()


class CpuEvent:
    """A moment of the host clock; a CPU has run everything when a call returns."""

    def __init__(self) -> None:
        self._at: float | None = None

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to ``end_event``; both must be recorded."""
        if self._at is None or end_event._at is None:
            raise error("out-of-order", "an event is read that was not recorded")
        return (end_event._at - self._at) * 1e3


class CpuRuntime(BaseRuntime):
    """A CPU with real capture semantics; see :class:`graphsafe.base.BaseRuntime` for what every runtime does."""

    name = "cpu"
    capture_executes = True
    raw_addresses = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._peak = 0

    def _begin(self, pool: Any) -> CpuGraph:
        if pool is not None and not isinstance(pool, CpuGraph):
            raise error("argument", f"pool is a {type(pool).__name__}; a graph of this runtime is needed")
        return CpuGraph(self)

    def _recorder(self, graph: CpuGraph) -> Recorder:
        return graph.tape

    @contextlib.contextmanager
    def _also_watching(self, watch: Watch, graph: CpuGraph | None) -> Iterator[None]:
        tape = None if graph is None else graph.tape
        if tape is not None:
            tape.watch = watch
        with interpreted_launches(watch, tape), answering(graph is not None):
            yield

    def _end(self, graph: CpuGraph) -> None:
        graph.tape.finish()

    def _abort(self, graph: CpuGraph) -> None:
        graph.tape.clear()

    def event(self) -> CpuEvent:
        """An event of the host clock."""
        return CpuEvent()

    def synchronize(self) -> None:
        """A CPU has run everything when a call returns."""

    def environment(self) -> dict[str, str | None]:
        """The processor's kind and the number of threads that torch uses."""
        return {"device": f"cpu ({platform.machine()})", "threads": str(torch.get_num_threads())}

    def memory(self) -> MemoryFigures:
        """Bytes of all tensor storages alive in this process; the peak is that of the calls made so far."""
        held = live_bytes()
        self._peak = max(self._peak, held)
        return MemoryFigures(held, self._peak)
