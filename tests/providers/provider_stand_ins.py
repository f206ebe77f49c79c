"""Stand-ins with the names and signatures of libraries that are not installed here, computed by the reference.

They record what they were called with, so that a test sees exactly what an adapter hands over.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F

from graphsafe_kernels.conv import causal_conv1d as own_convolution
from graphsafe_kernels.gdn import chunk_gated_delta_rule as own_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda as own_kda


def fla_npu(calls: list[dict[str, Any]]) -> types.ModuleType:
    """``fla_npu.ops.ascendc`` with both fused forwards: host boundaries, q and k taken as they are.

    KDA: packed batches of rank 3, states written into ``initial_state``, 12 results. GDN: q, k and v head by head, g,
    beta and o token by token, chunks listed for a packed batch, 10 results.
    """
    module = types.ModuleType("fla_npu.ops.ascendc")

    def chunk_kda_fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        chunk_size: int = 64,
        *,
        layout: str = "BSND",
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: tuple[int, ...] | None = None,
        chunk_indices: tuple[int, ...] | None = None,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
    ) -> tuple[Any, ...]:
        calls.append(dict(locals()))
        packed = cu_seqlens is not None
        assert (layout, q.dim()) == (("TND", 3) if packed else ("BSND", 4))
        assert not packed or all(type(n) is int for n in cu_seqlens)
        assert q.shape[-1] == v.shape[-1]
        assert q.shape[-1] in (64, 128)
        assert torch.float16 not in (g.dtype, beta.dtype)
        boundaries = torch.tensor(cu_seqlens, dtype=torch.int32) if packed else None
        o, state = own_kda(
            *((t[None] if packed else t) for t in (q, k, v, g.to(torch.float32), beta.to(q.dtype))),
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            use_gate_in_kernel=use_gate_in_kernel,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            A_log=A_log,
            dt_bias=dt_bias,
            state_v_first=state_v_first,
            cu_seqlens=boundaries,
        )
        if initial_state is not None:
            initial_state.copy_(state)
        return (o[0] if packed else o, state if output_final_state else None, *[None] * 9, initial_state)

    def chunk_gated_delta_rule_fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        chunk_size: int = 64,
        cu_seqlens: tuple[int, ...] | None = None,
        chunk_indices: tuple[int, ...] | None = None,
        scale: float | None = None,
        use_exp2: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        disable_recompute: bool = True,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        a_log: None = None,
        dt_bias: None = None,
        layout: str = "BNSD",
    ) -> tuple[Any, ...]:
        calls.append(dict(locals()))
        assert layout == "BNSD"
        assert q.is_contiguous()
        switches = (use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, use_gate_in_kernel, state_v_first)
        assert not any(switches)
        assert (cu_seqlens is None) == (chunk_indices is None)
        boundaries = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
        o, state = own_gated_delta_rule(
            *(t.transpose(1, 2) for t in (q, k, v)),
            g,
            beta.to(q.dtype),
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=boundaries,
        )
        return (o, state, *[None] * 4, q, k, None, None)

    module.chunk_kda_fwd = chunk_kda_fwd  # type: ignore[attr-defined]
    module.chunk_gated_delta_rule_fwd = chunk_gated_delta_rule_fwd  # type: ignore[attr-defined]
    return module


def causal_conv1d(calls: list[dict[str, Any]]) -> types.ModuleType:
    """``causal_conv1d`` with ``causal_conv1d_fn`` on ``[B, D, T]`` and a sequence number for each token."""
    module = types.ModuleType("causal_conv1d")

    def causal_conv1d_fn(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        calls.append(dict(locals()))
        assert x.stride(1) == 1, "the channel-last layout is the fast one"
        assert initial_states is None
        assert not return_final_states
        batch, _, tokens = x.shape
        number = torch.zeros(batch, tokens, dtype=torch.int32) if seq_idx is None else seq_idx
        assert number.dtype == torch.int32
        taps = weight.shape[1]
        out = torch.zeros_like(x)
        for j in range(taps):
            back = taps - 1 - j
            shifted = F.pad(x, (back, 0))[..., :tokens]
            same = F.pad(number, (back, 0), value=-1)[..., :tokens] == number
            out = out + weight[:, j, None] * shifted * same[:, None]
        out = out if bias is None else out + bias[:, None]
        return F.silu(out) if activation in ("silu", "swish") else out

    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    return module


def fla(calls: list[dict[str, Any]]) -> dict[str, types.ModuleType]:
    """The three modules of flash-linear-attention whose operators have providers; they know no graph arguments."""
    modules = {}
    for path, function in (
        ("fla.ops.gated_delta_rule", own_gated_delta_rule),
        ("fla.ops.kda", own_kda),
        ("fla.modules.causal_conv1d", own_convolution),
    ):
        module = types.ModuleType(path)

        def call(_function: Any = function, **arguments: Any) -> Any:
            calls.append(arguments)
            assert not {"use_graph", "max_num_seqs", "chunk_indices", "chunk_offsets"} & set(arguments)
            return _function(**arguments)

        setattr(module, function.__name__, call)
        modules[path] = module
    modules["fla"] = types.ModuleType("fla")
    return modules


def flash_qla(calls: list[dict[str, Any]]) -> types.ModuleType:
    """``flash_qla.chunk_gated_delta_rule`` with its own signature."""
    module = types.ModuleType("flash_qla")

    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        head_first: bool = False,
        state_v_first: bool = False,
        auto_cp: bool = True,
        enable_fwd_cp_cache: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(dict(locals()))
        return own_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            state_v_first=state_v_first,
        )

    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return module
