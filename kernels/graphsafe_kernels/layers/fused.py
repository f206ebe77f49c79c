"""Parameters that are one tensor in memory and several in a state dict.

Requirements
------------
1. A state dict has the names and shapes of the separate parameters, in both directions: checkpoints that know nothing
   of the fusion load, and what is saved loads elsewhere. With ``keep_vars=True`` its values are differentiable slices.
2. Missing and misshapen parts are reported by their own names; what is present loads with ``strict=False``.
3. The initial values are the parts' own. Rows added to fill a tensor up are zero, belong to no name, and are no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["ALIGNMENT", "fuse_rows", "save_fused_as"]

ALIGNMENT = 8
"""A fused projection has a multiple of so many rows, so that in 16 bits its output's rows are 16-byte aligned."""

Parts = Sequence[tuple[str, int]]
"""Names in the state dict and rows of each, in order."""


def fuse_rows(parts: Sequence[torch.Tensor], multiple: int = 1) -> nn.Parameter:
    """One parameter of all rows ``[sum of rows, ...]``, filled up with zero rows to a ``multiple``."""
    rows = sum(p.shape[0] for p in parts)
    fill = [] if rows % multiple == 0 else [parts[0].new_zeros(-rows % multiple, *parts[0].shape[1:])]
    return nn.Parameter(torch.cat([*(p.detach() for p in parts), *fill]))


def save_fused_as(module: nn.Module, names: Mapping[str, Parts]) -> None:
    """Let ``module``'s state dict show each fused parameter (its name in the module) as its parts."""
    module._fused_parameters = dict(names)  # type: ignore[assignment]
    module.register_state_dict_post_hook(_split)
    module.register_load_state_dict_pre_hook(_gather)


def _split(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for fused, parts in module._fused_parameters.items():
        whole = state.pop(prefix + fused, None)
        first = 0
        for name, rows in parts if whole is not None else ():
            state[prefix + name] = whole[first : first + rows]
            first += rows


def _gather(module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
            unexpected: list[str], errors: list[str]) -> None:
    for fused, parts in module._fused_parameters.items():
        current = module.get_parameter(fused).detach()
        pieces, first, found = [], 0, False
        for name, rows in parts:
            own = current[first : first + rows]
            first += rows
            given = state.pop(prefix + name, None)
            if given is None:
                missing.append(prefix + name)
            elif given.shape != own.shape:
                errors.append(f"size mismatch for {prefix + name}: {list(given.shape)} in the checkpoint, "
                              f"{list(own.shape)} here")
            else:
                own, found = given.detach(), True
            pieces.append(own)
        like = next((p for p in pieces if not p.is_meta), current)
        if first < current.shape[0]:
            pieces.append(like.new_zeros(current.shape[0] - first, *current.shape[1:]))
        # parts from anywhere, or the current value, which loads as it is
        state[prefix + fused] = torch.cat([p.to(like) for p in pieces]) if found else current
