"""The norm's shipped configurations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphsafe_kernels.norm.configurations import (
    backward_options,
    forward_options,
    max_width,
    reduce_options,
)
from graphsafe_kernels.norm.kernels import norm_backward_kernel, norm_forward_kernel, norm_reduce_kernel
from graphsafe_kernels.policy import Policy
from graphsafe_kernels.shipped import Shipped, pointer

__all__ = ["shipped"]

_HEADS = 16
_INTEGERS = {"tokens": "i32", "sequences": "i32", "tasks": "i32"}
_PITCH = 9232
"""Row of a fused projection, of which the gate is a slice."""


def shipped(policy: Policy) -> Iterator[Shipped]:
    """The layers' head widths in bf16, both gates; the other dtypes; odd widths, a hidden size, the most."""
    for width in (128, 256, 512):
        yield from _all(policy, torch.bfloat16, width, swish=width != 128)
    for dtype in (torch.float16, torch.float32):
        yield from _all(policy, dtype, 128, swish=True)
    yield from _all(policy, torch.bfloat16, 80, swish=True, packed=False)
    for width, heads in ((1000, _HEADS), (2048, 1), (max_width(policy.kind), 1)):
        yield from _all(policy, torch.bfloat16, width, swish=True, heads=heads)
        yield from _all(policy, torch.float32, width, swish=True, heads=heads, gated=False)
    sizes, warps = reduce_options(policy.kind, 128)
    types = {"partials": "*fp32", "dweight": "*bf16", "cu_seqlens": "*i32", **_INTEGERS}
    flags = {"H": _HEADS, "PACKED": True, "LOOP": policy.cores > 0}
    yield Shipped(norm_reduce_kernel, "bfloat16 16x128", types, sizes | flags, warps)


def _all(policy: Policy, dtype: torch.dtype, width: int, *, swish: bool, heads: int = _HEADS, packed: bool = True,
         gated: bool = True) -> Iterator[Shipped]:
    t, gate, index = pointer(dtype), pointer(dtype) if gated else None, "*i32" if packed else None
    name = f"{str(dtype).removeprefix('torch.')} {heads}x{width}"
    name += f"{'' if not gated else ' swish' if swish else ' sigmoid'}{'' if packed else ' dense'}"
    own, loop = (heads * width, width), policy.cores > 0
    pitch = own if not gated else (max(_PITCH, heads * width), width)
    flags = {"H": heads, "X_TOKEN": own[0], "X_HEAD": own[1], "G_TOKEN": pitch[0], "G_HEAD": pitch[1], "GATED": gated,
             "SWISH": swish, "WEIGHTED": True, "PACKED": packed, "LOOP": loop}

    sizes, warps = forward_options(policy.kind, width)
    types = {"x": t, "g": gate, "weight": t, "y": t, "cu_seqlens": index, "eps": "fp32", **_INTEGERS}
    yield Shipped(norm_forward_kernel, name, types, sizes | flags, warps)

    sizes, warps = backward_options(policy.kind, width)
    types = {"dy": t, "x": t, "g": gate, "weight": t, "dx": t, "dg": gate, "partials": "*fp32", "cu_seqlens": index,
             "eps": "fp32", **_INTEGERS}
    flags |= {"DY_TOKEN": own[0], "DY_HEAD": own[1], "DX": True, "DG": gated, "DW": True}
    yield Shipped(norm_backward_kernel, name, types, sizes | flags, warps)
