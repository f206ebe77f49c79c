"""Bitwise comparison of tensors, with the first difference named.

Requirements
------------
1. Equal means the same bits: NaN equals the same NaN, and 0.0 differs from -0.0.
2. A difference is reported with its place, both values, and how many elements differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.tree import leaves

__all__ = ["Difference", "differences", "first_difference"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """``name`` differs at ``index``: ``got`` instead of ``want``, as do ``count`` of ``total`` elements."""

    name: str
    index: tuple[int, ...]
    got: object
    want: object
    count: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.name}{list(self.index)} is {self.got}, want {self.want}; "
            f"{self.count} of {self.total} elements differ"
        )


def _bits(t: torch.Tensor) -> torch.Tensor:
    t = t.resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t if t.dtype is torch.bool else t.contiguous().view(_INTEGERS[t.element_size()])


def first_difference(name: str, got: torch.Tensor, want: torch.Tensor) -> Difference | None:
    """The first place where the bits differ, or None. Reads the device."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return Difference(name, (), f"{got.dtype}{list(got.shape)}", f"{want.dtype}{list(want.shape)}", 1, 1)
    unequal = _bits(got) != _bits(want)
    count = int(unequal.sum())
    if count == 0:
        return None
    place = tuple(int(i) for i in unequal.nonzero()[0])
    at = place[: got.dim()]
    return Difference(name, at, got[at].item(), want[at].item(), count, unequal.numel())


def differences(got: Any, want: Any, name: str = "output") -> list[Difference]:
    """First differences of all tensors of two equally nested values."""
    pairs = zip(leaves(got, name), leaves(want, name), strict=True)
    found = [
        first_difference(path, a, b)
        for (path, a), (_, b) in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    ]
    return [d for d in found if d is not None]
