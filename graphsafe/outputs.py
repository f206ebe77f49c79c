"""Which dimensions of a captured function's results follow the batch.

Requirements
------------
1. Found by running the function at a second capacity, different by amounts that cannot be confused, and comparing
   shapes: a size that merely equals the bucket's is never taken for it. The second has fewer tokens where it can: a
   body may own a buffer that ends at the bucket's capacity.
2. A dimension that is longer or shorter than the batch by a constant (``[N + 1]`` boundaries) stays so.
3. What a bound tensor pins to the bucket's capacity cannot be varied: such results keep the capacity's size.
4. The extra run is part of the warm-up: what it changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import error
from graphsafe.tree import leaves, map_leaves

__all__ = ["OutputPlan"]

_OTHER_CHUNKS = 2
_MORE_SEQUENCES = 3
# With BT tokens a chunk, the tokens differ by 2 BT (even) and the slots by -2 + 3 or 2 + 3 (odd): never by the same.


@dataclass(frozen=True)
class OutputPlan:
    """By output path: (dimension, "tokens" or "sequences", how much longer than the batch) of what follows it."""

    axes: dict[str, tuple[tuple[int, str, int], ...]]

    @classmethod
    def probe(
        cls,
        runtime: Any,
        run_at: Callable[[Bucket], Any],
        body: Callable[[], Any],
        bucket: Bucket | None,
        pinned: set[str],
        *,
        keep: Callable[[], Sequence[torch.Tensor]] | None,
        iterations: int,
    ) -> OutputPlan:
        """Warm ``body`` up, and ``run_at`` another bucket where there is one; compare the shapes of their results.

        ``pinned``: "tokens" or "sequences" where a bound tensor has the bucket's size.
        """
        shapes = _shapes(runtime.warm_up(body, iterations=iterations, keep=keep))
        more = 0 if "sequences" in pinned else _MORE_SEQUENCES
        # without more tokens, or with one token a chunk and no more sequences, slots cannot be told apart
        if bucket is None or "tokens" in pinned or (not more and bucket.chunk_size == 1):
            return cls({})
        step = _OTHER_CHUNKS * bucket.chunk_size
        tokens = bucket.tokens - step if bucket.tokens > step else bucket.tokens + step
        other = Bucket(tokens, bucket.sequences + more, bucket.chunk_size)
        shapes_there = _shapes(runtime.warm_up(lambda: run_at(other), keep=keep))
        if {p: len(s) for p, s in shapes.items()} != {p: len(s) for p, s in shapes_there.items()}:
            raise error("structure", f"the function's results differ in number or rank between {bucket} and {other}")
        follows = {tokens - bucket.tokens: ("tokens", bucket.tokens)}
        if more:
            follows[more] = ("sequences", bucket.sequences)
        return cls(
            {
                path: tuple(
                    (dim, follows[there - here][0], here - follows[there - here][1])
                    for dim, (here, there) in enumerate(zip(shape, shapes_there[path], strict=True))
                    if there - here in follows
                )
                for path, shape in shapes.items()
            }
        )

    def cut(self, result: Any, tokens: int, sequences: int) -> Any:
        """Views of the results at the batch's own size."""
        size = {"tokens": tokens, "sequences": sequences}

        def narrow(path: str, leaf: Any) -> Any:
            for dim, kind, longer in self.axes.get(path, ()):
                leaf = leaf.narrow(dim, 0, max(size[kind] + longer, 0))
            return leaf

        return map_leaves(narrow, result, "output")


def _shapes(result: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in leaves(result, "output") if isinstance(leaf, torch.Tensor)}
