"""Bucket: the capacity that one captured graph serves.

Requirements
------------
1. A bucket is three numbers of the caller's choice: ``tokens`` (T_max), ``sequences`` (N_max), ``chunk_size`` (BT).
2. Every fixed shape follows from it: a bucket has ``ceil(T_max / BT) + N_max - 1`` slots. The first term covers one
   sequence's chunks; every further sequence can add at most one partial chunk.
3. It is immutable, hashable and ordered by size, so that the smallest that fits can be found.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsafe.errors import error

__all__ = ["Bucket", "slot_count"]


def slot_count(tokens: int, sequences: int, chunk_size: int) -> int:
    """Rows of a chunk table: ``ceil(tokens / chunk_size) + sequences - 1``."""
    return -(-tokens // chunk_size) + sequences - 1


@dataclass(frozen=True, order=True)
class Bucket:
    """A capacity: at most ``tokens`` tokens in at most ``sequences`` sequences, cut into chunks of ``chunk_size``.

    Ordered by (tokens, sequences, chunk_size). Raises :class:`graphsafe.errors.ArgumentError` unless all three are
    positive integers and ``chunk_size`` is a power of two.
    """

    tokens: int
    sequences: int = 1
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise error("argument", f"Bucket({name}={value!r}): a positive integer is needed")
        if self.chunk_size & (self.chunk_size - 1):
            raise error("argument", f"Bucket(chunk_size={self.chunk_size}): a power of two is needed")

    @property
    def slots(self) -> int:
        """NT_max, the rows of this bucket's chunk table."""
        return slot_count(self.tokens, self.sequences, self.chunk_size)

    def fits(self, tokens: int, sequences: int) -> bool:
        """Whether a batch of ``tokens`` in ``sequences`` is within the capacity."""
        return tokens <= self.tokens and sequences <= self.sequences

    def __str__(self) -> str:
        return f"{self.tokens}x{self.sequences} (BT {self.chunk_size})"
