"""Launching the norm's kernels: rows, strides and compile-time constants; no autograd, no argument checks.

Requirements
------------
1. Forward is one launch; backward is one, and one more where the weight's gradient is wanted.
2. An operand is read where it lies if its channels are adjacent and its tokens evenly spaced: a slice of a fused
   projection is. Any other is copied first.
3. Plans are worked out once for each set of shapes, strides and dtypes. What is allocated here comes from the caller's
   allocator at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.norm.configurations import backward_options, forward_options, reduce_options
from graphsafe_kernels.norm.kernels import norm_backward_kernel, norm_forward_kernel, norm_reduce_kernel
from graphsafe_kernels.policy import device_kind, policy_for

__all__ = ["Rows", "backward", "forward", "rows"]

Strides = tuple[int, int]
"""Elements from one token to the next, and from one head to the next."""


class Rows(NamedTuple):
    """An operand as ``[tokens, H, D]`` rows, and where they lie."""

    tensor: torch.Tensor
    strides: Strides


def rows(t: torch.Tensor) -> Rows:
    """``t`` ``[B, T, ..., D]`` as evenly spaced rows: a view of it where there is one, else of a copy."""
    wide = t.unsqueeze(2) if t.dim() == 3 else t if t.dim() == 4 else t.flatten(2, -2)
    batch, tokens, _, width = wide.shape
    step, token, head, channel = wide.stride()
    if (channel != 1 and width > 1) or (batch > 1 and step != tokens * token):
        wide = wide.contiguous()
        _, token, head, _ = wide.stride()
    return Rows(wide, (token, head))


def _programs(device: torch.device, tasks: int) -> int:
    cores = policy_for(device).cores
    return min(tasks, cores) if cores else tasks


@functools.lru_cache(maxsize=1024)
def _forward_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], heads: int, width: int, x: Strides,
                    g: Strides | None, swish: bool) -> PreparedLaunch:
    # the dtypes are not looked at, but each set of them is a kernel of its own
    sizes, warps = forward_options(device_kind(device), width)
    flags = {"X_TOKEN": x[0], "X_HEAD": x[1], "G_TOKEN": g[0] if g else 0, "G_HEAD": g[1] if g else 0,
             "GATED": g is not None, "SWISH": swish, "WEIGHTED": dtypes[2] is not None,
             "PACKED": dtypes[3] is not None, "LOOP": policy_for(device).cores > 0}
    order = ("D", "H", "BD", "BR", *flags)
    constants = {"H": heads, **sizes, **flags}
    return PreparedLaunch(norm_forward_kernel, {k: constants[k] for k in order}, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _forward_plan(device: torch.device, shape: tuple[int, ...], x: Strides, g: Strides | None, swish: bool, eps: float,
                  sequences: int, *dtypes: torch.dtype | None) -> Callable[..., None]:
    batch, tokens, heads, width = shape
    launch = _forward_launch(device, dtypes, heads, width, x, g, swish)
    tasks = -(-batch * tokens * heads // launch.constants["BR"])
    # a float among the integers: nothing is specialised on either
    return launch.bind(device, _programs(device, tasks), (eps, batch * tokens, sequences, tasks))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _backward_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], heads: int, width: int, dy: Strides,
                     x: Strides, g: Strides | None, swish: bool, wanted: tuple[bool, bool, bool]) -> PreparedLaunch:
    sizes, warps = backward_options(device_kind(device), width)
    flags = {"X_TOKEN": x[0], "X_HEAD": x[1], "G_TOKEN": g[0] if g else 0, "G_HEAD": g[1] if g else 0,
             "DY_TOKEN": dy[0], "DY_HEAD": dy[1], "GATED": g is not None, "SWISH": swish,
             "WEIGHTED": dtypes[3] is not None, "DX": wanted[0], "DG": wanted[1], "DW": wanted[2],
             "PACKED": dtypes[4] is not None, "LOOP": policy_for(device).cores > 0}
    order = ("D", "H", "BD", "BR", "ROWS", *flags)
    constants = {"H": heads, **sizes, **flags}
    return PreparedLaunch(norm_backward_kernel, {k: constants[k] for k in order}, num_warps=warps)


@functools.lru_cache(maxsize=1024)
def _reduce_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], heads: int,
                   width: int) -> PreparedLaunch:
    sizes, warps = reduce_options(device_kind(device), width)
    constants = {"H": heads, **sizes, "PACKED": dtypes[1] is not None, "LOOP": policy_for(device).cores > 0}
    order = ("D", "H", "BD", "SUMS", "ROWS", "PACKED", "LOOP")
    return PreparedLaunch(norm_reduce_kernel, {k: constants[k] for k in order}, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _backward_plan(device: torch.device, shape: tuple[int, ...], dy: Strides, x: Strides, g: Strides | None,
                   swish: bool, eps: float, sequences: int, wanted: tuple[bool, bool, bool],
                   *dtypes: torch.dtype | None) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Both launches, functions of their kernel's pointers, and the partial sums."""
    batch, tokens, heads, width = shape
    launch = _backward_launch(device, dtypes, heads, width, dy, x, g, swish, wanted)
    tasks = -(-batch * tokens * heads // launch.constants["ROWS"])
    first = launch.bind(device, _programs(device, tasks), (eps, batch * tokens, sequences, tasks))  # type: ignore[arg-type]
    reduce = _reduce_launch(device, (dtypes[3], dtypes[4]), heads, width)
    blocks = -(-width // reduce.constants["BD"])
    return first, reduce.bind(device, _programs(device, blocks), (batch * tokens, sequences, blocks)), tasks


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def forward(x: Rows, g: Rows | None, weight: torch.Tensor | None, swish: bool, eps: float,
            cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """y ``[B, T, H, D]`` in x's dtype, contiguous; ``weight`` contiguous."""
    t = x.tensor
    plan = _forward_plan(
        t.device, t.shape, x.strides, g.strides if g else None, swish, eps,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, t.dtype, g.tensor.dtype if g else None, _dtype(weight),
        _dtype(cu_seqlens),
    )
    y = torch.empty_like(t, memory_format=torch.contiguous_format)
    plan(t, g.tensor if g else None, weight, y, cu_seqlens)
    return y


def backward(dy: Rows, x: Rows, g: Rows | None, weight: torch.Tensor | None, swish: bool, eps: float,
             cu_seqlens: torch.Tensor | None,
             wanted: tuple[bool, bool, bool]) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx, dg ``[B, T, H, D]`` and dweight ``[D]``, each contiguous, in its operand's dtype, and None unless wanted."""
    t = x.tensor
    first, reduce, tasks = _backward_plan(
        t.device, t.shape, dy.strides, x.strides, g.strides if g else None, swish, eps,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, wanted, dy.tensor.dtype, t.dtype,
        g.tensor.dtype if g else None, _dtype(weight), _dtype(cu_seqlens),
    )
    dx = torch.empty_like(t, memory_format=torch.contiguous_format) if wanted[0] else None
    dg = torch.empty_like(g.tensor, memory_format=torch.contiguous_format) if g and wanted[1] else None
    dweight = partials = None
    if weight is not None and wanted[2]:
        dweight = torch.empty_like(weight)
        partials = torch.empty((tasks, t.shape[-1]), dtype=torch.float32, device=t.device)
    first(dy.tensor, t, g.tensor if g else None, weight, dx, dg, partials, cu_seqlens)
    if dweight is not None:
        reduce(partials, dweight, cu_seqlens)
    return dx, dg, dweight
