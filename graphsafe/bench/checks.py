"""Right before fast: what is compared before a time is taken.

Requirements
------------
1. Every result and gradient of every mode is compared with the fp64 oracle, over live rows, by
   ``rms(oracle - result) / (rms(oracle) + 1e-8)``. NaN never passes.
2. Rows behind the live total are exactly zero wherever a result has the bucket's size.
3. A replay equals eager on the same static memory bit for bit, on two layouts, after poisoning.
4. ``use_graph=False`` changes no bit of what a call gives that says nothing about graphs.
5. An arm's provider that fails one of these is wrong: no time of it is taken or shown.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graphsafe.bench.cases import Case
from graphsafe.bench.modes import Prepared, reason_of
from graphsafe.bench.workloads import Tensors, Workload
from graphsafe.compare import first_difference
from graphsafe.errors import GraphSafeError

__all__ = ["Check", "bound_of", "check", "relative_error"]

_SLOW_GRADIENTS = ("dbeta", "dg", "dA_log", "ddt_bias")


@dataclass
class Check:
    """What was found. ``errors``: the largest over the modes, by result; ``bounds``: what they may be.

    ``replay``: whether a replay equals eager bit for bit, None where there is no graph. ``live_difference``: the
    largest difference between eager-fixed and eager-live on live rows, 0 for the same bits. ``same_bits``: the controls
    against eager-live. ``problems``: what makes the arms wrong.
    """

    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    replay: bool | None = None
    live_difference: float | None = None
    same_bits: dict[str, bool] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; an error that is no finite number is None, which JSON has."""
        found = asdict(self)
        found["errors"] = {name: value if math.isfinite(value) else None for name, value in self.errors.items()}
        return found


def bound_of(case: Case, name: str) -> float:
    """The largest relative error of result ``name``: see ``docs/bench.md`` for where each bound is from."""
    half = case.dtype != "float32"
    if case.operator == "tables":
        return 0.0
    if case.operator == "conv":
        return 4e-3 if case.dtype == "bfloat16" else 1e-3
    if case.is_layer or case.is_step:
        return (5e-2 if name.startswith("d") else 2e-2) if half else 1e-3
    if not half:
        return 1e-4
    return 0.02 if name in _SLOW_GRADIENTS else 0.008 if name.startswith("d") else 0.005


def relative_error(result: torch.Tensor, oracle: torch.Tensor) -> float:
    """``rms(oracle - result) / (rms(oracle) + 1e-8)``; NaN where either holds one."""
    device = oracle.device
    difference = oracle - result.detach().to(device, torch.float64)
    return float(difference.square().mean().sqrt() / (oracle.square().mean().sqrt() + 1e-8))


def check(workload: Workload, prepared: Prepared, oracle: Tensors) -> Check:
    """Compare everything; see the module's requirements."""
    found = Check()
    for mode, results in prepared.results.items():
        _against_oracle(found, workload, mode, results, oracle)
    if not found.problems:
        _controls(found, workload, prepared)
    if prepared.verify is not None:
        try:
            prepared.verify()
            found.replay = True
        except GraphSafeError as problem:
            found.replay = False
            found.problems.append(f"graph-replay: {reason_of(problem)}")
    return found


def _against_oracle(found: Check, workload: Workload, mode: str, results: Tensors, oracle: Tensors) -> None:
    for name, want in oracle.items():
        if name not in results:
            found.problems.append(f"{mode}: {name} is missing")
            continue
        bound = bound_of(workload.case, name)
        live = _live(workload, name, results[name])
        if live.shape != want.shape:
            found.problems.append(f"{mode}: {name} is {list(live.shape)}, and {list(want.shape)} is right")
            continue
        if want.is_floating_point():
            error = relative_error(live, want)
        else:
            error = float((live.to(want.device, want.dtype) != want).sum())
        found.errors[name] = _larger(found.errors.get(name, 0.0), error)
        found.bounds[name] = bound
        if not error <= bound:
            found.problems.append(f"{mode}: {name} differs from fp64 by {error:.2e}, more than {bound:.0e}")
        _padding(found, workload, mode, name, results[name])


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a


def _live(workload: Workload, name: str, result: torch.Tensor) -> torch.Tensor:
    case, kind = workload.case, workload.result_kind(name)
    if kind == "tokens":
        return result[:, : case.live_tokens]
    if kind == "sequences":
        return result[: case.live_sequences]
    if kind == "slots":
        # the batch's own table has room for slots of sequences that share a chunk; the live rows come first
        return result[: case.live_slots]
    return result[: case.live_sequences + 1] if kind == "boundaries" else result


def oracle_rows(workload: Workload, oracle: Tensors) -> Tensors:
    """The oracle cut as results are: a table has rows behind its live ones at any size."""
    return {name: _live(workload, name, t) for name, t in oracle.items()}


def _padding(found: Check, workload: Workload, mode: str, name: str, result: torch.Tensor) -> None:
    kind = workload.result_kind(name)
    if kind == "tokens":
        tail = result[:, workload.case.live_tokens :]
        if tail.numel() and not bool((tail == 0).all()):
            found.problems.append(f"{mode}: rows of {name} behind the live total are not zero")
    elif kind == "slots":
        tail = result[workload.case.live_slots :]
        if tail.numel() and not bool((tail == tail.new_tensor([-1, 0])).all()):
            found.problems.append(f"{mode}: unused slots of {name} do not hold the sentinel")


def _controls(found: Check, workload: Workload, prepared: Prepared) -> None:
    live = prepared.results.get("eager-live")
    if live is None:
        return
    for control in ("eager-off", "eager-on", "graph-live"):
        results = prepared.results.get(control)
        if results is not None:
            found.same_bits[control] = all(first_difference(n, results[n], live[n]) is None for n in live)
    if found.same_bits.get("eager-off") is False:
        found.problems.append("eager-off: use_graph=False changes bits of a call that says nothing about graphs")
    fixed = prepared.results.get("eager-fixed")
    if fixed is not None:
        found.live_difference = max(
            (
                float((_live(workload, n, fixed[n]).double() - _live(workload, n, live[n]).double()).abs().max())
                for n in live
                if live[n].numel()
            ),
            default=0.0,
        )
