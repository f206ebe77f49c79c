"""A prepared launch: what Triton works out anew at each launch, worked out once.

Requirements
------------
1. The first launch of a specialisation goes through ``kernel[grid](...)``: Triton compiles and its compile hooks fire,
   so that a guard sees a cold kernel.
2. Later ones call the compiled kernel's launcher with addresses. While a launch hook is installed they go through
   ``compiled[grid](...)`` instead, which calls it: whoever counts or refuses launches sees every one.
3. A compiled kernel is reused only where Triton would reuse it: same device and constants, the same pointers divisible
   by 16, the same integers beyond 32 bits. Dtypes and absent operands are part of what the caller keys its prepared
   launch by, and no integer argument is one that the kernel specialises.
4. A grid that an NPU does not take is refused by name where the launch is prepared.
5. Kernels in the interpreter, and on devices other than CUDA, are launched the ordinary way each time.
6. A pointer may be a :class:`Place` in a buffer, which costs no tensor where its address is enough.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import triton

from graphsafe.errors import error
from graphsafe_kernels import _interpreter

__all__ = ["Place", "PreparedLaunch"]

MOST_PROGRAMS = 65535
"""What Triton-Ascend accepts of a grid, its axes multiplied."""

NPU_OPTIONS = frozenset({"multibuffer"})
"""Options of the Ascend compiler; it takes none of the others, and nobody else takes these."""

_interpreter.prepare()
_knobs: Any = getattr(getattr(triton, "knobs", None), "runtime", None)  # none in Triton-Ascend 3.2


def _hooked() -> bool:
    """Whether somebody listens to launches. Triton 3.4 has one hook or None, later ones a chain that may be empty."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))
    )


def _stream_of() -> Callable[[int], int]:
    """The active driver's function from a device's index to the raw handle of its current stream."""
    function: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return function


class Place:
    """Memory in a buffer of bytes, from ``offset``, for a tensor of ``shape`` and ``dtype``; on CUDA alone."""

    __slots__ = ("_buffer", "_dtype", "_offset", "_shape", "address")

    def __init__(self, buffer: torch.Tensor, address: int, offset: int, shape: tuple[int, ...],
                 dtype: torch.dtype) -> None:  # fmt: skip
        self._buffer, self._offset, self._shape, self._dtype = buffer, offset, shape, dtype
        self.address = address + offset

    def data_ptr(self) -> int:
        return self.address

    def tensor(self) -> torch.Tensor:
        size = math.prod(self._shape) * self._dtype.itemsize
        return self._buffer[self._offset : self._offset + size].view(self._dtype).view(self._shape)


def _tensors(pointer: Any) -> Any:
    """The pointer, or descriptor, with a tensor for a place."""
    if isinstance(pointer, Place):
        return pointer.tensor()
    if not isinstance(getattr(pointer, "base", None), Place):
        return pointer
    made = object.__new__(type(pointer))  # a descriptor's dataclass would be checked anew
    made.__dict__.update(vars(pointer), base=pointer.base.tensor())
    return made


class PreparedLaunch:
    """One kernel with its compile-time constants and options; :meth:`bind` adds the device, the grid and the integers.

    ``constants``: name to value, in the order of the kernel's last parameters; ``options``: ``num_warps`` and the like.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self.constants = constants
        self._kernel = kernel
        self._values = tuple(constants.values())
        self._options = {name: value for name, value in options.items() if name not in NPU_OPTIONS}
        self._npu_options = {name: value for name, value in options.items() if name in NPU_OPTIONS}
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def bind(self, device: torch.device, programs: int,
             integers: tuple[int | float | None, ...]) -> Callable[..., None]:  # fmt: skip
        """A function of the kernel's pointers and tensor descriptors alone, in order, None where absent: it launches
        ``programs`` programs."""
        if programs == 0:
            return lambda *pointers: None
        if device.type == "npu" and programs > MOST_PROGRAMS:
            raise error("unsupported", f"a grid of {programs} programs of {self._kernel.__name__}",
                        why=f"An NPU takes {MOST_PROGRAMS} programs in all.",
                        remedy="Use a smaller bucket, or larger chunks.")
        grid = (programs, 1, 1)
        if _interpreter.interpreted(self._kernel) or device.type != "cuda":
            options = self._npu_options if device.type == "npu" else self._options
            given = _tensors if device.type == "cuda" else lambda pointer: pointer
            return lambda *pointers: self._kernel[grid](*map(given, pointers), *integers, **self.constants, **options)
        index = device.index
        key = (index, tuple(i is not None and i >= 2**31 for i in integers))
        alone = torch.cuda.device_count() == 1

        def launch(*pointers: Any) -> None:
            if alone or index == torch.cuda.current_device():
                self._launch(index, key, grid, pointers, integers)
            else:
                with torch.cuda.device(index):
                    self._launch(index, key, grid, pointers, integers)

        return launch

    def _launch(self, index: int, key: Any, grid: tuple[int, int, int], pointers: tuple[Any, ...],
                integers: tuple[int | float, ...]) -> None:
        # an absent pointer is a compile-time constant: what is passed in its place is not looked at
        addresses = [
            0 if p is None else p.data_ptr() if isinstance(p, (torch.Tensor, Place)) else p for p in pointers
        ]  # a descriptor goes to the launcher as it is
        numbers = [a for a in addresses if type(a) is int]
        if functools.reduce(operator.or_, numbers, 0) & 15:
            key = (key, tuple(number & 15 == 0 for number in numbers))
        found = self._compiled.get(key)
        if found is None:
            compiled = self._kernel[grid](*map(_tensors, pointers), *integers, **self.constants, **self._options)
            self._compiled[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata, _stream_of())
            return
        compiled, run, function, metadata, stream_of = found
        if _hooked():
            compiled[grid](*map(_tensors, pointers), *integers, *self._values)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *addresses, *integers, *self._values)
