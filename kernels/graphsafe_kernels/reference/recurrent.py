"""Both delta rules token by token: the ground truth that every other form is compared with.

Requirements
------------
1. The recurrence as it is defined, differentiated by autograd, in fp32 or fp64. For each token of a sequence::

       P = decay S                     GDN: one decay per head; KDA: one per key channel
       S = P + beta k (v - P^T k)^T    the error is taken against the decayed state
       o = scale S^T q

2. Dense and packed batches, sequences of any length from zero up, anywhere. Padding rows are never loaded, and their
   outputs and gradients are zero.
3. Eager only: the longest sequence of a packed batch is read on the host, once a call.
"""

from __future__ import annotations

import torch

from graphsafe_kernels.delta_rule import DeltaRuleOptions, state_dtype
from graphsafe_kernels.reference.gate import LOWEST, Gate, softplus

__all__ = ["delta_rule_recurrence", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]


def delta_rule_recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
                          state: torch.Tensor, scale: float,
                          lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over N sequences side by side.

    ``q``, ``k`` ``[N, T, HV, K]``, ``v`` ``[N, T, HV, V]``, ``decay`` ``[N, T, HV, K or 1, V or 1]`` (after the
    exponential), ``beta`` ``[N, T, HV]``, ``state`` ``[N, HV, K, V]``. With ``lengths`` ``[N]`` a sequence's state
    stays as it is from its length on. Returns ``o`` ``[N, T, HV, V]`` and the final state.
    """
    outputs = []
    for t in range(q.shape[1]):
        entering = state
        if lengths is not None:  # a sequence that has ended takes no part, so that its state may hold anything
            alive = (lengths > t).view(-1, 1, 1, 1)
            entering = state.masked_fill(~alive, 0)
        decayed = decay[:, t] * entering
        error = v[:, t] - (k[:, t].unsqueeze(-1) * decayed).sum(-2)
        update = (beta[:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1) * error.unsqueeze(-2)
        updated = decayed + update
        outputs.append(scale * (q[:, t].unsqueeze(-1) * updated).sum(-2))
        state = updated if lengths is None else torch.where(alive, updated, state)
    if not outputs:  # no element, but still a function of every operand, as autograd should see it
        return v * (q * k).sum(-1, keepdim=True) * (beta * decay.sum((-2, -1))).unsqueeze(-1), state.clone()
    return torch.stack(outputs, 1), state


class _Packed:
    """Rows of a packed batch as N sequences side by side, ``[N, longest, ...]``, and back."""

    def __init__(self, cu_seqlens: torch.Tensor, tokens: int) -> None:
        boundaries = cu_seqlens.long()
        self.lengths = boundaries[1:] - boundaries[:-1]
        longest = int(self.lengths.max())
        position = torch.arange(longest, device=boundaries.device)
        row = boundaries[:-1].unsqueeze(1) + position
        self.rows = row.masked_fill(position >= self.lengths.unsqueeze(1), tokens)
        places = torch.full((tokens + 1,), self.rows.numel(), dtype=torch.int64, device=boundaries.device)
        self.places = places.scatter(0, self.rows.view(-1), torch.arange(self.rows.numel(), device=places.device))[:-1]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, T, ...]`` -> ``[N, longest, ...]``; zeros behind a sequence's end."""
        padded = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])
        return padded[self.rows]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """The way back, zeros in rows that belong to no sequence."""
        flat = torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])])
        return flat[self.places].unsqueeze(0)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid by ``exp`` of what is below 0 alone: the same bits at any place, and a derivative autograd finds."""
    falling = torch.where(x < 0, x, -x).exp()
    return torch.where(x < 0, falling, torch.ones_like(x)) / (1 + falling)


def _gate(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The in-kernel gate as autograd should see it; x ``[N, T, HV]`` or ``[N, T, HV, K]``."""
    z = x if gate.bias is None else x + gate.bias
    factor = gate.factor()
    if gate.lower_bound is not None:
        return gate.lower_bound * _sigmoid(z if factor is None else factor * z)
    g = -softplus(z)
    return g.clamp(min=LOWEST) if factor is None else (factor * g).clamp(min=LOWEST)


def _recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: list[torch.Tensor], beta: torch.Tensor,
               gate: Gate, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
               options: DeltaRuleOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``gates``: log gates that multiply, each ``[B, T, HV, K or 1, V or 1]``; an in-kernel gate is the only one."""
    dtype, group = state_dtype(q.dtype), v.shape[2] // q.shape[2]
    packed = None if cu_seqlens is None else _Packed(cu_seqlens, q.shape[1])
    operands = [x.to(dtype) for x in (q, k, v, beta, *gates)]
    if packed is not None:
        operands = [packed.unpack(x) for x in operands]
    qs, ks, vs, betas, *logs = operands
    if options.qk_l2norm:
        qs, ks = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (qs, ks))
    qs, ks = (x.repeat_interleave(group, 2) for x in (qs, ks))
    if options.gate_in_kernel:
        logs = [_gate(logs[0], gate)]
    if options.beta_scale is not None:
        betas = options.beta_scale * _sigmoid(betas)
    decay = torch.ones_like(betas)[..., None, None]
    for log in logs:
        decay = decay * log.exp()
    shape = (vs.shape[0], vs.shape[2], qs.shape[3], vs.shape[3])
    state = torch.zeros(shape, dtype=dtype, device=q.device) if initial_state is None else initial_state
    if options.state_v_first and initial_state is not None:
        state = state.transpose(-1, -2)
    o, final = delta_rule_recurrence(qs, ks, vs, decay, betas, state, options.scale,
                                     None if packed is None else packed.lengths)
    o = o if packed is None else packed.pack(o)
    if not options.output_final_state:
        return o.to(q.dtype), None
    final = final.transpose(-1, -2) if options.state_v_first else final
    return o.to(q.dtype), final.contiguous()


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gk: torch.Tensor | None,
    gv: torch.Tensor | None, beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, options: DeltaRuleOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule on checked operands, shapes as in the public operator; (o, final states or None)."""
    dtype = state_dtype(q.dtype)
    gates = [x for x in (None if g is None else g[..., None, None], None if gk is None else gk.unsqueeze(-1),
                         None if gv is None else gv.unsqueeze(-2)) if x is not None]
    gate = Gate(None if A_log is None else A_log.to(dtype).view(-1, 1, 1),
                None if dt_bias is None else dt_bias.to(dtype).view(-1, 1, 1), None)
    return _recurrent(q, k, v, gates, beta, gate, initial_state, cu_seqlens, options)


def fused_recurrent_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, options: DeltaRuleOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention on checked operands, shapes as in the public operator; (o, final states or None)."""
    dtype, (heads, width) = state_dtype(q.dtype), g.shape[2:]
    gate = Gate(None if A_log is None else A_log.to(dtype).view(heads, 1, 1),
                None if dt_bias is None else dt_bias.to(dtype).view(heads, width, 1), options.lower_bound)
    return _recurrent(q, k, v, [g.unsqueeze(-1)], beta, gate, initial_state, cu_seqlens, options)
