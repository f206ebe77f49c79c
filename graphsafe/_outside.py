"""What a captured graph reads from outside, watched so that a replay can be refused once it died or moved.

Requirements
------------
1. No storage and no tensor is kept alive.
2. While everything lives where it was, a check costs one address comparison for each tensor.
3. The error names the tensor's shape, the operator and the line that first used it.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

import torch

from graphsafe._location import Location
from graphsafe._storage import StorageRef
from graphsafe._watch import Watch
from graphsafe.errors import error

__all__ = ["OutsideTensors"]


class _Outside:
    """A storage from outside, and who held it at the capture; a death puts it among the suspects."""

    def __init__(self, t: torch.Tensor, where: Location | None, name: str, suspects: list[_Outside]) -> None:
        self.ref = StorageRef(t)
        self.where = where
        self.what = f"a tensor of shape {list(t.shape)} that the graph reads in {name}"
        self.owner = weakref.ref(t, lambda _: suspects.append(self))
        self.address = t.data_ptr()

    def check(self) -> None:
        if not self.ref.alive():
            raise error("input-died", f"{self.what} has died; it was first used at {self.where}")
        if not self.ref.unchanged():
            self.refuse_moved()

    def refuse_moved(self) -> NoReturn:
        raise error("storage-replaced", f"{self.what} now has another storage; it was first used at {self.where}")


class OutsideTensors:
    """The tensors from outside of one graph: remembered once after the capture, checked at each replay."""

    def __init__(self) -> None:
        self._all: list[_Outside] = []
        self._suspects: list[_Outside] = []

    def remember(self, watch: Watch) -> None:
        """Watch what the captured body read."""
        for key, (t_ref, where, name) in watch.outside.items():
            t = t_ref()
            if t is not None and key not in watch.born:
                self._all.append(_Outside(t, where, name, self._suspects))

    def check(self) -> None:
        """Raise for the first tensor that died (rule ``input-died``) or moved (rule ``storage-replaced``)."""
        for suspect in self._suspects:
            suspect.check()
        for outside in self._all:
            owner = outside.owner()
            if owner is not None and owner.data_ptr() != outside.address:
                outside.refuse_moved()

    def forget(self) -> None:
        """Stop watching."""
        self._all.clear()
        self._suspects.clear()
