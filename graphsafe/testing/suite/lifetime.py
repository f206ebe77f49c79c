"""What a graph reads must live, at its address: a replay that finds otherwise is refused and runs nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsafe.testing.suite.checks import captured, data, refused, same

__all__ = ["LifetimeSuite"]


def _assign_data(x: torch.Tensor) -> None:
    x.data = torch.zeros_like(x)


def _set(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.set_(torch.zeros_like(x))  # type: ignore[call-overload]


def _resize(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.resize_(4 * x.numel())


_REPLACE: dict[str, Callable[[torch.Tensor], None]] = {".data": _assign_data, "set_": _set, "resize_": _resize}


class LifetimeSuite:
    """Rules about addresses."""

    def test_an_input_that_died_is_refused(self, runtime: Any) -> None:
        held = {"x": data(runtime, 1000)}
        total = torch.zeros(1000, device=runtime.device)
        graph, _ = captured(runtime, lambda: total.add_(held["x"]))
        del held["x"]
        gc.collect()
        problem = refused("input-died", graph.replay)
        assert "<lambda>" in problem.what, "the place where the tensor was used is missing"
        same(runtime, total, torch.zeros_like(total), "a state, after a replay that was refused")

    def test_a_new_tensor_at_the_old_address_is_not_taken_for_it(self, runtime: Any) -> None:
        shown = False
        for _ in range(20):  # until an allocation gets the old address
            held = {"x": data(runtime, 1000)}
            graph, _ = captured(runtime, lambda held=held: held["x"] * 2)  # type: ignore[misc]
            address = held["x"].data_ptr()
            del held["x"]
            gc.collect()
            reborn = [torch.ones(1000, device=runtime.device) for _ in range(32)]
            refused("input-died", graph.replay)
            shown = shown or any(t.data_ptr() == address for t in reborn)
            graph.close()
            if shown:
                break
        assert shown, "no allocation got the old address: nothing was shown"

    @pytest.mark.parametrize("how", _REPLACE)
    @pytest.mark.parametrize("kept", [False, True], ids=["storage freed", "storage kept"])
    def test_a_storage_that_was_replaced_is_refused(self, runtime: Any, how: str, kept: bool) -> None:
        x = data(runtime, 64)
        graph, y = captured(runtime, lambda: x.view(8, 8).t() * 2)
        graph.replay()
        old = x.view(-1) if kept else None
        _REPLACE[how](x)
        refused("storage-replaced", graph.replay)
        del old, y

    def test_a_view_that_died_is_no_loss_while_its_storage_lives(self, runtime: Any) -> None:
        base = data(runtime, 8)
        held = {"x": base[2:6]}
        graph, y = captured(runtime, lambda: held["x"] * 2)
        del held["x"]
        gc.collect()
        base.fill_(3.0)
        graph.replay()
        same(runtime, y, base[2:6] * 2)

    def test_new_values_in_the_old_storage_are_followed(self, runtime: Any) -> None:
        linear = torch.nn.Linear(4, 4).to(runtime.device)
        x = data(runtime, 2, 4)
        graph, y = captured(runtime, lambda: linear(x).detach())
        linear.load_state_dict({name: t * 2 for name, t in linear.state_dict().items()})
        graph.replay()
        same(runtime, y, linear(x).detach())

    def test_the_graph_does_not_keep_its_inputs_alive(self, runtime: Any) -> None:
        runtime.synchronize()
        gc.collect()
        before = runtime.memory().held
        held = {"x": data(runtime, 1 << 14)}
        graph, y = captured(runtime, lambda: held["x"].sum())
        del held["x"], y
        gc.collect()
        assert runtime.memory().held - before < (1 << 14) * 4
        graph.close()

    def test_a_closed_graph_gives_its_memory_back(self, runtime: Any) -> None:
        x = data(runtime, 1 << 14)
        runtime.synchronize()
        gc.collect()
        before = runtime.memory().held
        graph, y = captured(runtime, lambda: (x * 2).exp())
        del y
        graph.close()
        del graph
        gc.collect()
        assert runtime.memory().held == before
