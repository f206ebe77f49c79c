"""Which implementation serves an operator: the PyTorch reference or the Triton kernels.

Requirements
------------
1. A CPU tensor is served by the reference, unless ``TRITON_INTERPRET`` is on and the operator has kernels: then the
   kernels run in Triton's interpreter. A tensor on another device is served by the kernels where the operator has
   them, else by the reference, which is plain torch and runs on any device.
2. Every implementation of an operator is a function of the operator's name in the module registered here, and all of
   them take the same arguments.
3. A module is imported when it is first needed: importing this package loads neither triton nor a device's adapter.
4. An operator computes the same under ``torch.autocast`` as without: only the dtypes of its operands decide.
5. Inside ``reference_only()`` every operator is served by its reference, on every device: the oracle of a comparison.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

__all__ = [
    "DEVICES", "OPERATORS", "REFERENCE", "TRITON", "implementation", "only_reference", "reference_only", "resolve",
]

REFERENCE: dict[str, str] = {
    "build_tables": "graphsafe.metadata",
    "causal_conv1d": "graphsafe_kernels.reference.conv",
    "chunk_gated_delta_rule": "graphsafe_kernels.reference.gated_delta_rule",
    "chunk_kda": "graphsafe_kernels.reference.kda",
    "clear_padding": "graphsafe_kernels.reference.rows",
    "fused_kda_gate": "graphsafe_kernels.reference.gate",
    "fused_recurrent_gated_delta_rule": "graphsafe_kernels.reference.recurrent",
    "fused_recurrent_kda": "graphsafe_kernels.reference.recurrent",
    "join_columns": "graphsafe_kernels.reference.rows",
    "rms_norm": "graphsafe_kernels.reference.norm",
    "split_columns": "graphsafe_kernels.reference.rows",
}
"""Operator -> module of its PyTorch reference. Every operator has one."""

TRITON: dict[str, str] = {
    "build_tables": "graphsafe_kernels.tables",
    "causal_conv1d": "graphsafe_kernels.conv.autograd",
    "chunk_gated_delta_rule": "graphsafe_kernels.gdn.autograd",
    "chunk_kda": "graphsafe_kernels.kda.autograd",
    "clear_padding": "graphsafe_kernels.layers.clear",
    "fused_kda_gate": "graphsafe_kernels.kda.gate",
    "fused_recurrent_gated_delta_rule": "graphsafe_kernels.gdn.recurrent",
    "fused_recurrent_kda": "graphsafe_kernels.kda.recurrent",
    "join_columns": "graphsafe_kernels.layers.split",
    "rms_norm": "graphsafe_kernels.norm.autograd",
    "split_columns": "graphsafe_kernels.layers.split",
}
"""Operator -> module of its Triton implementation, for the operators whose kernels serve by default."""

DEVICES: dict[str, tuple[str, ...]] = {}
"""Operator -> the types of device that its kernels serve, where they have not been shown on all of them."""

OPERATORS = tuple(REFERENCE)

_reference_only: contextvars.ContextVar[bool] = contextvars.ContextVar("reference_only", default=False)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Inside the block, calls of operators take the PyTorch reference whatever the device."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def only_reference() -> bool:
    """Whether the caller is inside ``reference_only()``."""
    return _reference_only.get()


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def implementation(operator: str, device: torch.device) -> Literal["reference", "triton"]:
    """The implementation that serves ``operator`` for a tensor on ``device``."""
    if operator not in REFERENCE:
        raise KeyError(f"no operator {operator!r}; known: {', '.join(OPERATORS)}")
    if operator not in TRITON or only_reference() or device.type not in DEVICES.get(operator, (device.type,)):
        return "reference"
    return "triton" if device.type != "cpu" or _interpreting() else "reference"


@functools.cache
def _load(operator: str, kind: str) -> Callable[..., Any]:
    module = (TRITON if kind == "triton" else REFERENCE)[operator]
    function: Callable[..., Any] = getattr(importlib.import_module(module), operator)
    return _in_its_own_precision(function) if kind == "reference" else function


def _in_its_own_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference with autocast off: it is made of torch's products, which have dtypes of their own to keep."""

    @functools.wraps(function)
    def precise(*args: Any, **kwargs: Any) -> Any:
        kinds = {t.device.type for t in args if isinstance(t, torch.Tensor)}
        with contextlib.ExitStack() as off:
            for kind in kinds:
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    off.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return precise


def resolve(operator: str, device: torch.device) -> Callable[..., Any]:
    """The function that serves ``operator`` for a tensor on ``device``; its module is imported at the first call."""
    return _load(operator, implementation(operator, device))
