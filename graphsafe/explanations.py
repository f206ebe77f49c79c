"""What errors of drivers and libraries mean in code that captures graphs, and what to do; adapters extend the table.

Requirements
------------
1. The core's table holds messages that do not depend on a device. An adapter adds its own in its module ``explain``,
   which has a function ``explanation_of``; an adapter is imported only when its errors are asked about.
2. Each row names the rule that was broken, and the source that says what the error means.
3. What no row fits is not explained.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass

from graphsafe.runtime import known_runtimes

__all__ = ["EXPLANATIONS", "Explanation", "explanation_of", "explanations_of", "first"]


@dataclass(frozen=True)
class Explanation:
    """``pattern`` finds the error in a text; ``rule`` is the rule it breaks; then its meaning, the remedy, and where it
    is documented."""

    pattern: str
    rule: str
    meaning: str
    remedy: str
    source: str = ""


EXPLANATIONS = (
    Explanation(
        r"graph capture of step\(\) for an instance of \w+ but param_groups' capturable is False",
        "unsupported",
        "The optimizer keeps its step count on the host, which a replay would not advance.",
        "Make the optimizer with capturable=True.",
        "torch/optim/optimizer.py, _accelerator_graph_capture_health_check",
    ),
    Explanation(
        r"needed for gradient computation has been modified by an inplace operation",
        "metadata-changed",
        "A tensor that a backward pass still needs was written in place: by the body itself, or by an update or a "
        "replay between a forward and its backward, since a graph writes its inputs and outputs in place at each call.",
        "Run the backward inside the captured body, or clone what an eager backward needs before the next call.",
        "torch/csrc/autograd/saved_variable.cpp",
    ),
    Explanation(
        r"Trying to backward through the graph a second time",
        "tensor-escapes",
        "The saved tensors of this backward are freed already. In captured code: a tensor made in one run, with its "
        "autograd graph, was kept and is used in another.",
        "Detach what is carried from step to step, or run forward and backward in one body.",
        "torch/csrc/autograd/saved_variable.cpp",
    ),
    Explanation(
        r"does not require grad and does not have a grad_fn",
        "unsupported",
        "Nothing behind this tensor is differentiable. The results of a replay are plain memory without an autograd "
        "graph.",
        "Run the backward inside the captured body, as TrainStep does.",
        "torch/csrc/autograd/engine.cpp",
    ),
    Explanation(
        r"(?i)\bautotun\w*\b.*\bcaptur|\bcaptur\w*\b.*\bautotun|\bdo_bench(_cudagraph)?\b",
        "cold-kernel",
        "A Triton kernel met a new key of its autotuner during the capture; tuning measures time, which synchronises, "
        "and the driver breaks the capture.",
        "Run the body once with the same shapes, dtypes and options before the capture (runtime.warm_up does).",
        "triton issue 10596; triton/testing.py, do_bench_cudagraph",
    ),
)


def first(table: Iterable[Explanation], text: str) -> Explanation | None:
    """The first row whose pattern is in the text."""
    return next((e for e in table if re.search(e.pattern, text)), None)


def explanation_of(problem: BaseException | str | int) -> Explanation | None:
    """The core's explanation of an error, its text, or its code."""
    return first(EXPLANATIONS, str(problem))


def explanations_of(problem: str | int) -> list[tuple[str, Explanation]]:
    """All that is known: (``"any"`` or the runtime's name, explanation).

    A text that names another runtime's device, and not an adapter's own, is not for that adapter.
    """
    found = []
    core = explanation_of(problem)
    if core is not None:
        found.append(("any", core))
    known = sorted(known_runtimes().items())
    named = {name for name, _ in known if re.search(rf"(?i){name}", str(problem))} - {"cpu"}
    for name, entry in known:
        module = f"{entry.module}.explain"
        if (named and name not in named) or importlib.util.find_spec(module) is None:
            continue
        row = importlib.import_module(module).explanation_of(problem)
        if row is not None and row is not core:
            found.append((name, row))
    return found
