"""Storages as the unit of memory: identity, life, and raw bytes.

Requirements
------------
1. A storage is identified by its own object, never by its address: a new storage at an old address is another one.
2. Watching a storage does not keep its memory alive.
3. ``holders`` counts what keeps a storage alive apart from the watcher.
"""

from __future__ import annotations

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["NOT_PLAIN", "StorageRef", "is_plain", "key_of", "kind_of"]

NOT_PLAIN = "Only strided tensors have one storage of a fixed size that a graph can read and write."


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is a strided view of one storage."""
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized and not is_traceable_wrapper_subclass(t)


def kind_of(t: torch.Tensor) -> str:
    """What a tensor that is not plain is."""
    if is_traceable_wrapper_subclass(t):
        return f"a {type(t).__name__} of several tensors"
    return "a nested tensor" if t.is_nested else "a quantized tensor" if t.is_quantized else f"a {t.layout} tensor"


def key_of(t: torch.Tensor) -> int:
    """The identity of a tensor's storage; unique for as long as the storage or a :class:`StorageRef` to it lives."""
    return int(t.untyped_storage()._cdata)


class StorageRef:
    """A weak reference to the storage of a tensor, with its address, size and device at the time."""

    __slots__ = ("_weak", "address", "device", "key", "nbytes")

    def __init__(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        self.key = int(storage._cdata)
        self.nbytes = storage.nbytes()
        self.address = storage.data_ptr()
        self.device = storage.device
        self._weak = StorageWeakRef(storage)

    def alive(self) -> bool:
        return not self._weak.expired()

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None once it died."""
        if self._weak.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)

    def unchanged(self) -> bool:
        """Whether the storage still has the memory it had when this reference was made."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.address and storage.nbytes() == self.nbytes

    def holders(self) -> int:
        """How many tensors (Python objects, saved tensors of autograd, gradients) keep the storage alive."""
        if self._weak.expired():
            return 0
        return _use_count(self.key) - _wrapper_count()

    def bytes(self) -> torch.Tensor | None:
        """The whole storage as a uint8 tensor, or None once it died."""
        storage = self.storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


def _use_count(key: int) -> int:
    return int(torch._C._storage_Use_Count(key))


@functools.lru_cache(maxsize=1)
def _wrapper_count() -> int:
    """What the Python object of a storage adds to its use count; differs between torch versions, so it is measured."""
    t = torch.empty(1)
    return _use_count(StorageRef(t).key) - 1
