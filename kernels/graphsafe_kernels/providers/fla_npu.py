"""The AscendC kernels of the ``fla_npu`` wheel as a provider.

Requirements
------------
1. The adapter calls ``fla_npu.ops.ascendc``: ``chunk_kda_fwd`` in layout BSND, or TND for a packed batch, which are
   views of what the public operator takes; and ``chunk_gated_delta_rule_fwd`` in BNSD, the layout that it has on every
   device, for which q, k and v are transposed. Every conversion is declared.
2. What these functions do not do on every device and in every release (l2 norm of q and k, the sigmoid of beta) is
   done before the call in torch.
3. ``chunk_kda_fwd`` writes the states into ``initial_state``; the caller's tensor is not touched.
4. Where they would compute something else than the public operator, the call is refused.
5. On a machine without it, everything that is missing is named, not the first thing only.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphsafe_kernels.providers.service import Provider, Request, Service

__all__ = ["FlaNpuProvider"]

_EPSILON = 1e-6
_CHUNK = 64
_MAX_HEADS = 128
_WIDTHS = (64, 128)
_SEQUENCES = 1024


_HALVES = (torch.float16, torch.bfloat16)
_DELTA = frozenset(
    {
        "scale",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "cu_seqlens",
    }
)
_HOST_BOUNDARIES = "it takes the boundaries as host integers, so a graph would freeze one batch's layout"
_BEFORE_THE_CALL = (
    "cu_seqlens is read on the host",
    "the l2 norm of q and k is applied before the call",
    "the sigmoid of beta is applied before the call",
)


class FlaNpuProvider(Provider):
    """The fused forwards of KDA and GDN on Ascend."""

    name = "fla_npu"
    install = (
        "Install the fla_npu wheel of flash-linear-attention-npu built for this CANN and torch_npu, and source CANN's "
        "set_env.sh, on a machine with an Ascend NPU"
    )

    def __init__(self) -> None:
        gate = {"use_gate_in_kernel", "safe_gate", "lower_bound", "A_log", "dt_bias"}
        self.services = {
            "chunk_kda": Service(
                ("npu",),
                _HALVES,
                _DELTA | gate | {"disable_recompute", "state_v_first"},
                unsafe=_HOST_BOUNDARIES,
                backward=False,
                conversions=(
                    *_BEFORE_THE_CALL,
                    "a packed batch is handed on without its batch axis, as a view",
                    "initial_state is copied, as it would be overwritten",
                    "g and beta in fp16, A_log and dt_bias are converted to fp32; an omitted A_log becomes zeros",
                ),
                limit=_kda_limit,
            ),
            "chunk_gated_delta_rule": Service(
                ("npu",),
                _HALVES,
                _DELTA,
                unsafe=_HOST_BOUNDARIES,
                backward=False,
                conversions=(*_BEFORE_THE_CALL, "q, k and v are copied from [B, T, H, D] to [B, H, T, D]"),
                limit=_gdn_limit,
            ),
        }

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("fla-npu", "torch_npu")

    def missing(self) -> str | None:
        lacks = [f"no module {name}" for name in ("fla_npu", "torch_npu") if importlib.util.find_spec(name) is None]
        if not os.environ.get("ASCEND_HOME_PATH"):
            lacks.append("no CANN environment (ASCEND_HOME_PATH is not set)")
        if not lacks:
            importlib.import_module("torch_npu")
            if not torch.get_device_module("npu").is_available():
                lacks.append("no Ascend NPU")
        return "; ".join(lacks) or None

    def function(self, operator: str) -> Callable[..., Any]:
        library = importlib.import_module("fla_npu.ops.ascendc")
        return {"chunk_kda": _kda, "chunk_gated_delta_rule": _gdn}[operator](library)


def _kda(library: Any) -> Callable[..., Any]:
    def chunk_kda(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = options.pop("scale", q.shape[-1] ** -0.5)
        q, k, beta = _prepared(q, k, beta, options)
        if options.get("use_gate_in_kernel"):
            a_log, bias = options.get("A_log"), options.get("dt_bias")
            options["A_log"] = q.new_zeros(v.shape[2], dtype=torch.float32) if a_log is None else a_log.float()
            options["dt_bias"] = None if bias is None else bias.float()
        if options.get("initial_state") is not None:
            options["initial_state"] = options["initial_state"].clone()
        g, beta = (t.float() if t.dtype == torch.float16 else t for t in (g, beta))
        packed = options.get("cu_seqlens") is not None
        if packed:
            q, k, v, g, beta = (t.squeeze(0) for t in (q, k, v, g, beta))
        layout = "TND" if packed else "BSND"
        o, state, *_ = library.chunk_kda_fwd(q, k, v, g, beta, scale, _CHUNK, layout=layout, **options)
        return o.unsqueeze(0) if packed else o, state if options.get("output_final_state") else None

    return chunk_kda


def _gdn(library: Any) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = options.pop("scale", q.shape[-1] ** -0.5)
        q, k, beta = _prepared(q, k, beta, options)
        boundaries = options.get("cu_seqlens")
        if boundaries is not None:
            options["chunk_indices"] = _chunks_in_order(boundaries)
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        o, state, *_ = library.chunk_gated_delta_rule_fwd(
            q, k, v, g, beta, scale=scale, chunk_size=_CHUNK, layout="BNSD", disable_recompute=False, **options
        )
        return o, state if options.get("output_final_state") else None

    return chunk_gated_delta_rule


def _prepared(
    q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and beta after the options that are done here, which are taken out of ``options``."""
    if options.pop("use_qk_l2norm_in_kernel", False):
        q, k = _normalised(q), _normalised(k)
    doubled = options.pop("allow_neg_eigval", False)
    if options.pop("use_beta_sigmoid_in_kernel", False):
        beta = beta.float().sigmoid() * (2.0 if doubled else 1.0)
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = tuple(options["cu_seqlens"].tolist())
    return q, k, beta


def _chunks_in_order(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Sequence and chunk of each chunk, one after the other, as the library's host integers."""
    return tuple(
        number
        for sequence, (begin, end) in enumerate(itertools.pairwise(boundaries))
        for chunk in range(-(-(end - begin) // _CHUNK))
        for number in (sequence, chunk)
    )


def _normalised(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)).to(x.dtype)


def _kda_limit(request: Request) -> str | None:
    q, v = request.arguments["q"], request.arguments["v"]
    if q.shape[-1] != v.shape[-1] or v.shape[-1] not in _WIDTHS:
        return f"it takes K = V = 64 or 128, and the operands have K = {q.shape[-1]}, V = {v.shape[-1]}"
    if v.shape[2] > _MAX_HEADS:
        return f"it takes up to {_MAX_HEADS} value heads, and v has {v.shape[2]}"
    return _gate_limit(request.arguments) or _beta_limit(request.arguments) or _batch_limit(request.arguments)


def _gdn_limit(request: Request) -> str | None:
    q, v = request.arguments["q"], request.arguments["v"]
    if q.shape[-1] != 128 or v.shape[-1] not in (128, 256):
        return f"it takes K = 128 and V = 128 or 256, and the operands have K = {q.shape[-1]}, V = {v.shape[-1]}"
    return _beta_limit(request.arguments)


def _gate_limit(arguments: Mapping[str, Any]) -> str | None:
    bounded, safe = arguments.get("lower_bound") is not None, bool(arguments.get("safe_gate"))
    if bounded and not safe:
        return "it takes a lower_bound with safe_gate=True only"
    if safe and not bounded and arguments.get("use_gate_in_kernel"):
        return "it would take -5 for a lower_bound that safe_gate=True was passed without"
    return None


def _beta_limit(arguments: Mapping[str, Any]) -> str | None:
    if arguments.get("allow_neg_eigval") and not arguments.get("use_beta_sigmoid_in_kernel"):
        return "it takes allow_neg_eigval with use_beta_sigmoid_in_kernel only"
    return None


def _batch_limit(arguments: Mapping[str, Any]) -> str | None:
    cu_seqlens = arguments.get("cu_seqlens")
    if cu_seqlens is not None and cu_seqlens.shape[0] - 1 > _SEQUENCES:
        return f"it takes up to {_SEQUENCES} sequences, and the batch has {cu_seqlens.shape[0] - 1}"
    return None
