"""The gated delta rule in chunk form: one decay per head and token.

Requirements
------------
1. Exponents are sums of the gates between two tokens, never differences of running sums: nothing cancels, however
   strong the gates, and ``exp(-G)`` never appears.
2. The derivative by the gates sums in the same way.

Everything a slot needs of the gates is one matrix ``R`` ``[BT, BT + 1]``: column 0 holds exp(G_i), column j + 1 holds
exp(G_i - G_j), zero for j > i. Its last row is exp(G_last) and exp(G_last - G_j).
"""

from __future__ import annotations

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.reference.chunk import Decayed, chunk_delta_rule

__all__ = ["chunk_gated_delta_rule"]


class ScalarDecays:
    """One decay per token; see :class:`graphsafe_kernels.reference.chunk.Decays`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[Decayed, torch.Tensor]:
        chunk_size = g.shape[1]
        # row m, column c of the sum's terms: g_m where m >= c, that is where token m lies after token c - 1
        ratios = g.expand(-1, -1, chunk_size + 1).tril().cumsum(1).exp().tril(1)
        from_start, between, to_end = ratios[..., :1], ratios[..., 1:], ratios[:, -1, 1:, None]
        k_t = k.transpose(1, 2)
        terms = Decayed(kk=torch.bmm(k, k_t) * between, qk=torch.bmm(q, k_t) * between, qg=q * from_start,
                        kg=k * from_start, kd=k * to_end, decay=ratios[:, -1, :1])
        return terms, ratios

    def backward(self, q: torch.Tensor, k: torch.Tensor, terms: Decayed, d: Decayed,
                 saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from_start, between, to_end = saved[..., :1], saved[..., 1:], saved[:, -1, 1:, None]
        dkk, dqk = d.kk * between, d.qk * between
        dq = torch.baddbmm(d.qg * from_start, dqk, k)
        dk = torch.baddbmm(d.kg * from_start + d.kd * to_end, dkk + dkk.transpose(1, 2), k)
        dk = torch.baddbmm(dk, dqk.transpose(1, 2), q)
        # dlog: the gradient of R's exponents, the derivative of a term by its own logarithm being the term
        dlog = torch.cat([(d.qg * terms.qg + d.kg * terms.kg).sum(-1, keepdim=True),
                          d.kk * terms.kk + d.qk * terms.qk], -1)
        dlog[:, -1, 1:].add_((d.kd * terms.kd).sum(-1))
        dlog[:, -1, :1].add_(d.decay * terms.decay)
        # g_m is in the exponent of row i, column c where c <= m <= i
        after = torch.ones_like(dlog[0, :, 1:]).triu().expand(dlog.shape[0], -1, -1)
        return dq, dk, torch.bmm(after, dlog).tril().sum(-1, keepdim=True)


def chunk_gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                           A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                           initial_state: torch.Tensor | None, tables: ChunkTables | None,
                           options: DeltaRuleOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The chunk form on checked operands, shapes as in the public operator; returns (o, final states or None)."""
    o, final, _ = chunk_delta_rule(ScalarDecays(), q, k, v, g.unsqueeze(-1), beta, A_log, dt_bias, initial_state,
                                   tables, options, keep_intermediates=True)
    return o, final
