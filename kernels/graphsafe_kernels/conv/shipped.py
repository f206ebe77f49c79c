"""The convolution's shipped configurations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphsafe_kernels.conv.backward_kernels import conv_backward_kernel
from graphsafe_kernels.conv.forward_kernels import conv_forward_kernel
from graphsafe_kernels.conv.launch import MAX_PARTS, MAX_TAPS, backward_options, forward_options, reduce_options
from graphsafe_kernels.conv.reduce_kernels import conv_reduce_kernel
from graphsafe_kernels.policy import Policy
from graphsafe_kernels.shipped import Shipped, pointer

__all__ = ["shipped"]

_WIDTH = 8192
_UNEVEN_WIDTH = 1000
_INTEGERS = ("tokens", "sequences", "chunks", "slot_tasks", "tasks")


def shipped(policy: Policy) -> Iterator[Shipped]:
    """Every number of taps in bf16 and the usual one in every dtype, with every option and with none; other layouts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for taps in range(2, MAX_TAPS + 1) if dtype == torch.bfloat16 else (4, MAX_TAPS):
            for full in (False, True):
                yield from _both(policy, dtype, taps, full)
    yield from _both(policy, torch.bfloat16, 4, True, packed=False)
    yield from _both(policy, torch.bfloat16, 4, True, widths=(_UNEVEN_WIDTH,))
    if policy.cores == 0:  # q, k and v apart; not on an NPU: see launch
        for widths in ((2048, 2048, 4096), (2048, 2048, 2048), (96, 96, 100)):
            for full in (False, True):
                yield from _both(policy, torch.bfloat16, 4, full, widths=widths)
    for taps in (4, MAX_TAPS):
        yield _reduce(policy, taps)


def _both(policy: Policy, dtype: torch.dtype, taps: int, full: bool, *, packed: bool = True,
          widths: tuple[int, ...] = (_WIDTH,)) -> Iterator[Shipped]:
    t, option = pointer(dtype), pointer(dtype) if full else None
    index = "*i32" if packed else None
    tables = {"cu_seqlens": index, "chunk_indices": index, "chunk_offsets": index}
    integers = dict.fromkeys(_INTEGERS, "i32")
    device = {"SILU": True, "PACKED": packed, "PTX": policy.ptx, "FAST": policy.conv.fast, "LOOP": policy.cores > 0}
    name = f"{str(dtype).removeprefix('torch.')} W{taps}{' all options' if full else ''}"
    name += f"{'' if packed else ' dense'}{'' if widths == (_WIDTH,) else ' D' + '+'.join(map(str, widths))}"
    count, row = len(widths), sum(widths) + (1024 if len(widths) > 1 else 0)

    sizes, warps = forward_options(policy.conv, widths, taps, 64)
    types = {"x": t, "weight": t, "bias": option, "residual": option, "initial_state": option,
             **{f"y{i}": t if i < count else None for i in range(MAX_PARTS)}, "final_state": option, **tables,
             **integers, "x_batch": "i64", "residual_batch": "i64"}
    flags = {"X_ROW": row, "RESIDUAL_ROW": row, "HAS_BIAS": full, "HAS_RESIDUAL": full, "HAS_INITIAL": full,
             "HAS_FINAL": full}
    yield Shipped(conv_forward_kernel, name, types, sizes | flags | device, warps)

    sizes, warps = backward_options(policy.conv, widths, taps, 64)
    residual = option if packed else None
    types = {"x": t, "weight": t, "bias": option, **{f"dy{i}": t if i < count else None for i in range(MAX_PARTS)},
             "dfinal": option, "initial_state": option, "dx": t, "dresidual": residual, "dinitial": option,
             "partials": "*fp32", **tables, **integers, "x_batch": "i64", "dy_batch": "i64"}
    flags = {"X_ROW": row, "DY_ROW": widths[0], "DX_ROW": row, "HAS_BIAS": full, "HAS_RESIDUAL": full and packed,
             "HAS_INITIAL": full, "HAS_DFINAL": full}
    yield Shipped(conv_backward_kernel, name, types, sizes | flags | device, warps)


def _reduce(policy: Policy, taps: int) -> Shipped:
    sizes, warps = reduce_options(policy.conv, _WIDTH, taps)
    types = {"partials": "*fp32", "dweight": "*bf16", "dbias": "*bf16", "chunk_offsets": "*i32", "sequences": "i32",
             "slots": "i32", "tasks": "i32"}
    flags = {"HAS_BIAS": True, "PACKED": True, "LOOP": policy.cores > 0}
    return Shipped(conv_reduce_kernel, f"bfloat16 W{taps}", types, sizes | flags, warps)
