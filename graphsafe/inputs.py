"""Which arguments of a captured call are static inputs, how they grow to the bucket, and what may not change.

Requirements
------------
1. Every tensor leaf of the arguments, however nested, is a static input; each has a path that errors quote.
2. A leaf's kind says which dimension follows the batch: ``tokens`` (``[1, T, ...]``), ``sequences`` (``[N, ...]``),
   ``boundaries`` (a leaf called ``cu_seqlens``), ``fixed``, or ``bound`` (used where it is, never copied).
   Undeclared kinds are found once, from the sizes of the capture's example. A size that merely coincides with the
   example's shows at the first batch of another size, which is refused by name; declaring the kind settles it.
3. Leaves that share a ``cu_seqlens`` (the one in the same container) form a group with one T and one N.
4. Every other leaf is a host value: it selects a graph where declared static, otherwise it may not change.
5. Nothing here reads the device, except once, at capture, the example's live total. Boundaries on a CPU are checked at
   each call: from 0, never decreasing, no further than the tokens that there are.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphsafe._storage import key_of
from graphsafe.contract import describe
from graphsafe.errors import error
from graphsafe.tree import leaves, map_leaves

__all__ = ["Call", "Input", "InputPlan", "bind_call", "static_key"]

_KINDS = ("tokens", "sequences", "boundaries", "fixed", "bound")
_BOUNDARIES = "cu_seqlens"


@dataclass(frozen=True)
class Input:
    """How one argument follows the batch: ``kind``, the dimension ``dim`` that does, and the padding value ``pad``.

    ``dim`` defaults to 1 for tokens and to 0 for sequences.
    """

    kind: str
    dim: int | None = None
    pad: float = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise error("argument", f"Input(kind={self.kind!r}): one of {', '.join(_KINDS)} is needed")

    @property
    def axis(self) -> int:
        return self.dim if self.dim is not None else (1 if self.kind == "tokens" else 0)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by parameter name: ``tensors`` and ``values`` by path."""

    arguments: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def bind_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], injected: str | None
) -> Call:
    """Match a call to parameters, fill defaults, split the leaves. ``injected``: a parameter the wrapper fills."""
    if injected is not None and injected not in kwargs:
        kwargs = {**kwargs, injected: None}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise error("structure", f"the call does not match the function: {problem}") from problem
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if injected is not None:
        arguments.pop(injected, None)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        for path, leaf in leaves(value, name):
            if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor) and getattr(leaf, "shape", ()) != ():
                raise error("host-data", f"argument {path!r} is a {type(leaf).__name__}; the graph would freeze it")
            (tensors if isinstance(leaf, torch.Tensor) else values)[path] = leaf
    return Call(arguments, tensors, values)


def static_key(call: Call, static_argnames: tuple[str, ...]) -> tuple[tuple[Any, ...], ...]:
    """The values that select a graph, with what tells 1 from True and 1.0, and 0.0 from -0.0."""
    for path, t in call.tensors.items():
        if _under(path, static_argnames) is not None:
            raise error("argument", f"argument {path!r} is {describe(t)}: a tensor is an input and cannot be static")
    return tuple(
        (path, type(value), value, repr(value) if isinstance(value, float) else "")
        for path, value in call.values.items()
        if _under(path, static_argnames) is not None
    )


def _under(path: str, names: Any) -> str | None:
    """The longest of ``names`` that is ``path`` or contains it."""
    found = [n for n in names if path == n or (path.startswith(n) and path[len(n)] in ".[")]
    return max(found, key=len) if found else None


@dataclass
class _Group:
    """Leaves under one cu_seqlens: its path and the prefix its members share."""

    boundaries: str
    prefix: str
    members: list[str] = field(default_factory=list)


class InputPlan:
    """Kinds, groups and frozen values, fixed by the example of a capture."""

    def __init__(
        self, call: Call, declared: Mapping[str, Input], static_argnames: tuple[str, ...], capacities: Sequence[int]
    ) -> None:
        for given in declared:
            if not any(_under(path, [given]) for path in call.tensors):
                raise error(
                    "argument",
                    f"inputs names {given!r}, which is no tensor argument; there are "
                    f"{', '.join(call.tensors) or 'none'}",
                )
        self.static_argnames = static_argnames
        self.groups = _groups(call)
        self.inputs: dict[str, Input] = {}
        sizes = {g.boundaries: _example_sizes(call, g, capacities) for g in self.groups}
        for path, t in call.tensors.items():
            name = _under(path, declared)
            group = self._group_of(path)
            if name is not None:
                self.inputs[path] = declared[name]
                if path in sizes and declared[name].kind != "boundaries":
                    raise error(
                        "argument",
                        f"inputs declares {path!r} as {declared[name].kind!r}; boundaries are always copied, so that "
                        "a shorter batch can be continued by empty sequences",
                    )
            elif path in sizes:
                self.inputs[path] = Input("boundaries")
            elif group is None:
                self.inputs[path] = Input("fixed")
            else:
                self.inputs[path] = _infer(tuple(t.shape), *sizes[group.boundaries])
            kind, axis = self.inputs[path].kind, self.inputs[path].axis
            if kind in ("tokens", "sequences") and not 0 <= axis < t.dim():
                raise error("argument", f"inputs declares dimension {axis} of {path!r} as {kind}; it is {describe(t)}")
            if group is not None and kind in ("tokens", "sequences"):
                group.members.append(path)
        self.shapes = {path: tuple(t.shape) for path, t in call.tensors.items()}
        self.dtypes = {path: t.dtype for path, t in call.tensors.items()}
        self.frozen = {p: v for p, v in call.values.items() if _under(p, static_argnames) is None}
        self.bound = {p: (key_of(t), _geometry(t)) for p, t in call.tensors.items() if self.inputs[p].kind == "bound"}

    def _group_of(self, path: str) -> _Group | None:
        best: _Group | None = None
        for group in self.groups:
            inside = not group.prefix or path.startswith(group.prefix)
            if inside and (best is None or len(group.prefix) > len(best.prefix)):
                best = group
        return best

    def pinned(self, tokens: int, sequences: int) -> set[str]:
        """The kinds that a bound tensor of a packed batch fixes at this capacity: it cannot be run at another."""
        return {
            _infer(self.shapes[path], {tokens}, sequences).kind
            for path in self.bound
            if self._group_of(path) is not None
        } - {"fixed"}

    def copied(self) -> dict[str, Input]:
        """Inputs that are copied into static memory at each call."""
        return {p: i for p, i in self.inputs.items() if i.kind != "bound"}

    def group_sizes(self, call: Call) -> list[tuple[int, int]]:
        """(tokens, sequences) of each packed batch among the arguments."""
        found = []
        for group in self.groups:
            tokens, sequences = 0, int(call.tensors[group.boundaries].shape[0]) - 1
            for path in group.members:
                if self.inputs[path].kind == "tokens":
                    tokens = max(tokens, int(call.tensors[path].shape[self.inputs[path].axis]))
            found.append((tokens, sequences))
        return found

    def sizes(self, call: Call) -> tuple[int, int]:
        """(tokens, sequences) that a bucket must hold for this call: the largest over its packed batches."""
        sizes = self.group_sizes(call)
        return max((t for t, _ in sizes), default=0), max((n for _, n in sizes), default=0)

    def check(self, call: Call) -> None:
        """Refuse a call that the captured graph cannot serve: other structure, dtype, shape, value or bound tensor."""
        self._check_structure(call)
        for path, value in call.values.items():
            if path in self.frozen and not _same(self.frozen[path], value):
                raise error(
                    "frozen-scalar", f"argument {path!r} was {self.frozen[path]!r} at capture and is {value!r} now"
                )
        for path, t in call.tensors.items():
            self._check_tensor(path, t)
        for group in self.groups:
            self._check_group(call, group)
            if call.tensors[group.boundaries].device.type == "cpu":
                self._check_boundaries(call, group)

    def _check_structure(self, call: Call) -> None:
        missing = [p for p in self.inputs if p not in call.tensors]
        extra = [p for p in call.tensors if p not in self.inputs]
        if missing or extra:
            parts = [f"missing {', '.join(missing)}"] if missing else []
            parts += [f"new {', '.join(extra)}"] if extra else []
            raise error("structure", f"the tensor arguments differ from the capture's: {'; '.join(parts)}")
        for path in self.frozen:
            if path not in call.values:
                raise error("structure", f"argument {path!r} of the capture is missing")
        for path in call.values:
            if path not in self.frozen and _under(path, self.static_argnames) is None:
                raise error("structure", f"argument {path!r} was not there at the capture, which would ignore it")

    def _check_tensor(self, path: str, t: torch.Tensor) -> None:
        how, shape = self.inputs[path], self.shapes[path]
        if how.kind != "bound" and t.requires_grad and torch.is_grad_enabled():
            raise error(
                "unsupported",
                f"argument {path!r} requires grad, but a replay has no autograd graph to send a gradient through",
                why="The graph copies its inputs and returns its own memory; a backward outside would stop there.",
                remedy="Run the backward inside the captured function, pass a detached tensor, or call under no_grad.",
            )
        free = how.axis if how.kind in ("tokens", "sequences", "boundaries") else None
        fits = t.dim() == len(shape) and all(
            a == b or i == free for i, (a, b) in enumerate(zip(t.shape, shape, strict=True))
        )
        if not fits or t.dtype != self.dtypes[path]:
            want = [("*" if i == free else s) for i, s in enumerate(shape)]
            raise error("structure", f"argument {path!r} is {describe(t)}; the capture had {self.dtypes[path]} {want}")
        if path in self.bound and (key_of(t), _geometry(t)) != self.bound[path]:
            raise error("input-rebound", f"the bound argument {path!r} is another tensor than at capture")

    def _check_group(self, call: Call, group: _Group) -> None:
        for kind in ("tokens", "sequences"):
            paths = [p for p in group.members if self.inputs[p].kind == kind]
            sizes = {p: int(call.tensors[p].shape[self.inputs[p].axis]) for p in paths}
            if kind == "sequences":
                sizes[group.boundaries] = int(call.tensors[group.boundaries].shape[0]) - 1
            if len(set(sizes.values())) > 1:
                text = ", ".join(f"{p}: {s}" for p, s in sizes.items())
                raise error("structure", f"arguments of one packed batch disagree about its {kind}: {text}")

    def _check_boundaries(self, call: Call, group: _Group) -> None:
        """The values of boundaries, where reading them does not wait for a device."""
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):  # no read of the caller's: nobody's modes see it
            values = call.tensors[group.boundaries].tolist()
        if values[0] != 0 or any(b < a for a, b in itertools.pairwise(values)):
            raise error(
                "tables", f"argument {group.boundaries!r} is {values}; boundaries start at 0 and never decrease"
            )
        for path in group.members:
            how = self.inputs[path]
            if how.kind == "tokens" and values[-1] > call.tensors[path].shape[how.axis]:
                have = int(call.tensors[path].shape[how.axis])
                raise error("tables", f"argument {group.boundaries!r} ends at {values[-1]}; {path!r} has {have} tokens")

    def template(self, call: Call) -> dict[str, Any]:
        """The call's arguments with a hole for each copied tensor: it keeps the structure, and no example alive."""
        return {
            name: map_leaves(
                lambda p, v: _Hole(p) if isinstance(v, torch.Tensor) and self.inputs[p].kind != "bound" else v,
                value,
                name,
            )
            for name, value in call.arguments.items()
        }

    def fill(self, template: dict[str, Any], tensor_of: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """A template's arguments with ``tensor_of(path)`` in each hole."""
        return {
            name: map_leaves(lambda _, v: tensor_of(v.path) if isinstance(v, _Hole) else v, value, name)
            for name, value in template.items()
        }


class _Hole:
    """The place of a copied tensor."""

    def __init__(self, path: str) -> None:
        self.path = path


def _groups(call: Call) -> list[_Group]:
    found = []
    for path in call.tensors:
        for end in (f".{_BOUNDARIES}", f"[{_BOUNDARIES!r}]"):
            if path.endswith(end):
                found.append(_Group(path, path[: -len(end)]))
        if path == _BOUNDARIES:
            found.append(_Group(path, ""))
    return found


def _example_sizes(call: Call, group: _Group, capacities: Sequence[int]) -> tuple[set[int], int]:
    """Sizes that mean tokens (the live total, or a bucket's capacity for arguments padded by the caller), and N."""
    cu = call.tensors[group.boundaries]
    if cu.dim() != 1 or cu.dtype not in (torch.int32, torch.int64) or cu.shape[0] < 2:
        raise error(
            "structure", f"argument {group.boundaries!r} is {describe(cu)}; [N + 1] of int32 or int64 is needed"
        )
    return {int(cu[-1]), *capacities}, int(cu.shape[0]) - 1


def _infer(shape: tuple[int, ...], tokens: set[int], sequences: int) -> Input:
    """``[1, T, ...]`` holds tokens, ``[N, ...]`` sequences, anything else is fixed."""
    if len(shape) >= 2 and shape[0] == 1 and shape[1] in tokens:
        return Input("tokens")
    return Input("sequences") if len(shape) >= 2 and shape[0] == sequences else Input("fixed")


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def _python_number(value: Any) -> Any:
    """A numpy scalar as a Python number; anything else unchanged."""
    return value.item() if hasattr(value, "__array__") and getattr(value, "shape", None) == () else value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    a, b = _python_number(a), _python_number(b)
    if isinstance(a, (float, complex)):
        return type(a) is type(b) and repr(a) == repr(b)  # tells 0.0 from -0.0, and NaN is NaN
    if isinstance(a, (bool, int, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)):
        return type(a) is type(b) and bool(a == b)
    return False
