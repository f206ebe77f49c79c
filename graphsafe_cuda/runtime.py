"""CudaRuntime: ``graphsafe.get_runtime("cuda")``.

Requirements
------------
1. A capture runs on a side stream, with the error mode of :attr:`CudaRuntime.capture_error_mode`, from a pool that a
   callable's graphs share. Warm-up runs on the same side stream, so that compilation, tuning and library workspaces are
   done before.
2. Inside a capture torch's own detection of synchronisations is armed, and a triton kernel that is cold or wants tuning
   is refused by name before the driver fails.
3. A capture that fails leaves the current stream, the allocator, the generators and the collector as they were.
4. Driver errors come out as typed errors that say what they mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphsafe._location import Location
from graphsafe._watch import Streams, Watch
from graphsafe.base import BaseRuntime
from graphsafe.errors import GraphSafeError, error
from graphsafe.metadata import MetadataBuilder
from graphsafe.runtime import MemoryFigures
from graphsafe_cuda import compat
from graphsafe_cuda.driver import driver_version
from graphsafe_cuda.explain import explanation_of
from graphsafe_cuda.graph import CudaGraph, forget_buried

__all__ = ["CudaRuntime"]


class CudaRuntime(BaseRuntime):
    """The contract on ``torch.cuda.CUDAGraph``, on the device that is current when the runtime is made.

    ``capture_error_mode``: ``"global"`` (another thread's unsafe call breaks the capture, as torch's default),
    ``"thread_local"`` or ``"relaxed"``; see cudaStreamCaptureMode.
    """

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            why = "torch has no CUDA build" if torch.version.cuda is None else "torch finds no usable CUDA device"
            raise error("runtime-missing", f"{why} (torch {torch.__version__})")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.capture_error_mode = "global"
        self._side = torch.cuda.Stream(self.device)
        self._open: _OpenCapture | None = None

    # For users.

    def metadata_builder(self) -> MetadataBuilder:
        """The one-launch builder of the kernel set where triton is installed, else plain torch operators."""
        return _metadata_builder()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def memory(self) -> MemoryFigures:
        """Bytes in tensors now, and the peak since ``torch.cuda.reset_peak_memory_stats``."""
        return MemoryFigures(torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device))

    def event(self) -> torch.cuda.Event:
        """An event with timing: ``record()``, then ``a.elapsed_time(b)`` in milliseconds."""
        return torch.cuda.Event(enable_timing=True)

    def environment(self) -> dict[str, str | None]:
        """The GPU, its driver, and the CUDA that torch was built with."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }

    def explain(self, problem: BaseException | str | int) -> str:
        """What a CUDA error means and what to do."""
        found = explanation_of(problem)
        return str(problem) if found is None else f"{found.meaning} {found.remedy}"

    # The device's part of a capture.

    def _default_generators(self) -> list[torch.Generator]:
        return [torch.default_generator, torch.cuda.default_generators[self.device.index]]

    def _run_warm(self, body: Callable[[], Any]) -> Any:
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            result = body()
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        torch.cuda.synchronize(self.device)
        return result

    def _streams(self) -> Streams:
        def present() -> int:
            return int(torch.cuda.current_stream(self.device).cuda_stream)

        return Streams(present, present(), int(torch.cuda.default_stream(self.device).cuda_stream))

    def _begin(self, pool: Any) -> CudaGraph:
        if pool is not None and not isinstance(pool, CudaGraph):
            raise error("argument", f"pool is a {type(pool).__name__}; a graph of this runtime is needed")
        graph = CudaGraph(self, None if pool is None else pool.pool)
        self._open = _OpenCapture(self, graph)
        try:
            self._open.begin()
        except BaseException:
            self._abort(graph)
            raise
        return graph

    def _also_watching(self, watch: Watch, graph: CudaGraph | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if graph is None else _triton_rules(watch, graph)

    def _end(self, graph: CudaGraph) -> None:
        assert self._open is not None
        self._open.end()
        self._open = None
        forget_buried()
        graph.finish()

    def _captured(self, graph: CudaGraph, watch: Watch) -> None:
        graph.remember_outside(watch)

    def _abort(self, graph: CudaGraph) -> None:
        if self._open is not None:
            self._open.abort()
            self._open = None
        forget_buried()
        graph.discard()
        torch.cuda.empty_cache()

    def _explained(self, problem: Exception, where: Location | None) -> GraphSafeError | None:
        found = explanation_of(problem)
        if found is None:
            return None
        return error(found.rule, f"{found.meaning}\n  driver: {problem}", where=where, remedy=found.remedy)


class _OpenCapture:
    """One running ``torch.cuda.graph``: the stream, the sync detection, and how to get out of a broken one."""

    def __init__(self, runtime: CudaRuntime, graph: CudaGraph) -> None:
        self._runtime = runtime
        self._graph = graph
        self._previous_stream = torch.cuda.current_stream(runtime.device)
        self._previous_mode = torch.cuda.get_sync_debug_mode()
        self._context = torch.cuda.graph(
            graph.raw, pool=graph.pool, stream=runtime._side, capture_error_mode=runtime.capture_error_mode
        )

    def begin(self) -> None:
        for generator in self._runtime._extra_generators:
            if generator.device.type == "cuda":
                self._graph.raw.register_generator_state(generator)
        torch.cuda.synchronize(self._runtime.device)
        self._context.__enter__()
        torch.cuda.set_sync_debug_mode("error")  # armed here: capture_begin itself synchronises

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode(self._previous_mode)
        self._context.__exit__(None, None, None)

    def abort(self) -> None:
        """Leave a capture that failed: end it, and where the driver had broken it, mend what torch leaves behind."""
        torch.cuda.set_sync_debug_mode(self._previous_mode)
        try:
            self._context.__exit__(None, None, None)
        except RuntimeError:
            compat.release_pool(self._runtime.device.index, self._graph.pool)
            for generator in self._runtime.generators:
                if generator.device.type == "cuda":
                    compat.fresh_generator_state(generator)
        finally:
            torch.cuda.set_stream(self._previous_stream)


@contextlib.contextmanager
def _triton_rules(watch: Watch, graph: CudaGraph) -> Iterator[None]:
    def cold(kernel: str) -> None:
        raise watch.fail("cold-kernel", f"the triton kernel {kernel!r} would be compiled inside the capture")

    def tuning(kernel: str) -> None:
        raise watch.fail("cold-kernel", f"the triton kernel {kernel!r} would be tuned inside the capture")

    with compat.compile_hook(cold), compat.autotuner(tuning), compat.launch_hook(graph.kernel_names.append):
        yield


def _metadata_builder() -> MetadataBuilder:
    from graphsafe_cuda.tables import builder

    return builder()
