"""``captured()``: the graph and the arena that serve a call, for whoever measures a replay and an update apart."""

from __future__ import annotations

import pytest
import torch

import graphsafe as gs
from graphsafe.errors import CapacityError


def test_it_gives_what_a_call_would_use_and_runs_nothing() -> None:
    ran = []

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[gs.Bucket(8, 2), gs.Bucket(16, 4)], on_overflow="error")
    def double(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        ran.append(True)
        return x * 2

    boundaries = torch.tensor([0, 4, 10], dtype=torch.int32)
    x = torch.ones(1, 10, 3)
    found = double.captured(x, boundaries)
    warmed = len(ran)
    assert found.bucket == gs.Bucket(16, 4)
    assert set(found.arena) == {"x", "cu_seqlens"}
    assert double.stats.captures == 1
    assert double.stats.replays == 0
    y = double(x, boundaries)  # the same graph: nothing is captured again
    assert len(ran) == warmed
    found.arena.update({"x": 3 * x, "cu_seqlens": boundaries})
    found.graph.replay()
    assert torch.equal(y, 6 * x)
    with pytest.raises(CapacityError, match="fit none of"):
        double.captured(torch.ones(1, 17, 3), torch.tensor([0, 17], dtype=torch.int32))


def test_a_step_gives_its_own_too() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gs.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, runtime=gs.get_runtime("cpu"))
    batch = torch.ones(2, 3)
    before = model.weight.detach().clone()
    found = step.captured(batch)
    assert torch.equal(model.weight, before)  # nothing is trained
    found.graph.replay()
    assert not torch.equal(model.weight, before)
