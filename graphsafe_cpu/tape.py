"""The tape of a capture: operators and interpreted Triton launches, on the storages they had.

Requirements
------------
1. Every operator of the body is recorded with its arguments; a replay calls it again on the same storages and writes
   its results where the capture's results were. Views and uninitialised memory cost nothing at replay.
2. Memory born inside belongs to the tape (the graph's pool). Memory from outside is watched, not held: a replay first
   checks that each storage lives, at its address and size, and that the caller's tensor still is on it.
3. Host values are in the tape as they were: that is what a graph does. So is the grad mode, which some operators heed.
4. Random operators draw from the generator's present state at each replay.
5. ``poison`` fills all memory of the pool, so that leftovers of an earlier run cannot pass for results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphsafe._location import caller
from graphsafe._operators import OperatorFacts
from graphsafe._storage import StorageRef, key_of
from graphsafe._watch import Watch, argument_tensors
from graphsafe.contract import describe
from graphsafe.errors import error

__all__ = ["Tape"]


class _View(NamedTuple):
    """What part of a storage a tensor is: two tensors with equal views are the same values."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> _View:
        return cls(key_of(t), int(t.storage_offset()), tuple(t.size()), t.stride(), t.dtype, t.is_conj(), t.is_neg())

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A new tensor of this view. Call it outside inference mode, whose tensors cannot be written later."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.size, self.stride)
        made = made.conj() if self.conjugated else made
        return torch._neg_view(made) if self.negated else made


class _Owner:
    """A tensor from outside that the body used: at replay it must be what it was, if it still lives."""

    __slots__ = ("made_at", "tensor", "used_by", "view")

    def __init__(self, t: torch.Tensor, view: _View, used_by: str) -> None:
        self.tensor = weakref.ref(t)
        self.view = view
        self.used_by = used_by
        self.made_at = caller()

    def check(self) -> None:
        t = self.tensor()
        if t is None:
            return
        view = _View.of(t)
        if view != self.view:
            how = "another storage" if view.storage != self.view.storage else "another shape or strides"
            raise error(
                "storage-replaced",
                f"a tensor of shape {list(self.view.size)} that the graph uses in {self.used_by} now has {how}; "
                f"it was first used at {self.made_at}",
            )


class _Outside:
    """A view of memory that the graph does not own, made anew at each replay."""

    __slots__ = ("made_at", "ref", "used_by", "view")

    def __init__(self, t: torch.Tensor, view: _View, used_by: str) -> None:
        self.ref = StorageRef(t)
        self.view = view
        self.used_by = used_by
        self.made_at = caller()

    def tensor(self) -> torch.Tensor:
        what = f"a tensor of shape {list(self.view.size)} that the graph reads in {self.used_by}"
        storage = self.ref.storage()
        if storage is None:
            raise error("input-died", f"{what} has died; it was first used at {self.made_at}")
        if storage.data_ptr() != self.ref.address or storage.nbytes() != self.ref.nbytes:
            raise error("storage-replaced", f"{what} had its storage resized; it was first used at {self.made_at}")
        return self.view.tensor(storage)


class _Place:
    """Where a recorded argument comes from at replay: index into the outside tensors of the tape."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Node:
    """One recorded call. ``results``: (position, tensor to fill) of what the call returns; ``grad``: the grad mode."""

    __slots__ = ("args", "call", "from_outside", "grad", "kwargs", "name", "results")

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[tuple[int, torch.Tensor]],
        name: str,
        from_outside: bool,
    ) -> None:
        self.call, self.args, self.kwargs, self.results, self.name = call, args, kwargs, results, name
        self.from_outside = from_outside
        self.grad = torch.is_grad_enabled()

    def run(self, outside: Sequence[torch.Tensor]) -> None:
        torch._C._set_grad_enabled(self.grad)
        args, kwargs = self.args, self.kwargs
        if self.from_outside:
            args, kwargs = _resolve(args, outside), _resolve(kwargs, outside)
        made = self.call(*args, **kwargs)
        for position, target in self.results:
            result = made if isinstance(made, torch.Tensor) else made[position]
            if result.shape != target.shape:
                raise error(
                    "data-dependent-shape",
                    f"{self.name} made {describe(result)} in a replay and {describe(target)} at the capture",
                )
            target.copy_(result)


class Tape:
    """Records through the watch of a capture (:meth:`record`), then replays.

    ``watch`` is set by the runtime for the time of the capture.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._nodes: list[_Node] = []
        self._outside: list[_Outside] = []
        self._outside_index: dict[_View, int] = {}
        self._owners: dict[int, _Owner] = {}
        self._own: dict[_View, torch.Tensor] = {}
        self._own_count: dict[int, int] = {}
        self._pool: dict[int, torch.Tensor] = {}

    # Recording.

    def record(
        self, func: Any, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record one operator that has just run; views, new shapes and uninitialised memory need no replay."""
        fresh = self._fresh(result)
        if facts.fills_nothing or facts.changes_geometry:
            return
        if not fresh and not facts.writes:
            operands, results = list(argument_tensors((args, kwargs))), list(argument_tensors(result))
            if results or not operands:  # a view, or no device work at all; an assertion on a tensor is neither
                for t in operands:
                    self._see(t, facts.name)
                return
        self._append(func, args, kwargs, fresh, facts.name)

    def launch(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
        """Record a kernel launch: ``call`` writes into its tensor arguments and returns nothing."""
        self._append(call, args, kwargs, [], name)

    def _append(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: list[tuple[int, torch.Tensor]],
        name: str,
    ) -> None:
        held_args = tuple(self._hold(a, name) for a in args)
        held_kwargs = {k: self._hold(v, name) for k, v in kwargs.items()}
        self._nodes.append(_Node(call, held_args, held_kwargs, results, name, _has_place((held_args, held_kwargs))))

    def _fresh(self, result: Any) -> list[tuple[int, torch.Tensor]]:
        """Results in memory that this operator made."""
        assert self.watch is not None
        flat = result if isinstance(result, (list, tuple)) else [result]
        new = [
            (position, item)
            for position, item in enumerate(flat)
            if isinstance(item, torch.Tensor) and key_of(item) not in self._pool and key_of(item) in self.watch.born
        ]
        return [(position, self._private(item)) for position, item in new]

    def _private(self, t: torch.Tensor) -> torch.Tensor:
        """The tape's own tensor for a view of pool memory; it keeps the memory."""
        view = _View.of(t)
        own = self._own.get(view)
        if own is None:
            with torch.inference_mode(False), torch.no_grad():
                own = self._own[view] = view.tensor(t.untyped_storage())
            self._own_count[view.storage] = self._own_count.get(view.storage, 0) + 1
            self._pool.setdefault(view.storage, own)
        return own

    def _hold(self, value: Any, used_by: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._private(value) if key_of(value) in self._pool else self._from_outside(value, used_by)
        if isinstance(value, (list, tuple)):
            return type(value)(self._hold(item, used_by) for item in value)
        return value

    def _from_outside(self, t: torch.Tensor, used_by: str) -> _Place:
        view = self._see(t, used_by)
        if view not in self._outside_index:
            self._outside_index[view] = len(self._outside)
            self._outside.append(_Outside(t, view, used_by))
        return _Place(self._outside_index[view])

    def _see(self, t: torch.Tensor, used_by: str) -> _View:
        """Remember a tensor from outside, as it is after its latest use; returns its view."""
        view = _View.of(t)
        if view.storage in self._pool:
            return view
        known = self._owners.get(id(t))
        if known is None or known.tensor() is not t:
            self._owners[id(t)] = _Owner(t, view, used_by)
        else:
            known.view = view
        return view

    def finish(self) -> None:
        """The capture is over: forget tensors that lived only in it."""
        self.watch = None
        self._owners = {k: owner for k, owner in self._owners.items() if owner.tensor() is not None}

    def private_holders(self, key: int) -> int:
        """How many tensors of the tape hold the storage ``key``."""
        return self._own_count.get(key, 0)

    def is_private(self, t: torch.Tensor) -> bool:
        """Whether ``t`` is one of those tensors."""
        return self._own.get(_View.of(t)) is t

    # Replay.

    @property
    def launches(self) -> int:
        return len(self._nodes)

    @property
    def pool_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._pool.values())

    def replay(self) -> None:
        """Check everything that lies outside, then run the nodes in order, unseen by the caller's modes."""
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):
            for owner in self._owners.values():
                owner.check()
            outside = [place.tensor() for place in self._outside]
            for node in self._nodes:
                node.run(outside)

    def poison(self) -> None:
        """Fill all memory of the pool with NaN (all bits set)."""
        for t in self._pool.values():
            content = StorageRef(t).bytes()
            if content is not None:
                content.fill_(0xFF)

    def names(self) -> list[str]:
        """The recorded operators and kernels, in order."""
        return [node.name for node in self._nodes]

    def clear(self) -> None:
        """Forget the recording and give the pool back."""
        self.watch = None
        for holder in (
            self._nodes,
            self._outside,
            self._outside_index,
            self._owners,
            self._own,
            self._own_count,
            self._pool,
        ):
            holder.clear()


def _has_place(value: Any) -> bool:
    if isinstance(value, _Place):
        return True
    if isinstance(value, dict):
        return any(_has_place(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_place(item) for item in value)


def _resolve(value: Any, outside: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return outside[value.index]
    if isinstance(value, dict):
        return {name: _resolve(item, outside) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, outside) for item in value)
    return value
