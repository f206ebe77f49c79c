"""Kimi delta attention in chunk form: one decay per key channel and token.

Requirements
------------
1. Exponents are sums of the gates between two tokens, never differences of running sums, and every factor that is
   formed is at most 1 for gates up to 0: nothing overflows or cancels, however strong the gates.
2. The factors of an earlier token hold no gate of a later one, except in terms that only later rows read.

A pair i > j inside a slot is met at exactly one level l: the one where i lies in an odd block of ``2^l`` tokens and j
in the even block before it. There ``exp(G_i - G_j) = exp(from the block's start to i) exp(after j to its block's
end)``: one factor per token and level, ``F_l = exp(W_l g)`` with ``W_l`` of zeros and ones, so that a level is a
product of two matrices, read under the level's mask. With BT = 2^n, level n of the same rule is exp(G_last - G_j) and
level n + 1 is exp(G_i).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.reference.chunk import Decayed, chunk_delta_rule

__all__ = ["chunk_kda"]


class _Levels(NamedTuple):
    """``factors`` ``[Z, n + 2, BT, K]``; ``sums`` ``[(n + 2) BT, BT]``, the W of all levels; ``unmet`` ``[n, 1, BT,
    BT]``: the pairs a level does not read; ``qk`` ``[Z, n, 2, BT, K]``: q and k under their factors."""

    factors: torch.Tensor
    sums: torch.Tensor
    unmet: torch.Tensor
    qk: torch.Tensor


def _levels(chunk_size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``sums`` and ``unmet`` of :class:`_Levels`."""
    levels = chunk_size.bit_length() - 1
    # numbered from 2 BT, token numbers have at level n an even block and at level n + 1 an odd one
    token = torch.arange(2 * chunk_size, 3 * chunk_size, device=like.device)
    block = torch.bitwise_right_shift(token, torch.arange(levels + 2, device=like.device).unsqueeze(1))
    odd = torch.bitwise_and(block, 1).unsqueeze(2)
    mine, other = block.unsqueeze(2), block.unsqueeze(1)
    upto = (token.unsqueeze(1) >= token).long()
    sums = ((mine == other) & (odd == upto)).to(like.dtype)
    met = (mine == other + odd) & (odd == 1)
    return sums.view(-1, chunk_size), ~met[:levels].unsqueeze(1)


class ChannelDecays:
    """One decay per token and key channel; see :class:`graphsafe_kernels.reference.chunk.Decays`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[Decayed, _Levels]:
        slots, chunk_size, width = g.shape
        sums, unmet = _levels(chunk_size, g)
        levels = unmet.shape[0]
        factors = torch.bmm(sums.expand(slots, -1, -1), g).exp().view(slots, levels + 2, chunk_size, width)
        qk = torch.stack([q, k], 1).unsqueeze(1) * factors[:, :levels].unsqueeze(2)
        products = torch.bmm(qk.view(-1, 2 * chunk_size, width), qk[:, :, 1].reshape(-1, chunk_size, width).mT)
        products = products.view(slots, levels, 2, chunk_size, chunk_size).masked_fill_(unmet, 0).sum(1)
        products[:, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        to_end, from_start = factors[:, levels], factors[:, levels + 1]
        terms = Decayed(kk=products[:, 1], qk=products[:, 0], qg=q * from_start, kg=k * from_start, kd=k * to_end,
                        decay=from_start[:, -1])
        return terms, _Levels(factors, sums, unmet, qk)

    def backward(self, q: torch.Tensor, k: torch.Tensor, terms: Decayed, d: Decayed,
                 saved: _Levels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, chunk_size, width = k.shape
        levels = saved.unmet.shape[0]
        to_end, from_start = saved.factors[:, levels], saved.factors[:, levels + 1]
        dproducts = torch.stack([d.qk, d.kk], 1).unsqueeze(1).masked_fill(saved.unmet, 0)
        dproducts = dproducts.view(-1, 2 * chunk_size, chunk_size)
        rows, columns = saved.qk.view(-1, 2 * chunk_size, width), saved.qk[:, :, 1].reshape(-1, chunk_size, width)
        dqk = torch.bmm(dproducts, columns).view_as(saved.qk)
        dqk[:, :, 1].add_(torch.bmm(dproducts.mT, rows).view(slots, levels, chunk_size, width))
        dq, dk = (dqk * saved.factors[:, :levels].unsqueeze(2)).sum(1).unbind(1)
        diagonal = d.qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        dq = dq + d.qg * from_start + diagonal * k
        dk = dk + d.kg * from_start + d.kd * to_end + diagonal * q
        # the gradient of the factors' exponents, the derivative of a term by its own logarithm being the term
        dstart = d.qg * terms.qg + d.kg * terms.kg
        dstart[:, -1].add_(d.decay * terms.decay)
        dlog = torch.cat([(dqk * saved.qk).sum(2), torch.stack([d.kd * terms.kd, dstart], 1)], 1)
        dg = torch.bmm(saved.sums.t().expand(slots, -1, -1), dlog.view(slots, -1, width))
        return dq, dk, dg


def chunk_kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
              A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
              tables: ChunkTables | None, options: DeltaRuleOptions) -> tuple[torch.Tensor | None, ...]:
    """The chunk form on checked operands, shapes as in the public operator.

    Returns (o, final states or None), and with ``return_intermediate_states`` the states at the start of every chunk.
    """
    outputs = chunk_delta_rule(ChannelDecays(), q, k, v, g, beta, A_log, dt_bias, initial_state, tables, options,
                               keep_intermediates=options.disable_recompute)
    return outputs if options.return_intermediate_states else outputs[:2]
