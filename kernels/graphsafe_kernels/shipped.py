"""What is shipped: every kernel with the configurations it runs in, as ``compilecheck`` compiles them.

Requirements
------------
1. A kernel family names its configurations in a module of its own, listed here, with a function ``shipped(policy)``.
2. Configurations are made by the functions that make them at a launch, so that the check cannot drift from the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsafe_kernels.policy import Policy

__all__ = ["MODULES", "Shipped", "configurations", "pointer"]

MODULES = (
    "graphsafe_kernels.tables.shipped",
    "graphsafe_kernels.conv.shipped",
    "graphsafe_kernels.gdn.shipped",
    "graphsafe_kernels.kda.shipped",
    "graphsafe_kernels.layers.clear",
    "graphsafe_kernels.layers.split",
    "graphsafe_kernels.norm.shipped",
)
"""Modules with a function ``shipped(policy) -> Iterator[Shipped]``."""

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Shipped:
    """One kernel in one configuration.

    ``kernel``: the ``triton.jit`` function; ``name``: what tells it apart from the kernel's others; ``types``: each
    run-time parameter's Triton type, None for an absent pointer; ``constants``: the compile-time parameters;
    ``registers``: the most a thread may have on an NVIDIA device, 0 where the compiler decides; ``options``: of the
    Ascend compiler.
    """

    kernel: Any
    name: str
    types: Mapping[str, str | None]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 3
    registers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def pointer(dtype: torch.dtype | None) -> str | None:
    """``*bf16`` for bfloat16, None for an operand that is absent."""
    return None if dtype is None else "*" + _NAMES[dtype]


def configurations(policy: Policy) -> Iterator[Shipped]:
    """Every configuration of every kernel on a device of ``policy``."""
    for module in MODULES:
        yield from importlib.import_module(module).shipped(policy)
