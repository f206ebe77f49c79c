"""The public operators of Kimi delta attention: argument checks, tables, and the choice of implementation.

Requirements
------------
1. Names, order and defaults of flash-linear-attention 0.6.0, plus the graph arguments.
2. Bad input is refused by name before any launch and without a host read; what is not supported is refused, never
   ignored.
3. An omitted ``A_log`` means a unit scale in every operator here, the same as zeros.
4. One line per operator chooses the implementation (``graphsafe_kernels.backend.resolve``).
"""

from __future__ import annotations

import torch

from graphsafe.contract import check_tensor
from graphsafe.errors import error
from graphsafe_kernels.backend import resolve
from graphsafe_kernels.delta_rule import (
    OPERAND_DTYPES,
    check_gate_parameters,
    check_layout,
    check_operands,
    check_unsupported,
    make_options,
    refuse_graph,
    tables_for,
)
from graphsafe_kernels.providers.choice import selectable

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda"]

_CHUNK_SIZES = (32, 64)
_SAFE_LOWER_BOUND = -5.0


@selectable
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    provider: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Kimi delta attention over whole sequences, in chunks; differentiable once.

    For each token, per value head: ``S = Diag(exp(g)) S; S += beta k (v - S^T k)^T; o = scale S^T q``.

    Args:
        q, k: ``[B, T, H, K]``, K up to 256, fp16, bf16, fp32 or fp64.
        v: ``[B, T, HV, V]``, HV a multiple of H, dtype of q.
        g: ``[B, T, HV, K]``, the decay in log space, or with ``use_gate_in_kernel`` the gate's input x.
        beta: ``[B, T, HV]``; with ``use_beta_sigmoid_in_kernel`` the input of the sigmoid.
        scale: K^-1/2 if omitted.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 with fp64 operands); zeros if omitted.
        output_final_state: return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: q and k become ``x / sqrt(sum x^2 + 1e-6)`` first.
        use_gate_in_kernel: ``g = -exp(A_log) softplus(x + dt_bias)``, or with ``lower_bound`` = lb
            ``g = lb sigmoid(exp(A_log) (x + dt_bias))``.
        allow_neg_eigval: ``beta = 2 sigmoid(x)``; needs ``use_beta_sigmoid_in_kernel``.
        safe_gate: gates are within [-5, 0), which permits faster matrix products; in-kernel it needs ``lower_bound``
            in that range, with a given g it is the caller's promise. It never changes the result's meaning.
        disable_recompute: keep the forward's intermediates for the backward, which is faster and takes more memory.
        return_intermediate_states: inside ``torch.inference_mode()`` only.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]``, int32 or int64: boundaries of a packed batch (B = 1). Rows beyond the last boundary
            are padding: they change nothing, and their outputs and gradients are zero. Without it N = B.
        use_graph: the call is, or may be, captured: nothing reads the device from the host. ``max_num_seqs`` must be
            N if it is given.
        A_log, dt_bias: ``[HV]`` and ``[HV * K]``, for ``use_gate_in_kernel``; an omitted ``A_log`` is a unit scale.
        chunk_size: 32 or 64.
        chunk_indices, chunk_offsets: the tables of ``cu_seqlens``, built on the device if omitted.
        provider: whose kernels serve the call, by name; see :mod:`graphsafe_kernels.providers`.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype, and the states or None. With
        ``return_intermediate_states`` also the state at the start of every chunk, ``[B, chunks, HV, K, V]``, or for a
        packed batch one per slot, ``[1, slots, HV, K, V]``, zero in unused slots. With ``use_qk_l2norm_in_kernel`` o
        may be kept for the backward: autograd refuses one after o was written to in place.

    Raises:
        ArgumentError: wrong shape, dtype, device, value or combination (GS108).
        UnsupportedError: ``cu_seqlens_cpu`` or ``cp_context``, or a call that the provider cannot serve (GS106).
        MetadataError: tables that do not agree with the batch (GS303); in the backward, ``cu_seqlens`` was written to
            since the forward (GS302).
    """
    check_unsupported(cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context)
    *_, heads, key_width, width = check_operands(q, k, v, {"g": (g, ("HV", "K")), "beta": (beta, ("HV",))})
    check_gate_parameters(q, gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, value_heads=heads,
                          bias_size=heads * key_width, lower_bound=lower_bound)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or lower_bound < _SAFE_LOWER_BOUND):
        raise error("argument", f"safe_gate=True was passed with use_gate_in_kernel=True and lower_bound={lower_bound}",
                    why=f"A safe gate lies in [{_SAFE_LOWER_BOUND}, 0); the bound makes it so.",
                    remedy=f"Pass lower_bound in [{_SAFE_LOWER_BOUND}, 0), or leave safe_gate out.")
    if return_intermediate_states and not torch.is_inference_mode_enabled():
        raise error("argument", "return_intermediate_states=True was passed outside torch.inference_mode()",
                    why="The intermediate states carry no gradient.",
                    remedy="Call inside torch.inference_mode(), or leave return_intermediate_states out.")
    options = make_options(
        scale=scale, key_width=key_width, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, chunk_size=chunk_size, chunk_sizes=_CHUNK_SIZES,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound, state_v_first=state_v_first, safe_gate=safe_gate,
        disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states,
        use_graph=use_graph,
    )
    check_layout(q, cu_seqlens=cu_seqlens, max_num_seqs=max_num_seqs, initial_state=initial_state,
                 state_shape=(heads, key_width, width), state_v_first=state_v_first)
    tables = tables_for(q, cu_seqlens=cu_seqlens, chunk_size=chunk_size, chunk_indices=chunk_indices,
                        chunk_offsets=chunk_offsets)
    chunk = resolve("chunk_kda", q.device)
    outputs: tuple[torch.Tensor, torch.Tensor | None] = chunk(q, k, v, g, beta, A_log, dt_bias, initial_state, tables,
                                                              options)
    return outputs


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    use_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention token by token, for decoding; arguments, results and errors as :func:`chunk_kda`.

    ``use_graph`` can only be False: decoding is outside the graph contract (UnsupportedError, GS106, otherwise). The
    longest sequence of a packed batch is read on the host.
    """
    refuse_graph("fused_recurrent_kda", use_graph, "chunk_kda")
    *_, heads, key_width, width = check_operands(q, k, v, {"g": (g, ("HV", "K")), "beta": (beta, ("HV",))})
    check_gate_parameters(q, gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, value_heads=heads,
                          bias_size=heads * key_width, lower_bound=lower_bound)
    options = make_options(
        scale=scale, key_width=key_width, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel,
        gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, state_v_first=state_v_first,
    )
    check_layout(q, cu_seqlens=cu_seqlens, max_num_seqs=None, initial_state=initial_state,
                 state_shape=(heads, key_width, width), state_v_first=state_v_first)
    recurrent = resolve("fused_recurrent_kda", q.device)
    o, final_state = recurrent(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options)
    return o, final_state


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The gate of Kimi delta attention by itself; differentiable once.

    ``-exp(A_log) softplus(g + dt_bias)``, or with ``lower_bound`` = lb ``lb sigmoid(exp(A_log) (g + dt_bias))``.
    Shapes: ``g`` ``[..., HV, K]``, ``A_log`` ``[HV]`` (omitted: a unit scale), ``dt_bias`` ``[HV * K]``. The result is
    like ``g``, in ``output_dtype``. Raises ArgumentError (GS108).
    """
    check_tensor("g", g, dtypes=OPERAND_DTYPES)
    if g.dim() < 2:
        raise error("argument", f"g has shape {list(g.shape)}; [..., HV, K] is needed")
    if output_dtype not in OPERAND_DTYPES:
        raise error("argument", f"output_dtype is {output_dtype}; a floating dtype is needed")
    heads, width = g.shape[-2:]
    check_gate_parameters(g, gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, value_heads=heads,
                          bias_size=heads * width, lower_bound=lower_bound)
    gate: torch.Tensor = resolve("fused_kda_gate", g.device)(g, A_log, dt_bias, lower_bound, output_dtype)
    return gate
