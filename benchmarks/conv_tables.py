"""Times the short convolution and the chunk tables on one GPU, next to a plain copy and flash-linear-attention.

    python benchmarks/conv_tables.py --json conv_tables.json
    FLA_CONV_GLUON=1 python benchmarks/conv_tables.py --shape 4096x1 --json gluon.json

Device times are medians of replays of captured graphs, in microseconds, 256 MB written before each sample, the arms of
a shape in turn and in reverse (A B C, C B A). Each is taken twice: *idle*, the device waiting when the replay is asked
for, so that the host's launch is in it, and *queued* behind the write. Outputs and gradients of every arm are compared
with fp64 before anything is timed. Host times are wall-clock times of calls in a row, no device wait in between.

Sections: conv (forward; forward and backward with the tables, in one graph), tables, host, replay (50 random layouts in
one graph, bit for bit against eager, NaN in the padding).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from graphsafe.bucket import slot_count
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.reference.conv import causal_conv1d as reference
from graphsafe_kernels.tables import build_tables

try:
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "0" if "FLA_CONV_GLUON" in os.environ else "1")
    from fla.modules.causal_conv1d import causal_conv1d as fla_conv1d
    from fla.ops.utils import prepare_chunk_indices as fla_chunk_indices
    from fla.ops.utils.index import prepare_chunk_indices_static as fla_fixed_tables
except ImportError:
    fla_conv1d = None

WIDTH, TAPS, CHUNK = 8192, 4, 64
SHAPES = {"1024x4": (1024, 4), "4096x1": (4096, 1), "4096x32": (4096, 32), "8192x1": (8192, 1)}
SEQUENCES = (1, 32, 256, 1024, 4096)
METHODS = ("idle", "queued")
DEVICE = "cuda"


def layout(tokens: int, sequences: int, seed: int = 0) -> list[int]:
    """Random cuts of ``tokens`` into ``sequences``."""
    rng = random.Random(seed)
    return [0, *sorted(rng.sample(range(1, tokens), sequences - 1)), tokens]


class Clock:
    """Times captured graphs."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def _sample(self, graph: torch.cuda.CUDAGraph, idle: bool) -> float:
        self.flush.zero_()
        if idle:
            torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def graphs(self, graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, dict[str, float]]:
        """Median by arm and method."""
        taken: dict[str, dict[str, list[float]]] = {name: {m: [] for m in METHODS} for name in graphs}
        for method in METHODS:
            for _ in range(-(-self.samples // 2)):
                for name in (*graphs, *reversed(graphs)):
                    taken[name][method].append(self._sample(graphs[name], method == "idle"))
        return {name: {m: round(statistics.median(v), 1) for m, v in by.items()} for name, by in taken.items()}


def capture(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream and capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.detach().double() - want).norm() / want.norm()).item()


class Conv:
    """One shape: bf16 operands, SiLU, no bias, no state."""

    def __init__(self, tokens: int, sequences: int) -> None:
        gen = torch.Generator(DEVICE).manual_seed(1)
        randn = lambda *s: torch.randn(*s, device=DEVICE, generator=gen).bfloat16()  # noqa: E731
        self.tokens = tokens
        self.x, self.dy = randn(1, tokens, WIDTH), randn(1, tokens, WIDTH)
        self.weight = randn(WIDTH, TAPS)
        self.cu = torch.tensor(layout(tokens, sequences), dtype=torch.int32, device=DEVICE)
        # the other library's own boundaries are int64
        self.cu_long = self.cu.long()
        self.tables = build_tables(self.cu, tokens, CHUNK)

    def own(self, x: torch.Tensor, weight: torch.Tensor, *, tables: bool) -> torch.Tensor:
        t = build_tables(self.cu, self.tokens, CHUNK) if tables else self.tables
        return causal_conv1d(x, weight, activation="silu", cu_seqlens=self.cu, use_graph=True,
                             chunk_indices=t.chunk_indices, chunk_offsets=t.chunk_offsets)[0]

    def fla(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fla_conv1d(x=x, weight=weight, activation="silu", cu_seqlens=self.cu_long)[0]

    def gradients(self, operator: Callable[..., torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
        x, weight = self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()
        y = operator(x, weight, **options)
        return y, *torch.autograd.grad(y, (x, weight), self.dy)

    def reference(self) -> tuple[torch.Tensor, ...]:
        x, weight = (t.double().requires_grad_() for t in (self.x, self.weight))
        y, _ = reference(x, weight, None, None, None, output_final_state=False, activate=True, cu_seqlens=self.cu,
                         tables=None, chunk_size=CHUNK, use_graph=False)
        return y.detach(), *torch.autograd.grad(y, (x, weight), self.dy.double())


def measure_conv(clock: Clock, name: str) -> dict[str, Any]:
    case = Conv(*SHAPES[name])
    want = case.reference()
    arms = {"own": (case.own, {"tables": True}), **({"fla": (case.fla, {})} if fla_conv1d else {})}
    errors = {}
    for arm, (operator, options) in arms.items():
        got = case.gradients(operator, **options)
        errors[arm] = {k: relative(g, w) for k, g, w in zip(("y", "dx", "dweight"), got, want, strict=True)}
        del got
    del want
    target = torch.empty_like(case.x)

    def plain(operator: Callable[..., torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return operator(case.x, case.weight, **options)

    graphs = {"copy": capture(lambda: target.copy_(case.x))}
    for arm, (operator, options) in arms.items():
        only = {"tables": False} if arm == "own" else {}
        graphs[f"{arm} forward"] = capture(lambda f=operator, o=only: plain(f, o))
        graphs[f"{arm} forward + backward"] = capture(lambda f=operator, o=options: case.gradients(f, **o))
    times = clock.graphs(graphs)
    copies = {a: {m: round(t[m] / times["copy"][m], 2) for m in METHODS} for a, t in times.items()}
    allowed = {f"own {part}": {m: round(n * times["copy"][m] + 5, 1) for m in METHODS}
               for part, n in (("forward", 1.15), ("forward + backward", 3.1))}
    met = all(times[a][m] <= allowed[a][m] for a in allowed for m in METHODS)
    return {"shape": name, "us": times, "copies": copies, "allowed": allowed, "met": met, "errors": errors}


def measure_tables(clock: Clock, sequences: int, tokens: int = 8192) -> dict[str, Any]:
    cu = torch.tensor(layout(tokens, sequences), dtype=torch.int32, device=DEVICE)
    many = 20

    def repeated() -> None:
        for _ in range(many + 1):
            build_tables(cu, tokens, CHUNK)

    graphs = {"one": capture(lambda: build_tables(cu, tokens, CHUNK)), "many": capture(repeated)}
    if fla_conv1d:
        slots, cu_long = slot_count(tokens, sequences, CHUNK), cu.long()
        graphs["fla"] = capture(lambda: fla_fixed_tables(cu_long, CHUNK, slots))
    t = clock.graphs(graphs)
    within = {m: round((t["many"][m] - t["one"][m]) / many, 2) for m in METHODS}
    return {"sequences": sequences, "alone": t["one"], "within a graph": within, "fla": t.get("fla")}


def host(body: Callable[[], Any], calls: int = 200, rounds: int = 9) -> list[float]:
    """Microseconds a call, by round; the device is idle at the start of each."""
    for _ in range(20):
        body()
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        taken.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return taken


def measure_host() -> list[dict[str, Any]]:
    """Host time of a forward call at a size the device finishes before the host does."""
    x, weight = torch.randn(1, 256, 256, device=DEVICE).bfloat16(), torch.randn(256, TAPS, device=DEVICE).bfloat16()
    leaf = x.clone().requires_grad_()
    cu = torch.tensor([0, 100, 256], dtype=torch.int32, device=DEVICE)
    cu_long, t = cu.long(), build_tables(cu, 256, CHUNK)
    tables = {"cu_seqlens": cu, "chunk_indices": t.chunk_indices, "chunk_offsets": t.chunk_offsets}
    options = {"weight": weight, "activation": "silu"}
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dense, no grad": (lambda: causal_conv1d(x, **options), lambda: fla_conv1d(x, **options)),
        "dense, grad": (lambda: causal_conv1d(leaf, **options), lambda: fla_conv1d(leaf, **options)),
        "packed, tables given, no grad": (
            lambda: causal_conv1d(x, **options, **tables),
            lambda: fla_conv1d(x, **options, cu_seqlens=cu_long, chunk_indices=FLA_INDICES[0]),
        ),
        "packed, tables given, grad": (
            lambda: causal_conv1d(leaf, **options, **tables),
            lambda: fla_conv1d(leaf, **options, cu_seqlens=cu_long, chunk_indices=FLA_INDICES[0]),
        ),
        "packed, tables built (own) or cached by identity (fla), no grad": (
            lambda: causal_conv1d(x, **options, cu_seqlens=cu),
            lambda: fla_conv1d(x, **options, cu_seqlens=cu_long),
        ),
    }
    FLA_INDICES: list[torch.Tensor] = []
    if fla_conv1d:
        FLA_INDICES.append(fla_chunk_indices(cu_long, CHUNK))
    rows = []
    for name, (own, fla) in cases.items():
        with torch.set_grad_enabled(not name.endswith("no grad")):
            taken: dict[str, list[float]] = {"own": [], "fla": []}
            arms = {"own": own, "fla": fla} if fla_conv1d else {"own": own}
            for order in (list(arms), list(reversed(arms))):
                for arm in order:
                    taken[arm] += host(arms[arm])
        us = {arm: round(statistics.median(v), 1) for arm, v in taken.items() if v}
        rows.append({"call": name, "us": us, "ratio": round(us["own"] / us["fla"], 3) if "fla" in us else None})
    rows.append({"call": "torch.empty, for scale", "us": {"own": round(statistics.median(host(
        lambda: torch.empty(1, 256, 256, dtype=torch.bfloat16, device=DEVICE))), 1)}, "ratio": None})
    return rows


def measure_replay(layouts: int = 50, tokens: int = 4096, sequences: int = 32) -> dict[str, Any]:
    """One graph of tables, forward and backward with states, bias and residual, replayed over random layouts."""
    rng = random.Random(0)
    randn = lambda *s: torch.randn(*s, device=DEVICE).bfloat16()  # noqa: E731
    rows = {k: randn(1, tokens, WIDTH) for k in ("x", "residual", "dy")}
    held = {k: torch.empty_like(v) for k, v in rows.items()}
    weight, bias = randn(WIDTH, TAPS).requires_grad_(), randn(WIDTH).requires_grad_()
    initial, dfinal = randn(sequences, WIDTH, TAPS).requires_grad_(), randn(sequences, WIDTH, TAPS)
    cu = torch.tensor([0] + [tokens] * sequences, dtype=torch.int32, device=DEVICE)

    def body() -> tuple[torch.Tensor, ...]:
        x, residual = held["x"].detach().requires_grad_(), held["residual"].detach().requires_grad_()
        y, final = causal_conv1d(x, weight, bias, residual, initial, True, "silu", cu_seqlens=cu, use_graph=True)
        leaves = (x, weight, bias, residual, initial)
        return y, final, *torch.autograd.grad((y, final), leaves, (held["dy"], dfinal))

    def fill(live: int) -> None:
        for k, v in rows.items():
            held[k].copy_(v.roll(rng.randrange(tokens), 1))
            held[k][:, live:] = float("nan")

    fill(tokens)
    for _ in range(2):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = body()
    equal = zero = 0
    for _ in range(layouts):
        cuts = sorted(rng.randrange(tokens + 1) for _ in range(sequences))
        cu.copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        fill(cuts[-1])
        for t in static:
            t.fill_(float("nan"))
        graph.replay()
        eager = body()
        equal += all(torch.equal(a, b) for a, b in zip(static, eager, strict=True))
        zero += all(bool((static[i][:, cuts[-1] :] == 0).all()) for i in (0, 2, 5))
    return {"layouts": layouts, "bitwise equal": equal, "padding zero": zero}


def show(result: dict[str, Any], console: Console) -> None:
    """Tables for a person."""
    both = lambda d: f"{d['idle']} / {d['queued']}"  # noqa: E731
    table = Table("shape", "arm", "us, idle / queued", "copies", "allowed us",
                  title=f"Convolution, D {WIDTH}, W {TAPS}")
    for row in result["conv"]:
        for arm, us in row["us"].items():
            allowed = both(row["allowed"][arm]) if arm in row["allowed"] else ""
            table.add_row(row["shape"], arm, both(us), both(row["copies"][arm]), allowed)
    console.print(table)
    table = Table("N", "alone, idle / queued", "one more in a graph", "fla, alone",
                  title="Tables, T 8192, BT 64, us")
    for row in result["tables"]:
        table.add_row(str(row["sequences"]), both(row["alone"]), both(row["within a graph"]),
                      both(row["fla"]) if row["fla"] else "")
    console.print(table)
    table = Table("forward call", "own", "fla", "ratio", title="Host time, us")
    for row in result["host"]:
        table.add_row(row["call"], str(row["us"]["own"]), str(row["us"].get("fla", "")), str(row["ratio"] or ""))
    console.print(table)
    console.print("errors against fp64:", {r["shape"]: {a: {k: f"{v:.1e}" for k, v in e.items()}
                                                        for a, e in r["errors"].items()} for r in result["conv"]})
    console.print("replay:", result["replay"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="measure these shapes only")
    parser.add_argument("--samples", type=int, default=40, help="samples of each arm and method")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    clock = Clock(arguments.samples)
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "peer": None if fla_conv1d is None else "gluon" if "FLA_CONV_GLUON" in os.environ else "triton",
        "conv": [measure_conv(clock, name) for name in arguments.shape or SHAPES],
        "tables": [measure_tables(clock, n) for n in SEQUENCES],
        "host": measure_host(),
        "replay": measure_replay(),
    }
    show(result, Console(width=120))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
