"""A replay draws the numbers that eager would have drawn next; warm-up and capture draw none."""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.testing.suite.checks import captured, clone, data, same

__all__ = ["RandomSuite"]


def _seed(runtime: Any, seed: int) -> None:
    for generator in runtime.generators:
        generator.manual_seed(seed)


class RandomSuite:
    """Generators."""

    def test_replays_draw_what_eager_would_have_drawn_next(self, runtime: Any) -> None:
        x = data(runtime, 64).abs()

        def body() -> list[torch.Tensor]:
            dropped = torch.nn.functional.dropout(x, 0.5)
            return [dropped, torch.rand(3, device=x.device), torch.randn(5, device=x.device), torch.bernoulli(x / 8)]

        _seed(runtime, 11)
        eager = [clone(runtime, body()) for _ in range(4)]
        _seed(runtime, 11)
        graph, result = captured(runtime, body)
        for i, want in enumerate(eager):
            graph.replay()
            same(runtime, result, want, f"draw {i}")

    def test_replay_and_eager_take_turns(self, runtime: Any) -> None:
        def body() -> torch.Tensor:
            return torch.rand(4, device=runtime.device)

        _seed(runtime, 5)
        eager = [clone(runtime, body()) for _ in range(4)]
        graph, result = captured(runtime, body)
        _seed(runtime, 5)
        for i, want in enumerate(eager):
            if i % 2:
                got = body()
            else:
                graph.replay()
                got = result
            same(runtime, got, want, f"draw {i}")

    def test_a_seed_between_replays_is_followed(self, runtime: Any) -> None:
        graph, result = captured(runtime, lambda: torch.rand(4, device=runtime.device))
        _seed(runtime, 3)
        graph.replay()
        first = clone(runtime, result)
        graph.replay()
        second = clone(runtime, result)
        assert not torch.equal(first, second)
        _seed(runtime, 3)
        graph.replay()
        same(runtime, result, first)

    def test_warm_up_and_capture_leave_the_generators_as_they_were(self, runtime: Any) -> None:
        _seed(runtime, 7)
        before = [g.get_state() for g in runtime.generators]
        captured(runtime, lambda: torch.rand(4, device=runtime.device))
        assert all(torch.equal(g.get_state(), s) for g, s in zip(runtime.generators, before, strict=True))

    def test_a_registered_generator_advances_at_each_replay(self, runtime: Any) -> None:
        generator = torch.Generator(runtime.device)
        runtime.register_generator(generator)
        runtime.register_generator(generator)
        assert sum(g is generator for g in runtime.generators) == 1

        def body() -> torch.Tensor:
            return torch.rand(4, device=runtime.device, generator=generator)

        generator.manual_seed(9)
        eager = [clone(runtime, body()) for _ in range(3)]
        generator.manual_seed(9)
        graph, result = captured(runtime, body)
        for i, want in enumerate(eager):
            graph.replay()
            same(runtime, result, want, f"draw {i}")

    def test_dropout_in_a_backward_sees_the_forwards_mask(self, runtime: Any) -> None:
        w = torch.nn.Parameter(torch.ones(64, device=runtime.device))
        w.grad = torch.zeros_like(w)

        def body() -> tuple[torch.Tensor, torch.Tensor]:
            assert w.grad is not None
            w.grad.zero_()
            y = torch.nn.functional.dropout(w, 0.5)
            y.sum().backward()
            return y.detach(), w.grad

        graph, (y, grad) = captured(runtime, body)
        for _ in range(3):
            graph.replay()
            same(runtime, grad, y)
