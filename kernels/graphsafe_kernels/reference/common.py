"""What the chunk forms of both delta rules share: the layout of tokens in slots, gathers, l2norm, the state chain.

Requirements
------------
1. A token row reaches a slot, and a slot's row a token, by a gather whose index is computed on the device: a row that
   belongs to no slot is never loaded, and a token of no slot gets exact zeros. There is no scatter of values.
2. Slots are the outermost dimension of everything, so that what a slot computes does not depend, not by a bit, on how
   many slots there are.
3. Sequences meet only in the state chain, and there a state is exchanged by selection, never by arithmetic.
4. No host read, no shape that depends on data, no tensor made from host data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphsafe.metadata import ChunkTables

__all__ = ["HeadIndex", "SlotLayout", "dense_layout", "l2norm", "l2norm_backward", "packed_layout", "state_chain"]

_L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class HeadIndex:
    """Where the rows of one number of heads lie, tokens flattened over batch and heads and slots over heads.

    ``gather`` ``[S * heads * BT]``: the row of ``[tokens * heads, ...]`` (one more row of zeros follows them) that a
    slot's row takes. ``places`` ``[tokens * heads]``: the way back; ``S * heads * BT`` where a token has no slot.
    """

    heads: int
    gather: torch.Tensor
    places: torch.Tensor


class SlotLayout:
    """Which token each row of each slot holds, and how slots follow one another.

    ``rows`` ``[S, BT]``: the token row, or ``tokens`` where there is none; ``dead`` ``[S, BT]`` bool marks those.
    Slots are walked in ``steps`` steps of ``lanes`` slots each (S = steps * lanes). A dense batch of B sequences has
    B lanes and its sequences run from the first step to the last. A packed batch has one lane, and ``first`` and
    ``last`` ``[S]`` bool say where a sequence begins and ends, ``sequence`` ``[S]`` which one it is (0 for a
    sentinel), and per sequence ``[N]`` ``first_slot``, ``last_slot`` and ``empty``.
    """

    def __init__(self, rows: torch.Tensor, tokens: int, lanes: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.dead = rows == tokens
        self.slots, self.chunk_size = rows.shape
        self.lanes = lanes
        self.steps = self.slots // lanes
        self.packed = False
        self._indices: dict[int, HeadIndex] = {}

    sequence: torch.Tensor
    sentinel: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    first_slot: torch.Tensor
    last_slot: torch.Tensor
    empty: torch.Tensor

    def index(self, heads: int) -> HeadIndex:
        """The index of this layout for ``heads`` heads, made once."""
        if heads not in self._indices:
            rows = self.rows
            head = torch.arange(heads, device=rows.device)
            gather = torch.add((rows * heads).unsqueeze(1), head.unsqueeze(1)).view(-1)
            places = torch.full(((self.tokens + 1) * heads,), gather.shape[0], dtype=torch.int64, device=rows.device)
            places.scatter_(0, gather, torch.arange(gather.shape[0], device=rows.device))
            self._indices[heads] = HeadIndex(heads, gather, places[: self.tokens * heads])
        return self._indices[heads]

    def to_slots(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[B, T, heads, F]`` -> ``[S * heads, BT, F]`` in ``dtype``, zeros where a slot has no token."""
        heads, width = x.shape[2:]
        flat = x.to(dtype).reshape(self.tokens * heads, width)
        padded = torch.constant_pad_nd(flat, (0, 0, 0, heads))
        picked = padded.index_select(0, self.index(heads).gather)
        return picked.view(self.slots * heads, self.chunk_size, width)

    def to_tokens(self, x: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The way back: ``[S * heads, BT, F]`` -> ``shape``, which is ``[B, T, heads(, F)]``, zeros beyond the live."""
        flat = x.reshape(-1, x.shape[2])
        padded = torch.constant_pad_nd(flat, (0, 0, 0, 1))
        return padded.index_select(0, self.index(shape[2]).places).view(shape).to(dtype)

    def per_slot(self, states: torch.Tensor) -> torch.Tensor:
        """Each slot's own sequence's state: ``[N, HV, ...]`` -> ``[S, HV, ...]`` (packed batches)."""
        return states.index_select(0, self.sequence)

    def per_sequence(self, leaving: list[torch.Tensor], heads: int, otherwise: torch.Tensor | None,
                     *, reverse: bool) -> torch.Tensor:
        """The states that leave each sequence, ``[N, HV, K, V]``, of those that leave each step.

        A sequence without a token has no slot and gets ``otherwise``, or zero.
        """
        if not self.packed:
            return leaving[0 if reverse else -1].view(self.lanes, heads, *leaving[0].shape[1:])
        picked = torch.stack(leaving).index_select(0, self.first_slot if reverse else self.last_slot)
        empty = self.empty.view(-1, 1, 1, 1)
        return picked.masked_fill(empty, 0) if otherwise is None else torch.where(empty, otherwise, picked)

    def by_chunk(self, slots: torch.Tensor) -> torch.Tensor:
        """``[S, HV, K, V]`` as the caller counts chunks: ``[B, chunks, ...]`` or ``[1, S, ...]``, sentinels zero."""
        if self.packed:
            return slots.masked_fill(self.sentinel.view(-1, 1, 1, 1), 0).unsqueeze(0)
        return slots.view(self.steps, self.lanes, *slots.shape[1:]).transpose(0, 1)


def dense_layout(batch: int, tokens: int, chunk_size: int, device: torch.device) -> SlotLayout:
    """The layout of B sequences of T > 0 tokens; slot ``c * B + b`` holds chunk c of sequence b."""
    chunks = -(-tokens // chunk_size)
    token = torch.arange(chunks * chunk_size, device=device).view(chunks, 1, chunk_size)
    start = torch.arange(batch, device=device).view(1, batch, 1) * tokens
    rows = (token + start).masked_fill(token >= tokens, batch * tokens)
    return SlotLayout(rows.view(chunks * batch, chunk_size), batch * tokens, batch)


def packed_layout(tables: ChunkTables, tokens: int) -> SlotLayout:
    """The layout of a packed batch of ``tokens`` > 0 rows, from its tables; a sentinel slot holds no token."""
    boundaries, offsets = tables.cu_seqlens.long(), tables.chunk_offsets.long()
    sequence, chunk = tables.chunk_indices.long().unbind(1)
    sentinel = sequence < 0
    sequence = sequence.clamp(0, tables.max_num_seqs - 1)
    begin = boundaries.index_select(0, sequence) + chunk * tables.chunk_size
    # a boundary beyond the rows there are is cut off here, so that nothing outside the operands is touched
    end = boundaries.index_select(0, sequence + 1).clamp(max=tokens).masked_fill(sentinel, 0)
    within = torch.arange(tables.chunk_size, device=begin.device)
    rows = begin.unsqueeze(1) + within
    layout = SlotLayout(rows.masked_fill(rows >= end.unsqueeze(1), tokens), tokens, 1)
    layout.packed = True
    layout.sequence = sequence
    layout.sentinel = sentinel
    layout.first = chunk == 0
    next_offset = offsets.index_select(0, sequence + 1)
    layout.last = next_offset == torch.arange(1, layout.slots + 1, device=begin.device)
    layout.first_slot = offsets[:-1].clamp(max=layout.slots - 1)
    layout.last_slot = (offsets[1:] - 1).clamp(min=0)
    layout.empty = offsets[1:] == offsets[:-1]
    return layout


def state_chain(layout: SlotLayout, transfer: torch.Tensor, inject: torch.Tensor, start: torch.Tensor | None,
                *, reverse: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Carry states through the slots: ``leaving = transfer @ entering + inject`` for each slot in turn.

    ``transfer`` ``[S * HV, K, K]``, ``inject`` ``[S * HV, K, V]``, ``start`` ``[N, HV, K, V]`` or None for zeros: the
    state that enters a sequence's first slot (its last with ``reverse``, which walks backwards). Returns the states
    that enter the slots, ``[S * HV, K, V]``, and a list of those that leave each step, ``[lanes * HV, K, V]``, both in
    the order of the slots.

    A state of another sequence is replaced by selection, so what it holds cannot matter.
    """
    width = inject.shape[0] // layout.steps
    transfers = transfer.split(width)
    injects = inject.split(width)
    shape = injects[0].shape
    order = range(layout.steps)[:: -1 if reverse else 1]
    state = torch.zeros_like(injects[0]) if start is None or layout.packed else start.reshape(shape)
    restarts: tuple[torch.Tensor, ...] = ()
    starts: tuple[torch.Tensor, ...] = ()
    if layout.packed:
        restarts = (layout.last if reverse else layout.first).view(-1, 1, 1, 1).unbind(0)
        if start is not None:
            starts = layout.per_slot(start).unbind(0)
    entered, left = [], []
    for step in order:
        if starts:
            state = torch.where(restarts[step], starts[step], state)
        elif restarts:
            state = state.masked_fill(restarts[step], 0)
        entered.append(state)
        state = torch.baddbmm(injects[step], transfers[step], state)
        left.append(state)
    if reverse:
        entered.reverse()
        left.reverse()
    return torch.cat(entered), left


def l2norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = x r`` and ``r = (sum x^2 + 1e-6)^-1/2`` over the last dimension, kept as a dimension of size 1."""
    inverse_norm = (x * x).sum(-1, keepdim=True).add(_L2NORM_EPS).rsqrt()
    return x * inverse_norm, inverse_norm


def l2norm_backward(y: torch.Tensor, inverse_norm: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dx = r (dy - y <y, dy>)``."""
    return (dy - y * (y * dy).sum(-1, keepdim=True)) * inverse_norm
