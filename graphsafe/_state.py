"""Put back what a warm-up or a recorded run changed: tensors, gradients, generators.

Requirements
------------
1. Any tensor written in place is saved just before its first write, once per storage, and put back bit for bit.
2. A gradient that was None before is None afterwards.
3. Host generators (``random``, numpy where it is loaded) and torch's own are put back.
4. Nothing is kept alive that the body let go: storages born and dead inside cost nothing in the end.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from graphsafe._storage import StorageRef, key_of

__all__ = ["Generators", "SavedState", "host_random_state"]

_PRUNE_EVERY = 256


class SavedState:
    """Copies of storages from before their first write; :meth:`restore` writes them back.

    ``save`` is called with each tensor about to be written, ``leaf`` with each tensor that may get a gradient.
    ``contents``: save what storages hold; without it (a capture that does not execute) only gradients are put back.
    ``births``: also save storages made inside the run, so that state made by a first step can go back to its initial
    value; otherwise only what existed before is saved.
    """

    def __init__(self, *, births: bool = False, contents: bool = True) -> None:
        self.births = births
        self.contents = contents
        self._saved: dict[int, tuple[StorageRef, torch.Tensor]] = {}
        self._leaves: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        self._since_prune = 0

    def save(self, t: torch.Tensor) -> None:
        """Save the storage of ``t`` unless it is saved already."""
        key = key_of(t)
        if not self.contents or key in self._saved:
            return
        ref = StorageRef(t)
        content = ref.bytes()
        assert content is not None
        self._saved[key] = (ref, content.clone())
        self._since_prune += 1
        if self._since_prune >= _PRUNE_EVERY:
            self._saved = {k: v for k, v in self._saved.items() if v[0].alive()}
            self._since_prune = 0

    def leaf(self, t: torch.Tensor) -> None:
        """Remember the gradient of a leaf tensor as it is now."""
        if t.requires_grad and t.is_leaf and id(t) not in self._leaves:
            self._leaves[id(t)] = (weakref.ref(t), t.grad)

    def saved(self, key: int) -> bool:
        return key in self._saved

    def present(self) -> dict[str, torch.Tensor]:
        """Copies of what the saved storages that still live hold now, by a name that is the same at each call."""
        found = {}
        for number, (storage, _) in enumerate(self._saved.values()):
            content = storage.bytes()
            if content is not None:
                found[f"storage {number} of {storage.nbytes} bytes"] = content.clone()
        return found

    def restore(self) -> None:
        """Write every saved storage that still lives back, put gradients back, and forget."""
        self.restore_and_keep()
        self.drop()

    def restore_and_keep(self) -> None:
        """As :meth:`restore`, but what was saved stays saved."""
        for ref, grad in self._leaves.values():
            t = ref()
            if t is not None and t.grad is not grad:
                t.grad = grad
        with torch.no_grad():
            for storage, content in self._saved.values():
                present = storage.bytes()
                if present is not None and present.numel() == content.numel():
                    present.copy_(content)

    def drop(self) -> None:
        """Forget everything."""
        self._saved.clear()
        self._leaves.clear()


def host_random_state() -> tuple[Any, Any]:
    """The states of ``random`` and, where numpy is loaded, of its global generator, in a comparable form."""
    numpy = sys.modules.get("numpy")
    state: Any = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state = (name, keys.tobytes(), *rest)
    return random.getstate(), state


class Generators:
    """The states of torch generators and host generators at one moment."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._torch = [(g, g.get_state(), g.initial_seed()) for g in generators]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        for generator, state, _ in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def elsewhere(self) -> torch.Generator | None:
        """A generator whose state differs from then, or None."""
        return next((g for g, state, _ in self._torch if not torch.equal(g.get_state(), state)), None)

    def reseeded(self) -> torch.Generator | None:
        """A generator whose seed was set since, or None."""
        for generator, _, seed in self._torch:
            if generator.initial_seed() != seed:
                return generator
        return None
