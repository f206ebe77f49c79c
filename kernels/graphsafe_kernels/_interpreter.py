"""Triton's interpreter, made to work with the numpy that is installed.

Requirements
------------
1. ``prepare`` changes nothing unless kernels are interpreted (``TRITON_INTERPRET=1``), and may be called again.
2. A loaded loop bound works: the interpreter makes an ``int`` of an array of one element, which numpy refuses from 2.4.
"""

from __future__ import annotations

from typing import Any

import triton

__all__ = ["interpreted", "prepare"]


def interpreted(kernel: Any) -> bool:
    """Whether a ``triton.jit`` function runs in the interpreter; decided where it was decorated."""
    return not isinstance(kernel, triton.JITFunction)


def prepare() -> None:
    """Let a one-element array of the interpreter be a loop bound."""
    knobs = getattr(triton, "knobs", None)  # Triton-Ascend 3.2 has none
    if knobs is None or not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "indexes_arrays", False):
        return

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        index = lambda self: int(self.handle.data.item())  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    patch.indexes_arrays = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
