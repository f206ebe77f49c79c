"""A call's allocations and launches as a program: worked out once, for shapes, dtypes and options, then run.

What a call works out in Python (configurations, grids, constants, descriptors' geometry) costs more than its kernels
take on small batches, and is the same for every call of one signature. :func:`record` runs the function that launches
once on tensors without memory and keeps what it allocated and launched; a :class:`Program` does only that again.

Requirements
------------
1. A program holds no tensor: each run allocates anew by the framework's allocator, so in a capture it belongs to the
   graph, and calls share nothing.
2. What is recorded follows from shapes, dtypes, the device and Python values alone; callers key programs by these.
3. Launches go through :class:`graphsafe_kernels.launch.PreparedLaunch`.
4. On CUDA what a run does not return is one allocation, of which each launch gets addresses: twelve allocations take
   the host as long as two launches with descriptors.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphsafe_kernels.launch import Place, PreparedLaunch

__all__ = ["Program", "aligned", "record"]

Spec = tuple[tuple[int, ...], torch.dtype]

ALIGNMENT = 512
"""Bytes at a multiple of which each part of an allocation begins, as the framework's allocator aligns its own."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it on a GPU that starts at a multiple of 16 bytes, as descriptors need it there."""
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


class _Tile(NamedTuple):
    """A descriptor of the value with this number; ``fields`` are all of it but the tensor."""

    value: int
    fields: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _prepared(kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...], options: tuple[Any, ...],
              ) -> PreparedLaunch:  # fmt: skip
    """A launch with its compile-time constants in the kernel's order; ``kinds`` tells apart what is compiled apart."""
    values = dict(constants)
    ordered = {name: values.pop(name) for name in inspect.signature(kernel.fn).parameters if name in values}
    assert not values, f"{kernel.fn.__name__} has no parameters {sorted(values)}"
    return PreparedLaunch(kernel, ordered, **dict(options))


def _kind(argument: Any) -> Any:
    """What a kernel's parameter is compiled for."""
    if argument is None or isinstance(argument, torch.Tensor):
        return argument if argument is None else argument.dtype
    return argument.base.dtype, *argument.block_shape


class Program:
    """Allocations, then launches, over numbered values: the inputs first, then what is allocated."""

    def __init__(self, device: torch.device, inputs: Sequence[torch.Tensor | None]) -> None:
        self._device = device
        self._held = list(inputs)  # while it is recorded: numbers are found by identity
        self._numbers = {id(t): i for i, t in enumerate(inputs) if t is not None}
        self._allocations: list[Spec] = []
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._results: tuple[int | None, ...] = ()
        self._places: list[int | None] = []  # of each allocation: its offset in the one buffer, or None
        self._bytes: int | None = None  # of the one buffer; None: there is none

    def _number(self, tensor: torch.Tensor) -> int:
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self._held)
            self._held.append(tensor)
            self._allocations.append((tuple(tensor.shape), tensor.dtype))
        return found

    def _source(self, argument: Any) -> Any:
        if argument is None:
            return None
        if isinstance(argument, torch.Tensor):
            return self._number(argument)
        fields = {name: value for name, value in vars(argument).items() if name != "base"}
        return _Tile(self._number(argument.base), fields)

    def start(self, kernel: Any, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int,
              stages: int = 1, **more: Any) -> None:  # fmt: skip
        """Record a launch: ``arguments`` are tensors, descriptors and None, then numbers; ``more``: other options."""
        if not grid:
            return
        count = next((i for i, a in enumerate(arguments) if isinstance(a, (int, float))), len(arguments))
        options = {"num_warps": warps, "num_stages": stages, **more}
        prepared = _prepared(kernel, tuple(map(_kind, arguments[:count])), tuple(constants.items()),
                             tuple(options.items()))  # fmt: skip
        launch = prepared.bind(self._device, grid, arguments[count:])
        self._steps.append((launch, tuple(map(self._source, arguments[:count]))))

    def finish(self, results: Iterable[torch.Tensor | None]) -> None:
        """Say what a run returns, and let go of what was recorded with."""
        self._results = tuple(None if t is None else self._number(t) for t in results)
        first = len(self._held) - len(self._allocations)
        self._held, self._numbers = [], {}
        for number, (shape, dtype) in enumerate(self._allocations, first):
            if self._device.type != "cuda" or number in self._results:
                self._places.append(None)
                continue
            start = self._bytes or 0
            self._places.append(start)
            self._bytes = start + -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def run(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Allocate and launch; the inputs are as those recorded with, the first one is a tensor."""
        values: list[Any] = [*inputs]
        allocate = inputs[0].new_empty  # type: ignore[union-attr]
        if self._bytes is not None:
            buffer = allocate((self._bytes,), dtype=torch.uint8)
            address = buffer.data_ptr()
        for (shape, dtype), offset in zip(self._allocations, self._places, strict=True):
            if offset is None:
                values.append(allocate(shape, dtype=dtype))
            else:
                values.append(Place(buffer, address, offset, shape, dtype))
        for launch, sources in self._steps:
            launch(*[None if s is None else values[s] if type(s) is int else _descriptor(values[s.value], s.fields)
                     for s in sources])  # fmt: skip
        return [None if r is None else values[r] for r in self._results]


def _descriptor(base: torch.Tensor | None, fields: dict[str, Any]) -> Any:
    """A descriptor like the recorded one: nothing of it needs to be checked again."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=base)
    return made


def record(function: Callable[..., Iterable[torch.Tensor | None]], device: torch.device,
           specs: Sequence[Spec | None]) -> Program:  # fmt: skip
    """The program of ``function(start, *inputs)``, with inputs of these shapes and dtypes on ``device``.

    The function launches through ``start`` alone, allocates contiguous tensors, and returns the results.
    """
    with _disable_current_modes():  # nobody's work: whoever counts operators is not told
        inputs = [None if s is None else torch.empty(s[0], dtype=s[1], device="meta") for s in specs]
        program = Program(device, inputs)
        program.finish(function(program.start, *inputs))
    return program
