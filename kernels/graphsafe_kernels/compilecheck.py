"""Compile every shipped kernel configuration without a device: ``python -m graphsafe_kernels.compilecheck``.

Requirements
------------
1. Every configuration of ``graphsafe_kernels.shipped`` is compiled down to machine code for the target, and listed with
   its registers, spills and shared memory, as a table or with ``--json``.
2. The exit status is 0 only if all compiled, none spills and none wants more shared memory than a program may have on
   the target; 1 otherwise; 2 where the check could not be made at all: a target of the other Triton is such a case.
3. A target is one function from a configuration to figures: another back end is another entry in ``TARGETS``.
4. Several processes compile side by side, as many as the machine has cores unless ``--jobs`` says otherwise; the rows
   come in the order of ``shipped`` whatever their number.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import triton
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends import backends

from graphsafe_kernels._interpreter import interpreted
from graphsafe_kernels.compilecheck_ascend import ARCHITECTURES, compile_ascend
from graphsafe_kernels.policy import KINDS
from graphsafe_kernels.shipped import Shipped, configurations

__all__ = ["TARGETS", "Figures", "check", "main"]


@dataclass(frozen=True)
class Figures:
    """What became of one configuration on one target; the sizes are None where it did not compile.

    NVIDIA: ``registers`` a thread; ``spills``: loads and stores of local memory in the machine code; ``shared`` bytes a
    program. Ascend: ``units`` (aiv: vector alone; mix: cube and vector); ``unified``: bytes of the unified buffer in
    the compiler's plan; ``workspace`` bytes a program; ``locks``. ``problem``: the error's first line.
    """

    target: str
    kernel: str
    configuration: str
    warps: int
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    units: str | None = None
    unified: int | None = None
    workspace: int | None = None
    locks: int | None = None
    seconds: float = 0.0
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and not self.spills


SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability -> bytes of shared memory one thread block may have (CUDA programming guide, table of technical
specifications)."""


def _compile_cuda(shipped: Shipped, capability: int) -> dict[str, Any]:
    """Registers, spills and shared memory on compute capability ``capability`` (90 for sm_90)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(shipped.kernel.arg_names):
        kind = shipped.types.get(name)
        if kind is None:
            signature[name], constants[(i,)] = "constexpr", shipped.constants.get(name)
        else:
            signature[name] = kind
            if kind.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(shipped.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": shipped.warps, "num_stages": shipped.stages,
                 **({"maxnreg": shipped.registers} if shipped.registers else {})},
    )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", report)
    if registers is None or "EXIT" not in report:
        raise RuntimeError("cuobjdump showed neither the resource usage nor the machine code")
    # a stack frame alone says little: some compilers reserve one that nothing uses
    spills = len(re.findall(r"\b(?:STL|LDL)\b", report))
    shared = int(compiled.metadata.shared)
    figures: dict[str, Any] = {"registers": int(registers[1]), "spills": spills, "shared": shared}
    if shared > SHARED[capability]:
        figures["problem"] = f"{shared} bytes of shared memory a program; sm_{capability} has {SHARED[capability]}"
    return figures


TARGETS: dict[str, Callable[[Shipped], dict[str, Any]]] = {
    "sm_80": lambda shipped: _compile_cuda(shipped, 80),
    "sm_90": lambda shipped: _compile_cuda(shipped, 90),
    "sm_100": lambda shipped: _compile_cuda(shipped, 100),
    "ascend910b": lambda shipped: compile_ascend(shipped, "ascend910b"),
    "ascend950": lambda shipped: compile_ascend(shipped, "ascend950"),
}
"""Target -> compiler of one configuration. Its policy is that of the device kind of the same name."""


def check(target: str, kernels: Iterable[Shipped]) -> Iterator[Figures]:
    """Compile each of ``kernels`` for ``target``."""
    for shipped in kernels:
        figures = Figures(target, shipped.kernel.__name__, shipped.name, shipped.warps)
        start = time.perf_counter()
        try:
            figures = replace(figures, **TARGETS[target](shipped))
        except Exception as problem:  # whatever the compiler raises is a finding of the check
            first = (str(problem).strip().splitlines() or [""])[0]
            figures = replace(figures, problem=f"{type(problem).__name__}: {first}")
        yield replace(figures, seconds=time.perf_counter() - start)


def _check_one(target: str, index: int) -> Figures:
    """The figures of the configuration with number ``index``; a kernel does not travel between processes."""
    return next(check(target, itertools.islice(configurations(KINDS[target]), index, None)))


def _all(work: list[tuple[str, int, Shipped]], jobs: int) -> Iterator[Figures]:
    """Compile all of ``work``, ``jobs`` at a time, in order."""
    if jobs == 1 or len(work) == 1:
        for target, _, shipped in work:
            yield from check(target, [shipped])
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
        yield from pool.map(_check_one, [w[0] for w in work], [w[1] for w in work])


def _print(results: list[Figures], console: Console) -> None:
    table = Table()
    for column in ("target", "kernel", "configuration"):
        table.add_column(column, overflow="fold")
    ascend = any(r.target in ARCHITECTURES for r in results)
    sizes = ("units", "unified", "workspace") if ascend else ("registers", "spills", "shared")
    for column in ("warps", *sizes):
        table.add_column(column, justify="right")
    for r in results:
        told = (r.problem, "", "") if r.problem else (str(getattr(r, size)) for size in sizes)
        table.add_row(r.target, r.kernel, r.configuration, str(r.warps), *told, style=None if r.ok else "red")
    console.print(table)
    bad = sum(not r.ok for r in results)
    console.print(f"{len(results)} configurations, {bad} of them spill, do not fit or do not compile")


app = typer.Typer(add_completion=False)


@app.command()
def main(
    target: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TARGETS)}; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile side by side.")] = os.cpu_count() or 1,
) -> None:
    """Compile every shipped kernel configuration for one or several targets, without a device."""
    ascend = "ascend" in backends
    mine = [t for t in TARGETS if (t in ARCHITECTURES) == ascend]
    targets = target or mine
    errors = Console(stderr=True)
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        errors.print(f"unknown target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
        raise typer.Exit(2)
    foreign = [t for t in targets if t not in mine]
    if foreign:
        needed, here = ("triton", "triton-ascend") if ascend else ("triton-ascend", "triton")
        errors.print(f"{', '.join(foreign)} needs {needed}; this environment has {here}, and they exclude each other")
        raise typer.Exit(2)
    work = [(t, i, shipped) for t in targets for i, shipped in enumerate(configurations(KINDS[t]))]
    if any(interpreted(shipped.kernel) for _, _, shipped in work):
        errors.print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled. Unset it for this check.")
        raise typer.Exit(2)
    results = list(track(_all(work, jobs), description="compiling", total=len(work), console=errors, transient=True,
                         disable=not errors.is_terminal))  # fmt: skip
    if as_json:
        print(json.dumps([asdict(r) | {"ok": r.ok} for r in results], indent=1))
    else:
        _print(results, Console())
    raise typer.Exit(0 if all(r.ok for r in results) else 1)


if __name__ == "__main__":
    app()
