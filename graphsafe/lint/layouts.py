"""Another layout of a packed batch, of the same size.

Requirements
------------
1. A leaf of the arguments called ``cu_seqlens`` (or ``cu_seqlens_q``, ``cu_seq_lens_k`` and the like) with integer
   boundaries ``[N + 1]`` has a layout; nothing else is touched.
2. The second layout has the total, the number of sequences and, where the lengths differ, the longest length of the
   first, so that every shape of a program that keeps the rules is the same.
"""

from __future__ import annotations

import re

import torch

__all__ = ["boundaries_among", "other_layout"]

_NAME = re.compile(r"(^|[.'\"])cu_seq_?lens(_\w+)?['\"\]]*$")


def boundaries_among(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments that hold sequence boundaries, by path."""
    return {
        path: t
        for path, t in tensors.items()
        if _NAME.search(path) and t.dim() == 1 and t.shape[0] >= 2 and t.dtype in (torch.int32, torch.int64)
    }


def other_layout(boundaries: torch.Tensor) -> torch.Tensor | None:
    """``[N + 1]`` with the same total and other lengths, or None where there is no such layout."""
    lengths = boundaries.diff().tolist()
    turned = [*lengths[1:], *lengths[:1]]
    if turned == lengths:  # all of one length
        if len(lengths) < 2 or lengths[0] < 1:
            return None
        turned = [lengths[0] - 1, lengths[1] + 1, *lengths[2:]]
    made = boundaries.clone()
    made[1:] = boundaries[0] + torch.tensor(turned).cumsum(0)
    return made
