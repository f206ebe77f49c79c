"""The few driver calls that torch does not expose: counting a graph's nodes, filling raw memory, its own version.

Requirements
------------
1. Only functions of the CUDA driver's stable interface are called, through the library that torch has loaded.
2. A driver call that fails raises; nothing is guessed. A version that nobody tells is None.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess

__all__ = ["KERNEL_NODE", "driver_version", "fill_bytes", "node_kinds"]

KERNEL_NODE = 0
"""CUgraphNodeType of a kernel; 1 is a copy and 2 a fill."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code != 0:
        raise RuntimeError(f"{name} failed: CUDA driver error {code}")


def node_kinds(raw_graph: int) -> list[int]:
    """The type of every node of a ``cudaGraph_t``."""
    graph = ctypes.c_void_p(raw_graph)
    count = ctypes.c_size_t(0)
    _checked("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        _checked("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        _checked("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        kinds.append(kind.value)
    return kinds


def fill_bytes(address: int, value: int, nbytes: int) -> None:
    """Fill device memory; the caller synchronises."""
    _checked("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes))


def driver_version() -> str | None:
    """The installed driver's version ("580.95.05") as nvidia-smi tells it, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n") if done.returncode == 0 else []
    return lines[0].strip() or None if lines else None
