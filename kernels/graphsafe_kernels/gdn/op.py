"""The public operators of the gated delta rule: argument checks, tables, and the choice of implementation.

Requirements
------------
1. Names, order and defaults of flash-linear-attention 0.6.0, plus the graph arguments.
2. Bad input is refused by name before any launch and without a host read; what is not supported is refused, never
   ignored.
3. One line per operator chooses the implementation (``graphsafe_kernels.backend.resolve``).
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.errors import error
from graphsafe_kernels.backend import implementation, resolve
from graphsafe_kernels.delta_rule import (
    check_gate_parameters,
    check_layout,
    check_operands,
    check_unsupported,
    make_options,
    refuse_graph,
    tables_for,
)
from graphsafe_kernels.gdn.problem import UnbuiltTables
from graphsafe_kernels.policy import policy_for
from graphsafe_kernels.providers.choice import selectable

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

_CHUNK_SIZES = (16, 32, 64)


def _require_A_log(gate_in_kernel: bool, A_log: Any) -> None:
    if gate_in_kernel and A_log is None:
        raise error("argument", "A_log is missing; use_gate_in_kernel=True needs it",
                    remedy="Pass A_log [HV]; zeros give a unit scale.")


def _unbuilt(q: torch.Tensor, cu_seqlens: torch.Tensor | None, chunk_size: int,
             *given: torch.Tensor | None) -> UnbuiltTables | None:  # fmt: skip
    """Tables that the kernels write on their way, where none are given and the kernels serve the call."""
    if cu_seqlens is None or any(table is not None for table in given) or q.dtype == torch.float64:
        return None
    if implementation("chunk_gated_delta_rule", q.device) != "triton" or policy_for(q.device).cores:
        return None
    return UnbuiltTables.of(cu_seqlens, q.shape[1], chunk_size)



@selectable
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    chunk_offsets: torch.Tensor | None = None,
    provider: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences, in chunks; differentiable once.

    For each token, per value head: ``S = exp(g) S; S += beta k (v - S^T k)^T; o = scale S^T q``.

    Args:
        q, k: ``[B, T, H, K]``, K up to 256, fp16, bf16, fp32 or fp64.
        v: ``[B, T, HV, V]``, HV a multiple of H, dtype of q.
        g: ``[B, T, HV]``, the decay in log space, or with ``use_gate_in_kernel`` the input x of
            ``-exp(A_log) softplus(x + dt_bias)``.
        beta: ``[B, T, HV]``; with ``use_beta_sigmoid_in_kernel`` the input of the sigmoid.
        scale: K^-1/2 if omitted.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 with fp64 operands); zeros if omitted.
        output_final_state: return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k become ``x / sqrt(sum x^2 + 1e-6)`` first.
        allow_neg_eigval: ``beta = 2 sigmoid(x)``; needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]``, int32 or int64: boundaries of a packed batch (B = 1). Rows beyond the last boundary
            are padding: they change nothing, and their outputs and gradients are zero. Without it N = B.
        chunk_indices, chunk_offsets: the tables of ``cu_seqlens``, built on the device if omitted.
        A_log, dt_bias: ``[HV]`` each, for ``use_gate_in_kernel``; ``A_log`` is required there.
        chunk_size: 16, 32 or 64.
        use_graph: the call is, or may be, captured: nothing reads the device from the host. ``max_num_seqs`` must be
            N if it is given.
        provider: whose kernels serve the call, by name; see :mod:`graphsafe_kernels.providers`.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype, and the states or None.

    Raises:
        ArgumentError: wrong shape, dtype, device, value or combination (GS108).
        UnsupportedError: ``cu_seqlens_cpu`` or ``cp_context``, or a call that the provider cannot serve (GS106).
        MetadataError: tables that do not agree with the batch (GS303); in the backward, ``cu_seqlens`` was written to
            since the forward (GS302).
    """
    check_unsupported(cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context)
    *_, heads, key_width, width = check_operands(q, k, v, {"g": (g, ("HV",)), "beta": (beta, ("HV",))})
    _require_A_log(use_gate_in_kernel, A_log)
    check_gate_parameters(q, gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, value_heads=heads,
                          bias_size=heads, lower_bound=None)
    options = make_options(
        scale=scale, key_width=key_width, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, chunk_size=chunk_size, chunk_sizes=_CHUNK_SIZES,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, gate_in_kernel=use_gate_in_kernel,
        state_v_first=state_v_first, use_graph=use_graph,
    )
    check_layout(q, cu_seqlens=cu_seqlens, max_num_seqs=max_num_seqs, initial_state=initial_state,
                 state_shape=(heads, key_width, width), state_v_first=state_v_first)
    tables = _unbuilt(q, cu_seqlens, chunk_size, chunk_indices, chunk_offsets) or tables_for(
        q, cu_seqlens=cu_seqlens, chunk_size=chunk_size, chunk_indices=chunk_indices, chunk_offsets=chunk_offsets
    )
    chunk = resolve("chunk_gated_delta_rule", q.device)
    o, final_state = chunk(q, k, v, g, beta, A_log, dt_bias, initial_state, tables, options)
    return o, final_state


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    use_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule token by token, for decoding; arguments and results as :func:`chunk_gated_delta_rule`.

    Args beyond those:
        g: ``[B, T, HV]`` or None for no decay.
        gk, gv: ``[B, T, HV, K]`` and ``[B, T, HV, V]``: further decays in log space, per key and per value channel.
        beta: ``[B, T, HV]`` or None for 1.
        use_graph: only False; decoding is outside the graph contract.

    Raises as :func:`chunk_gated_delta_rule`; UnsupportedError (GS106) for ``use_graph=True``. The longest sequence of
    a packed batch is read on the host.
    """
    refuse_graph("fused_recurrent_gated_delta_rule", use_graph, "chunk_gated_delta_rule")
    _require_A_log(use_gate_in_kernel, A_log)
    if use_gate_in_kernel and g is None:
        raise error("argument", "g is missing; use_gate_in_kernel=True needs the gate's input")
    if use_gate_in_kernel and (gk is not None or gv is not None):
        raise error("argument", "gk or gv was passed with use_gate_in_kernel=True, which makes the gate from g alone",
                    remedy="Compute the gate outside and pass g, gk and gv in log space.")
    if use_beta_sigmoid_in_kernel and beta is None:
        raise error("argument", "beta is missing; use_beta_sigmoid_in_kernel=True needs the sigmoid's input")
    given = {"g": (g, ("HV",)), "gk": (gk, ("HV", "K")), "gv": (gv, ("HV", "V")), "beta": (beta, ("HV",))}
    *_, heads, key_width, width = check_operands(q, k, v, {n: t for n, t in given.items() if t[0] is not None})
    check_gate_parameters(q, gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, value_heads=heads,
                          bias_size=heads, lower_bound=None)
    options = make_options(
        scale=scale, key_width=key_width, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel,
        gate_in_kernel=use_gate_in_kernel, state_v_first=state_v_first,
    )
    check_layout(q, cu_seqlens=cu_seqlens, max_num_seqs=None, initial_state=initial_state,
                 state_shape=(heads, key_width, width), state_v_first=state_v_first)
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    recurrent = resolve("fused_recurrent_gated_delta_rule", q.device)
    o, final_state = recurrent(q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, cu_seqlens, options)
    return o, final_state
