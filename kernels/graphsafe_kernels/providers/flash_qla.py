"""FlashQLA's fused kernels of the gated delta rule as a provider."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from graphsafe_kernels.providers.service import Provider, Request, Service

__all__ = ["FlashQlaProvider"]

_WIDTH = 128
_CAPABILITIES = {(9, 0), (10, 0), (10, 3), (12, 0)}


class FlashQlaProvider(Provider):
    """GDN of ``flash_qla``: NVIDIA from Hopper on, K = V = 128, gate and beta given."""

    name = "flash_qla"
    install = "pip install flash-qla with tilelang and a CUDA toolkit (nvcc on PATH, CUDA_HOME set)"
    notes = ("automatic splitting of long sequences on one card is on, as is its default",)

    def __init__(self) -> None:
        self.services = {
            "chunk_gated_delta_rule": Service(
                ("cuda",),
                (torch.float16, torch.bfloat16),
                frozenset(
                    {
                        "scale",
                        "initial_state",
                        "output_final_state",
                        "use_qk_l2norm_in_kernel",
                        "state_v_first",
                        "cu_seqlens",
                    }
                ),
                unsafe="its grids and its splitting of sequences follow the batch's own lengths",
                limit=_limit,
            )
        }

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("flash-qla", "tilelang", "apache-tvm-ffi")

    def missing(self) -> str | None:
        absent = [name for name in ("flash_qla", "tilelang") if importlib.util.find_spec(name) is None]
        return f"no module {' and no module '.join(absent)}" if absent else None

    def function(self, operator: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module("flash_qla"), operator)
        return function


def _limit(request: Request) -> str | None:
    q, v = request.arguments["q"], request.arguments["v"]
    if q.shape[-1] != _WIDTH or v.shape[-1] != _WIDTH:
        return f"it needs K = V = {_WIDTH}, and the operands have K = {q.shape[-1]}, V = {v.shape[-1]}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability not in _CAPABILITIES:
        return f"it has kernels for compute capability 9.0, 10.0, 10.3 and 12.0, and this is {capability}"
    if capability == (12, 0) and request.wants_gradients:
        return "it has no backward on compute capability 12.0"
    return None
