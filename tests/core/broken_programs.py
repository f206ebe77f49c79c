"""The registry of small programs that each break one rule in one way, and what they share.

A case is a function of the runtime that returns (breaking program, twin). The statement that breaks the rule is marked
``# BREAKS``; the twin does the same work and keeps the rule.
"""

from __future__ import annotations

import inspect

import pytest
import torch

KEPT = []
"""Where programs keep what they should not."""

CASES = []


def case(rule, cls, devices=("cpu", "cuda", "npu")):
    """Register a case that must raise the error of ``rule``, an instance of ``cls``, on the ``devices`` that can show
    it: there the program is valid eagerly."""

    def register(make):
        make.devices = devices
        CASES.append(pytest.param(rule, cls, make, id=make.__name__))
        return make

    return register


def line_of(make):
    """(file, line) of the statement marked in the source of a case."""
    lines, first = inspect.getsourcelines(make)
    (found,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# BREAKS")]
    return inspect.getsourcefile(make), found


def capture(rt, body):
    """Warm the body up, capture it and replay it."""
    rt.warm_up(body)
    with rt.capture() as graph:
        graph.outputs(body())
    graph.replay()
    rt.synchronize()


def bodies(rt, breaking, twin):
    """The two programs of a case whose bodies are these."""
    return lambda: capture(rt, breaking), lambda: capture(rt, twin)


def data(rt, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(rt.device)


def leaf(rt, *shape):
    """A parameter whose gradient exists."""
    p = torch.nn.Parameter(data(rt, *shape))
    p.grad = torch.zeros_like(p)
    return p
