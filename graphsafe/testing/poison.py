"""Memory that nobody may read holds NaN, so that reading it shows.

Requirements
------------
1. ``poison`` fills a tensor with what cannot pass for a result: NaN, or the largest value of an integer type.
2. ``poisoned_padding`` does so behind the live rows of one dimension and leaves the live rows alone.
3. Inside ``poisoned_memory()`` memory that an operator leaves uninitialised (``torch.empty`` and its kin) is poisoned
   before the caller sees it, in forward and backward, eager and captured.
4. ``watched_arena`` gives an arena whose tensors lie between canaries, and checks them when the block ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe._operators import facts_of
from graphsafe.arena import Arena
from graphsafe.bucket import Bucket

__all__ = ["poison", "poisoned_memory", "poisoned_padding", "watched_arena"]


def poison(t: torch.Tensor) -> torch.Tensor:
    """Fill ``t`` in place: NaN for floating and complex types, True for bool, else the largest value."""
    with torch.no_grad():
        if t.dtype.is_floating_point or t.dtype.is_complex:
            return t.fill_(math.nan)
        return t.fill_(True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)


def poisoned_padding(t: torch.Tensor, live: int, dim: int = 1) -> torch.Tensor:
    """Poison the rows of ``dim`` from ``live`` on, in place."""
    poison(t.narrow(dim, live, t.shape[dim] - live))
    return t


class _PoisonedMemory(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if facts_of(func).fills_nothing and isinstance(result, torch.Tensor) and not result.is_meta:
            poison(result)
        return result


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside the block, uninitialised memory holds NaN."""
    with _PoisonedMemory():
        yield


@contextlib.contextmanager
def watched_arena(runtime: Any, bucket: Bucket) -> Iterator[Arena]:
    """An arena of ``runtime`` between canaries; raises PaddingError (rule canary) if one was overwritten."""
    with runtime.arena(bucket, canaries=True) as arena:
        yield arena
        runtime.synchronize()
        arena.check_canaries()
