"""What every runtime does the same way: warm-up, the frame of a capture, and what is restored after it.

Requirements
------------
1. An adapter derives from :class:`BaseRuntime` and gives the device's own part: ``_begin``, ``_end``, ``_abort`` and
   figures. Everything a user relies on on every device is here, once.
2. One capture runs at a time in a process, whatever the runtime; a second one is refused with the place of the first.
3. The collector is quiet during a capture. Generators, tensors written in place and gradients are afterwards what they
   were before, after a warm-up, a capture, and a failed capture.
4. A capture that fails leaves nothing: the graph is closed, its memory given back, and the next capture works.
5. A tensor born inside that outlives the capture is an output (returned, declared, or bound to a name in the block's
   own function) or an error that names who keeps it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

import torch

from graphsafe._escape import bound_tensors, escaped
from graphsafe._location import Location, caller
from graphsafe._one_capture import one_capture
from graphsafe._state import Generators, SavedState, host_random_state
from graphsafe._storage import key_of
from graphsafe._strict import leftover
from graphsafe._watch import Recorder, Streams, Watch
from graphsafe.arena import Arena
from graphsafe.bucket import Bucket
from graphsafe.errors import GraphSafeError, error
from graphsafe.explanations import explanation_of
from graphsafe.metadata import BoundTables, MetadataBuilder, TorchMetadataBuilder
from graphsafe.runtime import Graph, MemoryFigures
from graphsafe.tree import tensors

__all__ = ["GUARDS", "BaseGraph", "BaseRuntime", "Capture"]

GUARDS = ("off", "normal", "strict")
"""How much a capture and its replays check; see docs/guard.md."""


class BaseGraph:
    """A captured graph's life: open during the capture, then replayable, then closed."""

    def __init__(self, runtime: BaseRuntime) -> None:
        self.runtime = runtime
        self.state = "capturing"
        self.declared: list[torch.Tensor] = []
        self.strict = False
        self.made_at = caller()

    def outputs(self, *values: Any) -> Any:
        """Declare what is kept of the capture; returns the value, or the tuple of values, unchanged."""
        if self.state != "capturing":
            raise error("out-of-order", f"outputs() is for the time of the capture; the graph is {self.state}")
        self.declared.extend(tensors(values))
        return values[0] if len(values) == 1 else values

    def _ready(self) -> None:
        if self.state != "captured":
            raise error("out-of-order", f"replay of a graph that is {self.state}, made at {self.made_at}")
        if one_capture.running:
            raise error(
                "out-of-order", "a graph is replayed while a capture is running", remedy="Finish the capture first."
            )

    def close(self) -> None:
        """Give the graph and its memory back; a later replay is refused."""
        self.state = "closed"
        self.declared.clear()

    # An adapter gives these.

    def private_holders(self, key: int) -> int:
        """References that the graph itself holds to the storage ``key``."""
        return 0

    def is_private(self, t: torch.Tensor) -> bool:
        """Whether ``t`` is one of those references."""
        return False

    @property
    def launches(self) -> int:
        raise NotImplementedError

    @property
    def pool_bytes(self) -> int:
        raise NotImplementedError

    def replay(self) -> None:
        raise NotImplementedError


class Capture:
    """The context manager of :meth:`BaseRuntime.capture`; it is also the capture's guard."""

    def __init__(
        self,
        runtime: BaseRuntime,
        pool: Any,
        copied_inputs: Mapping[int, str] | None,
        *,
        guard: str = "normal",
        discard: bool = False,
    ) -> None:
        if guard not in GUARDS:
            raise error("argument", f"guard={guard!r}: one of {', '.join(map(repr, GUARDS))} is needed")
        self._guard = guard
        self._runtime = runtime
        self._discard = discard
        self._pool = pool
        self._copied_inputs = copied_inputs
        self._stack: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        where = caller()
        one_capture.acquire(where)
        self._stack = [one_capture.release]
        try:
            if not self._runtime.capture_executes:
                gc.collect()  # memory of garbage, which a capture could not give back
            torch.clear_autocast_cache()  # a cast made before would be read, though nothing holds it later
            if gc.isenabled():
                gc.disable()
                self._stack.append(gc.enable)
            generators = Generators(self._runtime.generators)
            self._stack.append(generators.restore)
            self._generators = generators
            self._host_random = host_random_state()
            self._saved = SavedState(contents=self._runtime.capture_executes)
            self._stack.append(self._saved.restore)
            self.graph = self._runtime._begin(self._pool)
            self.graph.strict = self._guard == "strict"
            self.watch = Watch(
                self._runtime.device,
                check=self._guard != "off",
                saved=self._saved,
                recorder=self._runtime._recorder(self.graph),
                generators=self._runtime.generators,
                raw_addresses=self._runtime.raw_addresses,
                compiled=self._guard == "off" and not self._runtime.capture_executes,  # else nothing would be recorded
                copied_inputs=self._copied_inputs,
                streams=self._runtime._streams(),
            )
            self._active = contextlib.ExitStack()
            self._active.enter_context(self.watch.active())
            self._active.enter_context(self._runtime._also_watching(self.watch, self.graph))
        except BaseException:
            self._unwind()
            raise
        return self.graph

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = sys._getframe(1)
        try:
            self._active.close()
            if problem is None:
                problem = self._end(frame)
                if problem is not None:
                    raise problem
            elif not isinstance(problem, GraphSafeError) and isinstance(problem, Exception):
                explained = self._runtime._explained(problem, _where_raised(problem))
                if explained is not None:
                    raise explained from problem
        except BaseException as raised:
            self._fail(raised)
            raise
        else:
            if problem is not None:
                self._fail(problem)
            elif self._discard:
                self.graph.close()
        finally:
            del frame
            self._unwind()

    def _end(self, frame: FrameType) -> GraphSafeError | None:
        graph, watch = self.graph, self.watch
        if watch.broken is not None:
            return watch.broken
        watch.generators_untouched()
        self._end_on_the_device()
        if self._guard == "off":
            self._runtime._captured(graph, watch)
            graph.state = "captured"
            return None
        reseeded = self._generators.reseeded()
        if reseeded is not None:
            return error("rng-state", f"the generator on {reseeded.device} was seeded inside the capture")
        if not watch.other_threads_drew and host_random_state() != self._host_random:
            return error("host-randomness", "the body drew from random or numpy.random on the host")
        kept = graph.declared or bound_tensors(frame)
        del frame
        torch.clear_autocast_cache()  # nor may a cast made inside be used outside
        problem = escaped(watch, kept, graph)
        if problem is not None:
            gc.collect()  # garbage keeps nothing
            time.sleep(0.01)  # nor does a thread of autograd that waits for the interpreter to drop what it used
            problem = escaped(watch, kept, graph)
        if problem is None:
            self._runtime._captured(graph, watch)
            graph.state = "captured"
        return problem

    def _end_on_the_device(self) -> None:
        try:
            self._runtime._end(self.graph)
        except Exception as problem:  # streams that were not joined, say: the line that last used one is to blame
            explained = self._runtime._explained(problem, next(reversed(self.watch.side_streams.values()), None))
            if explained is None:
                raise
            raise explained from problem

    def _fail(self, problem: BaseException) -> None:
        self._runtime._abort(self.graph)
        left = leftover(self.watch, self.graph, problem) if self._guard == "strict" else None
        self.graph.close()
        self.graph.state = "closed after a failed capture"
        if left is not None:
            raise left from problem

    def _unwind(self) -> None:
        problems: list[BaseException] = []
        while self._stack:
            try:
                self._stack.pop()()
            except Exception as problem:  # every step runs; the first problem is raised below
                problems.append(problem)
        if problems:
            raise problems[0]


class BaseRuntime:
    """Common part of all runtimes; see the module's requirements.

    ``capture_executes``: whether the body's work really runs while it is captured (on a CPU it does, and is undone).
    ``raw_addresses``: whether work through ``data_ptr`` is recorded.
    """

    name = "base"
    capture_executes = False
    raw_addresses = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._extra_generators: list[torch.Generator] = []

    # For users.

    def arena(self, bucket: Bucket, *, canaries: bool = False) -> Arena:
        """An arena for ``bucket`` on this device; ``canaries`` puts guard bytes around each tensor."""
        return Arena(bucket, self.device, canaries=canaries)

    def metadata_builder(self) -> MetadataBuilder:
        """The device's builder of chunk tables."""
        return TorchMetadataBuilder()

    def tables(self, bucket: Bucket) -> BoundTables:
        """The builder of a bucket's tables: ``runtime.tables(bucket).build(cu_seqlens)``."""
        return BoundTables(self.metadata_builder(), bucket)

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators a capture may draw from."""
        return [*self._default_generators(), *self._extra_generators]

    def register_generator(self, generator: torch.Generator) -> None:
        """Let captures draw from ``generator``: it is restored after a capture and advances at each replay."""
        if all(generator is not g for g in self._extra_generators):
            self._extra_generators.append(generator)

    def warm_up(
        self, body: Callable[[], Any], *, iterations: int = 1, keep: Callable[[], Sequence[torch.Tensor]] | None = None
    ) -> Any:
        """Run ``body`` eagerly, ``iterations`` times, and put back what it changed; returns the last result.

        ``keep``: called at the end; tensors born inside that stay (an optimizer's fresh state) and must go back to the
        value they had before they were first written. An error of the body is raised as rule ``eager-failed``.
        """
        if one_capture.running_here:
            raise error("out-of-order", "a warm-up inside a capture", remedy="Warm up before the capture.")
        generators = Generators(self.generators)
        saved = SavedState(births=keep is not None)
        watch = Watch(self.device, check=False, saved=saved)
        result: Any = None
        try:
            with watch.active(), self._also_watching(watch, None):
                for _ in range(iterations):
                    result = None
                    result = self._run_warm(body)
            if keep is not None:
                _settle(watch, saved, keep())
        except GraphSafeError:
            raise
        except Exception as problem:
            what = f"the body failed eagerly, before any capture: {type(problem).__name__}: {problem}"
            told = self.explain(problem)
            why = None if told == str(problem) else f"It failed without any graph. {told}"
            raise error("eager-failed", what, where=_where_raised(problem), why=why) from problem
        finally:
            saved.restore()
            generators.restore()
        return result

    def capture(
        self, *, pool: Any = None, copied_inputs: Mapping[int, str] | None = None, guard: str = "normal"
    ) -> Capture:
        """Record the block: ``with runtime.capture() as graph: ...``; then ``graph.replay()``.

        ``pool``: a graph whose memory pool to share. What the block binds to names of its own function, or declares
        with ``graph.outputs(...)``, stays readable after each replay; anything else born inside may not be kept.
        ``guard``: ``"off"`` checks no rule, here or at a replay, and leaves errors to the device; ``"strict"`` checks
        at each replay all that the graph reads from outside, and what a failed capture leaves behind (docs/guard.md).
        """
        return Capture(self, pool, copied_inputs, guard=guard)

    @property
    def capturing(self) -> bool:
        """Whether this thread is inside a capture, of whichever runtime."""
        return one_capture.running_here

    def guard(self) -> Capture:
        """The guard of a capture that is thrown away: it runs the rules and leaves no graph."""
        return Capture(self, None, None, discard=True)

    def explain(self, problem: BaseException | str | int) -> str:
        """What a device error means and what to do; the text itself where nothing is known about it."""
        found = explanation_of(problem)
        return str(problem) if found is None else f"{found.meaning} {found.remedy}"

    def environment(self) -> dict[str, str | None]:
        """What a result on this device depends on, by name: the device, its driver and its libraries."""
        return {"device": str(self.device)}

    # For adapters.

    def _default_generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def _run_warm(self, body: Callable[[], Any]) -> Any:
        return body()

    def _streams(self) -> Streams | None:
        """How to tell the present stream, where there are streams; asked once, inside the capture."""
        return None

    def _begin(self, pool: Any) -> Any:
        raise NotImplementedError

    def _recorder(self, graph: Any) -> Recorder | None:
        return None

    def _also_watching(self, watch: Watch, graph: Any) -> AbstractContextManager[None]:
        """The adapter's own ways to see what is no operator: kernel launches, synchronisation."""
        return contextlib.nullcontext()

    def _end(self, graph: Any) -> None:
        raise NotImplementedError

    def _captured(self, graph: Any, watch: Watch) -> None:
        """The capture kept every rule; ``watch`` knows what the body read and made."""

    def _abort(self, graph: Any) -> None:
        raise NotImplementedError

    def _explained(self, problem: Exception, where: Location | None) -> GraphSafeError | None:
        return None

    def event(self) -> Any:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    def memory(self) -> MemoryFigures:
        raise NotImplementedError


def _settle(watch: Watch, saved: SavedState, kept: Sequence[torch.Tensor]) -> None:
    """State born in a warm-up can be put back only if it was written after it was made."""
    for t in kept:
        key = key_of(t)
        if key in watch.born and not saved.saved(key):
            raise error(
                "capture-leftover",
                "state made by the first step has no value from before it (a momentum that starts as the gradient)",
                remedy="Take one eager step first, so that the state exists: step.eager(batch) of a TrainStep.",
            )


def _where_raised(problem: BaseException) -> Location | None:
    """The caller's innermost line in a traceback."""
    trace = problem.__traceback__
    found: Location | None = None
    while trace is not None:
        at = caller(trace.tb_frame)
        if (
            at is not None
            and trace.tb_frame.f_code.co_filename == at.file
            and at.function == trace.tb_frame.f_code.co_name
        ):
            found = Location(at.file, trace.tb_lineno, at.function)
        trace = trace.tb_next
    return found


def as_graph(graph: BaseGraph) -> Graph:
    """For the type checker: a base graph satisfies the protocol."""
    return graph
