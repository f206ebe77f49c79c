"""Clearing the padding rows of a packed batch, in one launch.

Requirements
------------
1. One launch on a device; the grid follows from the shape alone, and nothing is read on the host.
2. The input is not written to: it is the caller's.
3. fp64, which not every device's kernels have, is served by the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.layers.clear_kernels import clear_padding_kernel
from graphsafe_kernels.policy import Policy, policy_for
from graphsafe_kernels.reference import rows as reference
from graphsafe_kernels.shipped import Shipped

__all__ = ["clear_padding", "shipped"]

_BLOCK = 4096


def _constants(policy: Policy, width: int) -> dict[str, Any]:
    return {"D": width, "BLOCK": 1 << 16 if policy.kind == "interpreter" else _BLOCK, "LOOP": policy.cores > 0}


@functools.lru_cache(maxsize=1024)
def _launch(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], width: int) -> PreparedLaunch:
    # the dtypes are not looked at, but each pair of them is a kernel of its own
    return PreparedLaunch(clear_padding_kernel, _constants(policy_for(device), width), num_warps=4)


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, shape: tuple[int, ...], sequences: int, *dtypes: torch.dtype) -> Callable[..., None]:
    elements = shape[1] * shape[2]
    launch = _launch(device, dtypes, shape[2])  # type: ignore[arg-type]
    tasks = -(-elements // launch.constants["BLOCK"])
    cores = policy_for(device).cores
    return launch.bind(device, min(tasks, cores) if cores else tasks, (elements, sequences, tasks))


def clear_padding(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``x`` ``[1, T, D]`` of any floating dtype with zeros in the rows beyond ``cu_seqlens[-1]``: a contiguous copy."""
    if x.dtype == torch.float64:
        return reference.clear_padding(x, cu_seqlens)
    x = x.contiguous()
    y = torch.empty_like(x)
    _plan(x.device, x.shape, cu_seqlens.shape[0] - 1, x.dtype, cu_seqlens.dtype)(x, y, cu_seqlens)
    return y


def shipped(policy: Policy) -> Iterator[Shipped]:
    """The shipped configurations: the usual dtypes; a width with whole blocks and one without."""
    for name, width in (("bf16", 2048), ("fp32", 1000)):
        types = {"x": f"*{name}", "y": f"*{name}", "cu_seqlens": "*i32", "elements": "i32", "sequences": "i32",
                 "tasks": "i32"}
        yield Shipped(clear_padding_kernel, f"{name} {width}", types, _constants(policy, width), 4)
