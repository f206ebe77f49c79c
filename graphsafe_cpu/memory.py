"""Bytes that tensors hold in this process, counted by storage."""

from __future__ import annotations

import gc

import torch

from graphsafe._storage import key_of

__all__ = ["live_bytes"]


def live_bytes() -> int:
    """The sum over all CPU storages that a Python tensor refers to, each counted once."""
    seen: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type(): some libraries hold proxies whose isinstance() does work or warns
        is_tensor = issubclass(type(candidate), torch.Tensor)
        if is_tensor and candidate.layout is torch.strided and candidate.device.type == "cpu":
            seen[key_of(candidate)] = candidate.untyped_storage().nbytes()
    return sum(seen.values())
