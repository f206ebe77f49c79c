"""What differs between versions of torch_npu (2.9 to 2.14) and Triton-Ascend, in one place; and what is missing.

Requirements
------------
1. No other module of this package asks for a version or probes for an attribute.
2. Features are probed, never inferred from a version number.
3. Nothing is imported before :func:`load`, which raises the typed error ``runtime-missing`` for each thing that can be
   missing: torch_npu, CANN's libraries, a device.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphsafe.errors import error

__all__ = [
    "autotuner",
    "cann_version",
    "compile_hook",
    "fresh_generator_state",
    "launch_hook",
    "load",
    "memory_figures",
    "register_generator",
    "release_pool",
]

_CANN = (
    "Install CANN and load its environment (source set_env.sh of its folder) in the shell that starts Python. With "
    "torch_npu but no CANN, 'import torch' itself fails unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set."
)


def load() -> Any:
    """``torch.npu``, ready for use."""
    if importlib.util.find_spec("torch_npu") is None:
        short = torch.__version__.split("+")[0]
        raise error(
            "runtime-missing",
            f"torch_npu is not installed (torch {torch.__version__})",
            remedy=f"pip install torch_npu of the same version ({short}) and triton-ascend, on a machine with CANN and "
            "an NPU; or make a simulated one with graphsafe_npu/sim/set_up.py.",
        )
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as problem:
        first = str(problem).strip().split("\n")[0]
        raise error("runtime-missing", f"torch_npu cannot be loaded: {first}", remedy=_CANN) from problem
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        raise error(
            "runtime-missing",
            f"torch_npu finds no usable NPU (torch {torch.__version__})",
            remedy="Check npu-smi info, ASCEND_RT_VISIBLE_DEVICES, and that this user may open /dev/davinci*.",
        )
    return npu


def cann_version(npu: Any) -> str | None:
    """The version of CANN, or None where torch_npu does not tell it."""
    ask = getattr(getattr(npu, "utils", None), "get_cann_version", None)
    return None if ask is None else str(ask()) or None


def memory_figures(npu: Any, device: torch.device) -> tuple[int, int]:
    """Bytes that tensors asked for, now and at most; without the padding that 910 adds to each, where that is told."""
    stats = npu.memory_stats(device)
    name = "requested_bytes" if "requested_bytes.all.current" in stats else "allocated_bytes"
    return int(stats.get(f"{name}.all.current", 0)), int(stats.get(f"{name}.all.peak", 0))


def register_generator(graph: Any, generator: torch.Generator) -> None:
    """Tell a graph of a generator that its body draws from; newer versions find out by themselves and warn."""
    if hasattr(graph, "register_generator_state"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.register_generator_state(generator)


def release_pool(device: int, pool: Any) -> None:
    """Stop allocating into a pool whose capture ended with an error: the allocator is not told in that case."""
    module = importlib.import_module("torch_npu")._C
    before = getattr(module, "_npu_endAllocateCurrentStreamToPool", None)  # its name up to 2.12
    end = getattr(module, "_npu_endAllocateToPool", before)
    release = getattr(module, "_npu_releasePool", None)
    if end is None or release is None:
        return
    for step in (end, release):
        with contextlib.suppress(RuntimeError):  # it was told after all
            step(device, pool)


def fresh_generator_state(generator: torch.Generator) -> None:
    """Give a generator a state object that no capture holds: a broken capture may leave the old one in capture mode."""
    if hasattr(generator, "graphsafe_set_state"):
        other = torch.Generator(generator.device)
        generator.graphsafe_set_state(other.graphsafe_get_state())


def _module(name: str) -> Any:
    """A module of triton, or None where the caller's code has not imported triton."""
    return sys.modules.get(name)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def compile_hook(on_compile: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_compile(kernel name)`` before triton compiles or loads a kernel; it may raise."""
    knobs, jit = _module("triton.knobs"), _module("triton.runtime.jit")
    if jit is None:
        yield
        return
    owner, name = (jit.JITFunction, "cache_hook") if knobs is None else (knobs.runtime, "jit_cache_hook")
    previous = getattr(owner, name)

    def hook(*args: Any, **kwargs: Any) -> Any:
        fn = kwargs.get("fn")
        on_compile(str(getattr(fn, "name", fn)))
        return previous(*args, **kwargs) if previous is not None else None

    with _replaced(owner, name, hook if knobs is not None else staticmethod(hook)):
        yield


@contextlib.contextmanager
def launch_hook(on_launch: Callable[[str, bool, int], None]) -> Iterator[None]:
    """Call ``on_launch(kernel name, loaded, locks)`` before each launch of a triton kernel; it may raise.

    ``loaded``: whether its binary is on the device; ``locks``: how many locks its launch would initialise.
    """
    compiler = _module("triton.compiler.compiler")
    if compiler is None:
        yield
        return
    original = compiler.CompiledKernel.launch_metadata

    def launch_metadata(self: Any, *args: Any) -> Any:
        on_launch(str(self.name), self.module is not None, int(getattr(self.metadata, "lock_num", 0)))
        return original(self, *args)

    with _replaced(compiler.CompiledKernel, "launch_metadata", launch_metadata):
        yield


@contextlib.contextmanager
def autotuner(on_tuning: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_tuning(kernel name)`` before triton's autotuner measures a configuration; it may raise."""
    module = _module("triton.runtime.autotuner")
    if module is None:
        yield
        return
    original = module.Autotuner._bench

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        on_tuning(str(getattr(self.base_fn, "__name__", self.base_fn)))
        return original(self, *args, **kwargs)

    with _replaced(module.Autotuner, "_bench", bench):
        yield
