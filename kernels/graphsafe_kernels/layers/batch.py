"""How a layer's batch is laid out: dense, packed, or packed here from an attention mask.

Requirements
------------
1. An explicit ``cu_seqlens`` wins over an attention mask; ``tables`` bring their own.
2. Padding rows of a packed batch are cleared as they enter and as they leave, so that neither what they hold nor the
   gradient that arrives for them reaches a parameter: the weight gradient of a linear layer sums over all rows, and
   NaN times zero is NaN.
3. Only an attention mask reads the device from the host, and graph mode refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.contract import check_cu_seqlens, check_tensor
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import resolve
from graphsafe_kernels.reference.rows import padding_rows

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """The layout of one call; all None for a dense batch.

    ``cu_seqlens`` ``[N + 1]``; ``tables`` of the same batch; ``padding`` bool ``[1, T, 1]``, True behind the live
    total; ``kept`` ``[live]``, the rows of the flattened ``[B, T]`` batch that an attention mask kept; ``shape`` (B, T)
    as the caller passed it.
    """

    shape: tuple[int, int]
    use_graph: bool
    cu_seqlens: torch.Tensor | None = None
    tables: ChunkTables | None = None
    padding: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    @classmethod
    def of(cls, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
           tables: ChunkTables | None, use_graph: bool, chunked: bool) -> Batch:
        """Check the description of a batch ``[B, T, hidden]`` and work out its layout; ``chunked`` needs tables."""
        batch, tokens = int(hidden_states.shape[0]), int(hidden_states.shape[1])
        if tables is not None:
            if not isinstance(tables, ChunkTables):
                raise error("argument", f"tables is {type(tables).__name__}; graphsafe.ChunkTables is needed")
            cu_seqlens = tables.cu_seqlens if cu_seqlens is None else cu_seqlens
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, batch=batch, device=hidden_states.device)
            if tables is None and chunked:
                tables = resolve("build_tables", hidden_states.device)(cu_seqlens, tokens, 64)
            padding = padding_rows(cu_seqlens, tokens)[None, :, None]
            return cls((batch, tokens), use_graph, cu_seqlens, tables, padding)
        if attention_mask is None:
            return cls((batch, tokens), use_graph)
        if use_graph:
            raise error("unsupported", "attention_mask was passed with use_graph=True",
                        why="Dropping masked tokens gives a shape that depends on data.",
                        remedy="Pack the batch outside the graph and pass cu_seqlens.")
        check_tensor("attention_mask", attention_mask, shape=(batch, None), device=hidden_states.device)
        if attention_mask.shape[1] < tokens:
            raise error("argument", f"attention_mask has {attention_mask.shape[1]} columns for {tokens} tokens")
        # with cached tokens the mask covers them too; the last columns are this call's
        mask = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
        ends = mask.sum(1).cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends])
        return cls((batch, tokens), use_graph, cu_seqlens, kept=mask.flatten().nonzero().flatten())

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Clear padding, or drop masked rows: ``[B, T, hidden]`` to what the layer computes on."""
        if self.kept is not None:
            return hidden_states.flatten(0, 1).index_select(0, self.kept)[None]
        return hidden_states if self.padding is None else hidden_states.masked_fill(self.padding, 0)

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`enter`; rows that belong to nobody are zero."""
        if self.kept is not None:
            rows = output.new_zeros(self.shape[0] * self.shape[1], output.shape[-1])
            return rows.index_copy(0, self.kept, output[0]).view(*self.shape, -1)
        return output if self.padding is None else output.masked_fill(self.padding, 0)

    def operator_arguments(self) -> dict[str, Any]:
        """The keyword arguments that tell a convolution or chunk operator about this batch."""
        arguments: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "use_graph": self.use_graph}
        if self.tables is not None:
            arguments |= {"max_num_seqs": self.tables.max_num_seqs, "chunk_indices": self.tables.chunk_indices,
                          "chunk_offsets": self.tables.chunk_offsets, "chunk_size": self.tables.chunk_size}
        return arguments
