"""The chunk form common to both delta rules, vectorised over slots, forward and backward.

Requirements
------------
1. The chunk form below, with its exact first derivative. A delta rule supplies its decays by a :class:`Decays`: scalar
   per head (GDN) or one per key channel (KDA).
2. One path for every call: dense or packed, eager or inside a graph. No Python loop over tokens or sequences; the
   state chain alone walks the slots, two operators a step.
3. What padding rows hold, in operands and in incoming gradients, changes nothing; their outputs and gradients are
   exactly zero; parameter gradients sum live rows alone, slot by slot, then over slots in an order that further slots
   do not change.
4. Arithmetic is fp32, fp64 for fp64 operands.

With G the inclusive sum of the log gate inside a slot, and S the state that enters it::

    A_ij  = beta_i <k_i, exp(G_i - G_j) k_j>           for i > j, else 0
    [u w] = (I + A)^-1 [beta v, beta exp(G) k]
    o     = scale ((exp(G) q) S + <q_i, exp(G_i - G_j) k_j>_{i >= j} (u - w S))
    S'    = decay S + (exp(G_last - G) k)^T (u - w S)      decay = exp(G_last)

The state chain is written with one ``[K, K]`` transfer per slot: with ``S' = P S + U``,
``P = diag(decay) - kd^T w`` and ``U = kd^T u``, a step is a single multiplication, forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import DeltaRuleOptions, state_dtype
from graphsafe_kernels.reference.common import (
    SlotLayout,
    dense_layout,
    l2norm,
    l2norm_backward,
    packed_layout,
    state_chain,
)
from graphsafe_kernels.reference.gate import LOWEST, Gate, gate_backward, gate_forward, sigmoid_beta_backward
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries, ordered_sum, sigmoid

__all__ = ["Decayed", "Decays", "chunk_delta_rule"]


class Decayed(NamedTuple):
    """q and k of all slots under their decays; Z = S * HV, G the inclusive sum of the log gate inside a slot.

    ``kk``, ``qk`` ``[Z, BT, BT]``: <k_i, exp(G_i - G_j) k_j> below the diagonal (what lies on and above it is not
    read), and <q_i, exp(G_i - G_j) k_j> up to the diagonal, zero above. ``qg``, ``kg`` ``[Z, BT, K]``: exp(G) times q
    and k. ``kd`` ``[Z, BT, K]``: exp(G_last - G) k. ``decay`` ``[Z, K]`` or ``[Z, 1]``: exp(G_last).

    The same six fields carry the gradients back, ``kk`` and ``qk`` zero where the forward's are not read.
    """

    kk: torch.Tensor
    qk: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    kd: torch.Tensor
    decay: torch.Tensor


class Decays(Protocol):
    """How a delta rule decays: from q, k ``[Z, BT, K]`` and the log gate g ``[Z, BT, 1 or K]`` to :class:`Decayed`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[Decayed, Any]:
        """The decayed terms, and whatever ``backward`` wants to see again."""
        ...

    def backward(self, q: torch.Tensor, k: torch.Tensor, terms: Decayed, d: Decayed,
                 saved: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and g."""
        ...


class _Slots(NamedTuple):
    """The operands of all slots after their activations, and what those activations' derivatives need."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    q_inverse_norm: torch.Tensor | None
    k_inverse_norm: torch.Tensor | None
    gate_input: torch.Tensor | None


class _Solved(NamedTuple):
    """The forward's intermediates, ``[Z, ...]``: see the chunk form for u, w; ``qw`` is what S is multiplied with."""

    terms: Decayed
    decays: Any
    unscaled: torch.Tensor
    lower: torch.Tensor
    uw: torch.Tensor
    transfer: torch.Tensor
    qw: torch.Tensor
    entering: torch.Tensor


def _repeat_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """Repeat each q/k head for the ``group`` value heads that share it: ``[S * H, BT, F] -> [S * HV, BT, F]``."""
    if group == 1:
        return x
    return x.unsqueeze(1).expand(-1, group, -1, -1).reshape(-1, *x.shape[1:])


def _sum_value_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """The adjoint of :func:`_repeat_heads`."""
    return x if group == 1 else x.view(-1, group, *x.shape[1:]).sum(1)


def _slot_gate(layout: SlotLayout, heads: int, width: int, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
               options: DeltaRuleOptions, dtype: torch.dtype) -> Gate:
    """The gate's parameters, shaped for ``[S, HV, BT, 1 or K]``."""
    return Gate(None if A_log is None else A_log.to(dtype).view(heads, 1, 1),
                None if dt_bias is None else dt_bias.to(dtype).view(heads, 1, width), options.lower_bound)


def _prepare(layout: SlotLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
             beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
             options: DeltaRuleOptions) -> _Slots:
    dtype = state_dtype(q.dtype)
    group, heads, width = v.shape[2] // q.shape[2], v.shape[2], g.shape[3]
    qs, ks, vs, gs = (layout.to_slots(x, dtype) for x in (q, k, v, g))
    betas = layout.to_slots(beta.unsqueeze(-1), dtype)
    q_inverse_norm = k_inverse_norm = gate_input = None
    if options.qk_l2norm:
        qs, q_inverse_norm = l2norm(qs)
        ks, k_inverse_norm = l2norm(ks)
    if options.gate_in_kernel:
        gate_input = gs.view(layout.slots, heads, layout.chunk_size, width)
        gate = _slot_gate(layout, heads, width, A_log, dt_bias, options, dtype)
        gs = gate_forward(gate_input, gate).masked_fill(layout.dead[:, None, :, None], 0).view_as(gs)
    else:
        gs = gs.clamp(min=LOWEST)
    if options.beta_scale is not None:
        betas = sigmoid(betas) * options.beta_scale
    return _Slots(_repeat_heads(qs, group), _repeat_heads(ks, group), vs, gs, betas,
                  q_inverse_norm, k_inverse_norm, gate_input)


def _solve(layout: SlotLayout, x: _Slots, decays: Decays, start: torch.Tensor | None,
           scale: float) -> tuple[torch.Tensor, list[torch.Tensor], _Solved]:
    """Outputs ``[Z, BT, V]``, the states that leave each step, and the intermediates."""
    terms, saved = decays.forward(x.q, x.k, x.g)
    width = x.v.shape[2]
    lower = terms.kk * x.beta
    unscaled = torch.cat([x.v, terms.kg], -1)
    uw = torch.linalg.solve_triangular(lower, unscaled * x.beta, upper=False, unitriangular=True)
    carried = torch.bmm(terms.kd.transpose(1, 2), uw)
    transfer = carried[..., width:].neg()
    transfer.diagonal(dim1=1, dim2=2).add_(terms.decay)
    local = torch.bmm(terms.qk, uw)
    qw = terms.qg - local[..., width:]
    entering, leaving = state_chain(layout, transfer, carried[..., :width], start)
    o = torch.baddbmm(local[..., :width], qw, entering, beta=scale, alpha=scale)
    return o, leaving, _Solved(terms, saved, unscaled, lower, uw, transfer, qw, entering)


def _solve_backward(layout: SlotLayout, x: _Slots, s: _Solved, do: torch.Tensor, dht: torch.Tensor | None,
                    ) -> tuple[Decayed, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Gradients of the decayed terms, of v and beta, and the states' gradients that leave each step, walking back.

    ``do`` ``[Z, BT, V]`` is already scaled; ``dht`` ``[N, HV, K, V]``.
    """
    terms, width = s.terms, x.v.shape[2]
    u, w = s.uw[..., :width], s.uw[..., width:]
    dleaving, dentering = state_chain(layout, s.transfer.transpose(1, 2), torch.bmm(s.qw.transpose(1, 2), do), dht,
                                      reverse=True)
    corrected = torch.baddbmm(u, w, s.entering, alpha=-1)
    dcorrected = torch.baddbmm(torch.bmm(terms.kd, dleaving), terms.qk.transpose(1, 2), do)
    entering_t = s.entering.transpose(1, 2)
    dw = torch.bmm(dcorrected, entering_t).neg()
    ddecay = (dleaving * s.entering).sum(-1)
    if terms.decay.shape[1] == 1:
        ddecay = ddecay.sum(-1, keepdim=True)
    dunscaled = torch.linalg.solve_triangular(s.lower.transpose(1, 2), torch.cat([dcorrected, dw], -1), upper=True,
                                              unitriangular=True)
    dlower = torch.bmm(dunscaled, s.uw.transpose(1, 2)).tril(-1).neg()
    dbeta = (dunscaled * s.unscaled).sum(-1, keepdim=True) + (dlower * terms.kk).sum(-1, keepdim=True)
    dunscaled = dunscaled * x.beta
    d = Decayed(kk=dlower * x.beta, qk=torch.bmm(do, corrected.transpose(1, 2)).tril(), qg=torch.bmm(do, entering_t),
                kg=dunscaled[..., width:], kd=torch.bmm(corrected, dleaving.transpose(1, 2)), decay=ddecay)
    return d, dunscaled[..., :width], dbeta, dentering


def _gate_gradients(layout: SlotLayout, dg: torch.Tensor, x: _Slots, A_log: torch.Tensor | None,
                    dt_bias: torch.Tensor | None, options: DeltaRuleOptions,
                    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the gate's input ``[Z, BT, 1 or K]`` and of its parameters."""
    if x.gate_input is None:
        return dg, None, None
    _, heads, _, width = x.gate_input.shape
    live_dg = dg.view_as(x.gate_input).masked_fill(layout.dead[:, None, :, None], 0)
    gate = _slot_gate(layout, heads, width, A_log, dt_bias, options, dg.dtype)
    dx, dA = gate_backward(x.gate_input, gate, live_dg)
    dA_log = ddt_bias = None
    if A_log is not None and dA is not None:
        dA_log = ordered_sum(dA.sum((2, 3))).to(A_log.dtype)
    if dt_bias is not None:
        ddt_bias = ordered_sum(dx.sum(2)).view(-1).to(dt_bias.dtype)
    return dx.view_as(dg), dA_log, ddt_bias


def _transposed(states: torch.Tensor | None, options: DeltaRuleOptions) -> torch.Tensor | None:
    """States between the caller's layout and ``[..., K, V]``, either way."""
    return states.transpose(-1, -2) if states is not None and options.state_v_first else states


class _ChunkDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decays: Decays, options: DeltaRuleOptions, tables: ChunkTables | None,
                keep_intermediates: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
                beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                initial_state: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        batch, tokens, _, key_width = q.shape
        heads, width = v.shape[2:]
        start = _transposed(initial_state, options)
        ctx.decays, ctx.options = decays, options
        ctx.layout = ctx.saved = ctx.boundaries = None
        ctx.state_shape = (batch if tables is None else tables.max_num_seqs, heads, key_width, width)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state)
        if tables is not None:
            ctx.boundaries = SavedBoundaries("the delta rule", tables.cu_seqlens)
        final: torch.Tensor | None
        states: torch.Tensor | None
        if tokens == 0:
            o, final, states = _without_tokens(q, v, start, ctx.state_shape, tables)
        else:
            layout = (dense_layout(batch, tokens, options.chunk_size, q.device) if tables is None
                      else packed_layout(tables, tokens))
            x = _prepare(layout, q, k, v, g, beta, A_log, dt_bias, options)
            outputs, leaving, solved = _solve(layout, x, decays, start, options.scale)
            o, final, states = layout.to_tokens(outputs, v.shape, q.dtype), None, None
            if options.output_final_state:
                final = layout.per_sequence(leaving, heads, start, reverse=False)
            if options.return_intermediate_states:
                states = layout.by_chunk(solved.entering.view(-1, *ctx.state_shape[1:]))
            ctx.layout = layout
            ctx.saved = (x, solved) if keep_intermediates else None
        states_out = (_transposed(final, options) if options.output_final_state else None,
                      _transposed(states, options) if options.return_intermediate_states else None)
        return o, *(None if t is None else t.contiguous() for t in states_out)

    @staticmethod
    @first_order_only("the chunk form of a delta rule")
    def backward(ctx: Any, do: torch.Tensor, dfinal: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, initial_state = ctx.saved_tensors
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        options, layout = ctx.options, ctx.layout
        dh0: torch.Tensor | None = None
        none = (None,) * 4
        if layout is None:
            operands = (None if t is None else torch.zeros_like(t) for t in (q, k, v, g, beta, A_log, dt_bias))
            if initial_state is not None:
                dh0 = torch.zeros_like(initial_state) if dfinal is None else dfinal.clone()
            return (*none, *operands, dh0)
        start, dht = _transposed(initial_state, options), _transposed(dfinal, options)
        if ctx.saved is None:
            x = _prepare(layout, q, k, v, g, beta, A_log, dt_bias, options)
            solved = _solve(layout, x, ctx.decays, start, options.scale)[2]
        else:
            x, solved = ctx.saved
        do = layout.to_slots(do, x.v.dtype) * options.scale
        d, dv, dbeta, dentering = _solve_backward(layout, x, solved, do, dht)
        dq, dk, dg = ctx.decays.backward(x.q, x.k, solved.terms, d, solved.decays)
        dg, dA_log, ddt_bias = _gate_gradients(layout, dg, x, A_log, dt_bias, options)
        if options.beta_scale is not None:
            dbeta = sigmoid_beta_backward(x.beta, options.beta_scale, dbeta)
        group = v.shape[2] // q.shape[2]
        dq, dk = _sum_value_heads(dq, group), _sum_value_heads(dk, group)
        if x.q_inverse_norm is not None and x.k_inverse_norm is not None:
            dq = l2norm_backward(_every(x.q, group), x.q_inverse_norm, dq)
            dk = l2norm_backward(_every(x.k, group), x.k_inverse_norm, dk)
        gradients = (layout.to_tokens(dx, t.shape, t.dtype)
                     for dx, t in ((dq, q), (dk, k), (dv, v), (dg, g), (dbeta, beta)))
        if initial_state is not None:
            dh0 = _transposed(layout.per_sequence(dentering, v.shape[2], dht, reverse=True), options)
        return (*none, *gradients, dA_log, ddt_bias, dh0)


def _without_tokens(q: torch.Tensor, v: torch.Tensor, start: torch.Tensor | None, state_shape: tuple[int, ...],
                    tables: ChunkTables | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, final states and intermediate states of a batch of no rows: every state is handed through."""
    dtype = state_dtype(q.dtype)
    final = torch.zeros(state_shape, dtype=dtype, device=q.device) if start is None else start.clone()
    slots = 0 if tables is None else tables.slots
    return torch.empty_like(v), final, torch.zeros(q.shape[0], slots, *state_shape[1:], dtype=dtype, device=q.device)


def _every(x: torch.Tensor, group: int) -> torch.Tensor:
    """One value head of each group: the inverse of :func:`_repeat_heads`."""
    return x if group == 1 else x.view(-1, group, *x.shape[1:])[:, 0]


def chunk_delta_rule(decays: Decays, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
                     beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                     initial_state: torch.Tensor | None, tables: ChunkTables | None, options: DeltaRuleOptions,
                     *, keep_intermediates: bool) -> tuple[torch.Tensor | None, ...]:
    """A delta rule in chunk form on checked operands; ``keep_intermediates`` spares the backward a second forward.

    Shapes as in the public operators, ``g`` with a channel dimension of 1 or K. Returns (o, final states or None,
    states at the start of every chunk or None).
    """
    outputs: tuple[torch.Tensor | None, ...] = _ChunkDeltaRule.apply(
        decays, options, tables, keep_intermediates, q, k, v, g, beta, A_log, dt_bias, initial_state
    )
    return outputs
