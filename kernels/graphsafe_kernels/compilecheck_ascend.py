"""One kernel configuration compiled for Ascend, as far as that goes without the closed last step of its compiler.

Requirements
------------
1. The whole of Triton-Ascend and of the Ascend compiler runs: memory planning refuses what does not fit.
2. The figures are the compiler's: the bytes of the unified buffer that its plan takes, the workspace a program takes
   from the pool, the locks. A kernel with locks is a finding: a capture cannot initialise them; so is one that takes
   more workspace than a bucket's price counts.
3. An environment without Triton-Ascend is an error that says so.
"""

from __future__ import annotations

import re
from typing import Any

from graphsafe_kernels.policy import KINDS
from graphsafe_kernels.shipped import Shipped

__all__ = ["ARCHITECTURES", "compile_ascend"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "ascend910b": {"arch": "Ascend910B3"},
    "ascend950": {
        "arch": "Ascend910_9589", "compile_on_910_95": True, "multibuffer": False, "enable_auto_bind_sub_block": False,
        "enable_select_analysis": True,
    },
}  # fmt: skip
"""Target -> the compiler's name of it, and the options that Triton-Ascend gives on such a device."""

_CAUSE = re.compile(r"[^\n]*(?:overflow, requires[^(\n]*|error: [^\n]*)")
_PLACE = re.compile(r'loc\("[^"]*"(?::\d+)*\):? ?|error: ')


def compile_ascend(shipped: Shipped, target: str) -> dict[str, Any]:
    """Units, unified buffer and workspace in bytes, and locks of ``shipped``; raises RuntimeError with the cause."""
    _prepare()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {**ARCHITECTURES[target], **shipped.options}
    arch = options.pop("arch")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name in shipped.kernel.arg_names:
        kind = shipped.types.get(name)
        signature[name] = kind or "constexpr"
        if kind is None:
            constants[name] = shipped.constants.get(name)
    source = ASTSource(shipped.kernel, signature, constants)
    try:
        compiled = triton.compile(source, target=GPUTarget("npu", arch, 0), options=options)
    except Exception as problem:  # the compiler's report is a page; one line of it is the cause
        raise RuntimeError(f"{type(problem).__name__}: {_cause(problem)}") from problem
    told = compiled.metadata
    locks = max(int(getattr(told, "lock_num", 0)), 0)
    figures = {
        "units": told.mix_mode,
        "unified": int(told.required_ub_bits) // 8 or None,
        "workspace": max(int(getattr(told, "workspace_size", 0)), 0),
        "locks": locks,
    }
    if locks:
        figures["problem"] = f"needs {locks} locks, which no capture initialises"
    elif figures["workspace"] > KINDS[target].workspace:
        figures["problem"] = f"takes {figures['workspace']} bytes of workspace; the price has {KINDS[target].workspace}"
    return figures


def _cause(problem: BaseException) -> str:
    """One line of an error: of a compiler's report its causes, an overflow before all others; else the last one."""
    report = str(problem)
    lines = [_PLACE.sub("", m.group(0)).strip() for m in _CAUSE.finditer(report)]
    if lines:
        return min(lines, key=lambda line: "overflow" not in line)
    if "Stack dump" in report:
        return "the compiler crashed"
    return (report.strip().splitlines() or [""])[-1].strip()


def _prepare() -> None:
    """Triton-Ascend must be there; on a simulated Ascend its driver is replaced first."""
    from triton.backends import backends

    if "ascend" not in backends:
        raise RuntimeError("this environment has the stock triton; the target needs triton-ascend")
    from graphsafe_npu import sim

    if sim.present():
        sim.activate()
