"""The model of both examples: a byte-level language model of linear-attention layers, with its states as values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import graphsafe as gs
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention, LayerState

__all__ = ["Block", "ByteModel", "States"]

States = tuple[LayerState, ...]
"""One layer's state after another; row n of each tensor belongs to sequence n."""


class Block(nn.Module):
    """A mixer and an MLP, each behind a norm and beside a residual."""

    def __init__(self, kind: str, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        layer = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}[kind]
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixer = layer(hidden_size=hidden, num_heads=heads, head_dim=width, expand_v=1)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, tables: gs.ChunkTables, state: LayerState | None,
                keep_state: bool) -> tuple[torch.Tensor, LayerState | None]:
        mixed, _, state = self.mixer(self.norm(x), past_key_values=state, use_cache=keep_state, tables=tables,
                                     use_graph=True)
        x = x + mixed
        return x + self.down(F.silu(self.up(self.mlp_norm(x)))), state


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, kind: str = "gdn", hidden: int = 64, layers: int = 2, heads: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(Block(kind, hidden, heads, width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, ids: torch.Tensor, tables: gs.ChunkTables, states: States | None = None,
                keep_states: bool = False) -> tuple[torch.Tensor, States | None]:
        """``ids`` ``[1, T]`` of a packed batch to hidden rows ``[1, T, hidden]``, and the states behind the last rows.

        :meth:`logits` makes logits of them: of every row to train, of each sequence's last to serve.
        """
        x, new = self.embedding(ids), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, tables, None if states is None else states[i], keep_states)
            new.append(state)
        return x, tuple(new) if keep_states else None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to ``[..., 256]``."""
        logits: torch.Tensor = self.head(self.norm(rows))
        return logits

    def zero_states(self, sequences: int) -> States:
        """The states before the first byte of ``sequences`` sequences."""
        return tuple(block.mixer.zero_state(sequences) for block in self.blocks)
