"""What may not happen inside a capture is refused, by rule, at the caller's line, before the device fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsafe.testing.suite.checks import Worker, captured, data, refused, same

__all__ = ["RulesSuite"]

_KEPT: list[torch.Tensor] = []
_UNKNOWN: list[torch.Generator] = []


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * grads[0].sum().item()


_BROKEN: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "item": ("host-read", lambda x, w: x.sum().item()),
    "tolist": ("host-read", lambda x, w: x.tolist()),
    "cpu": ("host-read", lambda x, w: x.cpu()),
    "a truth value": ("host-read", lambda x, w: 1 if x.sum() > 0 else 2),
    "an index": ("host-read", lambda x, w: [1, 2, 3][x.argmax() * 0]),
    "printing": ("host-read", lambda x, w: repr(x)),
    "an equality": ("host-read", lambda x, w: torch.equal(x, w)),
    "in a backward": ("host-read", lambda x, w: torch.autograd.grad(_Reads.apply(w).sum(), w)),  # type: ignore[no-untyped-call]
    "nonzero": ("data-dependent-shape", lambda x, w: x.nonzero()),
    "a boolean index": ("data-dependent-shape", lambda x, w: x[x > 0]),
    "unique": ("data-dependent-shape", lambda x, w: x.unique()),
    "repeats": ("data-dependent-shape", lambda x, w: x.repeat_interleave(torch.ones_like(x).long())),
    "host data": ("host-data", lambda x, w: x + torch.tensor([1.0] * 8)),
    "a generator": ("unregistered-generator", lambda x, w: x.clone().normal_(generator=_UNKNOWN[0])),
    "a seed": ("rng-state", lambda x, w: torch.manual_seed(1)),
    "a generator's state": ("rng-state", lambda x, w: torch.get_rng_state()),
    "random": ("host-randomness", lambda x, w: x * random.random()),
    "another device": ("other-device", lambda x, w: x.to("meta")),
    "an escape": ("tensor-escapes", lambda x, w: _KEPT.append(x * 2)),
    "a new gradient": ("tensor-escapes", lambda x, w: (w * x).sum().backward()),
    "a sparse tensor": ("not-capturable or host-read", lambda x, w: x.to_sparse()),
    "a new storage": ("storage-replaced", lambda x, w: setattr(x, "data", w.detach() * 2)),
    "a new shape": ("storage-replaced", lambda x, w: x.unsqueeze_(0)),
}

_ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mask": lambda x, w: torch.where(x > 0, x, w.detach()),
    "a mask with a number": lambda x, w: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x, w: x.masked_fill(x > 0, 3.0),
    "a device index": lambda x, w: x[x.argsort()],
    "a factory": lambda x, w: x + torch.full((8,), 2.0, device=x.device) + torch.arange(8, device=x.device),
    "repeats with a size": lambda x, w: x.repeat_interleave(torch.ones_like(x).long(), output_size=8),
    "a copy of another dtype": lambda x, w: x.double().to(torch.float32),
    "a shape of its own": lambda x, w: (x * 1).unsqueeze_(0),
    "a new storage of its own": lambda x, w: x[:4].clone().resize_(2).zero_(),
    "a shape of the tensor": lambda x, w: x / len(x) + x.shape[0] + x.numel(),
    "scalars of Python": lambda x, w: (2 * x + 1) ** 2 / 3 - 0.5,
    "searchsorted": lambda x, w: torch.searchsorted(x.sort().values, w.detach()),
    "topk": lambda x, w: x.topk(3).values,
    "detached saved tensors": lambda x, w: torch.autograd.grad((w.exp() * x).sum(), w)[0],
}


class RulesSuite:
    """The first rule broken is named, with the line that breaks it."""

    @pytest.mark.parametrize("name", _BROKEN)
    def test_a_broken_rule_is_named_with_its_line(self, runtime: Any, name: str) -> None:
        rule, breaking = _BROKEN[name]
        x, w = data(runtime, 8), torch.nn.Parameter(data(runtime, 8, seed=1))
        _UNKNOWN[:] = [torch.Generator(runtime.device)]

        def capture() -> None:
            with runtime.capture():
                breaking(x, w)

        problem = refused(rule, capture)
        _KEPT.clear()
        code = _Reads.backward.__code__ if name == "in a backward" else breaking.__code__
        assert problem.where is not None
        assert problem.where.file == code.co_filename
        first = code.co_firstlineno
        assert first <= problem.where.line <= first + 2 * (name == "in a backward")
        assert problem.remedy
        assert problem.why

    @pytest.mark.parametrize("name", _ALLOWED)
    def test_what_breaks_no_rule_is_captured(self, runtime: Any, name: str) -> None:
        body = _ALLOWED[name]
        x, w = data(runtime, 8), torch.nn.Parameter(data(runtime, 8, seed=1))
        graph, y = captured(runtime, lambda: body(x, w))
        x.copy_(data(runtime, 8, seed=2))
        graph.replay()
        same(runtime, y, body(x, w))

    def test_the_rules_hold_only_inside(self, runtime: Any) -> None:
        x = data(runtime, 8)
        captured(runtime, lambda: x * 2)
        assert len(x.tolist()) == 8
        assert torch.tensor([1.0]).item() == 1.0
        random.random()
        torch.get_rng_state()

    def test_a_threads_own_work_is_no_business_of_the_capture(self, runtime: Any) -> None:
        def work() -> None:
            random.random()
            torch.get_rng_state()
            torch.arange(3).tolist()
            Worker(lambda: None).result()

        x = data(runtime, 8)
        worker = Worker(work)
        with runtime.capture() as graph:
            raised = worker.result()
            y = x * 2
        assert raised is None, f"another thread was refused: {raised}"
        graph.replay()
        same(runtime, y, x * 2)
