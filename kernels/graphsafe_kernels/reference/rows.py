"""Row arithmetic the references share: sums and activations whose bits do not depend on how much padding there is.

Requirements
------------
1. Nothing reads the device from the host, no shape depends on data, no tensor is made from host data.
2. ``ordered_sum`` adds rows in an order fixed by the row's index alone: zero rows appended at the end change no bit.
3. ``sigmoid`` gives an element the same bits wherever it lies in a tensor. ``torch.sigmoid`` on a CPU does not: it
   computes the tail of a range with other instructions than the rest, and where ranges end depends on the size.
4. A ``cu_seqlens`` that changes between forward and backward is noticed by its version, not by its contents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphsafe.errors import error
from graphsafe.metadata import ChunkTables

__all__ = [
    "SavedBoundaries", "clear_padding", "compute_dtype", "join_columns", "ordered_sum", "padding_rows", "sigmoid",
    "split_columns",
]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a reference computes in: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``: exact limits at both ends, and the same bits at any place in any tensor."""
    return (torch.exp(-x) + 1).reciprocal()


def ordered_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, ``[R, ...] -> [...]``, in an order that trailing zero rows do not change.

    The tensor is folded onto its first half until one row is left. The fold lengths are powers of two, so more zero
    rows only add folds that add zero. Adding zero at the end makes a sum of zeros +0, with or without such a fold.
    """
    count = rows.shape[0]
    if count == 0:
        return rows.sum(0)
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        folded = rows[: count - half] + rows[half:count]
        rows = folded if count == 2 * half else torch.cat([folded, rows[count - half : half]])
        count = half
    return rows[0] + 0


def padding_rows(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which of ``tokens`` rows lie beyond the live total: bool ``[tokens]``, made on the device."""
    rows = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return rows >= cu_seqlens[-1:]


def clear_padding(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``x`` ``[1, T, ...]`` with zeros in the rows beyond the live total, whatever they held."""
    rows = padding_rows(cu_seqlens, x.shape[1]).reshape(1, -1, *[1] * (x.dim() - 2))
    return x.masked_fill(rows, 0)


def split_columns(x: torch.Tensor, widths: tuple[int, ...], copied: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """Contiguous copies of the column ranges of ``x`` ``[B, T, W]`` that are ``copied``; None for the others."""
    parts = x.split([*widths, x.shape[2] - sum(widths)], -1)
    return [part.contiguous() if copy else None for part, copy in zip(parts, copied, strict=False)]


def join_columns(parts: Sequence[torch.Tensor | None], widths: tuple[int, ...],
                 into: torch.Tensor | None = None) -> torch.Tensor:
    """``[B, T, sum of widths]`` from its parts ``[B, T, w]``; zero where one is None.

    ``into``: ``[B, T, at least so many]`` whose last columns they become; without it one part is there.
    """
    if into is not None:
        for column, part in zip(into[..., into.shape[2] - sum(widths) :].split(widths, -1), parts, strict=True):
            column.zero_() if part is None else column.copy_(part)
        return into
    like = next(p for p in parts if p is not None)
    whole = [like.new_zeros((*like.shape[:2], w)) if p is None else p for p, w in zip(parts, widths, strict=True)]
    return torch.cat(whole, -1)


class SavedBoundaries:
    """A ``cu_seqlens`` kept for the backward, with the version it had in the forward; and tables made of it.

    They are not kept with ``save_for_backward``, whose own version check raises an untyped error.
    """

    def __init__(self, operator: str, cu_seqlens: torch.Tensor, **tables: torch.Tensor) -> None:
        self._operator = operator
        self._cu_seqlens = cu_seqlens
        self._version = _version(cu_seqlens)
        self._tables = [(name, t, _version(t)) for name, t in tables.items()]

    @classmethod
    def of(cls, operator: str, tables: ChunkTables) -> SavedBoundaries:
        """The boundaries and the tables that an operator's kernels read again in the backward."""
        return cls(operator, tables.cu_seqlens, chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets)

    def get(self) -> torch.Tensor:
        """The boundaries; raises ``metadata-changed`` if they or the tables were written to since the forward."""
        for name, t, version in (("cu_seqlens", self._cu_seqlens, self._version), *self._tables):
            if _version(t) != version:
                raise error("metadata-changed", f"{name} of {self._operator} was written to between its forward and "
                            "its backward")  # fmt: skip
        return self._cu_seqlens


def _version(t: torch.Tensor) -> int:
    # tensors made in inference mode have no version and cannot be written to outside it
    return -1 if t.is_inference() else t._version
