"""How a kernel of this package is launched: descriptors, options, and launches kept by what they are compiled for.

Requirements
------------
1. Descriptors are used where the device has them and every tile is whole; else the same kernels load by pointers.
2. A launch is worked out once for the same kernel, kinds of pointers, constants, options, device, grid and numbers.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from graphsafe_kernels.gdn.configurations import Configuration
from graphsafe_kernels.launch import PreparedLaunch

__all__ = ["grid", "heads_first", "launch", "npu_options", "options", "tile"]


def grid(c: Configuration, tasks: int, units: int = 2) -> int:
    """The programs for so many tasks: as many as there are cores of ``units`` (2: a cube and two vector units; 1: one
    vector unit) where programs walk tasks."""
    return min(tasks, max(1, c.cores // units)) if c.cores else tasks


def npu_options(c: Configuration) -> dict[str, Any]:
    """Options of the Ascend compiler: without copies of buffers, tiles fit."""
    return {"multibuffer": False} if c.cores else {}


def options(c: Configuration, warps: int, stages: int) -> dict[str, Any]:
    """How Triton compiles and launches a kernel."""
    overlap = {"launch_pdl": True} if c.overlap else {}
    return {"num_warps": warps, "num_stages": stages, **overlap, **npu_options(c)}


def heads_first(t: torch.Tensor, c: Configuration) -> torch.Tensor:
    """A gate ``[B, T, HV]`` as the kernels read it, ``[B, HV, T]`` where heads come first; and back."""
    return t.transpose(1, 2).contiguous() if c.heads_first else t


def tile(tensor: torch.Tensor | None, width: int, block: tuple[int, int], use: bool) -> Any:
    """A descriptor of ``tensor`` as a matrix with rows of ``width`` and tiles of ``block``; the tensor if not used."""
    if tensor is None or not use or not tensor.numel():
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], list(block))


def _kind(argument: Any) -> Any:
    """What a kernel's parameter is compiled for."""
    if argument is None or isinstance(argument, torch.Tensor):
        return argument if argument is None else argument.dtype
    return argument.base.dtype, *argument.block_shape


@functools.lru_cache(maxsize=1024)
def _prepared(kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...], options: tuple[Any, ...]
              ) -> PreparedLaunch:  # fmt: skip
    """A launch with its compile-time constants in the kernel's order; ``kinds`` tells apart what is compiled apart."""
    values = dict(constants)
    ordered = {name: values.pop(name) for name in inspect.signature(kernel.fn).parameters if name in values}
    assert not values, f"{kernel.fn.__name__} has no parameters {sorted(values)}"
    return PreparedLaunch(kernel, ordered, **dict(options))


@functools.lru_cache(maxsize=4096)
def _bound(prepared: PreparedLaunch, device: torch.device, programs: int, numbers: tuple[int | float, ...]) -> Any:
    return prepared.bind(device, programs, numbers)


def launch(kernel: Any, programs: int, pointers: tuple[Any, ...], numbers: tuple[int | float, ...],
           constants: dict[str, Any], options: dict[str, Any]) -> None:  # fmt: skip
    """Launch so many programs of a kernel whose parameters are pointers and descriptors, numbers, and constants."""
    kinds = tuple(_kind(p) for p in pointers)
    prepared = _prepared(kernel, kinds, tuple(constants.items()), tuple(options.items()))
    _bound(prepared, pointers[0].device, programs, numbers)(*pointers)
