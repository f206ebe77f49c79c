"""First order only: gradients that cannot be differentiated again say so, by name.

Requirements
------------
1. First-order gradients are unaffected, with ``create_graph=True`` as well.
2. Differentiating such a gradient raises a typed error (rule ``unsupported``) that names the operator. Without this,
   autograd would treat the gradient as a constant and go on with wrong numbers, or fail without a name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphsafe.errors import error

__all__ = ["first_order_only"]


class _Barrier(torch.autograd.Function):
    """Hands gradients on unchanged, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.operator = operator
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise error("unsupported", f"second-order gradients of {ctx.operator} were asked for",
                    why="Its backward is written out for first order.",
                    remedy="Differentiate once, or use the token-by-token operator.")


Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def first_order_only(operator: str) -> Callable[[Backward], Backward]:
    """Decorate the ``backward`` of an autograd function whose arithmetic autograd must not record."""

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            present = [r for r in results if r is not None]
            # the inputs make the results depend on everything a second derivative could be taken by
            inputs = (*gradients, *(t for t in ctx.saved_tensors if t is not None))
            guarded = iter(_Barrier.apply(operator, len(present), *present, *inputs))
            return tuple(None if r is None else next(guarded) for r in results)

        return once

    return decorate
