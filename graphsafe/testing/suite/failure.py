"""After a capture that failed the runtime is as good as new, whatever the failure was."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsafe.testing.suite.checks import ProcessState, captured, data, refused, same

__all__ = ["FailureSuite"]

_KEPT: list[torch.Tensor] = []


class _Hostile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise LookupError("in a backward")


class _Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


def _raise(problem: BaseException) -> None:
    raise problem


_FAILURES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a host read": lambda x, w: x.sum().item(),
    "a data-dependent shape": lambda x, w: x.nonzero(),
    "host data": lambda x, w: torch.tensor([1.0]),
    "an unknown generator": lambda x, w: x.uniform_(generator=torch.Generator(x.device)),
    "a seed": lambda x, w: torch.manual_seed(3),
    "a host random number": lambda x, w: __import__("random").random(),
    "an escape": lambda x, w: _KEPT.append(x * 2),
    "an escaped gradient": lambda x, w: (w * x).sum().backward(),
    "a thread": lambda x, w: threading.Thread(target=print).start(),
    "an error of the body": lambda x, w: _raise(ValueError("seven")),
    "an operator's error": lambda x, w: x @ x[:1],
    "an error in a backward": lambda x, w: _Hostile.apply(w).sum().backward(),  # type: ignore[no-untyped-call]
    "an interrupt": lambda x, w: _raise(_Stop()),
    "a generator's exit": lambda x, w: _raise(GeneratorExit()),
}


class FailureSuite:
    """Stream, pool, lock, collector, generators, tensors and gradients after a failed capture."""

    @pytest.mark.parametrize("name", _FAILURES)
    def test_a_failed_capture_leaves_nothing(self, runtime: Any, name: str) -> None:
        x, total = data(runtime, 16), torch.zeros(16, device=runtime.device)
        w = torch.nn.Parameter(data(runtime, 16, seed=1))
        state = ProcessState(runtime, x=x, total=total, w=w)
        self._fail(runtime, _FAILURES[name], x, total, w)
        _KEPT.clear()
        assert w.grad is None
        state.check()
        graph, y = captured(runtime, lambda: torch.nn.functional.dropout(x, 0.5) * 0 + x * 2)
        graph.replay()
        same(runtime, y, x * 2)

    @staticmethod
    def _fail(runtime: Any, failing: Any, x: torch.Tensor, total: torch.Tensor, w: torch.Tensor) -> None:
        """Fail halfway: after random numbers, memory and a write in place."""
        graph = None
        try:
            with runtime.capture() as graph:
                total.add_(torch.rand(16, device=x.device))
                big = torch.ones(1 << 16, device=x.device) * total.sum()
                total.add_(big[:16])
                failing(x, w)
        except (RuntimeError, ValueError, LookupError, _Stop, GeneratorExit):
            pass
        else:
            raise AssertionError("the capture should have failed")
        assert graph is not None
        assert "after a failed capture" in str(refused("out-of-order", graph.replay))

    def test_a_failed_capture_is_not_the_next_ones_pool(self, runtime: Any) -> None:
        x = data(runtime, 4)
        first, y = captured(runtime, lambda: x * 2)

        def fail() -> None:
            with runtime.capture(pool=first):
                x.sum().item()

        refused("host-read", fail)
        first.replay()
        same(runtime, y, x * 2)
        second, z = captured(runtime, lambda: x * 3, pool=first)
        second.replay()
        same(runtime, z, x * 3)

    def test_many_failures_in_a_row(self, runtime: Any) -> None:
        x = data(runtime, 4)
        state = ProcessState(runtime, x=x)

        def fail() -> None:
            with runtime.capture():
                x.add_(1).sum().item()

        for _ in range(5):
            refused("host-read", fail)
        state.check()

    def test_the_collector_stays_off_where_it_was_off(self, runtime: Any) -> None:
        x = data(runtime, 4)
        gc.disable()
        try:
            with runtime.capture() as graph:
                assert not gc.isenabled()
                graph.outputs(x + 1)
            assert not gc.isenabled()
        finally:
            gc.enable()
        with runtime.capture() as graph:
            assert not gc.isenabled()
            graph.outputs(x + 1)
        assert gc.isenabled()

    def test_an_error_that_the_body_swallows_fails_the_capture(self, runtime: Any) -> None:
        x = data(runtime, 4)

        def capture() -> None:
            with runtime.capture():
                with contextlib.suppress(RuntimeError):
                    x.sum().item()
                x.mul_(2)

        problem = refused("host-read", capture)
        assert "item()" in problem.what
