"""The fp64 oracle of a delta rule, some heads at a time.

Requirements
------------
1. Heads do not meet in a delta rule, so that the parts together are what one call gives.
2. A part is no larger than a device holds beside the arms: the reference's backward keeps some 90 operands at a time,
   which for 96 heads of 8192 tokens, or 32 of 32,768, would be 70 and 93 GiB at once, and batches of small products
   larger than libraries take everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from graphsafe.bench.workloads import Tensors, Workload

__all__ = ["PART", "by_heads"]

PART = 2**25
"""Elements of an operand of one row per token and value head, at most: 32 heads of 128 for 8192 tokens."""
_HEAD_AXIS = {"tokens": 2, "sequences": 1, "fixed": 0}


def by_heads(workload: Workload, tensors: Tensors, oracle: Callable[[Tensors], Tensors]) -> Tensors:
    """What ``oracle`` gives for ``tensors``, the operands of a delta rule, asked part by part."""
    tokens, heads = tensors["q"].shape[1:3]
    each = max(1, PART * heads // (tokens * tensors["v"].shape[2] * workload.case.key_dim))
    found = [
        oracle({n: _cut(workload, n, t, heads, first, min(each, heads - first)) for n, t in tensors.items()})
        for first in range(0, heads, each)
    ]
    if len(found) == 1:
        return found[0]
    return {n: torch.cat([part[n] for part in found], _HEAD_AXIS[workload.result_kind(n)]) for n in found[0]}


def _cut(workload: Workload, name: str, t: torch.Tensor, heads: int, first: int, count: int) -> torch.Tensor:
    """Of an operand what belongs to ``count`` query heads from ``first`` on; boundaries belong to all."""
    if name not in workload.operands:
        return t
    axis = _HEAD_AXIS[workload.operands[name].kind]
    each = t.shape[axis] // heads
    return t.narrow(axis, first * each, count * each)
