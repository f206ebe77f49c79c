"""flash-linear-attention's Triton kernels as a provider.

Requirements
------------
1. Its own dispatch to other libraries is off (``FLA_DISABLE_BACKEND_DISPATCH=1``, read when it is imported): otherwise
   a figure could be FlashQLA's or TileLang's. Imported already without it, the provider is refused.
2. Its guards stay. ``fla-unguarded`` is the same library with the guard of GDN's backward on Hopper lifted, in this
   process: for comparisons whose results are checked, never by default.
3. Where it is told the choices of its autotuners by files (its ``FLA_CACHE_MODE``), a record of its figures says so,
   and quotes the line ``about.txt`` beside them, if there is one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphsafe_kernels.providers.service import GRAPH_ARGUMENTS, Provider, Request, Service

__all__ = ["FlaProvider", "UnguardedFlaProvider"]

_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"
_HALVES = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cuda", "npu")
_DELTA = frozenset(
    {
        "scale",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
        "cu_seqlens",
        "use_gate_in_kernel",
        "A_log",
        "dt_bias",
        "chunk_size",
    }
)
_TABLES_BY_THE_HOST = "it builds chunk tables of the batch's own length with host reads and caches them by identity"
_MODULES = {
    "causal_conv1d": "fla.modules.causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
}


def _stored_choices() -> list[str]:
    mode = os.environ.get("FLA_CACHE_MODE", "disabled")
    if mode == "disabled":
        return []
    about = Path(os.environ.get("FLA_CONFIG_DIR", ""), "about.txt")
    said = about.read_text(encoding="utf-8").strip() if about.is_file() else "its own"
    return [f"its autotuners' choices are read from files (FLA_CACHE_MODE={mode}): {said}"]


class FlaProvider(Provider):
    """GDN, KDA and convolution of flash-linear-attention, as installed, by its Triton kernels alone."""

    name = "fla"
    install = "pip install flash-linear-attention, on a machine with an NVIDIA GPU or an Ascend NPU"
    notes: tuple[str, ...] = ("its dispatch to other back ends is off",)

    def __init__(self) -> None:
        self.notes = (*type(self).notes, *_stored_choices())
        self.services = {
            "chunk_gated_delta_rule": Service(
                _DEVICES, _HALVES, _DELTA, unsafe=_TABLES_BY_THE_HOST, limit=self._guarded
            ),
            "chunk_kda": Service(
                _DEVICES,
                _HALVES,
                _DELTA | {"safe_gate", "lower_bound", "disable_recompute", "return_intermediate_states"},
                unsafe="its use_graph leaves padding rows undefined and shares buffers between graphs of one shape",
            ),
            "causal_conv1d": Service(
                _DEVICES,
                _HALVES,
                frozenset(
                    {"weight", "bias", "residual", "initial_state", "output_final_state", "activation", "cu_seqlens"}
                ),
                unsafe=_TABLES_BY_THE_HOST,
            ),
        }

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("flash-linear-attention", "fla-core", "triton")

    def missing(self) -> str | None:
        absent = [name for name in ("fla", "triton", "einops") if importlib.util.find_spec(name) is None]
        if absent:
            return f"no module {' and no module '.join(absent)}"
        if "fla" in sys.modules and os.environ.get(_DISPATCH) != "1":
            return f"fla was imported without {_DISPATCH}=1, so its kernels may be another library's"
        return None

    def function(self, operator: str) -> Callable[..., Any]:
        os.environ.setdefault(_DISPATCH, "1")
        function: Callable[..., Any] = getattr(importlib.import_module(_MODULES[operator]), operator)

        def call(**arguments: Any) -> Any:
            return function(**{k: v for k, v in arguments.items() if k not in GRAPH_ARGUMENTS})

        return call

    def _guarded(self, request: Request) -> str | None:
        if not request.wants_gradients or request.first.device.type != "cuda":
            return None
        if torch.cuda.get_device_capability(request.first.device)[0] != 9 or not self._guard_is_up():
            return None
        return "it refuses the backward of GDN on Hopper with triton from 3.4.0 to 3.7.0"

    def _guard_is_up(self) -> bool:
        self.function("chunk_gated_delta_rule")
        module = importlib.import_module("fla.ops.common.chunk_o")
        return bool(getattr(module, "TRITON_ABOVE_3_4_0", False)) and not getattr(module, "TRITON_ABOVE_3_7_1", True)


class UnguardedFlaProvider(FlaProvider):
    """:class:`FlaProvider` with its guard lifted; see requirement 2."""

    name = "fla-unguarded"
    notes = (*FlaProvider.notes, "the guard of GDN's backward on Hopper is lifted")

    def function(self, operator: str) -> Callable[..., Any]:
        call = super().function(operator)
        if operator == "chunk_gated_delta_rule":
            vars(importlib.import_module("fla.ops.common.chunk_o"))["TRITON_ABOVE_3_7_1"] = True
        return call
