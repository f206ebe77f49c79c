"""Probes of Triton kernels and of what must happen before a capture: compilation, tuning, workspaces."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from graphsafe.capabilities.probe import Missing, Wrong, check, data, probe, replays
from graphsafe.errors import GraphSafeError


def _kernels(rt: Any) -> Any:
    if importlib.util.find_spec("triton") is None:
        raise Missing("triton is not installed")
    if rt.device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined
    return importlib.import_module("graphsafe_kernels.probe_kernels")


@probe("triton.fixed-grid", "a kernel whose grid is the capacity; unused slots hold the sentinel")
def _fixed_grid(rt: Any) -> str:
    kernels = _kernels(rt)
    x, y = data(rt, 8, 32), torch.zeros(8, 32, device=rt.device)
    rows = torch.tensor([0, 5, 2, -1, -1, -1, -1, -1], dtype=torch.int32).to(rt.device)

    def body() -> torch.Tensor:
        y.zero_()
        kernels.double_rows[(8,)](x, y, rows, 32, BLOCK=32)
        return y

    graph, _ = replays(rt, body)
    for live in ([7, 1, 3, 0, 4, 6, 5, 2], [], [6]):
        rows.copy_(torch.tensor([*live, *[-1] * (8 - len(live))], dtype=torch.int32))
        graph.replay()
        rt.synchronize()
        want = torch.zeros_like(y)
        want[live] = 2 * x[live]
        check(torch.equal(y, want), f"wrong rows for the slots {live}")
    return "in Triton's interpreter" if rt.device.type == "cpu" else f"{graph.launches} launches a replay"


@probe("triton.warm-up-compiles", "a kernel compiled by the warm-up is captured; a cold one is refused by its name")
def _cold(rt: Any) -> str:
    kernels = _kernels(rt)
    if rt.device.type == "cpu":
        raise Missing("on a CPU Triton runs in its interpreter, which compiles nothing")
    x, y = data(rt, 1000), torch.zeros(1000, device=rt.device)
    rt.warm_up(lambda: x * 2)

    def body() -> torch.Tensor:
        kernels.double[(8,)](x, y, 1000, BLOCK=128)
        return y

    _refuses_cold(rt, body, "double")
    replays(rt, body, [lambda: x.copy_(data(rt, 1000, seed=1))])
    return "a cold kernel is refused by name (GS111)"


@probe("triton.warm-up-tunes", "a kernel tuned by the warm-up is captured; a new tuning key is refused by name")
def _tuning(rt: Any) -> str:
    kernels = _kernels(rt)
    if rt.device.type == "cpu":
        raise Missing("on a CPU Triton runs in its interpreter, which tunes nothing")
    x, y = data(rt, 1000), torch.zeros(1000, device=rt.device)

    def body(n: int = 1000) -> torch.Tensor:
        kernels.tuned[lambda meta: ((n + meta["BLOCK"] - 1) // meta["BLOCK"],)](x, y, n)
        return y

    replays(rt, body, [lambda: x.copy_(data(rt, 1000, seed=1))])
    _refuses_cold(rt, lambda: body(992), "tuned")
    return "a new tuning key is refused by name (GS111)"


def _refuses_cold(rt: Any, body: Any, kernel: str) -> None:
    try:
        with rt.capture():
            body()
    except GraphSafeError as problem:
        if problem.rule.name != "cold-kernel" or kernel not in problem.what:
            raise
        return
    raise Wrong(f"the cold kernel {kernel!r} was not refused")


@probe("libraries.matmul-workspace", "a matrix product whose library makes its workspace in the warm-up")
def _matmul(rt: Any) -> None:
    x, w = data(rt, 64, 128, dtype=torch.bfloat16), data(rt, 128, 64, seed=1, dtype=torch.bfloat16)
    replays(rt, lambda: x @ w, [lambda: x.copy_(data(rt, 64, 128, seed=2, dtype=torch.bfloat16))])


@probe("libraries.convolution", "a convolution of torch, forward and backward")
def _convolution(rt: Any) -> None:
    x, w = data(rt, 1, 8, 64), data(rt, 8, 1, 4, seed=1).requires_grad_()

    def body() -> Any:
        y = torch.nn.functional.conv1d(x, w, padding=3, groups=8)
        return y.detach(), torch.autograd.grad(y.square().sum(), w)

    replays(rt, body, [lambda: x.copy_(data(rt, 1, 8, 64, seed=2))])


@probe("libraries.attention", "scaled_dot_product_attention, forward and backward")
def _attention(rt: Any) -> None:
    q, k, v = (data(rt, 1, 2, 16, 32, seed=i).requires_grad_() for i in range(3))

    def body() -> Any:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.detach(), torch.autograd.grad(y.square().sum(), [q, k, v])

    replays(rt, body)


@probe("libraries.linalg-solve", "a triangular solve")
def _solve(rt: Any) -> None:
    a, b = data(rt, 16, 16) + 8 * torch.eye(16, device=rt.device), data(rt, 16, 4, seed=1)
    replays(rt, lambda: torch.linalg.solve_triangular(a, b, upper=False), [lambda: b.copy_(data(rt, 16, 4, seed=2))])


@probe("libraries.compile", "a function of torch.compile inside the body")
def _compile(rt: Any) -> None:
    x = data(rt, 64)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    compiled(x)
    replays(rt, lambda: compiled(x))
