"""StaticArena: the owner of a bucket's static memory.

Requirements
------------
1. Every static tensor of a bucket has a name and lives here; the arena hands out the tensor itself, at one address for
   its whole life.
2. ``update`` copies new data in, in place, without a host read. What a smaller batch leaves free is set to the
   tensor's padding value, whoever wrote it last, so that nobody can read the tail of an earlier batch.
3. ``seal`` ends growth; a later allocation is refused with the line that asked for it, as is one inside a capture.
4. ``price`` in bytes is known before anything is allocated (:class:`Price`) and equals what is held afterwards.
5. With ``canaries`` each tensor lies between guard bytes, and ``check_canaries`` names the tensor that was overrun.
6. After ``close`` nothing is handed out or updated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import Self

from graphsafe._location import Location, caller
from graphsafe._one_capture import one_capture
from graphsafe._storage import key_of
from graphsafe.bucket import Bucket
from graphsafe.contract import check_tensor, describe
from graphsafe.errors import error
from graphsafe.pricing import Price, PriceLine

__all__ = ["Arena", "Slot", "StaticArena"]

_GUARD_BYTES = 256
_CANARY = 0xA5


@dataclass
class Slot:
    """One static tensor of an arena: its ``kind`` (tokens, sequences, slots, boundaries or fixed) and padding."""

    name: str
    tensor: torch.Tensor
    kind: str
    dim: int
    pad: float
    made_at: Location | None
    guarded: torch.Tensor | None


@runtime_checkable
class StaticArena(Protocol):
    """Owner of named static tensors; see the module's requirements."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def tokens(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def sequences(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def cu_seqlens(self, dtype: torch.dtype = torch.int32) -> torch.Tensor: ...

    def update(self, **values: torch.Tensor) -> None: ...

    def seal(self) -> None: ...

    def price(self) -> Price: ...

    def close(self) -> None: ...


class Arena:
    """The arena of plain torch memory, for every device. Use it as a context manager, or close it.

    ``bucket``: the capacity. ``device``: where the memory is. ``canaries``: guard bytes around each tensor.
    """

    def __init__(self, bucket: Bucket, device: torch.device, *, canaries: bool = False) -> None:
        self.bucket = bucket
        self.device = device
        self.canaries = canaries
        self.sealed = False
        self.closed = False
        self._slots: dict[str, Slot] = {}
        self._names: dict[int, str] = {}

    # Allocation.

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, pad: float = 0) -> torch.Tensor:
        """A static tensor of a fixed ``shape``, filled with ``pad``."""
        return self._allocate(name, tuple(shape), dtype, "fixed", 0, pad)

    def tokens(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, pad: float = 0) -> torch.Tensor:
        """``[1, T_max, *shape]``: one row for each token of the bucket."""
        return self._allocate(name, (1, self.bucket.tokens, *shape), dtype, "tokens", 1, pad)

    def sequences(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, pad: float = 0) -> torch.Tensor:
        """``[N_max, *shape]``: one row for each sequence of the bucket, a state for example."""
        return self._allocate(name, (self.bucket.sequences, *shape), dtype, "sequences", 0, pad)

    def slots(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, pad: float = 0) -> torch.Tensor:
        """``[NT_max, *shape]``: one row for each slot of the bucket."""
        return self._allocate(name, (self.bucket.slots, *shape), dtype, "slots", 0, pad)

    def cu_seqlens(self, dtype: torch.dtype = torch.int32, *, name: str = "cu_seqlens") -> torch.Tensor:
        """``[N_max + 1]`` boundaries, int32 or int64, all zero: an empty batch."""
        return self._allocate(name, (self.bucket.sequences + 1,), dtype, "boundaries", 0, 0)

    def like(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, dim: int, pad: float
    ) -> torch.Tensor:
        """A static tensor for an input whose ``dim`` holds the bucket's tokens or sequences."""
        full = list(shape)
        if kind == "boundaries":
            full = [self.bucket.sequences + 1]
        elif kind != "fixed":
            full[dim] = {"tokens": self.bucket.tokens, "sequences": self.bucket.sequences}[kind]
        return self._allocate(name, tuple(full), dtype, kind, dim, pad)

    def _allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, dim: int, pad: float
    ) -> torch.Tensor:
        self._open()
        if self.sealed or one_capture.running_here:
            state = "a sealed arena" if self.sealed else "an arena inside a capture"
            raise error("arena-sealed", f"tensor {name!r} was asked of {state}")
        if name in self._slots:
            raise error("argument", f"the arena already has a tensor {name!r}, made at {self._slots[name].made_at}")
        line = PriceLine.of(name, shape, dtype)
        guarded = None
        with torch.inference_mode(False):  # an inference tensor could not be updated later
            if self.canaries:
                guarded = torch.full((line.bytes + 2 * _GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=self.device)
                tensor = guarded[_GUARD_BYTES : _GUARD_BYTES + line.bytes].view(dtype).view(shape)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            tensor.fill_(pad)
        self._slots[name] = Slot(name, tensor, kind, dim, pad, caller(), guarded)
        self._names[key_of(tensor)] = name
        return tensor

    # Use.

    def __getitem__(self, name: str) -> torch.Tensor:
        self._open()
        return self._slot(name).tensor

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def update(self, values: Mapping[str, torch.Tensor] | None = None, /, **named: torch.Tensor) -> None:
        """Copy new data into the tensors named; rows left free get the padding value.

        A value may be shorter than the static tensor along its tokens or sequences; boundaries ``[N + 1]`` are
        continued by zero-length sequences. Everything is checked before anything is written.
        """
        self._open()
        pairs = [(self._slot(name), value) for name, value in itertools.chain((values or {}).items(), named.items())]
        for slot, value in pairs:
            self._check(slot, value)
        with torch.no_grad():
            self._write(pairs)

    def _check(self, slot: Slot, value: torch.Tensor) -> None:
        full, d = slot.tensor.shape, slot.dim
        if isinstance(value, torch.Tensor) and value.dtype == slot.tensor.dtype:
            shape = value.shape
            if shape == full:
                return
            alike = len(shape) == len(full) and shape[:d] == full[:d] and shape[d + 1 :] == full[d + 1 :]
            least = {"fixed": full[d] if full else 0, "boundaries": 2}.get(slot.kind, 0)
            if alike and least <= shape[d] <= full[d]:
                return
        self._refuse(slot, value)

    def _refuse(self, slot: Slot, value: torch.Tensor) -> None:
        """The error for a value that does not fit."""
        want: list[int | None] = list(slot.tensor.shape)
        if slot.kind != "fixed":
            want[slot.dim] = None
        check_tensor(slot.name, value, shape=tuple(want), dtypes=(slot.tensor.dtype,), rule="structure")
        have, room = value.shape[slot.dim], slot.tensor.shape[slot.dim]
        if have > room:
            raise error("capacity", f"{slot.name} is {describe(value)}; the bucket {self.bucket} has room for {room}")
        if slot.kind == "boundaries" and have < 2:
            raise error("structure", f"{slot.name} is {describe(value)}; at least two entries are needed")

    def _write(self, pairs: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """All copies of one dtype in one launch where the device can, and one launch for all tails of zeros."""
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        zeros: list[torch.Tensor] = []
        for slot, value in pairs:
            target, d = slot.tensor, slot.dim
            if self.holds(value) is not None:
                value = value.clone()  # all copies at once: none may read what another writes
            targets, sources = copies.setdefault(target.dtype, ([], []))
            sources.append(value)
            if slot.kind == "fixed":
                targets.append(target)
                continue
            have, room = value.shape[d], target.shape[d]
            targets.append(target.narrow(d, 0, have))
            if have == room:
                continue
            tail = target.narrow(d, have, room - have)
            if slot.kind == "boundaries":
                targets.append(tail)
                sources.append(value[-1:].expand(room - have))
            elif slot.pad == 0:
                zeros.append(tail)
            else:
                tail.fill_(slot.pad)
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)

    def spoil_padding(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Fill the rows that ``values`` left free, where they are floats padded with zero, with NaN.

        Returns whether there was such a row. The next :meth:`update` puts the padding back.
        """
        self._open()
        found = False
        with torch.no_grad():
            for slot, value in ((self._slot(name), value) for name, value in values.items()):
                have, room = (0, 0) if slot.kind == "fixed" else (value.shape[slot.dim], slot.tensor.shape[slot.dim])
                if have < room and slot.pad == 0 and slot.tensor.is_floating_point():
                    slot.tensor.narrow(slot.dim, have, room - have).fill_(math.nan)
                    found = True
        return found

    def holds(self, t: torch.Tensor) -> str | None:
        """The name under which this arena owns the storage of ``t``, or None."""
        return self._names.get(key_of(t))

    # Life.

    def seal(self) -> None:
        """End growth: from now on every tensor that exists is all there is."""
        self._open()
        self.sealed = True

    def price(self) -> Price:
        """Bytes by tensor; the total equals :attr:`bytes`."""
        return Price(tuple(PriceLine.of(s.name, tuple(s.tensor.shape), s.tensor.dtype) for s in self._slots.values()))

    @property
    def bytes(self) -> int:
        """Bytes of the storages this arena holds, without guard bytes."""
        guards = 2 * _GUARD_BYTES if self.canaries else 0
        return sum(s.tensor.untyped_storage().nbytes() - guards for s in self._slots.values())

    def check_canaries(self) -> None:
        """Raise the canary error if anything was written next to a tensor. Reads the device: not for a capture."""
        for slot in self._slots.values():
            if slot.guarded is None:
                continue
            for side, guard in (("before", slot.guarded[:_GUARD_BYTES]), ("after", slot.guarded[-_GUARD_BYTES:])):
                if not bool((guard == _CANARY).all()):
                    raise error(
                        "canary", f"something wrote {side} the arena's tensor {slot.name!r}, made at {slot.made_at}"
                    )

    def close(self) -> None:
        """Give the memory back. Closing twice is harmless."""
        self.closed = True
        self._slots.clear()
        self._names.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            raise error("argument", f"the arena has no tensor {name!r}; it has {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def _open(self) -> None:
        if self.closed:
            raise error("arena-closed", "the arena is closed")
