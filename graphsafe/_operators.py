"""What an aten operator does to a graph, read from its schema and tags and cached per operator.

Requirements
------------
1. Facts come from the operator itself (schema, tags), so that operators unknown to this project are classified too.
2. ``violation`` finds host reads, data-dependent shapes and host data before the operator runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["OperatorFacts", "facts_of", "violation", "written"]


@dataclass(frozen=True)
class OperatorFacts:
    """``writes``: (position, name) of arguments written in place; ``fills_nothing``: the result is uninitialised;
    ``writes_if``: where it writes only if a flag among its arguments is set; ``changes_geometry``: the argument itself
    gets another storage, shape or strides."""

    name: str
    writes: tuple[tuple[int, str], ...]
    writes_if: tuple[int, str] | None
    data_dependent: bool
    dynamic_shape: bool
    random: bool
    fills_nothing: bool
    changes_geometry: bool


_WRITES_UNMARKED = dict.fromkeys(
    (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
    ),
    ("running_mean", "running_var"),
)
"""Operators that write arguments which their schema does not mark as written."""


@functools.cache
def facts_of(func: Any) -> OperatorFacts:
    """Facts of an ``OpOverload``."""
    name = func.name()
    base = name.split("::")[-1].split(".")[0]
    unmarked = _WRITES_UNMARKED.get(base, ())
    arguments = [(position, a.name, a.alias_info) for position, a in enumerate(func._schema.arguments)]
    flags = [(position, argument) for position, argument, _ in arguments if unmarked and argument == "training"]
    return OperatorFacts(
        name=name,
        writes=tuple((p, a) for p, a, alias in arguments if a in unmarked or (alias is not None and alias.is_write)),
        writes_if=flags[0] if flags else None,
        data_dependent=torch.Tag.data_dependent_output in func.tags,
        dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        fills_nothing=base
        in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"),
        changes_geometry=torch.Tag.inplace_view in func.tags,
    )


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def written(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that the operator writes in place."""
    if facts.writes_if is not None:
        position, name = facts.writes_if
        if not (args[position] if position < len(args) else kwargs[name]):
            return
    for position, name in facts.writes:
        if position < len(args):
            yield from _flat(args[position])
        elif name in kwargs:
            yield from _flat(kwargs[name])


def _boolean_index(args: Sequence[Any]) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices or ())


def _becomes_masked_fill(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """torch turns ``x[mask] = scalar`` into masked_fill, which has a fixed shape: one mask, one value, no sum."""
    indices = [i for i in args[1] if i is not None]
    value = args[2] if len(args) > 2 else kwargs.get("values")
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one and not accumulate and all(i.dtype in (torch.bool, torch.uint8) for i in indices) and len(indices) == 1


_COLLECTIVES = ("c10d::", "c10d_functional::", "_c10d_functional::", "_c10d_functional_autograd::")
"""Namespaces of torch's operators that talk to other ranks."""


def violation(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The rule that the call breaks and a sentence that says how, or None."""
    base = facts.name.split("::")[-1].split(".")[0]
    if facts.name.startswith(_COLLECTIVES):
        return "collective", f"{facts.name} waits for other ranks inside the capture"
    if base.lstrip("_").startswith("to_sparse"):
        return "not-capturable", f"{facts.name} makes a sparse tensor, whose size depends on data"
    if base == "lift_fresh":
        return "host-data", "a tensor is made from host values"
    if base == "repeat_interleave" and facts.dynamic_shape:
        if kwargs.get("output_size") is None:
            return "data-dependent-shape", "repeat_interleave with a tensor of repeats and no output_size"
        return None
    if base == "index":
        return ("data-dependent-shape", "indexing with a boolean mask") if _boolean_index(args) else None
    if base in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"):
        if _boolean_index(args) and not _becomes_masked_fill(args, kwargs):
            return "data-dependent-shape", "assignment through a boolean mask"
        return None
    if facts.data_dependent:
        return "host-read", f"{facts.name} reads a value of the device on the host"
    if facts.dynamic_shape:
        return "data-dependent-shape", f"{facts.name} has a shape that depends on data"
    return None
