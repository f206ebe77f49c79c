"""One capture at a time; capture, then replay, and nothing after close."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphsafe.errors import GraphSafeError
from graphsafe.testing.suite.checks import ProcessState, Worker, captured, data, refused, same

__all__ = ["OrderSuite"]


class OrderSuite:
    """Rules about time."""

    def test_a_capture_inside_a_capture_is_refused_with_the_place_of_the_first(self, runtime: Any) -> None:
        x = data(runtime, 4)

        def nested() -> None:
            with runtime.capture():
                with runtime.capture():
                    x.mul_(2)

        problem = refused("concurrent-capture", nested)
        assert f"{nested.__code__.co_filename}:{nested.__code__.co_firstlineno + 1}" in problem.what

    def test_the_first_capture_survives_a_second_that_was_refused(self, runtime: Any) -> None:
        x = data(runtime, 4)
        with runtime.capture() as graph:
            with contextlib.suppress(GraphSafeError):
                runtime.capture().__enter__()
            y = x * 2
        graph.replay()
        same(runtime, y, x * 2)

    def test_a_capture_from_another_thread_is_refused(self, runtime: Any) -> None:
        x = data(runtime, 4)
        raised: list[BaseException | None] = []

        def other() -> None:
            with runtime.capture():
                x.mul_(2)

        waiting = Worker(other)
        with runtime.capture() as graph:
            raised.append(waiting.result())
            y = x * 2
        graph.replay()
        same(runtime, y, x * 2)
        assert isinstance(raised[0], GraphSafeError)
        assert raised[0].rule.name == "concurrent-capture"
        assert Worker(other).result() is None

    def test_a_replay_during_a_capture_is_refused(self, runtime: Any) -> None:
        x = data(runtime, 4)
        first, _ = captured(runtime, lambda: x * 2)

        def replay_inside() -> None:
            with runtime.capture():
                first.replay()

        refused("out-of-order", replay_inside)
        waiting = Worker(first.replay)
        with runtime.capture() as second:
            raised = waiting.result()
            second.outputs(x * 3)
        assert isinstance(raised, GraphSafeError)
        assert raised.rule.name == "out-of-order"
        first.replay()

    def test_a_graph_cannot_replay_itself_while_it_is_captured(self, runtime: Any) -> None:
        def replay_itself() -> None:
            with runtime.capture() as graph:
                graph.replay()

        assert "capturing" in str(refused("out-of-order", replay_itself))

    def test_a_warm_up_during_a_capture_is_refused(self, runtime: Any) -> None:
        x = data(runtime, 4)

        def warm_up_inside() -> None:
            with runtime.capture():
                runtime.warm_up(lambda: x * 2)

        refused("out-of-order", warm_up_inside)

    def test_nothing_is_replayed_after_close(self, runtime: Any) -> None:
        x, total = data(runtime, 4), torch.zeros(4, device=runtime.device)
        runtime.warm_up(lambda: total.add_(x))
        with runtime.capture() as graph:
            total.add_(x)
        graph.replay()
        graph.close()
        graph.close()
        problem = refused("out-of-order", graph.replay)
        assert "closed" in problem.what
        assert "test_nothing_is_replayed_after_close" in problem.what, "the place of the capture is missing"
        same(runtime, total, x)

    def test_the_same_body_is_captured_again_after_close(self, runtime: Any) -> None:
        x = data(runtime, 4)
        for seed in range(3):
            graph, y = captured(runtime, lambda: x * 2)
            x.copy_(data(runtime, 4, seed=seed))
            graph.replay()
            same(runtime, y, x * 2)
            graph.close()

    def test_a_generator_that_is_closed_inside_a_capture_ends_it(self, runtime: Any) -> None:
        x = data(runtime, 4)
        state = ProcessState(runtime, x=x)

        def halfway() -> Iterator[None]:
            with runtime.capture():
                x.mul_(2)
                yield

        steps = halfway()
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        state.check()
        captured(runtime, lambda: x * 2)
