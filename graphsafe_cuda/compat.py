"""What differs between versions of torch (2.9 to 2.15) and triton (3.4 to 3.9), in one place.

Requirements
------------
1. No other module of this package asks for a version or probes for an attribute.
2. Features are probed, never inferred from a version number.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["autotuner", "compile_hook", "fresh_generator_state", "launch_hook", "new_graph", "release_pool"]


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph whose nodes can be counted after the capture where torch keeps them, else a plain one."""
    if "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters:
        return torch.cuda.CUDAGraph(keep_graph=True)
    return torch.cuda.CUDAGraph()


def release_pool(device: int, pool: Any) -> None:
    """Stop allocating into a pool whose capture ended with an error: the allocator is not told in that case."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return
    for step in (end, release):
        with contextlib.suppress(RuntimeError):  # it was told after all
            step(device, pool)


def fresh_generator_state(generator: torch.Generator) -> None:
    """Give a generator a state object that no capture holds: a broken capture leaves the old one in capture mode."""
    other = torch.Generator(generator.device)
    generator.graphsafe_set_state(other.graphsafe_get_state())


def _knobs() -> Any:
    """Triton's runtime knobs, or None where the caller's code has not imported triton."""
    module = sys.modules.get("triton.knobs")
    return None if module is None else module.runtime


@contextlib.contextmanager
def compile_hook(on_compile: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_compile(kernel name)`` before triton compiles or loads a kernel; it may raise."""
    knobs = _knobs()
    if knobs is None:
        yield
        return
    previous = knobs.jit_cache_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        fn = kwargs.get("fn")
        on_compile(str(getattr(fn, "name", fn)))
        return previous(*args, **kwargs) if previous is not None else None

    knobs.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.jit_cache_hook = previous


@contextlib.contextmanager
def launch_hook(on_launch: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_launch(kernel name)`` for each launch of a triton kernel."""
    knobs = _knobs()
    if knobs is None:
        yield
        return

    def hook(metadata: Any) -> None:
        known = metadata.get() if hasattr(metadata, "get") and not isinstance(metadata, dict) else metadata
        on_launch(str((known or {}).get("name", "a triton kernel")))

    chain = knobs.launch_enter_hook
    if hasattr(chain, "add"):
        chain.add(hook)
        try:
            yield
        finally:
            chain.remove(hook)
        return
    knobs.launch_enter_hook = hook
    try:
        yield
    finally:
        knobs.launch_enter_hook = chain


@contextlib.contextmanager
def autotuner(on_tuning: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_tuning(kernel name)`` before triton's autotuner measures a configuration; it may raise."""
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        yield
        return
    tuner = module.Autotuner
    original = tuner._bench

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        on_tuning(str(getattr(self.base_fn, "__name__", self.base_fn)))
        return original(self, *args, **kwargs)

    tuner._bench = bench
    try:
        yield
    finally:
        tuner._bench = original
