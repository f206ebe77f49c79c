"""A pretended H200 where no GPU is: tensors lie on the CPU, kernels are compiled for sm_90, none is launched.

Requirements
------------
1. What Triton compiles has the cache key that the same call has on the device: target, specialisation of arguments and
   the properties that choose a configuration (capability, shared memory, multiprocessors) are the device's.
2. Every choice of an autotuner is compiled, at every call: which of them a device takes is not known here. Where
   flash-linear-attention is told its choices by files (``FLA_CONFIG_DIR``, see ``carry.py``), those alone.
3. No choice is made here. A pretended timing is never written into a cache: an autotuner that found it on the device
   would take its first choice for its best.
4. A choice that does not compile is told, and the others go on. What is computed is meaningless and costs little:
   random numbers are uninitialised, products of linear layers have a shape alone.

``install`` changes torch, Triton and what it finds of flash-linear-attention in this process for good: it is for a
process that does nothing else, before it imports this project's kernels or a library's.
"""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
PRETENDED = 1.0
"""The milliseconds that every choice "took": how ``pack`` knows a pretended result."""
PROPERTIES = {
    "max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32,
    "sm_clock_rate": 1980000, "mem_clock_rate": 3201000, "mem_bus_width": 6144,
}  # fmt: skip
compiled: list[str] = []
"""Names of the kernels that were compiled in this process, not found in the cache."""
failed: list[str] = []
"""Choices that did not compile, and why."""


class Driver:
    """Triton's driver of a device that is not there."""

    utils = types.SimpleNamespace(get_device_properties=lambda i: PROPERTIES, unload_module=lambda m: None)
    get_current_target = staticmethod(lambda: TARGET)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_device_interface = staticmethod(lambda: torch.cuda)
    is_active = staticmethod(lambda: True)


class OnCpu(TorchFunctionMode):
    """Creates on the CPU what is asked for on the GPU."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: _on_cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        return 0 if name == "get_device" else func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.split(":")[0] == "cuda"
    return torch.device("cpu") if named or (isinstance(value, torch.device) and value.type == "cuda") else value


class OfAnyIndex(list[int]):
    """A list by device, for tensors of the CPU, whose index is None."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index or 0)


class Linear(torch.autograd.Function):
    """A linear layer's shapes."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> torch.Tensor:
        ctx.operands = operands
        return operands[0].new_empty(*operands[0].shape[:-1], operands[1].shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if t is None else torch.empty_like(t) for t in ctx.operands)


def install(own: bool = True) -> None:
    """Pretend from now on; ``own``: this project's operators are served by its kernels, as there."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "FLA_DISABLE_BACKEND_DISPATCH": "1"}  # read at import
    import torch._dynamo  # noqa: F401  it looks at the names that are replaced below

    _torch()
    _triton()
    _flash_linear_attention()
    if own:
        _own()
    OnCpu().__enter__()


def _torch() -> None:
    c: Any = torch.cuda
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 2**30, warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, regs_per_multiprocessor=65536,
        L2_cache_size=60 * 2**20, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    nothing = lambda *a, **k: None  # noqa: E731
    stream = types.SimpleNamespace(cuda_stream=0, wait_stream=nothing, synchronize=nothing, wait_event=nothing,
                                   record_event=nothing)  # fmt: skip
    c.is_available = c.is_initialized = lambda: True
    c.device_count, c.current_device = lambda: 1, lambda: 0
    c.get_device_name, c.get_device_capability = lambda *a: properties.name, lambda *a: (9, 0)
    c.get_device_properties = lambda *a: properties
    c.device = lambda *a: contextlib.nullcontext()
    c.is_current_stream_capturing = lambda: False
    c.synchronize = c.init = c._lazy_init = nothing
    c.current_stream = c.default_stream = lambda *a: stream
    original: Any = torch.Generator

    class Kind(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return original("cpu")

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    names: Any = torch
    names.Generator = Kind("Generator", (), {})
    names.randn = lambda *size, generator=None, **k: torch.empty(*size, **k)
    torch.nn.functional.linear = lambda input, weight, bias=None: Linear.apply(input, weight, bias)


def _triton() -> None:
    def compile_choice(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            self.fn.run(*args, **(meta | config.all_kwargs()))
        except Exception as problem:  # a choice that a device would skip; told by whoever asked
            failed.append(f"{self.base_fn.__name__} {config}: {problem!r}"[:300])
            return [float("inf")] * 3
        return [PRETENDED] * 3

    def choose_nothing(self: Any, key: Any, configs: Any, compile_all: Any) -> bool:
        compile_all()
        return False

    def listener(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    run, tuned = JITFunction.run, Autotuner.run

    def every_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).run is every_time:
            self.cache.clear()  # a choice serves shapes that specialise a kernel in another way
        return tuned(self, *args, **kwargs)

    names: Any = Autotuner
    names._bench, names.check_disk_cache, names.run = compile_choice, choose_nothing, every_time
    compile_only: Any = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)  # noqa: E731
    JITFunction.run = compile_only
    knobs.compilation.listener = listener
    triton.runtime.driver.set_active(Driver())


def _flash_linear_attention() -> None:
    """It asks for shared memory by a tensor's device, and would take smaller tiles for a CPU's."""
    try:
        import fla.utils.hardware as hardware
    except ImportError:
        return
    hardware.get_all_max_shared_mem = lambda: OfAnyIndex([PROPERTIES["max_shared_mem"]])
    hardware.get_multiprocessor_count = lambda *a, **k: PROPERTIES["multiprocessor_count"]
    hardware.check_shared_mem.cache_clear()
    from fla.ops.utils.cache import CachedAutotuner

    stored: Any = CachedAutotuner.run

    def from_its_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.cache.clear()  # then it looks into its store, and what it finds there is the one choice to compile
        return stored(self, *args, **kwargs)

    names: Any = CachedAutotuner
    names.run = from_its_store


def _own() -> None:
    import graphsafe_kernels.policy as policy

    policy.device_kind = lambda device: "sm_90"
    import graphsafe_kernels.backend as backend
    import graphsafe_kernels.gdn.configurations as configurations

    configurations.device_capability = lambda device: 90
    served, gpu = backend.implementation, torch.device("cuda")
    backend.implementation = lambda operator, device: served(operator, gpu)


def compile_tilelang_only() -> None:
    """Let TileLang's kernels be compiled into its cache when they are asked for, and do nothing when called."""
    import tilelang
    from tilelang.jit import JITImpl

    tilelang.contrib.nvcc.get_target_compute_version = lambda target=None: "9.0"
    compile_kernel = JITImpl.compile

    def compile_and_forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        compile_kernel(self, *args, **kwargs)
        return lambda *operands: None

    JITImpl.compile = compile_and_forget
