"""The loop over cases: prepare, check, time, count; with a journal that an interrupted run resumes from.

Requirements
------------
1. A case's providers are prepared together and their arms timed in the same interleaved rounds.
2. What is wrong is not timed. What fails or is refused is a row with its reason, and the run goes on.
3. Each result is written to the journal when it is known. A run that was interrupted resumes from it, under the same
   conditions only; the same cases then give the same report as an uninterrupted run, its floors formed of one
   measurement of the device.
4. Interruption (Ctrl-C) leaves graphs closed and the results so far in the report.
5. A device that a call has broken, so that it serves nothing more in this process, ends the run as an interruption
   does: the next cases are no failures, and a resumed run measures them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphsafe.bench.cases import Case
from graphsafe.bench.checks import Check, check, oracle_rows
from graphsafe.bench.counts import launches_of, peak_bytes
from graphsafe.bench.environment import environment, not_resumable
from graphsafe.bench.figures import break_even, figures
from graphsafe.bench.floors import device_peaks, floor_us, work_of
from graphsafe.bench.modes import Prepared, prepare, reason_of
from graphsafe.bench.results import blank_result
from graphsafe.bench.steps import Step, prepare_step
from graphsafe.bench.timing import Protocol, Times, cache_flush, collector_spared, measure
from graphsafe.bench.workloads import Tensors, Workload, public_operator, workload_of
from graphsafe.errors import error

__all__ = ["Bench", "Progress"]

SCHEMA = 1
Progress = Callable[[int, int, str, str], None]
"""Called with (cases done, cases in all, label, stage)."""


@dataclass
class Bench:
    """One run. ``providers`` are compared case by case, one of ``limits`` in those cases whose label holds one of its
    texts; ``journal`` is where results go as they come; ``now`` is the host clock."""

    runtime: Any
    cases: Sequence[Case]
    providers: Sequence[str] = ("graphsafe",)
    protocol: Protocol = field(default_factory=Protocol)
    journal: Path | None = None
    resume: bool = False
    limits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    progress: Progress = lambda done, total, label, stage: None
    now: Callable[[], float] = time.perf_counter
    interrupted: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        from graphsafe_kernels.providers import get_provider

        named = [get_provider(name) for name in self.providers]
        self.environment = environment(self.runtime, self.protocol, [d for p in named for d in p.distributions])
        self.environment["providers"] = {p.name: self._notes(p) for p in named}

    def _notes(self, provider: Any) -> list[str]:
        """What a reader of its figures must know: its notes, and the conversions that its adapter makes."""
        asked = dict.fromkeys(public_operator(case) for case in self.cases)
        services = {name: provider.services[name] for name in asked if name in provider.services}
        limit = [self._limit(provider.name)] if provider.name in self.limits else []
        conversions = (f"{name}: {c}" for name, service in services.items() for c in service.conversions)
        return [*provider.notes, *limit, *conversions]

    def _limit(self, name: str) -> str:
        return f"it was asked for cases of {' or '.join(self.limits[name])} alone"

    def run(self) -> dict[str, Any]:
        """Measure every case and return the report; after an interruption, of what was measured."""
        known = self._resumed() if self.resume else {}
        self.environment["peaks"] = self.environment["peaks"] or device_peaks(self.runtime)
        self._start_journal(known)
        self._flush = cache_flush(self.runtime.device)
        with collector_spared() as spare:
            for number, case in enumerate(self.cases):
                missing = [p for p in self.providers if (case.key, p) not in known]
                try:
                    fresh = self._case(number, case, missing) if missing else []
                except KeyboardInterrupt:
                    self.interrupted = True
                    break
                for result in fresh:
                    self._write(result)
                done = {r["provider"]: r for r in fresh} | {p: r for (k, p), r in known.items() if k == case.key}
                self.results += [done[p] for p in self.providers if p in done]
                if any(r["status"] in ("failed", "wrong") for r in fresh) and not self._device_answers():
                    self.interrupted = True
                    break
                spare()  # what the case was the first to load, too
        return self.report()

    def report(self) -> dict[str, Any]:
        """Everything as plain values; times in microseconds, sizes in bytes."""
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "complete": not self.interrupted,
            "results": self.results,
            "break_even": break_even(self.results),
        }

    # One case.

    def _case(self, number: int, case: Case, providers: Sequence[str]) -> list[dict[str, Any]]:
        def stage(text: str) -> None:
            self.progress(number, len(self.cases), case.label, text)

        prepared: dict[str, Prepared] = {}
        results = {name: blank_result(case, name) | {"floor": self._floor(case)} for name in providers}
        try:
            self._measure(case, results, prepared, stage)
        except Exception as problem:  # a device out of memory, say: rows of the report, and the run goes on
            for result in results.values():
                if result["status"] == "ok":
                    result.update(status="failed", reason=reason_of(problem), times={})
        finally:
            for made in prepared.values():
                with contextlib.suppress(Exception):  # of a broken device: the rows say why
                    made.close()
        for result in results.values():
            result["figures"] = figures(result)
        return list(results.values())

    def _device_answers(self) -> bool:
        try:
            self.runtime.synchronize()
        except Exception:  # whatever a broken device raises: its rows say what went wrong
            return False
        return True

    def _floor(self, case: Case) -> dict[str, Any] | None:
        us = floor_us(case, self.environment["peaks"])
        return None if us is None else {"us": us, "directions": [asdict(work) for work in work_of(case)]}

    def _measure(
        self,
        case: Case,
        results: dict[str, dict[str, Any]],
        prepared: dict[str, Prepared],
        stage: Callable[[str], None],
    ) -> None:
        stage("fp64 reference")
        workload: Workload = Step(case, self.runtime.device) if case.is_step else workload_of(case, self.runtime.device)
        oracle = self._oracle(workload)
        for name in results:
            stage(f"{name}: warm-up and capture")
            self._prepare(workload, name, results[name], prepared)
        for name in list(prepared):
            stage(f"{name}: checks")
            self._check(workload, name, oracle, results[name], prepared)
        del oracle
        if not self.protocol.samples:
            return
        arms = {f"{name} {arm}": call for name, p in prepared.items() for arm, call in p.arms.items()}
        if arms:
            self._time(arms, results, lambda taken: stage(f"samples: {taken} of {self.protocol.samples}"))
        for name, made in prepared.items():
            stage(f"{name}: launches and bytes")
            self._count(made, results[name])

    def _oracle(self, workload: Workload) -> Tensors:
        # fp64 exists on CPUs and NVIDIA GPUs; other devices' results are compared on the host
        device = self.runtime.device if self.runtime.device.type in ("cpu", "cuda") else torch.device("cpu")
        found = oracle_rows(workload, workload.oracle(workload.batch(0), device))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # tens of gigabytes for long batches, which a capture could not take back
        return found

    def _prepare(self, workload: Workload, name: str, result: dict[str, Any], into: dict[str, Prepared]) -> None:
        if not self._asked(name, workload.case):
            result.update(status="refused", reason=self._limit(name))
            return
        try:
            if isinstance(workload, Step):
                made = prepare_step(workload, name, self.runtime)
            else:
                made = prepare(workload, name, self.runtime)
        except Exception as problem:  # a library that fails on this case is a row of the report
            result.update(status="failed", reason=reason_of(problem))
            return
        result["refusals"] = made.refusals
        if "eager-live" not in made.arms:
            result.update(status="refused", reason=made.refusals["eager-live"])
            return
        result.update(first_call_s=made.first_call_s, live_bytes=made.live_bytes)
        result["graph"] = None if made.facts is None else made.facts.as_dict()
        into[name] = made

    def _asked(self, name: str, case: Case) -> bool:
        """Whether a case is within a provider's limit; of an operator that it lacks, it says that itself."""
        from graphsafe_kernels.providers import get_provider

        served = public_operator(case) in get_provider(name).services
        return not served or any(text in case.label for text in self.limits.get(name, [""]))

    def _check(
        self, workload: Workload, name: str, oracle: Tensors, result: dict[str, Any], prepared: dict[str, Prepared]
    ) -> None:
        try:
            found = check(workload, prepared[name], oracle)
        except Exception as problem:
            found = Check(problems=[reason_of(problem)])
        result["checks"] = found.as_dict()
        prepared[name].results.clear()
        if found.problems:
            result.update(status="wrong", reason="; ".join(found.problems))
            prepared.pop(name).close()

    def _time(
        self, arms: dict[str, Callable[[], Any]], results: dict[str, dict[str, Any]], tick: Callable[[int], None]
    ) -> None:
        rounds = 0

        def count() -> None:
            nonlocal rounds
            rounds += 2
            tick(rounds)

        times: dict[str, Times] = measure(
            arms, self.runtime, self.protocol, flush=self._flush, now=self.now, tick=count
        )
        for arm, taken in times.items():
            provider, _, mode = arm.partition(" ")
            results[provider]["times"][mode] = taken.summaries()

    def _count(self, made: Prepared, result: dict[str, Any]) -> None:
        launches, reasons = launches_of(made, self.runtime)
        result["launches"] = {name: count.as_dict() for name, count in launches.items()}
        result["not_counted"] = reasons
        for name in ("eager-live", "eager-fixed", "graph-replay"):
            if name in made.arms:
                result["peak_bytes"][name] = peak_bytes(made.arms[name], self.runtime)

    # The journal.

    def _start_journal(self, known: dict[tuple[str, str], dict[str, Any]]) -> None:
        if self.journal is None:
            return
        lines = [{"environment": self.environment}, *known.values()]
        self.journal.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def _write(self, result: dict[str, Any]) -> None:
        if self.journal is not None:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")

    def _resumed(self) -> dict[tuple[str, str], dict[str, Any]]:
        if self.journal is None or not self.journal.exists():
            return {}
        lines = self.journal.read_text(encoding="utf-8").splitlines(keepends=True)
        complete = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run may leave half a line
        if not complete:
            return {}
        stored = complete[0]["environment"]
        differing = not_resumable(self.environment, stored)
        if differing:
            raise error(
                "argument",
                "the run cannot be resumed under other conditions: " + "; ".join(differing),
                why="One report would mix two conditions.",
                remedy="Run again without --resume.",
            )
        self.environment["peaks"] = stored["peaks"]
        return {(r["key"], r["provider"]): r for r in complete[1:]}
