"""Code that knows nothing of graphsafe, written the way such code is usually written. Lines to be found are marked."""

from __future__ import annotations

import itertools
import random

import torch
from torch import nn


class NaiveVarlen(nn.Module):
    """A layer that loops over the sequences of a packed batch."""

    def __init__(self, width=8):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, cu_seqlens):
        bounds = cu_seqlens.tolist()  # FINDS GS101
        parts = []
        for start, end in itertools.pairwise(bounds):
            part = x[:, start:end]  # FINDS GS301
            parts.append(self.proj(part).cumsum(1))
        return torch.cat(parts, 1)


class MaskedVarlen(nn.Module):
    """The same with a mask of fixed shape."""

    def __init__(self, width=8):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, cu_seqlens):
        tokens = torch.arange(x.shape[1])
        sequence = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True)
        same = (sequence[:, None] == sequence[None]) & (tokens[:, None] >= tokens[None])
        return same.to(x.dtype) @ self.proj(x)


class CachedTables(nn.Module):
    """Tables kept for the tensor, or for its shape, as several libraries do."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.cache = {}

    def forward(self, x, cu_seqlens):
        key = id(cu_seqlens) if self.by == "identity" else tuple(cu_seqlens.shape)
        if key not in self.cache:
            self.cache[key] = cu_seqlens.diff().cumsum(0)
        table = self.cache[key]
        return x[:, table - 1].sum(1)  # FINDS GS303


class BuiltTables(nn.Module):
    """Tables built in each run, shared by two uses."""

    def forward(self, x, cu_seqlens):
        table = cu_seqlens.diff().cumsum(0)
        return x[:, table - 1].sum(1) + x[:, table - 1].amax(1)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if grad.norm().item() > 1:  # FINDS GS101
            grad = grad / grad.norm()
        return grad


class Layout:
    def __init__(self, x):
        self.positive = x > 0


class KeepsAnObject(torch.autograd.Function):
    """Keeps a tensor for its backward inside an object of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.layout = Layout(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.where(ctx.layout.positive, grad * 2, 0)


weight = nn.Parameter(torch.ones(4))
weight.grad = torch.zeros(4)


def train(x):
    """A step whose backward reads the host."""
    weight.grad.zero_()
    loss = (Clip.apply(weight * x) * 3).sum()
    loss.backward()
    return loss


def many(x):
    """Several rules at once, one of them in a loop."""
    scale = 1.0
    for _ in range(3):
        scale = scale + x.sum().item()  # FINDS GS101
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])  # FINDS GS103
    noise = random.random()  # FINDS GS304
    positive = x[x > 0]  # FINDS GS102
    x.mul_(2)  # FINDS GS210
    return x * table * noise * scale + positive.sum()


def repeats(x):
    print(x, f"{x.sum():.1f}")  # FINDS GS101
    return x * 2


def repeats_in_a_loop(x):
    for _ in range(3):
        x = x * x.sum().item()  # FINDS GS101
    return x


def asks_whether_it_is_captured(x):
    """As models do whose eager path may read the host, and whose captured path may not."""
    if not torch.cuda.is_current_stream_capturing() and (x == 0).all():
        return x
    return x * 2


def reads_only_when_captured(x):
    return x * x.sum().item() if torch.cuda.is_current_stream_capturing() else x  # FINDS GS101


class Counts(nn.Module):
    """A module whose Python counter takes part in the computation."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls  # FINDS GS301


def allowed(x):
    a = x.sum().item()  # graphsafe: allow GS101 the demonstration reads once, on purpose
    # graphsafe: allow host-read the same, on the line above the code
    b = x.sum().item()
    text = "# graphsafe: allow GS101"
    return x * a * b * len(text)


class Everyday(nn.Module):
    """A block as it is found in most models; nothing in it is wrong."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, width))
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.statistics(self.mlp(x).flatten(0, 1))


def fails(x):
    return x @ torch.ones(3, 3)


def arguments():
    return (torch.arange(4.0) + 1,)


def no_arguments():
    return everyday(torch.ones(2, 3, 8))


everyday = Everyday()


def packed():
    return {"x": torch.randn(1, 9, 8), "cu_seqlens": torch.tensor([0, 2, 6, 9])}


varlen = NaiveVarlen()
