"""verify: passes where a replay is right, and fails where it does nothing, or works on stale or dirty state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import PaddingError
from graphsafe.graphed import graphed
from graphsafe.testing.layouts import boundaries
from graphsafe.testing.suite.checks import ProcessState, captured, clone, data, refused, same
from graphsafe.verify import verify_replay

__all__ = ["VerifySuite"]


class VerifySuite:
    """Proof on demand."""

    def test_a_right_replay_passes_and_nothing_is_left_behind(self, runtime: Any) -> None:
        total = torch.zeros(4, device=runtime.device)

        def body(x: torch.Tensor, total: torch.Tensor) -> dict[str, torch.Tensor]:
            total.add_(torch.nn.functional.dropout(x, 0.5))
            return {"y": total * 2}

        call = graphed(body, runtime=runtime, inputs={"total": "bound"})
        call.capture(data(runtime, 4), total)
        state = ProcessState(runtime, total=total)
        found = call.verify(data(runtime, 4, seed=1), total)
        assert (found.results, found.state) == (1, 1)
        assert found.bytes == 2 * 4 * 4
        state.check()

    def test_a_replay_that_does_nothing_fails(self, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        call = graphed(lambda x: x * 2, runtime=runtime)
        x = data(runtime, 4)
        graph = self._graph_of(call, x)
        call.verify(x)
        monkeypatch.setattr(graph, "replay", lambda: None)
        problem = refused("replay-differs", call.verify, x)
        assert isinstance(problem, PaddingError)
        assert "output" in problem.what
        assert "4 of 4 elements differ" in problem.what

    def test_a_replay_that_forgets_its_state_fails(self, runtime: Any) -> None:
        x, total = data(runtime, 4), torch.zeros(4, device=runtime.device)
        forgets, result = captured(runtime, lambda: x * 2)

        def body() -> torch.Tensor:
            total.add_(x)
            return x * 2

        problem = refused("replay-differs", verify_replay, runtime, forgets, body, result)
        assert problem.what.startswith("replay differs from eager: state")

    @pytest.mark.parametrize("stale", ["a host value", "a rebound tensor", "a flag"])
    def test_a_graph_that_is_stale_fails(self, runtime: Any, stale: str) -> None:
        held: dict[str, Any] = {"scale": 2.0, "w": data(runtime, 4), "flag": True}
        old = held["w"]
        call = graphed(lambda x: (x * held["scale"] + held["w"]) if held["flag"] else x, runtime=runtime)
        x = data(runtime, 4, seed=1)
        call.verify(x)
        changes = {"a host value": {"scale": 3.0}, "a rebound tensor": {"w": old * 2}, "a flag": {"flag": False}}
        held.update(changes[stale])
        refused("replay-differs", call.verify, x)

    def test_one_wrong_bit_fails_and_is_named(self, runtime: Any) -> None:
        x = data(runtime, 3, 5)
        where = torch.zeros(3, 5, device=runtime.device)
        graph, result = captured(runtime, lambda: {"y": [x + where]})

        def body() -> Any:
            y = x + where
            y[1, 2] = torch.nextafter(y[1, 2], y[1, 2] + 1)
            return {"y": [y]}

        problem = refused("replay-differs", verify_replay, runtime, graph, body, result)
        assert "output['y'][0][1, 2]" in problem.what
        assert "1 of 15 elements differ" in problem.what

    def test_a_negative_zero_is_not_a_zero_and_nan_is_nan(self, runtime: Any) -> None:
        x = torch.zeros(3, device=runtime.device)
        graph, result = captured(runtime, lambda: (x * 0.0, x / x))
        verify_replay(runtime, graph, lambda: (x * 0.0, x / x), result)
        refused("replay-differs", verify_replay, runtime, graph, lambda: (x * -0.0, x / x), result)

    def test_a_body_that_returns_nothing_is_verified_by_its_state(self, runtime: Any) -> None:
        x, total = data(runtime, 4), torch.zeros(4, device=runtime.device)

        def body(x: torch.Tensor, total: torch.Tensor) -> None:
            total.add_(x)

        call = graphed(body, runtime=runtime, inputs={"total": "bound"})
        found = call.verify(x, total)
        assert (found.results, found.state) == (0, 1)
        same(runtime, total, torch.zeros_like(total))

    def test_a_failed_verification_puts_everything_back(self, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        total = torch.zeros(4, device=runtime.device)

        def body(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            return total.add_(torch.rand(4, device=x.device)) * x

        call = graphed(body, runtime=runtime, inputs={"total": "bound"})
        x = data(runtime, 4)
        graph = self._graph_of(call, x, total)
        state = ProcessState(runtime, total=total)
        replay = graph.replay
        monkeypatch.setattr(graph, "replay", lambda: None)
        refused("replay-differs", call.verify, x, total)
        state.check()
        monkeypatch.setattr(graph, "replay", replay)
        call.verify(x, total)
        want = clone(runtime, call(x, total))
        assert not torch.equal(want, torch.zeros_like(want))

    def test_what_does_not_fit_is_not_verified_in_silence(self, runtime: Any) -> None:
        call = graphed(lambda x, cu_seqlens: x, runtime=runtime, buckets=[Bucket(16, 1, 16)])
        refused("capacity", call.verify, data(runtime, 1, 17, 2), boundaries([17], device=runtime.device))

    @staticmethod
    def _graph_of(call: Any, *args: Any) -> Any:
        call.capture(*args)
        (entry,) = call._entries.values()
        return entry.graph
