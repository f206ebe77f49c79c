"""TrainStep: a whole training step in one graph, bitwise equal to the same step eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphsafe.bucket import Bucket
from graphsafe.testing.layouts import boundaries, layouts
from graphsafe.testing.suite.checks import clone, data, grad_storage, refused, same
from graphsafe.train import TrainStep

__all__ = ["TrainSuite"]


class _Model(nn.Module):
    """Dropout and a parameter that nothing uses; batch norm where asked."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


def _model(runtime: Any, norm: bool = False) -> nn.Module:
    model = _Model(norm).to(runtime.device)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(data(runtime, *p.shape, seed=i) * 0.5)
    return model


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return loss


def _batch(runtime: Any, seed: int, rows: int = 6) -> dict[str, torch.Tensor]:
    return {"x": data(runtime, rows, 4, seed=seed), "y": data(runtime, rows, 2, seed=seed + 50)}


def _capturable(runtime: Any) -> dict[str, Any]:
    """What makes an optimizer of the Adam kind keep its counts on the device."""
    return {"fused": True} if runtime.device.type == "cpu" else {"capturable": True}


_Make = Callable[[Any, Any], torch.optim.Optimizer]
_OPTIMIZERS: dict[str, _Make] = {
    "sgd": lambda rt, p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "adamw": lambda rt, p: torch.optim.AdamW(p, lr=0.01, **_capturable(rt)),
    "adamw, tensor lr": lambda rt, p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device=rt.device), **_capturable(rt)),
    "amsgrad": lambda rt, p: torch.optim.Adam(p, lr=0.01, amsgrad=True, **_capturable(rt)),
}


def _eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], max_grad_norm: float | None = None
) -> list[torch.Tensor]:
    """What TrainStep stands for, written out; gradients of unused parameters are zero, as in its arena."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    losses = []
    for batch in batches:
        loss = _loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [model.state_dict(), [list(s.values()) for s in optimizer.state.values()]]


class TrainSuite:
    """Forward, backward and optimizer in one graph."""

    @pytest.mark.parametrize("norm", [False, True], ids=["dropout", "dropout and batch norm"])
    @pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
    @pytest.mark.parametrize("name", _OPTIMIZERS)
    def test_steps_equal_eager_bit_for_bit(self, runtime: Any, name: str, clip: float | None, norm: bool) -> None:
        model = _model(runtime, norm)
        twin = copy.deepcopy(model)
        optimizer = _OPTIMIZERS[name](runtime, model.parameters())
        optimizer_twin = _OPTIMIZERS[name](runtime, twin.parameters())
        step = TrainStep(model, _loss, optimizer, runtime=runtime, max_grad_norm=clip)
        before = clone(runtime, _state(model, optimizer)[0])
        generators = [g.get_state() for g in runtime.generators]
        step.capture(_batch(runtime, 99))
        same(runtime, _state(model, optimizer)[0], before, "model after capture")
        for i in range(5):
            batch = _batch(runtime, i)
            for g, state in zip(runtime.generators, generators, strict=True):
                g.set_state(state)
            loss = clone(runtime, step(batch))
            for g, state in zip(runtime.generators, generators, strict=True):
                g.set_state(state)
            (want,) = _eager_step(twin, optimizer_twin, [batch], clip)
            generators = [g.get_state() for g in runtime.generators]
            same(runtime, loss, want, f"loss of step {i}")
            same(runtime, _state(model, optimizer), _state(twin, optimizer_twin), f"state after step {i}")
        assert step.stats.captures == 1
        assert step.stats.replays == 5
        step.verify(_batch(runtime, 7))
        step.close()

    def test_accumulated_micro_batches_give_the_sum(self, runtime: Any) -> None:
        model = _model(runtime).eval()
        twin = copy.deepcopy(model)
        step = TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, accumulate=3)
        sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
        for i in range(3):
            batches = [_batch(runtime, 10 * i + j) for j in range(3)]
            losses = step(batches)
            want = _eager_step(twin, sgd, batches)
            same(runtime, losses, torch.stack(want), "losses")
            same(runtime, [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], "gradients")
            same(runtime, model.state_dict(), twin.state_dict(), "parameters")
        for wrong in (_batch(runtime, 0), [_batch(runtime, 0)] * 2, ()):
            refused("structure", step, wrong)

    def test_packed_batches_with_tables(self, runtime: Any) -> None:
        def loss_fn(model: nn.Module, batch: Any, tables: Any) -> torch.Tensor:
            place = torch.arange(batch["x"].shape[1], device=batch["x"].device)
            live = (place < tables.cu_seqlens[-1]).view(1, -1, 1)
            error = (model(batch["x"]) - batch["y"]).square()
            loss: torch.Tensor = torch.where(live, error, torch.zeros_like(error)).sum() / live.sum()
            return loss

        model = _model(runtime).eval()
        bucket = Bucket(64, 4, 16)
        step = TrainStep(
            model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, bucket=bucket,
            on_overflow="error",
        )  # fmt: skip
        for seed, lengths in enumerate(layouts(12, 64, 4)):
            if not sum(lengths):
                continue
            rows = {k: v[None] for k, v in _batch(runtime, seed, rows=sum(lengths)).items()}
            batch = {**rows, "cu_seqlens": boundaries(lengths, device=runtime.device)}
            step.verify(batch)
            before = clone(runtime, model.state_dict())
            loss = clone(runtime, step(batch))
            model.load_state_dict(before)
            same(runtime, loss, step.eager(batch), f"{lengths}")
        assert step.stats.captures == 1
        too_long = {**batch, "x": torch.zeros(1, 65, 4, device=runtime.device), "y": rows["y"]}
        too_long["y"] = torch.zeros(1, 65, 2, device=runtime.device)
        refused("capacity", step, too_long)

    def test_gradients_belong_to_the_arena(self, runtime: Any) -> None:
        model = _model(runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        own = {name: grad_storage(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            assert step.gradients.holds(p.grad) == f"grad.{name}"  # type: ignore[arg-type]
        for i in range(3):
            step(_batch(runtime, i))
            assert {name: grad_storage(p) for name, p in model.named_parameters()} == own
            optimizer.zero_grad()
        model.body[0].weight.grad = torch.zeros_like(model.body[0].weight)  # type: ignore[union-attr, index]
        problem = refused("input-rebound", step, _batch(runtime, 0))
        assert "'body.0.weight'" in problem.what
        price = step.price().bytes
        assert price > sum(p.numel() * p.element_size() for p in model.parameters())
        step.close()
        assert all(p.grad is None for p in model.parameters())

    def test_a_frozen_value_that_changes_is_refused_by_name(self, runtime: Any) -> None:
        def lr(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["lr"] = 0.5

        def mode(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model.eval()

        def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model.get_parameter("body.0.bias").requires_grad_(False)

        def group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=runtime.device))]})

        quoted = {lr: "['lr']", mode: "training", freeze: "'body.0.bias'", group: "[1]"}
        for first in ("step", "verify", "capture"):
            for change, name in quoted.items():
                model = _model(runtime)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                step = TrainStep(model, _loss, optimizer, runtime=runtime)
                getattr(step, "__call__" if first == "step" else first)(_batch(runtime, 0))
                change(model, optimizer)
                before = clone(runtime, model.state_dict())
                problem = refused("frozen-scalar", step, _batch(runtime, 1))
                assert name in problem.what, f"{change.__name__}: {problem.what}"
                same(runtime, model.state_dict(), before, "a model whose step was refused")

    def test_a_parameter_that_is_exchanged_is_refused_by_name(self, runtime: Any) -> None:
        model = _model(runtime)
        step = TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        step(_batch(runtime, 0))
        model.body[0].bias = nn.Parameter(torch.zeros(8, device=runtime.device))  # type: ignore[union-attr, index]
        problem = refused("input-rebound", step, _batch(runtime, 1))
        assert "'body.0.bias'" in problem.what

    def test_a_learning_rate_in_a_tensor_is_followed(self, runtime: Any) -> None:
        model = _model(runtime).eval()
        twin = copy.deepcopy(model)
        name = "adamw, tensor lr"
        optimizer = _OPTIMIZERS[name](runtime, model.parameters())
        optimizer_twin = _OPTIMIZERS[name](runtime, twin.parameters())
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        for i in range(3):
            for one in (optimizer, optimizer_twin):
                one.param_groups[0]["lr"].fill_(0.01 * (i + 1))
            step(_batch(runtime, i))
            _eager_step(twin, optimizer_twin, [_batch(runtime, i)])
            same(runtime, model.state_dict(), twin.state_dict(), f"step {i}")

    def test_new_weights_are_followed(self, runtime: Any) -> None:
        model = _model(runtime)
        step = TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
        step(_batch(runtime, 0))
        model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})
        step.verify(_batch(runtime, 1))

    def test_state_that_cannot_be_put_back_is_refused_before_it_is_lost(self, runtime: Any) -> None:
        model = _model(runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        before = clone(runtime, model.state_dict())
        refused("capture-leftover", step, _batch(runtime, 0))
        same(runtime, model.state_dict(), before)
        twin = copy.deepcopy(model).eval()
        model.eval()
        sgd = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        optimizer.state.clear()
        _eager_step(model, optimizer, [_batch(runtime, 0)])
        _eager_step(twin, sgd, [_batch(runtime, 0)])
        for p in model.parameters():
            p.grad = None
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        for i in range(3):
            step(_batch(runtime, i))
            _eager_step(twin, sgd, [_batch(runtime, i)])
            same(runtime, model.state_dict(), twin.state_dict(), f"step {i}")

    def test_an_optimizer_that_reads_its_state_is_refused_with_the_remedy(self, runtime: Any) -> None:
        model = _model(runtime)

        def read(optimizer: Any, args: Any, kwargs: Any) -> None:
            model.get_parameter("body.0.bias").sum().item()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(read)
        before = clone(runtime, model.state_dict())
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        problem = refused("host-read", step, _batch(runtime, 0))
        assert "SGD" in problem.what
        assert "capturable=True" in problem.remedy
        same(runtime, model.state_dict(), before)

    def test_a_closed_step_is_refused_and_a_new_one_works(self, runtime: Any) -> None:
        model = _model(runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, _loss, optimizer, runtime=runtime)
        step(_batch(runtime, 0))
        step.close()
        refused("arena-closed", step, _batch(runtime, 0))
        again = TrainStep(model, _loss, optimizer, runtime=runtime)
        again(_batch(runtime, 0))
        again.verify(_batch(runtime, 1))

    @pytest.mark.parametrize("accumulate", [0, -1, 1.5])
    def test_a_wrong_accumulation_is_refused(self, runtime: Any, accumulate: Any) -> None:
        model = _model(runtime)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        refused("argument", TrainStep, model, _loss, sgd, runtime=runtime, accumulate=accumulate)
