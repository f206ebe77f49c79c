"""Packed layouts to test with, and the tables a host would compute for them.

Requirements
------------
1. Deterministic: the same arguments give the same layout on every machine and Python version.
2. Within the capacity: at least one sequence, at most ``sequences``; at most ``tokens`` tokens in all.
3. ``naive_tables`` is written with loops over Python integers, so that it shares nothing with what it checks.
"""

from __future__ import annotations

import random

import torch

__all__ = ["boundaries", "corner_lengths", "layouts", "naive_tables", "random_lengths"]


def random_lengths(seed: int, tokens: int, sequences: int) -> list[int]:
    """The sequence lengths of one random batch; about a quarter of the sequences are empty."""
    draw = random.Random(f"{seed} {tokens} {sequences}")
    n = draw.randint(1, sequences)
    total = tokens if draw.random() < 0.2 else draw.randint(0, tokens)
    cuts = sorted(draw.randint(0, total) for _ in range(n - 1))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    for i in range(n):
        if draw.random() < 0.25:
            lengths[i] = 0
    return lengths


def corner_lengths(tokens: int, sequences: int) -> dict[str, list[int]]:
    """The layouts at the edges, by name."""
    n = sequences
    some = max(tokens // (2 * n), 1)
    ones = [1] * min(n, tokens)
    return {
        "all empty": [0] * n,
        "one empty": [0],
        "one token": [1],
        "one long": [tokens],
        "many short": ones,
        "empty in front": [0] * (n // 2) + ones[: n - n // 2],
        "empty in the middle": [some] + [0] * max(n - 2, 0) + ([some] if n > 1 else []),
        "empty at the end": [some] + [0] * (n - 1),
        "every second empty": [some if i % 2 else 0 for i in range(n)],
        "full": [tokens // n + (i < tokens % n) for i in range(n)],
        "full in the last": [0] * (n - 1) + [tokens],
    }


def layouts(count: int, tokens: int, sequences: int, seed: int = 0) -> list[list[int]]:
    """``count`` layouts: the corners first, then random ones."""
    corners = list(corner_lengths(tokens, sequences).values())[:count]
    return corners + [random_lengths(seed + i, tokens, sequences) for i in range(count - len(corners))]


def boundaries(
    lengths: list[int],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.int32,
    sequences: int | None = None,
) -> torch.Tensor:
    """``cu_seqlens`` of the lengths; with ``sequences``, continued by empty ones to ``[sequences + 1]``."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    if sequences is not None:
        sums += [sums[-1]] * (sequences + 1 - len(sums))
    return torch.tensor(sums, dtype=dtype).to(device)


def naive_tables(lengths: list[int], tokens: int, sequences: int, chunk_size: int) -> tuple[list[list[int]], list[int]]:
    """(chunk_indices, chunk_offsets) of a batch, continued to the capacity."""
    lengths = lengths + [0] * (sequences - len(lengths))
    slots = (tokens + chunk_size - 1) // chunk_size + sequences - 1
    rows: list[list[int]] = []
    offsets = [0]
    for sequence, length in enumerate(lengths):
        chunks = (length + chunk_size - 1) // chunk_size
        rows += [[sequence, chunk] for chunk in range(chunks)]
        offsets.append(len(rows))
    return rows + [[-1, 0]] * (slots - len(rows)), offsets
