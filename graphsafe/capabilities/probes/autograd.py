"""Probes of training inside a graph: custom functions, optimizers, checkpoints, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsafe.capabilities.probe import data, probe, replays


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grads[0]


@probe("autograd.custom-forward", "the forward of a custom autograd function")
def _custom_forward(rt: Any) -> None:
    x = data(rt, 32)
    replays(rt, lambda: _Square.apply(x), [lambda: x.copy_(data(rt, 32, seed=1))])  # type: ignore[no-untyped-call]


@probe("autograd.custom-backward", "the backward of a custom autograd function, into gradients that existed before")
def _custom_backward(rt: Any) -> None:
    x, w = data(rt, 32), torch.nn.Parameter(data(rt, 32, seed=1))
    w.grad = torch.zeros_like(w)

    def body() -> torch.Tensor:
        assert w.grad is not None
        w.grad.zero_()
        (_Square.apply(w) * x).sum().backward()  # type: ignore[no-untyped-call]
        return w.grad

    replays(rt, body, [lambda: x.copy_(data(rt, 32, seed=2))])


@probe("autograd.grad", "torch.autograd.grad inside the body")
def _grad(rt: Any) -> None:
    x, w = data(rt, 8, 4), data(rt, 4, 4, seed=1).requires_grad_()
    replays(rt, lambda: torch.autograd.grad((x @ w).tanh().sum(), w), [lambda: x.copy_(data(rt, 8, 4, seed=2))])


@probe("autograd.checkpoint", "activation checkpointing with preserve_rng_state=False")
def _checkpoint(rt: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w = data(rt, 8, 4), data(rt, 4, 4, seed=1).requires_grad_()

    def body() -> Any:
        y: Any = checkpoint(lambda v: (v @ w).sin(), x, use_reentrant=False, preserve_rng_state=False)
        return torch.autograd.grad(y.sum(), w)

    replays(rt, body, [lambda: x.copy_(data(rt, 8, 4, seed=2))])


@probe("autograd.autocast", "forward and backward under autocast to bfloat16")
def _autocast(rt: Any) -> None:
    x, w = data(rt, 8, 16), data(rt, 16, 16, seed=1).requires_grad_()

    def body() -> Any:
        with torch.autocast(rt.device.type, torch.bfloat16):
            y = x @ w
        return torch.autograd.grad(y.float().square().sum(), w)

    replays(rt, body, [lambda: x.copy_(data(rt, 8, 16, seed=2))])


def _train(make: Callable[[Any, str], torch.optim.Optimizer], eager_first: bool = False) -> Callable[[Any], str]:
    def run(rt: Any) -> str:
        from graphsafe.train import TrainStep

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(rt.device)

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

        def batch(seed: int) -> dict[str, torch.Tensor]:
            return {"x": data(rt, 6, 8, seed=seed), "y": torch.arange(6).remainder(4).to(rt.device)}

        optimizer = make(model.parameters(), rt.device.type)
        step = TrainStep(model, loss_of, optimizer, runtime=rt, max_grad_norm=1.0)
        if eager_first:
            step.eager(batch(9))
        for seed in range(3):
            step(batch(seed))
        step.verify(batch(3))
        return f"{step.stats.graphs[0].launches} launches a step"

    return run


probe("autograd.step-sgd", "forward, backward, clipping and SGD in one graph")(
    _train(lambda p, device: torch.optim.SGD(p, lr=0.1))
)
probe("autograd.step-sgd-momentum", "SGD with momentum, whose first step was eager")(
    _train(lambda p, device: torch.optim.SGD(p, lr=0.1, momentum=0.9), eager_first=True)
)
probe("autograd.step-adamw", "AdamW with foreach, capturable where there is a device")(
    _train(lambda p, device: torch.optim.AdamW(p, lr=0.1, foreach=True, capturable=device != "cpu"))
)
probe("autograd.step-adamw-fused", "AdamW with fused=True, capturable where there is a device")(
    _train(lambda p, device: torch.optim.AdamW(p, lr=0.1, fused=True, capturable=device != "cpu"))
)
