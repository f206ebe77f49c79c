"""ChunkTables and how they are built: on the device, from ``cu_seqlens`` alone, at a fixed shape.

Requirements
------------
1. ``build_tables`` reads nothing on the host and no shape depends on data: it can run inside a capture.
2. It follows the contents of ``cu_seqlens``: nothing is cached.
3. Zero-length sequences anywhere are right; int32 and int64 are right and keep their dtype.
4. It is the definition that every device's one-launch builder is compared with, bit for bit.

Shapes (N = ``cu_seqlens`` entries less one, NT = slots): ``cu_seqlens`` ``[N + 1]``; ``chunk_indices`` ``[NT, 2]`` rows
(sequence, chunk within it), the sentinel ``(-1, 0)`` behind the last live row; ``chunk_offsets`` ``[N + 1]``, the first
slot of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from graphsafe.bucket import Bucket, slot_count

__all__ = ["SENTINEL", "BoundTables", "ChunkTables", "MetadataBuilder", "TorchMetadataBuilder", "build_tables"]

SENTINEL = (-1, 0)
"""The row of an unused slot."""


@dataclass(frozen=True)
class ChunkTables:
    """The tables of one batch, for one chunk size: device tensors of one integer dtype.

    Fields: ``cu_seqlens`` ``[N + 1]``, ``chunk_indices`` ``[NT, 2]``, ``chunk_offsets`` ``[N + 1]``, ``chunk_size``.
    """

    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    chunk_offsets: torch.Tensor
    chunk_size: int = 64

    @property
    def max_num_seqs(self) -> int:
        """N, the sequences the tables have room for."""
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def slots(self) -> int:
        """NT, the rows of ``chunk_indices``."""
        return int(self.chunk_indices.shape[0])

    def live(self, tokens: int) -> torch.Tensor:
        """Which of ``tokens`` rows belong to the batch: bool ``[tokens]``, device work alone.

        What sums over tokens in a captured body (a mean, a loss) must leave the other rows out.
        """
        return torch.arange(tokens, device=self.cu_seqlens.device) < self.cu_seqlens[-1]


def build_tables(cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> ChunkTables:
    """Build the tables of a batch with device work alone.

    ``cu_seqlens``: ``[N + 1]`` int32 or int64, non-decreasing from 0, live total at most ``tokens``. The result has
    ``slot_count(tokens, N, chunk_size)`` slots, and its tensors have the dtype and device of ``cu_seqlens``.
    """
    n = int(cu_seqlens.shape[0]) - 1
    slots = slot_count(tokens, n, chunk_size)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    chunks = torch.div(lengths + (chunk_size - 1), chunk_size, rounding_mode="floor")
    ends = torch.cumsum(chunks, 0, dtype=cu_seqlens.dtype)
    offsets = torch.cat([torch.zeros_like(ends[:1]), ends])
    slot = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # right=True: the first sequence that ends after the slot, so sequences without chunks are passed over
    sequence = torch.searchsorted(ends, slot, right=True)
    live = sequence < n
    sequence = torch.where(live, sequence, torch.zeros_like(sequence))
    chunk = slot - offsets[sequence]
    indices = torch.stack(
        [
            torch.where(live, sequence.to(cu_seqlens.dtype), torch.full_like(slot, SENTINEL[0])),
            torch.where(live, chunk, torch.full_like(slot, SENTINEL[1])),
        ],
        dim=1,
    )
    return ChunkTables(cu_seqlens, indices, offsets, chunk_size)


@runtime_checkable
class MetadataBuilder(Protocol):
    """Builds a batch's tables on the device from ``cu_seqlens`` alone, at a fixed shape, without a host read."""

    def build(self, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> ChunkTables:
        """Tables with ``slot_count(tokens, N, chunk_size)`` slots; bit for bit those of :func:`build_tables`."""
        ...


class TorchMetadataBuilder:
    """The builder of plain torch operators: right on every device, about a dozen launches."""

    def build(self, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64) -> ChunkTables:
        return build_tables(cu_seqlens, tokens, chunk_size)


@dataclass(frozen=True)
class BoundTables:
    """A builder with a bucket's numbers filled in: ``BoundTables(builder, bucket).build(cu_seqlens)``."""

    builder: MetadataBuilder
    bucket: Bucket

    def build(self, cu_seqlens: torch.Tensor) -> ChunkTables:
        """Tables of ``cu_seqlens`` ``[sequences + 1]`` for this bucket."""
        return self.builder.build(cu_seqlens, self.bucket.tokens, self.bucket.chunk_size)
