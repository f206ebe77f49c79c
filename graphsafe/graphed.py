"""graphed(): one callable over one or several buckets; capture once, then update and replay.

Requirements
------------
1. The caller writes a plain function. Tensor arguments become static inputs, whatever their nesting; a parameter
   called ``tables`` is filled with the batch's :class:`~graphsafe.metadata.ChunkTables`, built inside the graph from
   its ``cu_seqlens``; with several ``cu_seqlens`` it is a tuple of them, in the order of the arguments.
2. A call uses the smallest bucket that fits. A batch that fits none runs eagerly and is counted with its reason, or
   raises, as ``on_overflow`` says; the wrapper never turns eager for another reason.
3. Everything is checked before anything is written. After an error the callable is as it was.
4. Outputs are the graph's static tensors, cut to the batch's own size: the next call overwrites them. They carry no
   autograd graph; a body that trains runs its backward inside.
5. One call at a time: what a second thread would write into the static memory of the first is refused.
6. The same call with other host values is refused by name, unless they are declared static: then each has a graph.
7. ``guard="strict"`` proves every call, spoils its padding, and checks canaries and layouts; ``"off"`` leaves errors to
   the device. What either does is in docs/guard.md.
8. ``verify`` proves a call: eager, then poison, then replay, equal bit for bit, with all state put back.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from graphsafe._location import caller
from graphsafe._storage import NOT_PLAIN, is_plain, key_of, kind_of
from graphsafe._strict import refuse_layout_dependence
from graphsafe.arena import Arena
from graphsafe.base import GUARDS
from graphsafe.bucket import Bucket
from graphsafe.errors import error
from graphsafe.inputs import Call, Input, InputPlan, bind_call, static_key
from graphsafe.outputs import OutputPlan
from graphsafe.pricing import Price
from graphsafe.runtime import get_runtime
from graphsafe.stats import CaptureFigures, Stats
from graphsafe.tree import map_leaves
from graphsafe.verify import Verification, verify_replay

__all__ = ["Captured", "GraphedCallable", "graphed"]

_TABLES = "tables"


@dataclass
class _Entry:
    """One bucket of one set of static values: its memory, its inputs and, once captured, its graph and results."""

    bucket: Bucket
    arena: Arena
    plan: InputPlan
    body: Callable[[], Any]
    elsewhere: Callable[[], Any]
    probe: Callable[[Bucket], Any]
    graph: Any = None
    result: Any = None
    outputs: OutputPlan | None = None
    figures: CaptureFigures | None = None


@dataclass(frozen=True)
class Captured:
    """What serves a call: its ``bucket``, the ``graph`` and the ``arena`` of its static inputs, by argument path."""

    bucket: Bucket
    graph: Any
    arena: Arena


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """A method that only one call at a time may run."""

    @functools.wraps(method)
    def alone(self: GraphedCallable, *args: Any, **kwargs: Any) -> Any:
        if not self._in_use.acquire(blocking=False):
            raise error(
                "out-of-order",
                f"{self.function!r} is called while another call of it runs",
                why="Both would write the same static memory.",
                remedy="Call it from one thread, or make a callable for each thread.",
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._in_use.release()

    return cast(_Method, alone)


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    if any(is_kind(function) for is_kind in _RUN_LATER):
        raise error("argument", f"{function!r} runs nothing when it is called: a plain function is needed")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as problem:
        raise error("argument", f"the parameters of {function!r} are unknown: wrap it in a function") from problem


class GraphedCallable:
    """What :func:`graphed` returns. Call it like the function; see the module's requirements."""

    def __init__(
        self,
        function: Callable[..., Any],
        runtime: Any,
        buckets: Sequence[Bucket],
        on_overflow: str,
        inputs: Mapping[str, Input | str],
        static_argnames: Sequence[str],
        warm_up: int,
        keep: Callable[[], Sequence[torch.Tensor]] | None = None,
        guard: str = "normal",
    ) -> None:
        if guard not in GUARDS:
            raise error("argument", f"guard={guard!r}: one of {', '.join(map(repr, GUARDS))} is needed")
        if on_overflow not in ("eager", "error"):
            raise error("argument", f"on_overflow={on_overflow!r}: 'eager' or 'error' is needed")
        if warm_up < 1:
            raise error("argument", f"warm_up={warm_up}: at least one eager run must precede a capture")
        functools.update_wrapper(self, function)
        self.function = function
        self.runtime = runtime
        if isinstance(buckets, Bucket):
            raise error("argument", f"buckets is one Bucket ({buckets}); a list is needed: buckets=[bucket]")
        self.buckets = tuple(sorted(buckets))
        self.on_overflow = on_overflow
        self.guard = guard
        self.stats = Stats()
        self._in_use = threading.Lock()
        self._signature = _signature_of(function)
        self._injected = _TABLES if _TABLES in self._signature.parameters else None
        self._declared = {k: Input(v) if isinstance(v, str) else v for k, v in inputs.items()}
        self._static_argnames = self._checked_names(static_argnames)
        self._warm_up = warm_up
        self._keep = keep
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._made_at = caller()

    # Use.

    @_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update and replay; captures first where this call's graph does not exist yet."""
        call = self._bind(args, kwargs)
        entry = self._select(call)
        if isinstance(entry, str):
            return self._overflow(call, entry)
        self._ensure_captured(entry)
        self._update(entry, call)
        if self.guard == "strict":
            self._prove(entry, call)
            self._update(entry, call)
        entry.graph.replay()
        if self.guard == "strict":
            self.runtime.synchronize()
            entry.arena.check_canaries()
        self._count(entry, call)
        return self._cut(entry, call)

    @_alone
    def capture(self, *args: Any, **kwargs: Any) -> list[CaptureFigures]:
        """Capture every bucket with this example (cut to the bucket where it is larger). Returns their figures.

        The example's values do not matter; its shapes, dtypes and structure do. State is afterwards what it was.
        """
        call = self._bind(args, kwargs)
        found = []
        for bucket in self.buckets or (None,):
            entry = self._entry(call, bucket)
            self._ensure_captured(entry)
            assert entry.figures is not None
            found.append(entry.figures)
        return found

    @_alone
    def captured(self, *args: Any, **kwargs: Any) -> Captured:
        """The graph and the static memory that serve this call, captured now if they do not exist yet; nothing is
        updated or replayed. For measuring a replay and an update apart; both belong to the callable, which closes them.

        Raises rule ``capacity`` where no bucket fits.
        """
        call = self._bind(args, kwargs)
        entry = self._select(call)
        if isinstance(entry, str):
            raise error("capacity", f"no graph serves this call: {entry}")
        self._ensure_captured(entry)
        return Captured(entry.bucket, entry.graph, entry.arena)

    @_alone
    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same call on the same static memory without a graph: what a replay is compared with (eager-fixed)."""
        call = self._bind(args, kwargs)
        entry = self._select(call)
        if isinstance(entry, str):
            return self._overflow(call, entry)
        self._update(entry, call)
        result = _detached(entry.body())
        return result if entry.outputs is None else self._cut(entry, call, result)

    @_alone
    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """Prove that replay equals eager on this call, bit for bit; raises PaddingError (replay-differs) if not."""
        call = self._bind(args, kwargs)
        entry = self._select(call)
        if isinstance(entry, str):
            raise error("capacity", f"nothing to verify: {entry}")
        self._ensure_captured(entry)
        self._update(entry, call)
        return verify_replay(self.runtime, entry.graph, entry.elsewhere, entry.result)

    def _prove(self, entry: _Entry, call: Call) -> None:
        """As :meth:`verify`, with padding spoiled too; the inputs have to be written again afterwards."""
        packed = bool(entry.plan.groups and self.buckets)

        def live(result: Any) -> Any:
            return self._cut(entry, call, result)

        def spoil() -> bool:
            return entry.arena.spoil_padding({path: call.tensors[path] for path in entry.plan.copied()})

        verify_replay(
            self.runtime, entry.graph, entry.elsewhere, entry.result, spoil=spoil if packed else None, live=live
        )

    def price(self) -> Price:
        """Static memory of the buckets prepared so far."""
        return Price(tuple(line for e in self._entries.values() for line in e.arena.price().lines))

    def close(self) -> None:
        """Give all graphs and arenas back."""
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.close()
            entry.arena.close()
        self._entries.clear()

    # Selection.

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = bind_call(self._signature, args, kwargs, self._injected)
        call.values.update(_ambient(self.runtime.device.type))
        for path, t in call.tensors.items():
            if not is_plain(t):
                raise error("not-capturable", f"argument {path!r} is {kind_of(t)}", why=NOT_PLAIN)
            if t.device.type != self.runtime.device.type:
                raise error(
                    "other-device", f"argument {path!r} is on {t.device}; the runtime's device is {self.runtime.device}"
                )
        return call

    def _checked_names(self, names: Sequence[str]) -> tuple[str, ...]:
        parameters = self._signature.parameters.values()
        for name in names:
            root = name.split(".")[0].split("[")[0]
            if not any(p.name == root or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
                raise error("argument", f"static_argnames has {name!r}, but {self.function!r} has no such parameter")
        return tuple(names)

    def _key(self, call: Call) -> tuple[Any, ...]:
        key = static_key(call, self._static_argnames)
        try:
            hash(key)
        except TypeError as problem:
            raise error("frozen-scalar", f"a static argument cannot select a graph: {problem}") from problem
        return key

    def _known_plan(self, call: Call) -> InputPlan:
        """The plan that earlier calls with the same static values fixed, or a new one from this call."""
        key = self._key(call)
        return next((e.plan for (k, _), e in self._entries.items() if k == key), None) or self._plan(call)

    def _select(self, call: Call) -> _Entry | str:
        """The entry that serves a call, prepared now if it is the first, or the reason why no bucket fits."""
        plan = self._known_plan(call)
        plan.check(call)
        if not self.buckets:
            return self._entry(call, None)
        tokens, sequences = plan.sizes(call)
        bucket = next((b for b in self.buckets if b.fits(tokens, sequences)), None)
        if bucket is None:
            return f"{tokens} tokens in {sequences} sequences fit none of {', '.join(map(str, self.buckets))}"
        return self._entry(call, bucket)

    def _plan(self, call: Call) -> InputPlan:
        plan = InputPlan(call, self._declared, self._static_argnames, [b.tokens for b in self.buckets])
        if self._injected and not plan.groups:
            raise error("structure", "the function takes tables, but no argument is called cu_seqlens")
        if plan.groups and not self.buckets:
            raise error(
                "capacity", f"argument {plan.groups[0].boundaries!r} needs a capacity, and no bucket was given",
                remedy="Pass buckets=[Bucket(...)] to graphed(), or bucket=Bucket(...) to TrainStep.",
            )  # fmt: skip
        return plan

    def _overflow(self, call: Call, reason: str) -> Any:
        if self.on_overflow == "error":
            raise error("capacity", reason)
        plan = self._known_plan(call)
        tokens, sequences = plan.sizes(call)
        self.stats.overflows["tokens" if tokens > self.buckets[-1].tokens else "sequences"] += 1
        live = Bucket(max(tokens, 1), sequences, self.buckets[-1].chunk_size)
        return _detached(self._run(plan, plan.template(call), lambda path: call.tensors[path], live))

    # Capture.

    def _entry(self, call: Call, bucket: Bucket | None) -> _Entry:
        """The prepared memory of a bucket; nothing is captured."""
        key = (self._key(call), bucket)
        if key not in self._entries:
            plan = self._known_plan(call)
            plan.check(call)
            capacity = bucket or Bucket(1)
            template = plan.template(call)
            arena = self._arena(plan, call, capacity)
            arena.update({path: _example(call.tensors[path], how, capacity) for path, how in plan.copied().items()})
            self._entries[key] = _Entry(
                capacity,
                arena,
                plan,
                # a new tensor object at each run, as in eager: a cache keyed by identity in the body misses in the
                # capture too, and what it then does is seen
                body=lambda: self._run(plan, template, lambda path: arena[path].detach(), capacity),
                elsewhere=lambda: self._run(plan, template, lambda path: arena[path].clone(), capacity),
                probe=lambda other: self._at_capacity(plan, template, arena, other),
            )
        return self._entries[key]

    def _arena(self, plan: InputPlan, call: Call, capacity: Bucket) -> Arena:
        arena: Arena = self.runtime.arena(capacity, canaries=self.guard == "strict")
        for path, how in plan.copied().items():
            t = call.tensors[path]
            arena.like(path, tuple(t.shape), t.dtype, how.kind, how.axis, how.pad)
        arena.seal()
        return arena

    def _ensure_captured(self, entry: _Entry) -> None:
        if entry.graph is not None:
            return
        bucket = entry.bucket if self.buckets else None
        pinned = set() if bucket is None else entry.plan.pinned(bucket.tokens, bucket.sequences)
        begin = time.perf_counter()
        outputs = OutputPlan.probe(
            self.runtime, entry.probe, entry.body, bucket, pinned, keep=self._keep, iterations=self._warm_up
        )
        if self.guard == "strict" and bucket is not None:
            boundaries = {group.boundaries: entry.arena[group.boundaries] for group in entry.plan.groups}
            refuse_layout_dependence(self.runtime, entry.body, boundaries)
        warm = time.perf_counter()
        pool = next((e.graph for e in self._entries.values() if e.graph is not None), None)
        names = {key_of(entry.arena[path]): path for path in entry.plan.copied()}
        with self.runtime.capture(pool=pool, copied_inputs=names, guard=self.guard) as graph:
            result = _detached(entry.body())
            graph.outputs(result)
        done = time.perf_counter()
        entry.graph, entry.result, entry.outputs = graph, result, outputs
        entry.figures = CaptureFigures(
            str(bucket or "fixed"),
            graph.launches,
            entry.arena.bytes,
            entry.arena.price().bytes,
            graph.pool_bytes,
            warm - begin,
            done - warm,
        )
        self.stats.captures += 1
        self.stats.graphs.append(entry.figures)

    def _run(self, plan: InputPlan, template: Any, tensor_of: Callable[[str], torch.Tensor], bucket: Bucket) -> Any:
        """The function on given tensors, with tables of ``bucket`` built from their boundaries."""
        arguments = plan.fill(template, tensor_of)
        if self._injected:
            bound = self.runtime.tables(bucket)
            built = [bound.build(tensor_of(group.boundaries)) for group in plan.groups]
            arguments[self._injected] = built[0] if len(built) == 1 else tuple(built)
        call = self._signature.bind_partial()
        call.arguments.update({name: arguments[name] for name in self._signature.parameters if name in arguments})
        return self.function(*call.args, **call.kwargs)

    def _at_capacity(self, plan: InputPlan, template: Any, arena: Arena, other: Bucket) -> Any:
        """The function at another capacity, to see which dimensions of its outputs follow the bucket's."""
        there: Arena = self.runtime.arena(other)
        for path, how in plan.copied().items():
            t = arena[path]
            there.like(path, tuple(t.shape), t.dtype, how.kind, how.axis, how.pad)
        there.update({path: _example(arena[path], how, other) for path, how in plan.copied().items()})
        return self._run(plan, template, there.__getitem__, other)

    # Update and results.

    def _update(self, entry: _Entry, call: Call) -> None:
        entry.arena.update({path: call.tensors[path] for path in entry.plan.copied()})

    def _cut(self, entry: _Entry, call: Call, result: Any = None) -> Any:
        result = entry.result if result is None else result
        if not entry.plan.groups:
            return result
        assert entry.outputs is not None
        return entry.outputs.cut(result, *entry.plan.sizes(call))

    def _count(self, entry: _Entry, call: Call) -> None:
        self.stats.replays += 1
        for tokens, sequences in entry.plan.group_sizes(call):
            self.stats.tokens_used += tokens
            self.stats.sequences_used += sequences
            self.stats.tokens_held += entry.bucket.tokens
            self.stats.sequences_held += entry.bucket.sequences


def _ambient(device_type: str) -> dict[str, Any]:
    """Host state that a body's results depend on though it is no argument: autocast."""
    enabled = torch.is_autocast_enabled(device_type)
    return {f"torch.autocast({device_type!r})": torch.get_autocast_dtype(device_type) if enabled else None}


def _detached(result: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result, "output")


def _example(t: torch.Tensor, how: Input, bucket: Bucket) -> torch.Tensor:
    """The example cut to what the bucket holds: its first tokens and sequences, boundaries clamped."""
    if how.kind == "boundaries":
        return t[: bucket.sequences + 1].clamp(max=bucket.tokens)
    if how.kind in ("tokens", "sequences"):
        room = bucket.tokens if how.kind == "tokens" else bucket.sequences
        return t.narrow(how.axis, 0, min(room, int(t.shape[how.axis])))
    return t


def graphed(
    function: Callable[..., Any] | None = None,
    *,
    runtime: Any = None,
    buckets: Sequence[Bucket] = (),
    on_overflow: str = "eager",
    inputs: Mapping[str, Input | str] | None = None,
    static_argnames: Sequence[str] = (),
    warm_up: int = 1,
    guard: str = "normal",
) -> Any:
    """Make a function that is captured once and replayed for every batch that fits a bucket; also a decorator.

    ``runtime``: from :func:`graphsafe.get_runtime`; default the best one here. ``buckets``: capacities, for functions
    of packed batches; without one, all shapes are fixed. ``on_overflow``: ``"eager"`` or ``"error"``. ``inputs``: how
    arguments follow the batch, by path (:class:`~graphsafe.inputs.Input` or its kind), where the example alone does not
    tell. ``static_argnames``: host values that select a graph of their own. ``warm_up``: eager runs before a capture.
    ``guard``: ``"off"``, ``"normal"`` or ``"strict"``, which proves every call and is slow (docs/guard.md).
    """
    if function is None:
        return functools.partial(
            graphed,
            runtime=runtime,
            buckets=buckets,
            on_overflow=on_overflow,
            inputs=inputs,
            static_argnames=static_argnames,
            warm_up=warm_up,
            guard=guard,
        )
    chosen = runtime if runtime is not None else get_runtime()
    return GraphedCallable(function, chosen, buckets, on_overflow, inputs or {}, static_argnames, warm_up, guard=guard)
