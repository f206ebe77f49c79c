"""Which dimensions of a captured function's results follow the batch.

Requirements
------------
1. Found by running the function at a second capacity, larger by amounts that cannot be confused, and comparing shapes:
   a size that merely equals the bucket's is never taken for it.
2. The extra run is part of the warm-up: what it changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.bucket import Bucket
from graphsafe.tree import leaves, map_leaves

__all__ = ["OutputPlan"]

_MORE_SEQUENCES = 3


@dataclass(frozen=True)
class OutputPlan:
    """By output path: (dimension, "tokens" or "sequences") pairs."""

    axes: dict[str, tuple[tuple[int, str], ...]]

    @classmethod
    def probe(
        cls,
        runtime: Any,
        run_at: Callable[[Bucket], Any],
        body: Callable[[], Any],
        bucket: Bucket | None,
        *,
        keep: Callable[[], Sequence[torch.Tensor]] | None,
        iterations: int,
    ) -> OutputPlan:
        """Warm ``body`` up, and ``run_at`` a larger bucket where there is one; compare the shapes of their results."""
        shapes = _shapes(runtime.warm_up(body, iterations=iterations, keep=keep))
        if bucket is None:
            return cls({})
        grown = Bucket(bucket.tokens + bucket.chunk_size, bucket.sequences + _MORE_SEQUENCES, bucket.chunk_size)
        larger = _shapes(runtime.warm_up(lambda: run_at(grown), keep=keep))
        follows = {bucket.chunk_size: "tokens", _MORE_SEQUENCES: "sequences"}
        return cls(
            {
                path: tuple(
                    (d, follows[b - a])
                    for d, (a, b) in enumerate(zip(shape, larger[path], strict=True))
                    if b - a in follows
                )
                for path, shape in shapes.items()
            }
        )

    def cut(self, result: Any, tokens: int, sequences: int) -> Any:
        """Views of the results at the batch's own size."""
        size = {"tokens": tokens, "sequences": sequences}

        def narrow(path: str, leaf: Any) -> Any:
            for dim, kind in self.axes.get(path, ()):
                leaf = leaf.narrow(dim, 0, size[kind])
            return leaf

        return map_leaves(narrow, result, "output")


def _shapes(result: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in leaves(result, "output") if isinstance(leaf, torch.Tensor)}
