"""Who keeps a tensor that was born inside a capture.

Requirements
------------
1. A storage born inside that something other than the graph still holds after the capture has escaped, unless it
   belongs to a declared output or to the autograd graph behind one.
2. The error names where the tensor was made and who keeps it: a gradient, a global, an attribute, a list, a closure.
3. Nothing here keeps a tensor, or a frame, alive.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

import torch

from graphsafe._storage import is_plain, key_of
from graphsafe._watch import Watch
from graphsafe.errors import GraphSafeError, error
from graphsafe.tree import leaves, tensors

__all__ = ["bound_tensors", "escaped", "escapes", "holder_of"]


def bound_tensors(frame: FrameType) -> list[torch.Tensor]:
    """Tensors bound to names of the function that holds the ``with`` block."""
    names = frame.f_locals
    found = []
    for value in list(names.values()):
        with contextlib.suppress(GraphSafeError):  # a container that contains itself holds no output
            found.extend(tensors(value))
    if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(names, dict):
        names.clear()  # before Python 3.13 this is a copy that would keep the tensors alive
    return found


def escaped(watch: Watch, kept: list[torch.Tensor], graph: Any) -> GraphSafeError | None:
    """The error for the first storage that escaped, or None."""
    return next((problem for _, problem in escapes(watch, kept, graph)), None)


def escapes(watch: Watch, kept: list[torch.Tensor], graph: Any) -> Iterator[tuple[str, GraphSafeError]]:
    """What made it, and the error, for each storage that escaped."""
    allowed = {key_of(t) for t in kept if is_plain(t)}
    allowed.update(key_of(t) for t in _behind(kept) if is_plain(t))
    for key, (ref, where, made) in watch.born.items():
        if key in allowed or ref.holders() <= graph.private_holders(key):
            continue
        holder = _holder(key, graph)
        problem = error(
            "tensor-escapes",
            f"a tensor born inside the capture ({made}) is kept by {holder}",
            where=where,
            remedy=_GRADIENT_REMEDY if holder.startswith("the gradient") else None,
        )
        yield made, problem


_GRADIENT_REMEDY = (
    "Allocate the gradient before the capture (p.grad = torch.zeros_like(p)) and clear it in place "
    "(zero_grad(set_to_none=False)), or use TrainStep, whose arena owns the gradients."
)


def _behind(outputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that the autograd graph of the outputs saved."""
    seen: set[Any] = set()
    stack: list[Any] = [t.grad_fn for t in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_saved_") or name in ("saved_tensors", "variable"):
                try:
                    yield from tensors(getattr(node, name))
                except RuntimeError:  # freed by a backward pass: nothing is kept
                    continue
        yield from _attributes(node, seen)


def _attributes(owner: Any, seen: set[Any]) -> Iterator[torch.Tensor]:
    """Tensors that a node of the autograd graph keeps as attributes, or through objects of its function's own."""
    for _, leaf in leaves(list(getattr(owner, "__dict__", {}).values())):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _NOT_OWN) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _attributes(leaf, seen)


_NOT_OWN = (type, types.ModuleType, types.FunctionType, torch.nn.Module)
"""What a function may refer to without owning it."""


def _holder(key: int, graph: Any) -> str:
    return holder_of(key, graph) or "the autograd graph of a tensor that was not declared as an output"


def holder_of(key: int, graph: Any) -> str | None:
    """Who keeps a storage, in words, or None if no gradient and no Python object but a frame does."""
    found = []
    for candidate in _live_tensors():
        grad = candidate.grad if candidate.is_leaf else None
        if grad is not None and key_of(grad) == key:
            return f"the gradient of a leaf tensor of shape {list(candidate.shape)}"
        if key_of(candidate) == key and not graph.is_private(candidate):
            found.append(candidate)
    for candidate in found:
        for referrer in gc.get_referrers(candidate):
            text = None if referrer is found else _describe(referrer, candidate)
            if text is not None:
                return text
    return None


def _live_tensors() -> list[torch.Tensor]:
    # type(): some libraries hold proxies whose isinstance() does work or warns
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.layout is torch.strided]
    return [t for t in found if _has_storage(t)]


def _has_storage(t: torch.Tensor) -> bool:
    """False for what a function transform left behind: a wrapper, which says that it has one until it is asked."""
    try:
        t.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _describe(referrer: Any, t: torch.Tensor) -> str | None:
    if isinstance(referrer, (FrameType, types.ModuleType)):
        return None
    if isinstance(referrer, dict):
        name = next((k for k, v in referrer.items() if v is t), None)
        if name is None:
            return None
        module = referrer.get("__name__") if isinstance(referrer.get("__name__"), str) else None
        if module is not None and "__spec__" in referrer:
            return f"the global {name!r} of module {module!r}"
        owner = next((o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer), None)
        return f"a dict under {name!r}" if owner is None else f"the attribute {name!r} of a {type(owner).__name__}"
    if isinstance(referrer, types.CellType):
        return "a variable that a nested function closes over"
    if isinstance(referrer, (list, tuple, set)):
        return f"a {type(referrer).__name__} of {len(referrer)} items"
    for name, value in getattr(referrer, "__dict__", {}).items():
        if value is t:
            return f"the attribute {name!r} of a {type(referrer).__name__}"
    return None
