"""Triton's interpreter, made to work with the numpy that is installed, with products and casts of bf16 as on devices.

Requirements
------------
1. ``prepare`` changes nothing unless kernels are interpreted (``TRITON_INTERPRET=1``), and may be called again.
2. A loaded loop bound works: the interpreter makes an ``int`` of an array of one element, which numpy refuses from 2.4.
3. Products of bf16 operands are those of their values, where the interpreter multiplies their bits; fp32 is rounded to
   bf16 to nearest, ties to even, where the interpreter cuts it off. NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import triton

__all__ = ["interpreted", "prepare"]


def interpreted(kernel: Any) -> bool:
    """Whether a ``triton.jit`` function runs in the interpreter; decided where it was decorated."""
    return not isinstance(kernel, triton.JITFunction)


def prepare() -> None:
    """Let a one-element array of the interpreter be a loop bound, and bf16 be multiplied and rounded as on a device."""
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
    _mend_bf16(interpreter)


def _mend_bf16(interpreter: Any) -> None:
    """Bf16 is held as its bits in unsigned numbers of 16 bits."""
    import numpy as np  # the interpreter needs it; nothing else of this package does
    from triton import language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, widened(a), widened(b), *more)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return handle(np.where(np.isnan(src.data), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
