"""Small programs with the faults that lint found in three bodies of code of others (docs/lint.md).

Lines to be found are marked; each has a twin of fixed shapes.
"""

from __future__ import annotations

import torch
from torch import nn


class SplitAttention(nn.Module):
    """Attention inside each sequence: queries, keys and values are cut by lengths that the host reads."""

    def __init__(self, width=8):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, cu_seqlens):
        qkv = self.qkv(x)
        lengths = cu_seqlens.diff()
        cut = qkv.split(lengths.tolist(), 1)  # FINDS GS101  # FINDS GS301
        done = []
        for part in cut:
            q, k, v = part.chunk(3, -1)
            done.append(torch.softmax(q @ k.mT, -1) @ v)
        return torch.cat(done, 1)


class MaskedAttention(SplitAttention):
    """The same with a mask of fixed shape."""

    def forward(self, x, cu_seqlens):
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1], device=x.device).to(cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens, at, right=True)
        scores = (q @ k.mT).masked_fill(sequence[:, None] != sequence[None], float("-inf"))
        return torch.softmax(scores, -1) @ v


def grid_boundaries(grid):
    """Boundaries of frames, ``grid`` ``[images, 3]`` of frames, height, width; positions one image after another."""
    frames = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])  # FINDS GS102
    scale = torch.tensor([2])  # FINDS GS103
    rows = []
    for _, height, width in grid.tolist():  # FINDS GS101
        rows.append(torch.arange(height).repeat_interleave(width))
    return frames.cumsum(0), torch.cat(rows) // scale


def grid_boundaries_of_a_capacity(grid, places):
    """The same for at most ``places`` frames in all, one image after another."""
    ends = grid[:, 0].cumsum(0)
    image = torch.searchsorted(ends, torch.arange(places, device=grid.device), right=True)
    live = image < grid.shape[0]
    area = (grid[:, 1] * grid[:, 2]).gather(0, image.clamp(max=grid.shape[0] - 1))
    return torch.where(live, area, torch.zeros_like(area)).cumsum(0)


class GraphLayer(nn.Module):
    """Messages along edges, then one mean a graph; how many graphs there are is read from the data."""

    def __init__(self, width=8):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, edges, batch):
        apart = edges[0] != edges[1]
        edges = edges[:, apart]  # FINDS GS102
        x = x.index_add(0, edges[1], self.proj(x)[edges[0]])
        graphs = int(batch.max()) + 1  # FINDS GS101
        return x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)


class PaddedGraphLayer(GraphLayer):
    """The same for a fixed number of graphs, self loops masked."""

    def forward(self, x, edges, batch, graphs=3):
        apart = (edges[0] != edges[1]).to(x.dtype)
        x = x.index_add(0, edges[1], self.proj(x)[edges[0]] * apart[:, None])
        return x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
