"""Nested arguments as a flat list of named leaves.

Requirements
------------
1. Dicts, lists, tuples, named tuples and dataclass instances are opened; everything else is a leaf.
2. Each leaf has a path as a caller would write it: ``batch.ids``, ``batch['ids']``, ``xs[0]``.
3. ``map_leaves`` makes the same structure around new leaves and never mutates the original.
4. A container that contains itself is refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from graphsafe.errors import error

__all__ = ["leaves", "map_leaves", "tensors"]


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def leaves(value: Any, path: str = "", _above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in a fixed order; ``path`` names the root."""
    children = _children(value)
    if children is None:
        yield path, value
        return
    if id(value) in _above:
        raise error("structure", f"{path or 'a container'} contains itself")
    for suffix, item in children:
        yield from leaves(item, path + suffix if path else suffix.lstrip("."), (*_above, id(value)))


def map_leaves(function: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """The same structure with each leaf replaced by ``function(path, leaf)``."""
    children = _children(value)
    if children is None:
        return function(path, value)
    new = [map_leaves(function, item, path + suffix if path else suffix.lstrip(".")) for suffix, item in children]
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # keeps what the type holds beside its items, a default factory for example
        for key, item in zip(value.keys(), new, strict=True):
            made[key] = item
        return made
    if isinstance(value, Mapping):
        return type(value)(dict(zip(value.keys(), new, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new)
    if isinstance(value, (list, tuple)):
        return type(value)(new)
    fields = dict(zip((f.name for f in dataclasses.fields(value)), new, strict=True))
    init = {f.name: fields[f.name] for f in dataclasses.fields(value) if f.init}
    replaced = dataclasses.replace(value, **init)
    for f in dataclasses.fields(value):
        if not f.init:
            object.__setattr__(replaced, f.name, fields[f.name])
    return replaced


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors among the leaves, in order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
