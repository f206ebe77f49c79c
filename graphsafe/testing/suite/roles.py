"""The roles of the architecture: each object satisfies its protocol, each figure is what it says."""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.arena import StaticArena
from graphsafe.bucket import Bucket
from graphsafe.metadata import ChunkTables, MetadataBuilder
from graphsafe.runtime import CaptureGuard, Event, Graph, GraphRuntime
from graphsafe.testing.suite.checks import captured, data, refused

__all__ = ["RolesSuite"]


class RolesSuite:
    """Who owns what."""

    def test_the_runtime_is_a_graph_runtime(self, runtime: Any) -> None:
        assert isinstance(runtime, GraphRuntime)
        assert isinstance(runtime.name, str)
        assert runtime.name
        assert isinstance(runtime.device, torch.device)
        assert torch.empty(1, device=runtime.device).device.type == runtime.device.type

    def test_a_capture_leaves_a_graph(self, runtime: Any) -> None:
        x = data(runtime, 4)
        graph, _ = captured(runtime, lambda: x * 2)
        assert isinstance(graph, Graph)

    def test_the_guard_is_a_capture_guard(self, runtime: Any) -> None:
        assert isinstance(runtime.guard(), CaptureGuard)

    def test_the_arena_is_a_static_arena_on_the_device(self, runtime: Any) -> None:
        with runtime.arena(Bucket(8)) as arena:
            assert isinstance(arena, StaticArena)
            assert arena.tokens("x", (2,), torch.float32).device.type == runtime.device.type

    def test_the_tables_are_built_by_a_metadata_builder(self, runtime: Any) -> None:
        bound = runtime.tables(Bucket(64, 2))
        assert isinstance(bound.builder, MetadataBuilder)
        cu = torch.tensor([0, 3, 9], dtype=torch.int32).to(runtime.device)
        tables = bound.build(cu)
        assert isinstance(tables, ChunkTables)
        assert (tables.max_num_seqs, tables.slots, tables.chunk_size) == (2, 2, 64)

    def test_memory_counts_live_tensors(self, runtime: Any) -> None:
        runtime.synchronize()
        before = runtime.memory().held
        held = torch.zeros(1 << 18, device=runtime.device)
        figures = runtime.memory()
        assert figures.held - before == 4 << 18
        assert figures.peak >= figures.held
        del held
        assert runtime.memory().held == before

    def test_events_measure_time(self, runtime: Any) -> None:
        first, second = runtime.event(), runtime.event()
        assert isinstance(first, Event)
        first.record()
        data(runtime, 64, 64).mm(data(runtime, 64, 64))
        second.record()
        runtime.synchronize()
        assert first.elapsed_time(second) >= 0

    def test_an_unknown_problem_is_explained_by_its_own_text(self, runtime: Any) -> None:
        assert "no such thing 7431" in runtime.explain(RuntimeError("no such thing 7431"))

    def test_a_pool_of_another_kind_is_refused(self, runtime: Any) -> None:
        def capture() -> None:
            with runtime.capture(pool=object()):
                pass

        refused("argument", capture)
        x = data(runtime, 4)
        captured(runtime, lambda: x + 1)
