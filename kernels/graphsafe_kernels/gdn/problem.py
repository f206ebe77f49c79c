"""One call of the chunk form: its sizes and options, its operands, what it keeps, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphsafe import bucket
from graphsafe.metadata import ChunkTables

__all__ = [
    "Gradients", "Operands", "Prepared", "Problem", "UnbuiltTables", "boundaries", "parted", "segments", "slot_count",
]  # fmt: skip

FEW_SEQUENCES = 32
"""Sequences up to which the preparation finds its slots itself: a warp adds up their chunks without a barrier."""


@dataclass(frozen=True)
class UnbuiltTables(ChunkTables):
    """The memory of a batch's tables, for the preparation to write."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int) -> UnbuiltTables | None:
        """None where the tables take a launch of their own: many sequences, or no slot whose program would write."""
        sequences = cu_seqlens.shape[0] - 1
        slots = bucket.slot_count(tokens, sequences, chunk_size)
        if sequences > FEW_SEQUENCES or not slots or not cu_seqlens.is_contiguous():
            return None
        return cls(cu_seqlens, cu_seqlens.new_empty((slots, 2)), cu_seqlens.new_empty(sequences + 1), chunk_size)

    @property
    def tile(self) -> int:
        """The compile-time size of the sequences: one, or as many as :data:`FEW_SEQUENCES`."""
        return 1 if self.max_num_seqs == 1 else FEW_SEQUENCES


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a call. ``tokens`` is T of each sequence (dense) or the capacity (packed)."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    sequences: int
    chunk_size: int
    scale: float
    qk_l2norm: bool = False
    gate_in_kernel: bool = False
    beta_scale: float | None = None
    state_v_first: bool = False

    @property
    def rows(self) -> int:
        """Token rows of q, k and v taken together."""
        return self.batch * self.tokens

    @property
    def chunks(self) -> int:
        """Chunks of a dense sequence."""
        return -(-self.tokens // self.chunk_size)


class Prepared(NamedTuple):
    """What the forward leaves for the backward: the preparation, and the chain's states where they are kept."""

    correction: torch.Tensor
    scores: torch.Tensor
    vectors: torch.Tensor
    decay: torch.Tensor
    states: torch.Tensor | None = None
    residuals: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    transitions: torch.Tensor | None = None


class Gradients(NamedTuple):
    """The gradients of one call; None where there is no such input."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


class Operands(NamedTuple):
    """The inputs of one call, contiguous: shapes as in the public operator."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def slot_count(problem: Problem, tables: ChunkTables | None) -> int:
    """Slots of the batch: live chunks and, packed, the unused ones."""
    return problem.batch * problem.chunks if tables is None else tables.slots


def boundaries(tables: ChunkTables | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(cu_seqlens, chunk_indices, chunk_offsets), None each for a dense batch."""
    if tables is None:
        return None, None, None
    return tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets


def parted(p: Problem) -> bool:
    """Whether dq and dk come in parts, to be summed over value heads or projected."""
    return p.value_heads != p.heads or p.qk_l2norm


def segments(p: Problem, span: int) -> int:
    """Segments of the longest sequence that fits, ``span`` chunks each; 1 where sequences are not cut (span 0)."""
    return -(-p.chunks // span) if span else 1
