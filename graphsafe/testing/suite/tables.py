"""Chunk tables: built on the device from cu_seqlens alone, inside the graph, anew at each replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphsafe.bucket import Bucket, slot_count
from graphsafe.metadata import SENTINEL, build_tables
from graphsafe.testing.layouts import boundaries, layouts, naive_tables
from graphsafe.testing.suite.checks import captured, same

__all__ = ["TablesSuite"]

_BUCKETS = [Bucket(96, 5, 16), Bucket(130, 7, 64), Bucket(1, 1, 16), Bucket(64, 1, 64)]


class TablesSuite:
    """The contract's section Tables."""

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("bucket", _BUCKETS, ids=str)
    def test_replayed_tables_equal_those_of_a_host(self, runtime: Any, bucket: Bucket, dtype: torch.dtype) -> None:
        bound = runtime.tables(bucket)
        cu = boundaries([bucket.tokens], device=runtime.device, dtype=dtype, sequences=bucket.sequences)

        def build() -> tuple[torch.Tensor, torch.Tensor]:
            tables = bound.build(cu)
            return tables.chunk_indices, tables.chunk_offsets

        graph, (indices, offsets) = captured(runtime, build)
        assert indices.shape == (bucket.slots, 2)
        assert offsets.shape == (bucket.sequences + 1,)
        assert indices.dtype == offsets.dtype == dtype
        for seed, lengths in enumerate(layouts(24, bucket.tokens, bucket.sequences)):
            cu.copy_(boundaries(lengths, device=runtime.device, dtype=dtype, sequences=bucket.sequences))
            graph.poison()
            graph.replay()
            runtime.synchronize()
            want = naive_tables(lengths, bucket.tokens, bucket.sequences, bucket.chunk_size)
            got = (indices.tolist(), offsets.tolist())
            assert got == want, f"layout {seed}: {lengths}"

    @pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
    def test_the_devices_builder_equals_the_definition(self, runtime: Any, chunk_size: int) -> None:
        bucket = Bucket(200, 6, chunk_size)
        for lengths in layouts(16, bucket.tokens, bucket.sequences, seed=50):
            cu = boundaries(lengths, device=runtime.device, sequences=bucket.sequences)
            got = runtime.tables(bucket).build(cu)
            want = build_tables(cu, bucket.tokens, chunk_size)
            same(runtime, got, want, f"{lengths}")
            assert got.slots == slot_count(bucket.tokens, bucket.sequences, chunk_size)

    def test_unused_slots_hold_the_sentinel(self, runtime: Any) -> None:
        bucket = Bucket(64, 4, 16)
        tables = runtime.tables(bucket).build(boundaries([0], device=runtime.device, sequences=4))
        runtime.synchronize()
        assert tables.chunk_indices.tolist() == [list(SENTINEL)] * bucket.slots
        assert tables.chunk_offsets.tolist() == [0] * 5

    def test_tables_follow_the_contents_not_the_identity(self, runtime: Any) -> None:
        bucket = Bucket(64, 4, 16)
        cu = boundaries([64], device=runtime.device, sequences=4)
        for lengths in ([64], [1, 2, 3, 4], [0, 0, 0, 64], [16, 16, 16, 16]):
            cu.copy_(boundaries(lengths, device=runtime.device, sequences=4))
            tables = runtime.tables(bucket).build(cu)
            runtime.synchronize()
            got = (tables.chunk_indices.tolist(), tables.chunk_offsets.tolist())
            assert got == naive_tables(lengths, 64, 4, 16)

    def test_one_build_serves_every_layer(self, runtime: Any) -> None:
        bucket = Bucket(64, 4, 16)
        cu = boundaries([64], device=runtime.device, sequences=4)

        def body() -> list[torch.Tensor]:
            tables = runtime.tables(bucket).build(cu)
            return [tables.chunk_indices[:, 1] + layer for layer in range(3)]

        graph, results = captured(runtime, body)
        cu.copy_(boundaries([20, 0, 30], device=runtime.device, sequences=4))
        graph.replay()
        want = torch.tensor(naive_tables([20, 0, 30], 64, 4, 16)[0], dtype=torch.int32)[:, 1].to(runtime.device)
        same(runtime, results, [want + layer for layer in range(3)])
