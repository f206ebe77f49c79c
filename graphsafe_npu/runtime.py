"""NpuRuntime: ``graphsafe.get_runtime("npu")``.

Requirements
------------
1. A capture runs on a side stream, in the error mode ``global`` (``thread_local`` does not keep other threads' copies
   out), from a pool that a callable's graphs share. Warm-up runs on the same side stream.
2. Settings under which NPUGraph cannot capture are refused by name before the capture begins.
3. Inside a capture torch_npu's own detection of synchronisations is armed, and a triton kernel that is cold, wants
   tuning or needs locks is refused by name.
4. A capture that fails leaves the current stream, the allocator, the generators and the collector as they were, also
   where torch_npu itself leaves the capture stream current or a partial graph replayable.
5. ACL codes come out as typed errors that say what they mean.
6. On a simulated Ascend the runtime works the same and says so: ``simulated`` is true.
7. Without torch_npu, CANN or a device, making a runtime raises ``runtime-missing`` with the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphsafe._location import Location
from graphsafe._watch import Recorder, Streams, Watch
from graphsafe.base import BaseRuntime
from graphsafe.errors import GraphSafeError, error
from graphsafe.metadata import MetadataBuilder, TorchMetadataBuilder
from graphsafe.runtime import MemoryFigures
from graphsafe_npu import compat, sim
from graphsafe_npu.explain import explanation_of
from graphsafe_npu.graph import NpuGraph, forget_buried, is_npu
from graphsafe_npu.settings import refuse_settings

__all__ = ["NpuRuntime"]


class NpuRuntime(BaseRuntime):
    """The contract on ``torch.npu.NPUGraph``, on the device that is current when the runtime is made.

    ``simulated``: the device is the simulator of :mod:`graphsafe_npu.sim`; nothing measured on it is about hardware.
    """

    name = "npu"

    def __init__(self) -> None:
        self.npu = compat.load()
        self.simulated = sim.present()
        if self.simulated:
            sim.activate()
        super().__init__(torch.device("npu", self.npu.current_device()))
        self._side = self.npu.Stream(self.device)
        self._open: _OpenCapture | None = None

    # For users.

    def metadata_builder(self) -> MetadataBuilder:
        """The one-launch builder of the kernel set where Triton-Ascend is installed, else plain torch operators."""
        return _metadata_builder()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        self.npu.synchronize(self.device)

    def memory(self) -> MemoryFigures:
        """Bytes in tensors now, and the peak since ``torch.npu.reset_peak_memory_stats``."""
        return MemoryFigures(*compat.memory_figures(self.npu, self.device))

    def event(self) -> Any:
        """An event with timing: ``record()``, then ``a.elapsed_time(b)`` in milliseconds."""
        return self.npu.Event(enable_timing=True)

    def environment(self) -> dict[str, str | None]:
        """The NPU and the version of CANN, where torch_npu tells it."""
        name = str(self.npu.get_device_name(self.device))
        return {"device": name, "cann": None if self.simulated else compat.cann_version(self.npu)}

    def explain(self, problem: BaseException | str | int) -> str:
        """What an ACL error means and what to do."""
        found = explanation_of(problem)
        return str(problem) if found is None else f"{found.meaning} {found.remedy}"

    # The device's part of a capture.

    def _default_generators(self) -> list[torch.Generator]:
        return [torch.default_generator, self.npu.default_generators[self.device.index]]

    def _run_warm(self, body: Callable[[], Any]) -> Any:
        current = self.npu.current_stream(self.device)
        self._side.wait_stream(current)
        with self.npu.stream(self._side):
            result = body()
        current.wait_stream(self._side)
        self.synchronize()
        return result

    def _streams(self) -> Streams:
        def present() -> int:
            return int(self.npu.current_stream(self.device).npu_stream)

        return Streams(present, present(), int(self.npu.default_stream(self.device).npu_stream))

    def _begin(self, pool: Any) -> NpuGraph:
        if pool is not None and not isinstance(pool, NpuGraph):
            raise error("argument", f"pool is a {type(pool).__name__}; a graph of this runtime is needed")
        refuse_settings()
        graph = NpuGraph(self, None if pool is None else pool.pool)
        self._open = _OpenCapture(self, graph)
        try:
            self._open.begin()
        except BaseException:
            self._abort(graph)
            raise
        return graph

    def _recorder(self, graph: NpuGraph) -> Recorder:
        return graph

    def _also_watching(self, watch: Watch, graph: NpuGraph | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if graph is None else _triton_rules(watch, graph)

    def _end(self, graph: NpuGraph) -> None:
        assert self._open is not None
        self._open.end()
        self._open = None
        forget_buried()

    def _captured(self, graph: NpuGraph, watch: Watch) -> None:
        graph.outside.remember(watch)

    def _abort(self, graph: NpuGraph) -> None:
        if self._open is not None:
            self._open.abort()
            self._open = None
        forget_buried()
        graph.discard()
        self.npu.empty_cache()

    def _explained(self, problem: Exception, where: Location | None) -> GraphSafeError | None:
        found = explanation_of(problem)
        if found is None:
            return None
        return error(found.rule, f"{found.meaning}\n  device: {problem}", where=where, remedy=found.remedy)


class _OpenCapture:
    """One running ``torch.npu.graph``: the stream, the sync detection, and how to get out of a broken one."""

    def __init__(self, runtime: NpuRuntime, graph: NpuGraph) -> None:
        self._runtime = runtime
        self._graph = graph
        self._npu = runtime.npu
        self._previous_stream = self._npu.current_stream(runtime.device)
        self._previous_mode = self._npu.get_sync_debug_mode()
        self._context = self._npu.graph(
            graph.raw, pool=graph.pool, stream=runtime._side, capture_error_mode="global"
        )

    def begin(self) -> None:
        for generator in self._runtime._extra_generators:
            if is_npu(generator):
                compat.register_generator(self._graph.raw, generator)
        self._context.__enter__()
        self._npu.set_sync_debug_mode("error")  # armed here: entering synchronises

    def end(self) -> None:
        self._npu.set_sync_debug_mode(self._previous_mode)
        self._context.__exit__(None, None, None)

    def abort(self) -> None:
        """Leave a capture that failed: end it, and where the device had broken it, mend what torch_npu leaves."""
        self._npu.set_sync_debug_mode(self._previous_mode)
        try:
            self._context.__exit__(None, None, None)
        except RuntimeError:
            compat.release_pool(self._runtime.device.index, self._graph.pool)
            for generator in self._runtime.generators:
                if is_npu(generator):
                    compat.fresh_generator_state(generator)
        finally:
            self._npu.set_stream(self._previous_stream)


@contextlib.contextmanager
def _triton_rules(watch: Watch, graph: NpuGraph) -> Iterator[None]:
    def cold(kernel: str) -> None:
        raise watch.fail("cold-kernel", f"the triton kernel {kernel!r} would be compiled inside the capture")

    def tuning(kernel: str) -> None:
        raise watch.fail("cold-kernel", f"the triton kernel {kernel!r} would be tuned inside the capture")

    def launch(kernel: str, loaded: bool, locks: int) -> None:
        if not loaded:
            raise watch.fail("cold-kernel", f"the triton kernel {kernel!r} would be loaded inside the capture")
        if locks > 0:
            raise watch.fail(
                "not-capturable",
                f"the triton kernel {kernel!r} needs {locks} locks",
                why="A launch initialises locks by a synchronous copy, which a capture refuses and no replay repeats.",
                remedy="Write the kernel without dependencies between its programs.",
            )
        graph.kernel_names.append(kernel)

    with compat.compile_hook(cold), compat.autotuner(tuning), compat.launch_hook(launch):
        yield


@functools.cache
def _metadata_builder() -> MetadataBuilder:
    if importlib.util.find_spec("triton") is None:
        return TorchMetadataBuilder()
    from graphsafe_kernels.tables import TritonMetadataBuilder

    made: MetadataBuilder = TritonMetadataBuilder()
    return made
