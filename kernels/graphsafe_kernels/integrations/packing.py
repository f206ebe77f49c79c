"""A packed batch as the layers of a model see it.

Requirements
------------
1. Everything is worked out once a call, on the device, from ``cu_seqlens``: tables, positions, attention's segments.
2. Rows beyond the live total are one more sequence where an operator must not leave rows out: what attention or a
   rotary embedding makes of them is finite and reaches nobody.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from graphsafe.contract import check_cu_seqlens
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import resolve

__all__ = ["Packed"]


@dataclass(frozen=True)
class Packed:
    """One call's batch: T tokens with ``tables`` of N sequences; ``use_graph`` as the operators take it."""

    tokens: int
    tables: ChunkTables
    use_graph: bool
    _windows: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, batch: int, tokens: int, device: torch.device, cu_seqlens: torch.Tensor | None,
           tables: ChunkTables | None, use_graph: bool) -> Packed:
        """Check the description of a batch of ``[batch, tokens]`` ids, and build the tables where none are given."""
        if tables is None:
            assert cu_seqlens is not None
            check_cu_seqlens(cu_seqlens, batch=batch, device=device)
            tables = resolve("build_tables", device)(cu_seqlens, tokens, 64)
        elif not isinstance(tables, ChunkTables):
            raise error("argument", f"tables is {type(tables).__name__}; graphsafe.ChunkTables is needed")
        else:
            check_cu_seqlens(tables.cu_seqlens, batch=batch, device=device)
        return cls(tokens, tables, use_graph)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """``[N + 1]``."""
        return self.tables.cu_seqlens

    @functools.cached_property
    def segments(self) -> torch.Tensor:
        """The sequence of each row, N for padding: int64 ``[T]``."""
        rows = torch.arange(self.tokens, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens[1:], rows, right=True)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Each row's place in its sequence: int64 ``[1, T]``."""
        rows = torch.arange(self.tokens, device=self.cu_seqlens.device)
        return (rows - self.cu_seqlens.long()[self.segments])[None]

    @functools.cached_property
    def covering(self) -> torch.Tensor:
        """``cu_seqlens`` with padding as one more sequence: int32 ``[N + 2]``, from 0 to T."""
        end = torch.full((1,), self.tokens, device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.cat([self.cu_seqlens.int(), end])

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """Which row may attend to which: bool ``[1, 1, T, T]``, causal within a sequence."""
        same = self.segments[:, None] == self.segments[None, :]
        return same.tril()[None, None]

    def mask_within(self, window: int | None) -> torch.Tensor:
        """The mask; with a window, of the row itself and the ``window - 1`` rows before it."""
        if window is None:
            return self.mask
        if window not in self._windows:
            self._windows[window] = self.mask.triu(1 - window)
        return self._windows[window]
