"""The providers of this package: its kernels (the default), and its PyTorch reference.

Requirements
------------
1. ``graphsafe`` is what the public operators do: kernels on an accelerator, the reference on a CPU, or the kernels in
   Triton's interpreter where that is on.
2. ``reference`` is the plain PyTorch implementation on any device, and calls no kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import reference_only, resolve
from graphsafe_kernels.providers.choice import selectable
from graphsafe_kernels.providers.service import OPERATORS, Provider, Service, own_operator

__all__ = ["GraphsafeProvider", "ReferenceProvider", "build_tables"]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.int32, torch.int64)


@selectable
def build_tables(
    cu_seqlens: torch.Tensor, tokens: int, chunk_size: int = 64, *, provider: str | None = None
) -> ChunkTables:
    """A batch's chunk tables, built on the device of ``cu_seqlens``; see :func:`graphsafe.metadata.build_tables`."""
    tables: ChunkTables = resolve("build_tables", cu_seqlens.device)(cu_seqlens, tokens, chunk_size)
    return tables


def _services() -> dict[str, Service]:
    return {name: Service((), _INTEGER if name == "build_tables" else _FLOATING) for name in OPERATORS}


class GraphsafeProvider(Provider):
    """This project's kernels, on a CPU its reference."""

    name = "graphsafe"

    def __init__(self) -> None:
        self.services = _services()

    def missing(self) -> str | None:
        return None

    def function(self, operator: str) -> Callable[..., Any]:
        return own_operator(operator)


class ReferenceProvider(Provider):
    """The same operators in plain PyTorch, on any device, in fp64 too."""

    name = "reference"

    def __init__(self) -> None:
        self.services = _services()

    def missing(self) -> str | None:
        return None

    @functools.cache  # noqa: B019 (one object per process)
    def function(self, operator: str) -> Callable[..., Any]:
        own = own_operator(operator)

        @functools.wraps(own)
        def reference(*args: Any, **kwargs: Any) -> Any:
            with reference_only():
                return own(*args, **kwargs)

        return reference
