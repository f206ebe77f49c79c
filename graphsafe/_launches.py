"""Launches of Triton kernels as a trace sees them: which kernel, on what grid, with what Python values.

Requirements
------------
1. Compiled and interpreted kernels are seen alike, also those that an autotuner chose.
2. A grid that is a function is evaluated once, by Triton.
3. Nothing of triton is imported unless the caller's code has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["traced_launches"]

_LAUNCHERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))


@contextlib.contextmanager
def traced_launches(on_launch: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    """Call ``on_launch(kernel's name, values by name)`` at each launch; the grid is the value ``grid``."""
    with contextlib.ExitStack() as stack:
        for module_name, class_name in _LAUNCHERS:
            module = sys.modules.get(module_name)
            if module is not None:
                stack.enter_context(_traced(getattr(module, class_name), on_launch))
        yield


@contextlib.contextmanager
def _traced(launcher: Any, on_launch: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    original = launcher.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        values = {name: v for name, v in given.items() if not isinstance(v, torch.Tensor)}

        def seen(shape: Any) -> Any:
            on_launch(str(self.__name__), {"grid": tuple(int(n) for n in shape), **values})
            return shape

        if not warmup:  # a grid that is a function is evaluated once, by Triton
            grid = (lambda meta, asked=grid: seen(asked(meta))) if callable(grid) else seen(grid)
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    launcher.run = run
    try:
        yield
    finally:
        launcher.run = original
