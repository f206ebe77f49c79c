"""What the process of one probe does: run it and say in plain values what was found.

Requirements
------------
1. An error becomes a status: what a rule refuses is ``unsupported``, all else ``failed``, with category and text.
2. A row that is no probe (``environment``) tells versions, device and driver, or why the runtime cannot be used.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import graphsafe
from graphsafe._revision import commit
from graphsafe.capabilities.matrix import FAILED, SUPPORTED, UNSUPPORTED
from graphsafe.capabilities.probe import Missing, Wrong, probes
from graphsafe.errors import Category, GraphSafeError
from graphsafe.explanations import explanations_of
from graphsafe.rules import rule
from graphsafe.runtime import get_runtime

__all__ = ["found_by"]

_PLACE = re.compile(r" \(made by (\S+) at [^()]*\)")


def found_by(runtime_name: str, row: str) -> dict[str, Any]:
    """Run one probe; returns the fields of a row, or the environment (``missing``: why there is none)."""
    asked = probes().get(row)
    try:
        runtime: Any = get_runtime(runtime_name)
    except GraphSafeError as problem:
        if asked is not None:
            raise
        return {"missing": problem.what, "remedy": problem.remedy}
    simulated = bool(getattr(runtime, "simulated", False))
    if asked is None:
        return {"environment": _environment(runtime), "simulated": simulated}
    found: dict[str, Any] = {"simulated": simulated, "status": SUPPORTED}
    try:
        found["text"] = asked.run(runtime) or ""
    except Missing as problem:
        found.update(_of_rule("unsupported", str(problem)), status=UNSUPPORTED)
    except Wrong as problem:
        found.update(_of_rule("replay-differs", str(problem)), status=FAILED)
    except GraphSafeError as problem:
        refused = problem.category in (Category.UNSUPPORTED, Category.DISTRIBUTED)
        found.update(_of_rule(problem.rule.name, problem.what), status=UNSUPPORTED if refused else FAILED)
    except Exception as problem:
        found.update(status=FAILED, text=f"{type(problem).__name__}: {problem}")
        known = explanations_of(str(problem))
        if known:
            named = rule(known[0][1].rule)
            found.update(rule=named.id, category=str(named.category), explanation=known[0][1].meaning)
    return found


def _of_rule(name: str, text: str) -> dict[str, str]:
    text = _PLACE.sub(r" (made by \1)", text)  # a matrix names no path of a machine
    return {"rule": rule(name).id, "category": str(rule(name).category), "text": text}


def _environment(runtime: Any) -> dict[str, str | None]:
    def of(distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return {
        "graphsafe": graphsafe.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: v for name in ("triton", "triton-ascend", "torch_npu") if (v := of(name)) is not None},
        **runtime.environment(),
    }
