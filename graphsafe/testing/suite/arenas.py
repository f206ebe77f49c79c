"""The arena: static tensors by name, updated in place, priced, sealed, watched by canaries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import LifetimeError, PaddingError
from graphsafe.testing.layouts import boundaries
from graphsafe.testing.poison import watched_arena
from graphsafe.testing.suite.checks import captured, data, refused, same

__all__ = ["ArenaSuite"]

_BUCKET = Bucket(64, 4, 16)
_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64]


class ArenaSuite:
    """Memory that a graph reads."""

    def test_each_kind_has_the_buckets_shape(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            assert arena.tokens("q", (2, 3), torch.float32).shape == (1, 64, 2, 3)
            assert arena.sequences("state", (2,), torch.float32).shape == (4, 2)
            assert arena.slots("partial", (5,), torch.float32).shape == (_BUCKET.slots, 5)
            assert arena.cu_seqlens().shape == (5,)
            assert arena.cu_seqlens(torch.int64, name="other").dtype == torch.int64
            assert arena.tensor("w", (3,), torch.float32).shape == (3,)
            assert list(arena) == ["q", "state", "partial", "cu_seqlens", "other", "w"]
            assert "q" in arena
            assert "x" not in arena

    def test_a_tensor_keeps_its_address(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)
            address = x.data_ptr()
            for rows in (64, 3, 0):
                arena.update(x=data(runtime, 1, rows, 2))
                assert arena["x"] is x
                assert x.data_ptr() == address
            assert arena.holds(x.view(-1)[3:]) == "x"
            assert arena.holds(data(runtime, 2)) is None

    @pytest.mark.parametrize("pad", [0.0, math.nan, 7.0], ids=str)
    @pytest.mark.parametrize("dirty", [False, True], ids=["after an update", "after a write past it"])
    def test_what_a_smaller_batch_leaves_free_is_padding(self, runtime: Any, pad: float, dirty: bool) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32, pad=pad)
            state = arena.sequences("state", (2,), torch.float32, pad=pad)
            for rows, n in ((64, 4), (10, 1), (33, 3), (0, 2)):
                new = {"x": data(runtime, 1, rows, 2, seed=rows), "state": data(runtime, n, 2, seed=n)}
                if dirty:
                    x.fill_(5.0)
                    state.fill_(5.0)
                arena.update(new)
                same(runtime, x[:, :rows], new["x"])
                same(runtime, state[:n], new["state"])
                same(runtime, x[:, rows:], torch.full_like(x[:, rows:], pad), f"tail behind {rows}")
                same(runtime, state[n:], torch.full_like(state[n:], pad), f"states behind {n}")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_boundaries_are_continued_by_empty_sequences(self, runtime: Any, dtype: torch.dtype) -> None:
        with runtime.arena(_BUCKET) as arena:
            cu = arena.cu_seqlens(dtype)
            for lengths in ([64], [1, 2, 3, 4], [0, 5], [0]):
                arena.update(cu_seqlens=boundaries(lengths, device=runtime.device, dtype=dtype))
                runtime.synchronize()
                assert cu.tolist() == boundaries(lengths, sequences=4).tolist()

    def test_a_wrong_value_is_refused_and_nothing_is_written(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)
            y = arena.tensor("y", (3,), torch.float32)
            cu = arena.cu_seqlens()
            good = data(runtime, 1, 5, 2)
            wrong: dict[str, list[dict[str, Any]]] = {
                "structure": [
                    {"y": data(runtime, 4)}, {"y": data(runtime, 3).double()}, {"y": 1.0}, {"x": data(runtime, 5, 2)},
                    {"x": data(runtime, 1, 5, 3)}, {"cu_seqlens": torch.zeros(1, dtype=torch.int32, device=cu.device)},
                    {"cu_seqlens": torch.zeros(5, device=cu.device)},
                ],
                "capacity": [
                    {"x": data(runtime, 1, 65, 2)}, {"cu_seqlens": torch.zeros(6, dtype=torch.int32, device=cu.device)},
                ],
                "argument": [{"z": good}],
            }  # fmt: skip
            for rule, values in wrong.items():
                for value in values:
                    refused(rule, arena.update, {"x": good, **value})
            same(runtime, (x, y, cu), (torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(cu)))

    def test_a_name_is_given_once(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            arena.tokens("x", (2,), torch.float32)
            problem = refused("argument", arena.tensor, "x", (3,), torch.float32)
            assert "test_a_name_is_given_once" in problem.what, "the place of the first is missing"

    def test_a_sealed_arena_does_not_grow(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)
            arena.seal()
            problem = refused("arena-sealed", arena.tokens, "y", (2,), torch.float32)
            assert isinstance(problem, LifetimeError)
            arena.update(x=data(runtime, 1, 64, 2))
            same(runtime, x, data(runtime, 1, 64, 2))
            assert list(arena) == ["x"]

    def test_an_arena_does_not_grow_inside_a_capture(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)

            def grow() -> None:
                with runtime.capture():
                    arena.tokens("y", (2,), torch.float32).copy_(x)

            refused("arena-sealed", grow)
            assert list(arena) == ["x"]

    def test_nothing_is_handed_out_after_close(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            arena.tokens("x", (2,), torch.float32)
        arena.close()
        for use in (
            lambda: arena["x"], lambda: arena.update(x=data(runtime, 1, 1, 2)),
            lambda: arena.tensor("y", (1,), torch.float32), arena.seal,
        ):  # fmt: skip
            refused("arena-closed", use)

    @pytest.mark.parametrize("canaries", [False, True], ids=["bare", "canaries"])
    def test_the_price_is_the_bytes(self, runtime: Any, canaries: bool) -> None:
        with runtime.arena(_BUCKET, canaries=canaries) as arena:
            for i, dtype in enumerate(_DTYPES):
                arena.tokens(f"t{i}", (3,), dtype)
                arena.tensor(f"f{i}", (i,), dtype)
            arena.tensor("scalar", (), torch.float32)
            arena.cu_seqlens()
            assert arena.price().bytes == arena.bytes
            assert arena.price().bytes == sum(arena[n].numel() * arena[n].element_size() for n in arena)

    def test_the_memory_is_the_price_and_comes_back(self, runtime: Any) -> None:
        runtime.synchronize()
        before = runtime.memory().held
        arena = runtime.arena(_BUCKET)
        arena.tokens("x", (128,), torch.float32)
        arena.tokens("y", (256,), torch.bfloat16)
        assert runtime.memory().held - before == arena.price().bytes
        arena.close()
        assert runtime.memory().held == before

    @pytest.mark.parametrize("side", ["before", "after"])
    def test_a_write_past_a_tensor_is_named(self, runtime: Any, side: str) -> None:
        with runtime.arena(_BUCKET, canaries=True) as arena:
            arena.tensor("left", (3,), torch.float32)
            x = arena.tensor("victim", (3,), torch.float32)
            arena.check_canaries()
            x.as_strided((1,), (1,), x.storage_offset() + (3 if side == "after" else -1)).fill_(1.0)
            runtime.synchronize()
            with pytest.raises(PaddingError, match=f"{side} the arena's tensor 'victim'"):
                arena.check_canaries()

    def test_a_replay_between_canaries(self, runtime: Any) -> None:
        with watched_arena(runtime, _BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)
            y = arena.tokens("y", (2,), torch.float32)
            graph, _ = captured(runtime, lambda: y.copy_(x * 2))
            arena.update(x=data(runtime, 1, 20, 2))
            graph.replay()
            same(runtime, y, x * 2)

    def test_an_update_inside_a_capture_is_replayed(self, runtime: Any) -> None:
        with runtime.arena(_BUCKET) as arena:
            x = arena.tokens("x", (2,), torch.float32)
            new = data(runtime, 1, 5, 2)
            graph, y = captured(runtime, lambda: (arena.update(x=new), x * 2)[1])
            new.fill_(3.0)
            graph.replay()
            same(runtime, y[:, :5], new * 2)

    def test_memory_made_in_inference_mode_is_updated_outside_it(self, runtime: Any) -> None:
        with torch.inference_mode():
            arena = runtime.arena(_BUCKET)
            x = arena.tokens("x", (2,), torch.float32)
        arena.update(x=data(runtime, 1, 64, 2))
        same(runtime, x, data(runtime, 1, 64, 2))
        arena.close()
