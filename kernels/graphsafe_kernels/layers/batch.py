"""How a layer's batch is laid out: dense, packed, or packed here from an attention mask.

Requirements
------------
1. An explicit ``cu_seqlens`` wins over an attention mask; ``tables`` bring their own.
2. Padding reaches no parameter: the weight gradient of a linear layer sums over all rows, and NaN times zero is NaN. So
   where gradients are wanted padding rows are cleared, in the input as it enters, and in the output's gradient as it
   comes back: one launch each. The other two ways need none: the operators make padding rows exact zeros, and a
   projection without a bias keeps them so.
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
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries

__all__ = ["Batch", "cleared"]


class _ClearInput(torch.autograd.Function):
    """x with its padding cleared; padding rows of the gradient are zero as they come."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        copy: torch.Tensor = resolve("clear_padding", x.device)(x, cu_seqlens)
        return copy

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _ClearGradient(torch.autograd.Function):
    """y, whose padding rows are zero as they come; those of its gradient are cleared."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        ctx.boundaries = SavedBoundaries("the layer", cu_seqlens)
        return y.view_as(y)

    @staticmethod
    @first_order_only("a layer")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return resolve("clear_padding", dy.device)(dy, ctx.boundaries.get()), None


def cleared(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` ``[1, T, D]`` with zeros behind the live total, there and in its gradient."""
    copy: torch.Tensor = _ClearInput.apply(_ClearGradient.apply(x, cu_seqlens), cu_seqlens)
    return copy


@dataclass(frozen=True)
class Batch:
    """The layout of one call; all None for a dense batch.

    ``cu_seqlens`` ``[N + 1]``; ``tables`` of the same batch; ``kept`` ``[live]``, the rows of the flattened ``[B, T]``
    batch that an attention mask kept; ``shape`` (B, T) as the caller passed it; ``padded``: rows behind the live total
    are to be kept out.
    """

    shape: tuple[int, int]
    use_graph: bool
    cu_seqlens: torch.Tensor | None = None
    tables: ChunkTables | None = None
    padded: bool = False
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
            return cls((batch, tokens), use_graph, cu_seqlens, tables, padded=True)
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
        if not (self.padded and torch.is_grad_enabled()):
            return hidden_states
        # the operators leave the gradient's padding rows zero
        copy: torch.Tensor = _ClearInput.apply(hidden_states, self.cu_seqlens)
        return copy

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`enter`; rows that belong to nobody are zero."""
        if self.kept is not None:
            rows = output.new_zeros(self.shape[0] * self.shape[1], output.shape[-1])
            return rows.index_copy(0, self.kept, output[0]).view(*self.shape, -1)
        if not (self.padded and output.requires_grad):
            return output
        guarded: torch.Tensor = _ClearGradient.apply(output, self.cu_seqlens)
        return guarded

    def operator_arguments(self) -> dict[str, Any]:
        """The keyword arguments that tell a convolution or chunk operator about this batch."""
        arguments: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "use_graph": self.use_graph}
        if self.tables is not None:
            arguments |= {"max_num_seqs": self.tables.max_num_seqs, "chunk_indices": self.tables.chunk_indices,
                          "chunk_offsets": self.tables.chunk_offsets, "chunk_size": self.tables.chunk_size}
        return arguments
