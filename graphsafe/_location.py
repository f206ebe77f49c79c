"""Find the line of the caller's own code that an error should name.

Requirements
------------
1. The frame reported is the innermost one that belongs neither to this project's machinery nor to torch, triton,
   or the standard library's wrappers (``contextlib``, ``functools``).
2. ``graphsafe.testing``, ``.cli``, ``.demo`` and ``.bench`` count as callers: the bodies they capture are user code.
3. A thread of autograd has no frame of the caller; it was started by a backward in which the main thread waits, and
   that line is reported.
4. Finding a location never raises and holds no reference to a frame.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from dataclasses import dataclass
from types import FrameType

__all__ = ["Location", "caller", "is_internal"]

_INTERNAL_PACKAGES = (
    "graphsafe",
    "graphsafe_cpu",
    "graphsafe_cuda",
    "graphsafe_npu",
    "graphsafe_kernels",
    "torch",
    "torch_npu",
    "triton",
)
_CALLER_PACKAGES = ("graphsafe.testing", "graphsafe.cli", "graphsafe.demo", "graphsafe.bench")
_STDLIB_WRAPPERS = ("contextlib", "functools", "threading", "dataclasses", "typing", "importlib", "runpy", "abc")


@dataclass(frozen=True)
class Location:
    """A line of source: ``file``, 1-based ``line``, and the ``function`` it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


@functools.lru_cache(maxsize=4096)
def is_internal(module: str, file: str) -> bool:
    """Whether a frame of ``module`` in ``file`` is machinery rather than a caller's code."""
    if _within(module, _CALLER_PACKAGES):
        return False
    if _within(module, _INTERNAL_PACKAGES) or module.split(".")[0] in _STDLIB_WRAPPERS:
        return True
    return file.startswith("<frozen") or os.sep + "_pytest" + os.sep in file


def caller(frame: FrameType | None = None) -> Location | None:
    """The innermost frame of the caller's own code, or None where there is none (a thread of the library, say)."""
    asked_about_this_thread = frame is None
    frame = frame if frame is not None else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_internal(frame.f_globals.get("__name__", ""), code.co_filename):
            return Location(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    # Python did not start autograd's threads, and asking for the current thread would make it believe so
    here = threading.get_ident()
    if asked_about_this_thread and all(thread.ident != here for thread in threading.enumerate()):
        waiting = sys._current_frames().get(threading.main_thread().ident or 0)
        return None if waiting is None else caller(waiting)
    return None
