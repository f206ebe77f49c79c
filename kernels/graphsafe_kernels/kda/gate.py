"""The KDA gate as a differentiable function of its own, on kernels: what ``fused_kda_gate`` calls there.

Requirements
------------
1. Same arguments and results as the reference: one launch forward; backward one, and one more where a parameter's
   gradient is summed over rows, in an order that the number of rows does not change.
2. fp64 operands and results are served by the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphsafe_kernels.kda.finish_kernels import finish_kernel
from graphsafe_kernels.kda.gate_kernels import gate_backward_kernel, gate_kernel
from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.policy import KINDS, device_kind, policy_for
from graphsafe_kernels.reference import gate as reference
from graphsafe_kernels.reference.once import first_order_only

__all__ = ["WARPS", "constants", "fused_kda_gate"]

WARPS = 4
_ROWS = 32


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def constants(kind: str, scaled: bool, biased: bool, heads: int, width: int,
              lower_bound: float | None) -> dict[str, Any]:  # fmt: skip
    """Compile-time constants of both gate kernels on a device of ``kind``."""
    return {"HV": heads, "K": width, "BK": _power(width), "ROWS": _ROWS, "GATE": 1 if lower_bound is None else 2,
            "SCALED": scaled, "BIAS": biased, "LOOP": KINDS[kind].cores > 0}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _launches(device: torch.device, dtypes: tuple[torch.dtype | None, ...], heads: int, width: int,
              lower_bound: float | None) -> tuple[PreparedLaunch, PreparedLaunch, PreparedLaunch]:  # fmt: skip
    # the dtypes are looked at for absence alone, but each set of them is a kernel of its own
    _, A_log, dt_bias, _ = dtypes
    sizes = constants(device_kind(device), A_log is not None, dt_bias is not None, heads, width, lower_bound)
    flags = {name: sizes[name] for name in ("SCALED", "BIAS", "LOOP")}
    sums = {"H": heads, "HV": heads, "K": width, "BT": _ROWS, "BK": _power(width), "ROWS": 16, "PACKED": False,
            **flags, "PARTS": False, "SUMS": 32}  # fmt: skip
    kernels = ((gate_kernel, sizes), (gate_backward_kernel, sizes), (finish_kernel, sums))
    first, second, third = (PreparedLaunch(kernel, of, num_warps=WARPS) for kernel, of in kernels)
    return first, second, third


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, dtypes: tuple[torch.dtype | None, ...], rows: int, heads: int, width: int,
          lower_bound: float | None) -> tuple[tuple[Callable[..., None], ...], int]:  # fmt: skip
    """The three launches, functions of their kernels' pointers, and the blocks of rows."""
    forward, backward, finish = _launches(device, dtypes, heads, width, lower_bound)
    blocks = -(-rows // _ROWS)
    programs = policy_for(device).programs
    numbers: tuple[Any, ...] = (lower_bound or 0.0, rows)
    bind = [launch.bind(device, programs(blocks * heads), numbers) for launch in (forward, backward)]
    return (*bind, finish.bind(device, programs(heads), (rows, 1, blocks, 0))), blocks


def _key(g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, other: torch.dtype,
         lower_bound: float | None) -> tuple[Any, ...]:  # fmt: skip
    heads, width = g.shape[-2:]
    dtypes = (g.dtype, None if A_log is None else A_log.dtype, None if dt_bias is None else dt_bias.dtype, other)
    return g.device, dtypes, g.numel() // (heads * width), heads, width, lower_bound


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                lower_bound: float | None, output_dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        y = torch.empty(g.shape, dtype=output_dtype, device=g.device)
        (launch, *_), _ = _plan(*_key(g, A_log, dt_bias, output_dtype, lower_bound))
        launch(g, A_log, dt_bias, y)
        return y

    @staticmethod
    @first_order_only("fused_kda_gate")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, A_log, dt_bias = ctx.saved_tensors
        heads, width = g.shape[-2:]
        (_, backward, finish), blocks = _plan(*_key(g, A_log, dt_bias, dy.dtype, ctx.lower_bound))
        dg = torch.empty_like(g)
        sums = lambda *shape: torch.empty(shape, dtype=torch.float32, device=g.device)  # noqa: E731
        scale_sums = None if A_log is None else sums(blocks, heads)
        bias_sums = None if dt_bias is None else sums(blocks, heads, width)
        backward(g, A_log, dt_bias, dy.contiguous(), dg, scale_sums, bias_sums)
        dA_log, ddt_bias = (None if t is None else torch.empty_like(t) for t in (A_log, dt_bias))
        if A_log is not None or dt_bias is not None:
            finish(None, None, None, None, scale_sums, bias_sums, dA_log, ddt_bias, None, None)
        return dg, dA_log, ddt_bias, None, None


def fused_kda_gate(g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                   lower_bound: float | None, output_dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """The gate on checked operands: ``g`` ``[..., HV, K]``, ``A_log`` ``[HV]``, ``dt_bias`` ``[HV * K]``."""
    if torch.float64 in (g.dtype, output_dtype):
        return reference.fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)
    A_log, dt_bias = (None if t is None else t.contiguous() for t in (A_log, dt_bias))
    result: torch.Tensor = _Gate.apply(g.contiguous(), A_log, dt_bias, lower_bound, output_dtype)
    return result
