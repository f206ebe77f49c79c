"""Bodies of many kinds, each with its inputs and the state it changes: all of them must replay bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphsafe.testing.suite.checks import data

__all__ = ["BODIES", "Body"]


@dataclass
class Body:
    """``run()`` reads ``inputs``, returns results, and changes ``state`` in place."""

    inputs: list[torch.Tensor]
    run: Callable[[], Any]
    state: list[torch.Tensor] = field(default_factory=list)


BODIES: dict[str, Callable[[Any], Body]] = {}
"""By name: a function of the runtime that makes a fresh body."""


def _body(make: Callable[[Any], Body]) -> Callable[[Any], Body]:
    BODIES[make.__name__] = make
    return make


def _module(runtime: Any, module: nn.Module) -> nn.Module:
    """The module on the device with fixed parameters and gradients that exist."""
    module = module.to(runtime.device)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(data(runtime, *p.shape, seed=100 + i) * 0.3)
            p.grad = torch.zeros_like(p)
    return module


def _grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def _trains(runtime: Any, module: nn.Module, x: torch.Tensor, loss_of: Callable[[Any], torch.Tensor]) -> Body:
    """Gradients cleared in place, forward, backward."""
    module = _module(runtime, module)

    def run() -> list[torch.Tensor]:
        module.zero_grad(set_to_none=False)
        loss_of(module(x)).backward()
        return _grads(module)

    return Body([x], run, [*_grads(module), *module.buffers()])


@_body
def forward(runtime: Any) -> Body:
    x, w = data(runtime, 5, 4), data(runtime, 4, 3, seed=1)
    return Body([x, w], lambda: torch.softmax(x @ w, -1))


@_body
def views_and_strides(runtime: Any) -> Body:
    x = data(runtime, 6, 4)
    return Body([x], lambda: (x.t() @ x, x[1:, ::2] * 2, x.expand(3, 6, 4).sum(0), x.view(24).flip(0)))


@_body
def results_that_share_one_storage(runtime: Any) -> Body:
    x = data(runtime, 6)

    def run() -> Any:
        y = x * 2
        return {"all": y, "head": y[:2], "again": (y.view(2, 3), [y])}

    return Body([x], run)


@_body
def a_result_that_is_an_input_or_a_parameter(runtime: Any) -> Body:
    x = data(runtime, 4)
    p = nn.Parameter(data(runtime, 4, seed=1))
    return Body([x], lambda: (x, p.detach(), x + p.detach()))


@_body
def a_result_of_none(runtime: Any) -> Body:
    x, y = data(runtime, 4), data(runtime, 4, seed=1)

    def run() -> None:
        y.add_(x)

    return Body([x], run, [y])


@_body
def no_elements_and_no_dimensions(runtime: Any) -> Body:
    empty, scalar = data(runtime, 0, 3), data(runtime)
    return Body([empty, scalar], lambda: (empty * 2, empty.sum(0), scalar * 2, torch.cat([empty, empty])))


@_body
def memory_left_uninitialised_and_filled_later(runtime: Any) -> Body:
    x = data(runtime, 4)

    def run() -> torch.Tensor:
        y = torch.empty(2, 4, device=x.device)
        y[0] = x
        y[1].copy_(x * 2)
        return y

    return Body([x], run)


@_body
def shapes_changed_in_place(runtime: Any) -> Body:
    x = data(runtime, 4)

    def run() -> Any:
        y = (x @ x.view(4, 1)).exp()  # squeezes in place
        z = (x * 2).unsqueeze_(0).t_()
        return y, z + 1, (x * 3).view(2, 2).transpose_(0, 1), (x * 1)[:2].clone().resize_(1).fill_(3.0)

    return Body([x], run)


@_body
def conjugated_and_negated_views(runtime: Any) -> Body:
    x = data(runtime, 4, dtype=torch.complex64)
    outside = data(runtime, 4, seed=1, dtype=torch.complex64).conj()
    return Body([x], lambda: (x.conj() * 2, (x * 1).conj(), x.conj().imag + 1, outside * x, outside.imag + 1))


@_body
def writes_in_place(runtime: Any) -> Body:
    x, total = data(runtime, 4), torch.zeros(4, device=runtime.device)

    def run() -> torch.Tensor:
        total.add_(x)
        total[1:].mul_(2)
        return total + 1

    return Body([x], run, [total])


@_body
def inference_mode(runtime: Any) -> Body:
    x = data(runtime, 4)
    return Body([x], torch.inference_mode()(lambda: (x * 2 + 1).cumsum(0)))


@_body
def autocast(runtime: Any) -> Body:
    x = data(runtime, 4, 4)
    linear = _module(runtime, nn.Linear(4, 4))

    def run() -> torch.Tensor:
        with torch.autocast(runtime.device.type, torch.bfloat16):
            y: torch.Tensor = linear(x)
        return y.detach()

    return Body([x, *(p.detach() for p in linear.parameters())], run)


@_body
def backward(runtime: Any) -> Body:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    return _trains(runtime, mlp, data(runtime, 3, 4), lambda y: y.square().mean())


@_body
def batch_norm_statistics(runtime: Any) -> Body:
    return _trains(runtime, nn.BatchNorm1d(4), data(runtime, 8, 4), lambda y: (y * y.sigmoid()).sum())


@_body
def attention(runtime: Any) -> Body:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = data(runtime, 2, 5, 8)
    module = _module(runtime, layer)

    def run() -> list[torch.Tensor]:
        module.zero_grad(set_to_none=False)
        module(x, x, x, need_weights=False)[0].square().sum().backward()
        return _grads(module)

    return Body([x], run, _grads(module))


@_body
def recurrent_network(runtime: Any) -> Body:
    return _trains(runtime, nn.LSTM(3, 4), data(runtime, 5, 1, 3), lambda y: y[0].square().sum())


@_body
def results_of_autograd_grad(runtime: Any) -> Body:
    x = data(runtime, 3, 4)
    linear = _module(runtime, nn.Linear(4, 2))

    def run() -> Any:
        first = torch.autograd.grad(linear(x).square().sum(), list(linear.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(linear.parameters()))  # type: ignore[arg-type]
        return [g.detach() for g in (*first, *second)]

    return Body([x], run)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grads[0] * 3 * x * x
        return result


@_body
def custom_function(runtime: Any) -> Body:
    return _trains(runtime, nn.Linear(4, 2), data(runtime, 3, 4), lambda y: _Cube.apply(y).sum())  # type: ignore[no-untyped-call]


@_body
def checkpointed(runtime: Any) -> Body:
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)

    return _trains(runtime, Checkpointed(), data(runtime, 3, 4), lambda y: y.square().sum())


@_body
def hooks(runtime: Any) -> Body:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda module, inputs, output: output * 2)
    linear.weight.register_hook(lambda grad: grad * 3)

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    linear.bias.register_post_accumulate_grad_hook(halve)
    return _trains(runtime, linear, data(runtime, 3, 4), lambda y: y.square().sum())


@_body
def function_transforms(runtime: Any) -> Body:
    x = data(runtime, 3, 4)
    linear = _module(runtime, nn.Linear(4, 2))

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(linear, parameters, (row,)).square().sum()
        return result

    def run() -> Any:
        parameters = {name: p.detach() for name, p in linear.named_parameters()}
        return torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)

    return Body([x], run)


@_body
def optimizer(runtime: Any) -> Body:
    x = data(runtime, 3, 4)
    module = _module(runtime, nn.Linear(4, 2))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)

    def run() -> torch.Tensor:
        sgd.zero_grad(set_to_none=False)
        loss: torch.Tensor = module(x).square().mean()
        loss.backward()
        sgd.step()
        return loss.detach()

    return Body([x], run, [*(p.detach() for p in module.parameters()), *_grads(module)])
