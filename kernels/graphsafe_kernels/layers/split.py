"""Columns of a projection as tensors of their own, and their gradients as one: a launch each way.

Requirements
------------
1. ``split`` gives each part as it is asked for: a view, where its reader takes strides, or a contiguous copy. All
   copies are one launch; in the backward all gradients become one tensor in one launch, zero where there is none.
   ``join_columns`` also fills the last columns of a tensor whose first ones somebody else writes.
2. The grid follows from shapes alone; nothing is read on the host. fp64, which not every device's kernels have, is
   served by the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphsafe_kernels.backend import resolve
from graphsafe_kernels.reference import rows as reference
from graphsafe_kernels.reference.once import first_order_only

__all__ = ["join_columns", "shipped", "split", "split_columns"]

_PARTS = 5
_ELEMENTS = 4096
_COLUMNS = (16, 512)
"""Of a tile, at least and at most: narrow tiles of many rows fill an NPU's buffer with padding."""


def _constants(widths: Sequence[int], strides: Sequence[int | None], whole: int, join: bool, elements: int,
               first: int = 0) -> dict[str, Any]:
    """``strides``: each part's rows apart, None where it is absent; ``first``: column of the first part."""
    firsts = [first + sum(widths[:i]) for i in range(len(widths))]
    pad = _PARTS - len(widths)
    columns = {
        "F": [*firsts, *[0] * pad],
        "W": [*widths, *[0] * pad],
        "R": [*(s or 0 for s in strides), *[0] * pad],
        "H": [*(s is not None for s in strides), *[False] * pad],
        "B": [*(min(_COLUMNS[1], max(_COLUMNS[0], 1 << (w - 1).bit_length())) for w in widths), *[1] * pad],
    }
    found = {f"{letter}{i}": values[i] for letter, values in columns.items() for i in range(_PARTS)}
    return {**found, "WHOLE": whole, "JOIN": join, "ELEMENTS": elements}


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, dtype: torch.dtype, rows: int, widths: tuple[int, ...],
          strides: tuple[int | None, ...], whole: int, join: bool, first: int) -> Callable[..., None]:
    # imported here: layers are used where there is no Triton
    from graphsafe_kernels.launch import PreparedLaunch
    from graphsafe_kernels.layers.split_kernels import columns_kernel
    from graphsafe_kernels.policy import policy_for

    # the dtype is not looked at, but each is a kernel of its own
    elements = 1 << 16 if policy_for(device).kind == "interpreter" else _ELEMENTS
    c = _constants(widths, strides, whole, join, elements, first)
    tiles = sum(-(-rows // (elements // c[f"B{i}"])) * -(-w // c[f"B{i}"])
                for i, w in enumerate(widths) if join or strides[i] is not None)
    return PreparedLaunch(columns_kernel, c, num_warps=4).bind(device, tiles, (rows,))


def _row_stride(t: torch.Tensor) -> int | None:
    """Elements from one of ``t``'s rows ``[B, T, W]`` to the next; None where they are not evenly spaced."""
    batch, tokens, width = t.shape
    if (width > 1 and t.stride(2) != 1) or (batch > 1 and t.stride(0) != tokens * t.stride(1)):
        return None
    return t.stride(1) if tokens > 1 else width


def split_columns(x: torch.Tensor, widths: tuple[int, ...], copied: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """Contiguous copies of the column ranges of ``x`` ``[B, T, W]`` that are ``copied``; None for the others."""
    if x.dtype == torch.float64:
        return reference.split_columns(x, widths, copied)
    pitch = _row_stride(x)
    if pitch is None:
        x = x.contiguous()
        pitch = x.shape[2]
    rows = x.shape[0] * x.shape[1]
    parts = [x.new_empty((*x.shape[:2], w)) if copy else None for w, copy in zip(widths, copied, strict=True)]
    strides = tuple(w if copy else None for w, copy in zip(widths, copied, strict=True))
    plan = _plan(x.device, x.dtype, rows, widths, strides, pitch, False, 0)
    plan(x, *parts, *[None] * (_PARTS - len(parts)))
    return parts


def join_columns(parts: Sequence[torch.Tensor | None], widths: tuple[int, ...],
                 into: torch.Tensor | None = None) -> torch.Tensor:
    """``[B, T, sum of widths]`` from its parts ``[B, T, w]``; zero where one is None.

    ``into``: a contiguous ``[B, T, at least so many]`` whose last columns they become; without it one part is there.
    """
    if any(p is not None and p.dtype == torch.float64 for p in parts):
        return reference.join_columns(parts, widths, into)
    given, strides = list(parts), list[int | None]()
    for i, part in enumerate(given):
        stride = None if part is None else _row_stride(part)
        if part is not None and stride is None:
            given[i] = part.contiguous()
            stride = part.shape[2]
        strides.append(stride)
    if into is None:
        like = next(p for p in given if p is not None)
        whole = like.new_empty((*like.shape[:2], sum(widths)))
    else:
        whole = into
    columns = whole.shape[2]
    plan = _plan(whole.device, whole.dtype, whole.shape[0] * whole.shape[1], widths, tuple(strides), columns, True,
                 columns - sum(widths))
    plan(whole, *given, *[None] * (_PARTS - len(given)))
    return whole


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, widths: tuple[int, ...], copied: tuple[bool, ...]) -> tuple[
            torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        fill = x.shape[2] - sum(widths)
        ctx.widths = (*widths, fill) if fill else widths
        return tuple(_parts(x, widths, copied))

    @staticmethod
    @first_order_only("a layer")
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        device = next((g.device for g in gradients if g is not None), None)
        if device is None:
            return None, None, None
        parts = (*gradients, *[None] * (len(ctx.widths) - len(gradients)))
        return resolve("join_columns", device)(parts, ctx.widths), None, None


def _parts(x: torch.Tensor, widths: tuple[int, ...], copied: tuple[bool, ...]) -> list[torch.Tensor]:
    copies = resolve("split_columns", x.device)(x, widths, copied)
    views = x.split([*widths, x.shape[2] - sum(widths)], -1)
    return [view if copy is None else copy for view, copy in zip(views, copies, strict=False)]


def split(x: torch.Tensor, widths: Sequence[int], copied: Sequence[bool] | None = None) -> list[torch.Tensor]:
    """Columns of ``x`` ``[B, T, W]`` from the first on, ``widths`` wide: copies where ``copied`` (all, when None).

    At most five parts, columns of no part counted as one.
    """
    sizes, flags = tuple(widths), (True,) * len(widths) if copied is None else tuple(copied)
    if torch.is_grad_enabled() and x.requires_grad:
        return list(_Split.apply(x, sizes, flags))
    return _parts(x, sizes, flags)


def shipped(policy: Any) -> Iterator[Any]:
    """The shipped configurations: q, k and v of a convolution's output; a projection's gradient; odd widths."""
    from graphsafe_kernels.layers.split_kernels import columns_kernel
    from graphsafe_kernels.shipped import Shipped

    cases = (("bf16", (2048, 2048, 4096), True, False), ("bf16", (8192, 4096, 32, 32), True, True),
             ("fp32", (96, 96, 100, 6, 6), False, True))
    for dtype, widths, even, join in cases:
        c = _constants(widths, widths, sum(widths) + (0 if even else 2), join, _ELEMENTS)
        types = {"whole": f"*{dtype}", **{f"p{i}": f"*{dtype}" if i < len(widths) else None for i in range(_PARTS)},
                 "rows": "i32"}
        yield Shipped(columns_kernel, f"{dtype} {'x'.join(map(str, widths))}{' joined' if join else ''}", types, c, 4)
