"""The one call of CANN's runtime that torch_npu does not expose: filling raw device memory.

Requirements
------------
1. Only a function of CANN's stable interface is called, through the library that torch_npu has loaded.
2. A call that fails raises.
"""

from __future__ import annotations

import ctypes
import functools

__all__ = ["fill_bytes"]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libascendcl.so")


def fill_bytes(address: int, value: int, nbytes: int) -> None:
    """Fill device memory and wait."""
    size = ctypes.c_size_t(nbytes)
    code = _library().aclrtMemset(ctypes.c_void_p(address), size, ctypes.c_int32(value), size)
    if code != 0:
        raise RuntimeError(f"aclrtMemset failed: error {code}")
