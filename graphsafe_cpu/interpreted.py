"""Launches of Triton kernels in Triton's interpreter, made visible to a watch and a tape.

Requirements
------------
1. Nothing of triton is imported unless the caller's code has imported it.
2. A launch is seen whole: what the interpreter does inside (copies, numpy) is neither an operator nor a broken rule.
3. Tensors that a launch may write are saved before it, since the interpreter does not say which it writes; a copied
   input that did change is a broken rule.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphsafe._storage import key_of
from graphsafe._watch import Watch
from graphsafe.tree import tensors
from graphsafe_cpu.tape import Tape

__all__ = ["interpreted_launches"]


@contextlib.contextmanager
def interpreted_launches(watch: Watch, tape: Tape | None) -> Iterator[None]:
    """While the block runs, tell ``watch`` and ``tape`` of each interpreted launch of this process."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    executor: Any = interpreter.GridExecutor
    original = executor.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            operands = tensors((args, kwargs))
            before = {key_of(t): t.clone() for t in operands if key_of(t) in watch.copied_inputs}
            for t in operands:
                if watch.saved.births or key_of(t) not in watch.born:
                    watch.saved.save(t)
            result = original(self, *args, **kwargs)
            watch.operators += 1
            for t in operands:
                if key_of(t) in before and not torch.equal(before[key_of(t)], t):
                    watch.about_to_write(t)
            if tape is not None:
                tape.launch(functools.partial(original, self), args, kwargs, _name(self))
        return result

    executor.__call__ = watched
    try:
        yield
    finally:
        executor.__call__ = original


def _name(executor: Any) -> str:
    return f"triton::{getattr(executor.fn, '__name__', type(executor.fn).__name__)}"
