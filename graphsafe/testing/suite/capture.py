"""Capture once, replay many: forward, backward and optimizer, for bodies of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphsafe.errors import BackendError
from graphsafe.testing.suite.bodies import BODIES
from graphsafe.testing.suite.checks import ProcessState, captured, clone, data, refused, same

__all__ = ["CaptureSuite"]

_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]


class CaptureSuite:
    """Statements of the contract's sections Capture and Replay about a single graph."""

    @pytest.mark.parametrize("name", BODIES)
    def test_a_replay_writes_what_eager_writes(self, runtime: Any, name: str) -> None:
        body = BODIES[name](runtime)
        before = clone(runtime, body.state)
        graph, result = captured(runtime, body.run)
        same(runtime, body.state, before, "state after capture")
        for seed in range(1, 4):
            for i, x in enumerate(body.inputs):
                with torch.no_grad():
                    x.copy_(data(runtime, *x.shape, seed=10 * seed + i, dtype=x.dtype))
            before = clone(runtime, body.state)
            eager = clone(runtime, body.run())
            after = clone(runtime, body.state)
            for t, old in zip(body.state, before, strict=True):
                t.copy_(old)
            graph.poison()
            graph.replay()
            same(runtime, result, eager, f"{name}, seed {seed}")
            same(runtime, body.state, after, f"state of {name}, seed {seed}")

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_every_dtype_replays(self, runtime: Any, dtype: torch.dtype) -> None:
        x = data(runtime, 7, dtype=torch.float32).mul(3).to(dtype)
        graph, result = captured(runtime, lambda: (x.clone(), torch.stack([x, x]), x == x))
        x.copy_(data(runtime, 7, seed=1).mul(3).to(dtype))
        graph.replay()
        same(runtime, result, (x, torch.stack([x, x]), torch.ones_like(x, dtype=torch.bool)))

    def test_a_replay_writes_into_the_same_memory(self, runtime: Any) -> None:
        x = data(runtime, 4)
        graph, y = captured(runtime, lambda: x * 2)
        address = y.data_ptr()
        for value in (1.0, 5.0):
            x.fill_(value)
            graph.replay()
            runtime.synchronize()
            assert y.data_ptr() == address
            assert y.tolist() == [2 * value] * 4

    def test_replays_of_the_same_data_write_the_same_bits(self, runtime: Any) -> None:
        x = data(runtime, 33, 17)
        graph, y = captured(runtime, lambda: torch.softmax(x @ x.t(), -1).cumsum(0))
        graph.replay()
        first = clone(runtime, y)
        for _ in range(3):
            graph.poison()
            graph.replay()
            same(runtime, y, first)

    def test_a_capture_has_no_effect_until_it_is_replayed(self, runtime: Any) -> None:
        total = torch.zeros(3, device=runtime.device)
        graph, _ = captured(runtime, lambda: total.add_(1))
        runtime.synchronize()
        assert total.tolist() == [0, 0, 0]
        graph.replay()
        runtime.synchronize()
        assert total.tolist() == [1, 1, 1]

    def test_a_host_value_stays_what_it_was_at_the_capture(self, runtime: Any) -> None:
        x, scale = data(runtime, 4), [2.0]
        graph, y = captured(runtime, lambda: x * scale[0])
        scale[0] = 3.0
        graph.replay()
        same(runtime, y, x * 2.0)

    def test_a_name_bound_to_another_tensor_is_ignored(self, runtime: Any) -> None:
        held = {"x": data(runtime, 4)}
        original = held["x"]
        graph, y = captured(runtime, lambda: held["x"] * 2)
        held["x"] = data(runtime, 4, seed=1)
        graph.replay()
        same(runtime, y, original * 2)

    def test_names_of_the_block_are_outputs_without_being_declared(self, runtime: Any) -> None:
        x = data(runtime, 4)
        runtime.warm_up(lambda: x * 2)
        with runtime.capture() as graph:
            y = x * 2
            parts = {"sum": [y.sum()]}
        x.fill_(1.0)
        graph.replay()
        runtime.synchronize()
        assert y.tolist() == [2.0] * 4
        same(runtime, parts["sum"][0], y.sum())

    def test_outputs_returns_what_it_is_given(self, runtime: Any) -> None:
        x = data(runtime, 4)
        with runtime.capture() as graph:
            one = graph.outputs(x + 1)
            two = graph.outputs(x + 2, {"c": x + 3})
        graph.replay()
        same(runtime, one, x + 1)
        same(runtime, two, (x + 2, {"c": x + 3}))
        refused("out-of-order", graph.outputs, x)

    def test_a_graph_tells_its_launches_and_bytes(self, runtime: Any) -> None:
        x = data(runtime, 64)
        graph, _ = captured(runtime, lambda: (x * 2) + 1)
        assert graph.launches >= 1
        assert graph.pool_bytes >= x.numel() * x.element_size()

    @pytest.mark.parametrize("shared", [False, True], ids=["own pools", "shared pool"])
    def test_two_graphs_of_one_shape_are_independent(self, runtime: Any, shared: bool) -> None:
        x = data(runtime, 8)
        first, y = captured(runtime, lambda: (x * 2).cumsum(0))
        second, z = captured(runtime, lambda: (x * 3).cumsum(0), pool=first if shared else None)
        for seed in range(1, 4):
            x.copy_(data(runtime, 8, seed=seed))
            first.replay()
            old = clone(runtime, y)
            x.copy_(data(runtime, 8, seed=seed + 10))
            second.replay()
            same(runtime, y, old, "the first graph's result")
            same(runtime, z, (x * 3).cumsum(0), "the second graph's result")
            first.replay()
            same(runtime, y, (x * 2).cumsum(0), "the first graph again")
        first.close()
        second.replay()
        same(runtime, z, (x * 3).cumsum(0), "the second graph, after the first was closed")

    def test_two_calls_in_one_graph_do_not_share_memory(self, runtime: Any) -> None:
        x = data(runtime, 8)

        def once(factor: float) -> torch.Tensor:
            return (x * factor).exp().sum(0, keepdim=True)

        graph, (a, b) = captured(runtime, lambda: (once(1.0), once(2.0)))
        graph.replay()
        same(runtime, (a, b), (once(1.0), once(2.0)))

    def test_warm_up_returns_the_result_and_puts_state_back(self, runtime: Any) -> None:
        total = torch.zeros(3, device=runtime.device)
        p = torch.nn.Parameter(data(runtime, 3))
        state = ProcessState(runtime, total=total, p=p)

        def body() -> torch.Tensor:
            (p * torch.rand(3, device=p.device)).sum().backward()
            return total.add_(1) * 2

        result = runtime.warm_up(body, iterations=2)
        same(runtime, result, torch.full((3,), 4.0, device=runtime.device))
        assert p.grad is None
        del result
        state.check()

    def test_an_eager_failure_is_told_apart_from_a_captures(self, runtime: Any) -> None:
        def body() -> None:
            raise ValueError("seven")

        problem = refused("eager-failed", runtime.warm_up, body)
        assert isinstance(problem, BackendError)
        assert "ValueError: seven" in str(problem)
        assert problem.where is not None
        assert problem.where.function == "body"
        assert problem.where.line == body.__code__.co_firstlineno + 1

    def test_an_error_of_the_body_comes_out_as_it_is(self, runtime: Any) -> None:
        with pytest.raises(ZeroDivisionError, match="by seven"):
            with runtime.capture():
                raise ZeroDivisionError("by seven")

    def test_the_guard_runs_the_rules_and_leaves_no_graph(self, runtime: Any) -> None:
        x = data(runtime, 4)
        state = ProcessState(runtime, x=x)
        with runtime.guard() as graph:
            graph.outputs(x.mul_(2) + 1)
        refused("out-of-order", graph.replay)
        del graph
        state.check()
        with pytest.raises(RuntimeError):
            with runtime.guard():
                x.sum().item()
