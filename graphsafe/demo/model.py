"""A small byte-level language model of linear-attention layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphsafe.demo.corpus import IGNORED, Batch
from graphsafe.metadata import ChunkTables

__all__ = ["ByteModel", "loss_of"]

_BYTES = 256


class ByteModel(nn.Module):
    """Embedding, two layers of ``kind`` (``"gdn"`` or ``"kda"``) with residuals, and a head over 256 bytes."""

    def __init__(self, kind: str, hidden: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.layers = nn.ModuleList(_layer(kind, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, _BYTES, bias=False)

    def forward(self, batch: Batch, tables: ChunkTables) -> torch.Tensor:
        """Logits ``[1, T, 256]`` of the next byte."""
        x = self.embedding(batch.ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            mixed, _, _ = layer(norm(x), cu_seqlens=batch.cu_seqlens, tables=tables, use_graph=True)
            x = x + mixed
        return self.head(x)  # type: ignore[no-any-return]


def _layer(kind: str, hidden: int) -> nn.Module:
    from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

    shape: dict[str, Any] = {"hidden_size": hidden, "head_dim": 16, "num_heads": 2}
    made: nn.Module = GatedDeltaNet(expand_v=2, **shape) if kind == "gdn" else KimiDeltaAttention(expand_v=1, **shape)
    return made


def loss_of(model: nn.Module, batch: Batch, tables: ChunkTables) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats, over the positions that have one."""
    logits = model(batch, tables)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
