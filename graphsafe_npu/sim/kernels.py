"""Triton's driver for the simulated device.

Requirements
------------
1. Every kernel goes through the whole of Triton-Ascend and the Ascend compiler, so that what does not compile or does
   not fit is refused as there. What runs is the IR of the front end, on the CPU, one program after the other.
2. A launch takes what the real launcher takes: one workspace per launch, from the current pool, given back at once; at
   most 65,535 programs; the given stream. Addresses and scalars are recorded.
3. Launch hooks are called, as by the real launcher.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphsafe_npu.sim import streams
from graphsafe_npu.sim.lowering import compiled

__all__ = ["install"]

_MOST_PROGRAMS = 65535
_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip
_npu: Any = torch.npu  # type: ignore[attr-defined]


class _Memory:
    """The address and the number of elements of a tensor argument; an integer is an address."""

    def __init__(self, t: Any) -> None:
        raw = isinstance(t, int)
        self.address: int = t if raw else t.data_ptr()
        self.size: int = 0 if raw else t.untyped_storage().nbytes() // t.element_size()


def _arguments(kinds: list[str], values: list[Any]) -> list[Any]:
    """C arguments: a memref of one dimension is two pointers, an offset, a size and a stride."""
    made: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == "memref":
            address, size = (value.address, value.size) if value is not None else (0, 0)
            pointer = ctypes.c_void_p(address)
            made += [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(size), ctypes.c_int64(1)]
        else:
            made.append(_SCALARS[kind](value))
    return made


class _Launcher:
    """One compiled kernel. Its arguments: a lock, the workspace, the kernel's own, the grid, the program's place."""

    def __init__(self, src: Any, metadata: Any) -> None:
        from triton.runtime.cache import get_cache_manager

        name = src.name[:150]
        group = get_cache_manager(metadata.hash).get_group(f"{name}.json")
        self._ir = Path(group[f"{name}.ttadapter"])

        def index(key: Any) -> int:
            key = key[0] if isinstance(key, tuple) else key
            return int(src.fn.arg_names.index(key) if isinstance(key, str) else key)

        self._constants = {index(k) for k in src.constants}
        self._constants |= {index(k) for k, kind in src.signature.items() if kind == "constexpr"}
        self._pointers = {index(k) for k, kind in src.signature.items() if kind.startswith("*")}
        self._workspace = int(getattr(metadata, "workspace_size", 0))
        self._compiled: tuple[Any, list[str]] | None = None

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch: Any, enter: Any,
                 leave: Any, *arguments: Any) -> None:
        if x * y * z > _MOST_PROGRAMS:
            raise RuntimeError(f"a grid of {x} x {y} x {z}: more than {_MOST_PROGRAMS} programs")
        if self._compiled is None:
            self._compiled = compiled(self._ir.read_text(), Path(os.environ["TRITON_CACHE_DIR"]) / "simulated")
        kernel, kinds = self._compiled
        size = self._workspace * x * y * z
        workspace = _Memory(torch.empty(size, dtype=torch.uint8, device="npu")) if size > 0 else None
        own = [
            (None if a is None else _Memory(a)) if i in self._pointers else a
            for i, a in enumerate(arguments)
            if i not in self._constants
        ]
        if enter is not None:
            enter(launch)
        streams.submit(_programs(kernel, kinds, [None, workspace, *own, x, y, z, 0, 0, 0], (x, y, z)), stream)
        if leave is not None:
            leave(launch)


def _programs(kernel: Any, kinds: list[str], values: list[Any], grid: tuple[int, int, int]) -> Callable[[], None]:
    arguments = _arguments(kinds, values)
    x, y, z = arguments[-3:]

    def run() -> None:
        for z.value in range(grid[2]):
            for y.value in range(grid[1]):
                for x.value in range(grid[0]):
                    kernel(*arguments)

    return run


class _Utilities:
    """Stands in for Triton-Ascend's helper that is compiled against CANN."""

    def get_arch(self) -> str:
        return os.environ["TRITON_ASCEND_ARCH"]

    def get_aicore_num(self) -> int:
        return 20

    def get_aivector_core_num(self) -> int:
        return 2 * self.get_aicore_num()

    def get_device_properties(self, device: int) -> dict[str, int]:
        cores = self.get_aicore_num()
        return {"max_shared_mem": 1, "num_aicore": cores, "num_vectorcore": 2 * cores}

    def load_binary(self, *arguments: Any) -> tuple[Any, Any, int, int]:
        return object(), None, 0, 0


class _Driver:
    launcher_cls = _Launcher
    utils = _Utilities()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", self.utils.get_arch(), 0)

    def get_current_device(self) -> int:
        return int(_npu.current_device())

    def set_current_device(self, device: int) -> None:
        _npu.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return streams.current_handle()

    def get_device_interface(self) -> Any:
        return _npu

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, device="npu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For ``triton.autotune``; it synchronises, as the real one does, so tuning cannot happen in a capture."""

        def measure(run: Callable[[], Any], *args: Any, **kwargs: Any) -> list[float]:
            _npu.synchronize()
            begin = time.perf_counter()
            run()
            _npu.synchronize()
            return [(time.perf_counter() - begin) * 1e3] * 3

        return measure


def install() -> None:
    """Make the simulated driver Triton's active one."""
    import triton
    from triton.backends import backends
    from triton.backends.ascend import driver

    # the compiler module is loaded under a second name: replace the helper in the globals of the class in use too
    backends["ascend"].compiler.add_stages.__globals__["NPUUtils"] = driver.NPUUtils = _Utilities
    triton.runtime.driver.set_active(_Driver())
