"""The two modes that see everything a captured body does.

Requirements
------------
1. The function mode sees what never reaches an operator on some devices: ``tolist``, ``numpy``, ``cpu``, ``print``,
   ``data_ptr``. The dispatch mode sees every operator, in forward and in backward.
2. The first rule broken raises at the line that breaks it, before the operator runs. An error that the body swallows
   is kept in ``Watch.broken`` and raised at the end.
3. The watch holds no tensor: storages are known by weak references.
4. Without a recorder it costs nothing after the capture.
5. torch drops what it compiled, for good, once a compiled function is called under a mode. So under a watch it runs as
   it was written, its operators seen; or, in a capture without guard, compiled and unseen. Afterwards it is compiled.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe._host_work import as_written, called_by, no_host_work
from graphsafe._location import Location, caller
from graphsafe._operators import OperatorFacts, facts_of, violation, written
from graphsafe._state import SavedState
from graphsafe._storage import NOT_PLAIN, StorageRef, is_plain, key_of, kind_of
from graphsafe.contract import describe
from graphsafe.errors import GraphSafeError, error

__all__ = ["Outside", "Recorder", "Streams", "Watch", "argument_tensors"]

_T = torch.Tensor
_HOST_READS: dict[Any, str] = {
    _T.tolist: "tolist()",
    _T.item: "item()",
    _T.numpy: "numpy()",
    _T.cpu: "cpu()",
    _T.__repr__: "printing",
    _T.__format__: "formatting",
    _T.__array__: "a numpy conversion",
    _T.__bool__: "its truth value",
    _T.__int__: "int()",
    _T.__float__: "float()",
    _T.__index__: "use as an index",
    _T.__complex__: "complex()",
    _T.__contains__: "the 'in' operator",
    _T.is_nonzero: "is_nonzero()",
}
_READS_ARGUMENTS = {torch.tensor_split: "tensor_split", _T.tensor_split: "tensor_split"}
"""Functions that read a tensor among their later arguments on the host, through no operator."""
_FROM_HOST: dict[Any, tuple[str, int]] = {
    torch.tensor: ("torch.tensor", 0),
    torch.as_tensor: ("torch.as_tensor", 0),
    _T.new_tensor: ("new_tensor()", 1),
}
"""Functions that make a tensor of Python values, and the place of the values among their arguments."""
_REPLACES_STORAGE = {_T.data.__set__: "assigning .data"}  # type: ignore[attr-defined]
_RAW_ADDRESS: dict[Any, str] = {_T.data_ptr: "data_ptr()", _T.__dlpack__: "a DLPack export"}


class Recorder(Protocol):
    """What a runtime that records operators itself (the CPU) adds to a watch."""

    def record(
        self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Called after each operator with the arguments and the result it had."""
        ...


class Outside(NamedTuple):
    """A storage from outside that the body used, by the tensor and operator that used it first."""

    tensor: weakref.ref[torch.Tensor]
    storage: StorageRef
    shape: tuple[int, ...]
    where: Location | None
    operator: str


class Streams(NamedTuple):
    """Streams by a number: how to tell the ``present`` one, the ``captured`` and the ``default`` one."""

    present: Callable[[], int]
    captured: int
    default: int


class Watch:
    """What one run of a body did: storages it made and wrote, rules it broke.

    ``check``: raise on broken rules (a capture); otherwise only state is followed (a warm-up).
    ``saved``: where storages about to be written are saved, or None where the run does not execute.
    ``raw_addresses``: whether work through ``data_ptr`` is recorded by the device (false on a CPU).
    ``compiled``: whether functions of torch.compile run compiled, and nothing inside them is seen.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        check: bool,
        saved: SavedState,
        recorder: Recorder | None = None,
        generators: Sequence[torch.Generator] = (),
        raw_addresses: bool = True,
        compiled: bool = False,
        copied_inputs: Mapping[int, str] | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.device = device
        self.check = check
        self.saved = saved
        self.recorder = recorder
        self.generators = tuple(generators)
        self.raw_addresses = raw_addresses
        self.compiled = compiled
        self.copied_inputs = copied_inputs or {}
        self.streams = streams
        self.side_streams: dict[int, Location | None] = {}
        self.broken: GraphSafeError | None = None
        self.born: dict[int, tuple[StorageRef, Location | None, str]] = {}
        self.outside: dict[int, Outside] = {}
        self.operators = 0
        self.other_threads_drew = False
        self._thread = threading.get_ident()
        self._states = self._generator_states()

    def fail(self, rule: str, what: str, **details: Any) -> GraphSafeError:
        """The error of a rule, remembered in case the body swallows it."""
        raised = error(rule, what, **{"where": self.where(), **details})
        if self.broken is None:
            self.broken = raised
        return raised

    def refuse(self, rule: str, what: str, *, tensor: torch.Tensor | None = None, **details: Any) -> None:
        """A rule is broken, by ``tensor`` where one is to blame: raise. A watch that collects overrides this and
        returns; the run then goes on.
        """
        raise self.fail(rule, what + ("" if tensor is None else self._origin(tensor, what)), **details)

    def _origin(self, t: torch.Tensor, what: str) -> str:
        """Which tensor it is, where that is known: an input, or what made it and where."""
        if not is_plain(t):
            return ""
        key = key_of(t)
        if key in self.copied_inputs:
            name = repr(self.copied_inputs[key])
            return "" if name in what else f" (the input {name})"
        ref, where, made = self.born.get(key, (None, None, ""))
        if ref is None or where is None or not ref.alive():
            return ""
        return f" (made by {made.split(' ')[0]} at {where})"

    def read_anyway(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a refused function; only a watch that collects gets here."""
        return func(*args, **kwargs)

    def where(self) -> Location | None:
        """The caller's line; on a thread of autograd, the line of the capturing thread that started the backward."""
        found = caller()
        if found is None and threading.get_ident() != self._thread:
            found = caller(sys._current_frames().get(self._thread))
        return found

    @contextlib.contextmanager
    def active(self) -> Iterator[Watch]:
        """Watch what this thread, and the backward passes it starts, do inside the block."""
        with contextlib.ExitStack() as stack:
            if self.check:
                stack.enter_context(no_host_work(self))
                stack.enter_context(_FunctionWatch(self))
            elif not self.compiled:
                stack.enter_context(as_written())
            stack.enter_context(_DispatchWatch(self))
            yield self

    # What the modes call.

    def before(self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.check:
            self.generators_untouched()
            self._refuse(facts, args, kwargs)
            if self.streams is not None:
                self._follow_stream(self.streams, facts)
        for t in written(facts, args, kwargs):
            self.about_to_write(t)
        for t in argument_tensors((args, kwargs)):
            self.saved.leaf(t)
            if self.check and (key := key_of(t)) not in self.born and key not in self.outside:
                self.outside[key] = Outside(weakref.ref(t), StorageRef(t), tuple(t.shape), self.where(), facts.name)

    def _follow_stream(self, streams: Streams, facts: OperatorFacts) -> None:
        now = streams.present()
        if now == streams.default:
            self.refuse(
                "not-capturable",
                f"{facts.name} runs on the default stream",
                why="The default stream waits for all others, which a capture cannot record.",
                remedy="Use the stream that is current inside the capture, or a side stream that is joined back to it.",
            )
        if now != streams.captured:
            self.side_streams.pop(now, None)  # the last used comes last
            self.side_streams[now] = self.where()

    def about_to_write(self, t: torch.Tensor) -> None:
        """A storage is about to be written in place."""
        key = key_of(t)
        if self.check and key in self.copied_inputs:
            self.refuse("input-written", f"the body writes its input {self.copied_inputs[key]!r} in place", tensor=t)
        if self.saved.births or key not in self.born:
            self.saved.save(t)

    def after(
        self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self.operators += 1
        self._states = self._generator_states()
        known = {key_of(t) for t in argument_tensors((args, kwargs))}
        for t in _all_tensors(result):
            if not is_plain(t):
                if self.check:
                    self._refuse_not_plain(t)
                continue
            key = key_of(t)
            if key not in known and not (key in self.born and self.born[key][0].alive()):
                self.born[key] = (StorageRef(t), self.where() if self.check else None, f"{facts.name} {describe(t)}")
        if self.recorder is not None:
            self.recorder.record(func, facts, args, kwargs, result)

    def _refuse(self, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        broken = violation(facts, args, kwargs)
        if broken is not None:
            rule, how = broken
            self.refuse(rule, how, tensor=next(_all_tensors((args, kwargs)), None))
        generator = kwargs.get("generator")
        if facts.random and generator is not None and not any(_same_generator(generator, g) for g in self.generators):
            self.refuse("unregistered-generator", f"{facts.name} draws from a generator the runtime does not know")
        target = kwargs.get("device")
        operands = list(_all_tensors((args, kwargs)))
        # a factory on another device is host work of no consequence, until something captured uses its result
        if target is not None and operands and torch.device(target).type != self.device.type:
            self.refuse("other-device", f"{facts.name} works on {target} while {self.device} is captured")
        for t in operands:
            if not is_plain(t):
                self._refuse_not_plain(t)
            if t.device.type != self.device.type:
                what = f"{facts.name} uses {describe(t)} while {self.device} is captured"
                self.refuse("other-device", what, tensor=t)
        if facts.changes_geometry and args[0]._base is None:
            self.storage_replaced(args[0], facts.name)

    def _generator_states(self) -> list[torch.Tensor]:
        """Present states of the generators, where a capture executes; a device refuses to tell while it captures."""
        if not self.check or not self.saved.contents:
            return []
        return [g.get_state() for g in self.generators]

    def generators_untouched(self) -> None:
        """Refuse a state that changed between two operators: methods of a generator can be seen in no other way."""
        for generator, state, now in zip(self.generators, self._states, self._generator_states(), strict=False):
            if not torch.equal(now, state):
                self.refuse(
                    "rng-state",
                    f"the state of the generator on {generator.device} changed between two operators of the capture: "
                    "it was seeded or set, or another thread drew from it",
                    remedy="Seed before the capture, and give other threads generators of their own.",
                )

    def storage_replaced(self, t: torch.Tensor, how: str) -> None:
        """Refuse to give a tensor from outside another storage or shape: no replay repeats it, nothing undoes it."""
        if self.check and is_plain(t) and key_of(t) not in self.born:
            what = f"{how} changes {describe(t)}, which was made outside the capture"
            self.refuse("storage-replaced", what, tensor=t)

    def _refuse_not_plain(self, t: torch.Tensor) -> None:
        what = f"{kind_of(t)} of dtype {t.dtype} is used inside the capture"
        self.refuse("not-capturable", what, tensor=t, why=NOT_PLAIN)


def _same_generator(a: Any, b: Any) -> bool:
    """An operator receives a new Python object for a generator: the C++ object is its identity."""
    return bool(a._cdata == b._cdata)


def _all_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _all_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _all_tensors(item)


def argument_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that have a storage to follow."""
    return (t for t in _all_tensors(value) if is_plain(t))


class _FunctionWatch(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_READS:
            t = args[0] if args else None
            self._watch.refuse("host-read", f"{_HOST_READS[func]} reads {describe(t)} on the host", tensor=t)
            return self._watch.read_anyway(func, args, kwargs)
        if func in _RAW_ADDRESS and not self._watch.raw_addresses and not called_by("triton"):
            self._watch.refuse(
                "not-capturable",
                f"{_RAW_ADDRESS[func]} hands out the raw address of {describe(args[0])}",
                tensor=args[0],
                why="Work done through a raw address on a CPU is not an operator, so it cannot be recorded.",
            )
        if func in _FROM_HOST and self._watch.device.type != "cpu":
            # on a CPU the operator that lifts the values is seen; a device copies them before there is an operator
            name, place = _FROM_HOST[func]
            if not isinstance(args[place] if place < len(args) else kwargs.get("data"), _T):
                self._watch.refuse("host-data", f"{name} makes a tensor from host values")
        if func in _READS_ARGUMENTS and (read := next(argument_tensors((args[1:], kwargs)), None)) is not None:
            what = f"{_READS_ARGUMENTS[func]} reads {describe(read)} on the host"
            self._watch.refuse("host-read", what, tensor=read)
            return self._watch.read_anyway(func, args, kwargs)
        if func in _REPLACES_STORAGE:
            self._watch.storage_replaced(args[0], _REPLACES_STORAGE[func])
        return func(*args, **kwargs)


class _DispatchWatch(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """torch asks its modes before it runs a function compiled, those of a class and of an object alike."""
        return self._watch.compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        self._watch.before(func, facts, args, kwargs)
        result = func(*args, **kwargs)
        self._watch.after(func, facts, args, kwargs, result)
        return result
