"""Host work that is no operator, refused inside a capture: seeding, host random numbers, threads, the collector.

Requirements
------------
1. The functions that do such work are replaced for the time of a capture; each breaks the rule named beside it.
2. Other threads of the program may go on calling them; autograd's own threads belong to the capture.
3. A function of torch.compile is refused when it is called, whether this version of torch would compile it anew under
   the guard's modes, run it as it was written, or find it compiled. It is not interrupted: torch would keep its state.
   It runs as it was written: under a mode torch would not compile it, then or ever after.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graphsafe.errors import GraphSafeError

__all__ = ["as_written", "called_by", "no_host_work"]


class _Refuses(Protocol):
    """The part of a watch that is needed here."""

    other_threads_drew: bool

    def refuse(self, rule: str, what: str, *, tensor: torch.Tensor | None = None, **details: Any) -> None: ...


def called_by(package: str, *, frames: int = 1) -> bool:
    """Whether one of the nearest ``frames`` callers of the function that asks is of ``package``."""
    frame = sys._getframe(1).f_back
    for _ in range(frames):
        if frame is None:
            return False
        module = str(frame.f_globals.get("__name__", ""))
        if module == package or module.startswith(package + "."):
            return True
        frame = frame.f_back
    return False


_SEEDING = ("manual_seed", "seed", "set_rng_state", "get_rng_state")


def _refused_functions() -> Iterator[tuple[Any, str, str, str]]:
    """(owner, name, rule, text) of functions that work on generators on the host, or where a watch cannot see."""
    yield torch, "compile", "cold-kernel", "torch.compile is called inside a capture"
    yield threading.Thread, "start", "not-capturable", "a thread is started inside a capture"
    for name in ("collect", "enable"):
        text = f"gc.{name}() inside a capture lets finalizers run between its operators"
        yield gc, name, "not-capturable", text
    for module in (torch, torch.random):
        for name in _SEEDING:
            if hasattr(module, name):
                yield module, name, "rng-state", f"torch.{name} is called inside a capture"
    numpy = sys.modules.get("numpy")
    modules = [random] if numpy is None else [random, numpy.random]
    for module in modules:
        for name, function in vars(module).items():
            owner = getattr(function, "__self__", None)
            # the module's own generator: its methods are the module's functions
            if not name.startswith("_") and type(owner).__name__ in ("Random", "RandomState") and callable(function):
                text = f"{module.__name__}.{name} is called inside a capture"
                yield module, name, "host-randomness", text


@contextlib.contextmanager
def no_host_work(watch: _Refuses) -> Iterator[None]:
    """Some host work is no operator; the functions that do it are replaced for the time of a capture.

    Other threads of the program may go on calling them; autograd's own threads belong to the capture.
    """
    capturing = threading.get_ident()

    def refuse(original: Callable[..., Any], rule: str, text: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def refused(*args: Any, **kwargs: Any) -> Any:
            here = threading.get_ident()
            if here != capturing and any(thread.ident == here for thread in threading.enumerate()):
                watch.other_threads_drew |= rule in ("rng-state", "host-randomness")
                return original(*args, **kwargs)
            if not called_by("torch._dynamo", frames=2):
                watch.refuse(rule, text)
            return original(*args, **kwargs)

        return refused

    replaced = [(*found, getattr(found[0], found[1])) for found in _refused_functions()]
    for owner, name, rule, text, original in replaced:
        setattr(owner, name, refuse(original, rule, text))
    try:
        with _no_compiled_function(watch):
            yield
    finally:
        for owner, name, _, _, original in replaced:
            setattr(owner, name, original)


_COMPILE_REMEDY = (
    "Leave torch.compile out of the captured body: under the guard's modes it compiles anew even after a warm-up, "
    "or in some versions of torch runs the function as it was written."
)


def _no_compiled_function(watch: _Refuses) -> AbstractContextManager[None]:
    def refuse() -> None:
        with contextlib.suppress(GraphSafeError):  # the watch keeps it for the end of the capture
            watch.refuse("cold-kernel", "a function of torch.compile is called", remedy=_COMPILE_REMEDY)

    return as_written(refuse)


@contextlib.contextmanager
def as_written(told: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Functions of torch.compile run as they were written, and ``told`` is called before.

    What torch.compile returned sets a callback around each call: that is where it can be told.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    original = getattr(dynamo, "_maybe_set_eval_frame", None)
    if original is None:
        yield
        return

    def set_callback(callback: Any) -> Any:
        if not callable(callback):
            return original(callback)
        told()
        return original(None)

    dynamo._maybe_set_eval_frame = set_callback
    try:
        yield
    finally:
        dynamo._maybe_set_eval_frame = original
