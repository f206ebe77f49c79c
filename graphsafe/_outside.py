"""What a captured graph reads from outside, watched so that a replay can be refused once it died or moved.

Requirements
------------
1. No storage and no tensor is kept alive.
2. A storage that died is noticed at the next replay, at no cost while all live, also where another tensor was born at
   its address.
3. A tensor that moved to another storage while the old one lives, and a storage that was resized, are noticed by
   comparing addresses: of some tensors in turn at a normal replay, so that its cost does not grow with the graph, and
   of all of them at a strict one.
4. The error names the tensor's shape, the operator and the line that first used it.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

import torch

from graphsafe._watch import Outside, Watch
from graphsafe.errors import error

__all__ = ["EACH", "OutsideTensors"]

EACH = 6
"""Tensors whose addresses a normal replay compares; a storage without its tensor takes the time of ``_WITHOUT``."""
_WITHOUT = 3


class _Outside:
    """A storage from outside, and who held it at the capture; the storage's death puts it among the dead."""

    __slots__ = ("_death", "address", "owner", "ref", "what", "where")

    def __init__(self, read: Outside, storage: torch.UntypedStorage, dead: list[_Outside]) -> None:
        self.ref, self.where, self.owner = read.storage, read.where, read.tensor
        self.what = f"a tensor of shape {list(read.shape)} that the graph reads in {read.operator}"
        t = read.tensor()
        self.address = read.storage.address if t is None else t.data_ptr()
        # the Python object of a storage lives as long as the storage
        self._death = weakref.ref(storage, lambda _: dead.append(self))

    def check(self) -> int:
        """Compare addresses: of the tensor while it lives, else of the storage. Returns what that cost, in tensors."""
        owner = self.owner()
        if owner is None:
            if not self.ref.unchanged():
                self._refuse_moved()
            return _WITHOUT
        if owner.data_ptr() != self.address:
            self._refuse_moved()
        return 1

    def refuse_dead(self) -> NoReturn:
        if self.owner() is not None:  # the tensor lives on another storage
            self._refuse_moved()
        raise error("input-died", f"{self.what} has died; it was first used at {self.where}")

    def _refuse_moved(self) -> NoReturn:
        raise error("storage-replaced", f"{self.what} now has another storage; it was first used at {self.where}")


class OutsideTensors:
    """The tensors from outside of one graph: remembered once after the capture, checked at each replay."""

    def __init__(self) -> None:
        self._all: list[_Outside] = []
        self._dead: list[_Outside] = []
        self._next = 0

    def remember(self, watch: Watch) -> None:
        """Watch what the captured body read."""
        for key, read in watch.outside.items():
            storage = read.storage.storage()
            if storage is not None and key not in watch.born:
                self._all.append(_Outside(read, storage, self._dead))

    def check(self, *, strict: bool = False) -> None:
        """Raise for the first tensor that died (rule ``input-died``) or moved (rule ``storage-replaced``)."""
        if self._dead:
            self._dead[0].refuse_dead()
        if strict:
            for outside in self._all:
                outside.check()
            return
        budget, left = EACH, len(self._all)
        while budget > 0 and left > 0:
            self._next = (self._next + 1) % len(self._all)
            budget -= self._all[self._next].check()
            left -= 1

    def forget(self) -> None:
        """Stop watching."""
        self._all.clear()
        self._dead.clear()
