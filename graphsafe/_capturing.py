"""Code that asks torch whether a stream is being captured gets an answer where the runtime captures without a stream.

Requirements
------------
1. Inside the block ``torch.cuda.is_current_stream_capturing()``, and that of ``torch.npu`` where it is loaded, answer
   for the thread that runs the block; other threads are answered by torch, or no where torch cannot answer.
2. Builds of torch without CUDA answer nothing by themselves, so a warm-up needs an answer too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["answering"]

_NAME = "is_current_stream_capturing"


@contextlib.contextmanager
def answering(capturing: bool) -> Iterator[None]:
    """Inside the block the question is answered with ``capturing``."""
    here = threading.get_ident()

    def answer(original: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(original)
        def asked() -> bool:
            if threading.get_ident() == here:
                return capturing
            try:
                return original()
            except (AttributeError, RuntimeError):  # a build without CUDA
                return False

        return asked

    candidates: list[Any] = [torch.cuda, getattr(torch, "npu", None)]
    devices = [module for module in candidates if hasattr(module, _NAME)]
    originals = [getattr(module, _NAME) for module in devices]
    for module, original in zip(devices, originals, strict=True):
        setattr(module, _NAME, answer(original))
    try:
        yield
    finally:
        for module, original in zip(devices, originals, strict=True):
            setattr(module, _NAME, original)
