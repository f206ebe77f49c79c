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
4. Kernels in the interpreter, and on devices other than CUDA, are launched the ordinary way each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphsafe_kernels import _interpreter

__all__ = ["PreparedLaunch"]

_interpreter.prepare()


def _hooked() -> bool:
    """Whether somebody listens to launches. Triton 3.4 has one hook or None, later ones a chain that may be empty."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class PreparedLaunch:
    """One kernel with its compile-time constants and options: ``launch(grid, device, pointers, integers)``.

    ``constants``: name to value, in the order of the kernel's last parameters; ``options``: ``num_warps`` and the like.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self.constants = constants
        self._kernel = kernel
        self._values = tuple(constants.values())
        self._options = options
        self._compiled: dict[Any, Any] = {}
        self._interpreted = _interpreter.interpreted(kernel)

    def __call__(
        self, grid: int, device: torch.device, pointers: tuple[torch.Tensor | None, ...], integers: tuple[int, ...]
    ) -> None:
        """Launch ``grid`` programs on ``device``: the kernel's pointers in order (None where absent), then integers."""
        if grid == 0:
            return
        if self._interpreted or device.type != "cuda":
            self._kernel[(grid,)](*pointers, *integers, **self.constants, **self._options)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, device, pointers, integers)
            return
        addresses = [p if p is None else p.data_ptr() for p in pointers]
        union = 0
        for address in addresses:
            if address is not None:
                union |= address
        key: Any = index
        if union & 15:
            key = (index, *(address is not None and address & 15 == 0 for address in addresses))
        if max(integers) >= 2**31:
            key = (key, *(i >= 2**31 for i in integers))
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[(grid, 1, 1)](*pointers, *integers, **self.constants, **self._options)
        elif _hooked():
            compiled[(grid, 1, 1)](*pointers, *integers, *self._values)
        else:
            stream = triton.runtime.driver.active.get_current_stream(index)
            compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                         *addresses, *integers, *self._values)
