"""Times both layers on one GPU: replayed, eager, and flash-linear-attention's eager; forward, and with the backward.

    python benchmarks/layers.py --warm 15 --json layers.json
    python benchmarks/layers.py --device cpu --small        # the same steps on a CPU, to try the script

Hidden size 2048, bf16; head counts as published: Gated DeltaNet 16 query/key and 32 value heads of 128 (Qwen3-Next),
KDA 32 of 128 (Kimi Linear). Packed batches; ours build their chunk tables inside the graph. The same parameters in
every arm. Before anything is timed a replay is compared with eager bit for bit, output and every gradient, and output
and input gradient with the peer's; what the peer chooses at its first call it chooses at the longest shape.

Times are milliseconds, medians; 256 MB written and the device idle before each sample, the arms in turn. Host launches
are what the profiler sees the host ask of the driver in one step; bytes are the peak of one eager step above what was
there before, parameters and their gradients aside. This project's arms are timed at every shape first, then all arms in
turn. A case that fails is told, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from rich.console import Console
from rich.table import Table

import graphsafe as gs
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

HIDDEN = 2048
SHAPES = {"512x1": (512, 1), "1024x4": (1024, 4), "4096x32": (4096, 32), "8192x1": (8192, 1)}
LONGEST = "8192x1"
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "gdn": (GatedDeltaNet, {"num_heads": 16, "num_v_heads": 32, "head_dim": 128, "expand_v": 1}),
    "kda": (KimiDeltaAttention, {"num_heads": 32, "head_dim": 128, "safe_gate": True, "lower_bound": -5.0}),
}
SMALL: dict[str, dict[str, Any]] = {"gdn": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16},
                                    "kda": {"num_heads": 2, "head_dim": 16}}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def peer_layer(kind: str, own: torch.nn.Module, hidden: int, sizes: dict[str, Any]) -> torch.nn.Module:
    """flash-linear-attention's layer with the same parameters."""
    peers.flash_linear_attention()
    from fla.layers import GatedDeltaNet as PeerGdn
    from fla.layers import KimiDeltaAttention as PeerKda

    peer = (PeerGdn if kind == "gdn" else PeerKda)(hidden_size=hidden, layer_idx=0, norm_eps=1e-5, **sizes)
    like = next(own.parameters())
    peer = peer.to(like.device, like.dtype)
    peer.load_state_dict(own.state_dict())
    return peer.train()


class Clock:
    """Median times of arms in turn."""

    def __init__(self, device: torch.device, samples: int) -> None:
        self.cuda, self.samples = device.type == "cuda", samples
        self.scratch = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self.cuda else None

    def once(self, arm: Callable[[], Any]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            arm()
            return (time.perf_counter() - start) * 1e3
        assert self.scratch is not None
        self.scratch.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        arm()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def medians(self, arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
        for arm in arms.values():
            for _ in range(2):
                self.once(arm)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for i in range(self.samples):
            for name in list(arms) if i % 2 == 0 else reversed(list(arms)):
                found[name].append(self.once(arms[name]))
        return {name: round(statistics.median(times), 4) for name, times in found.items()}


def host_launches(arm: Callable[[], Any]) -> int:
    """Launches that the host asks for in one run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        arm()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if e.key.startswith(LAUNCHES))


def peak_bytes(arm: Callable[[], Any]) -> int:
    """The most that one run holds above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    arm()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative rms; infinite where ``got`` holds NaN."""
    got, want = got.double(), want.double()
    found = ((got - want).square().mean().sqrt() / (want.square().mean().sqrt() + 1e-8)).item()
    return found if found == found else float("inf")


class Case:
    """A layer, the peer's, and a packed batch."""

    def __init__(self, kind: str, shape: str, rt: Any, *, small: bool = False, with_peer: bool = True) -> None:
        tokens, sequences = (96, 3) if small else SHAPES[shape]
        hidden, dtype = (64, torch.float32) if small else (HIDDEN, torch.bfloat16)
        cls, sizes = KINDS[kind]
        sizes = sizes | (SMALL[kind] if small else {})
        torch.manual_seed(0)
        self.rt, self.bucket = rt, gs.Bucket(tokens=tokens, sequences=sequences)
        self.own = cls(hidden_size=hidden, **sizes).to(rt.device, dtype)
        self.x = torch.randn(1, tokens, hidden, device=rt.device, dtype=dtype).requires_grad_()
        self.dy = torch.randn(1, tokens, hidden, device=rt.device, dtype=dtype)
        step = max(1, tokens // sequences)
        self.cu = torch.tensor([*range(0, step * sequences, step), tokens], dtype=torch.int32, device=rt.device)
        self.index = self.cu.long()
        self.peer = peer_layer(kind, self.own, hidden, sizes) if with_peer else None

    def own_forward(self) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = self.own(self.x, tables=self.rt.tables(self.bucket).build(self.cu), use_graph=True)[0]
            return y

    def own_both(self) -> tuple[torch.Tensor, ...]:
        y = self.own(self.x, tables=self.rt.tables(self.bucket).build(self.cu), use_graph=True)[0]
        return (y.detach(), *torch.autograd.grad(y, [self.x, *self.own.parameters()], self.dy))

    def peer_forward(self) -> torch.Tensor:
        assert self.peer is not None
        with torch.no_grad():
            y: torch.Tensor = self.peer(self.x, cu_seqlens=self.index)[0]
            return y

    def peer_both(self) -> tuple[torch.Tensor, ...]:
        assert self.peer is not None
        y = self.peer(self.x, cu_seqlens=self.index)[0]
        return (y.detach(), *torch.autograd.grad(y, [self.x, *self.peer.parameters()], self.dy, allow_unused=True))

    def peer_calls(self) -> list[Callable[[], Any]]:
        return [] if self.peer is None else [self.peer_forward, self.peer_both]


def measure(case: Case, row: dict[str, Any], samples: int, launches: bool) -> None:
    """Everything about one case, into ``row``."""
    rt = case.rt
    arms: dict[str, dict[str, Callable[[], Any]]] = {"forward": {"eager": case.own_forward},
                                                     "both": {"eager": case.own_both}}
    static: dict[str, Any] = {}
    graphs = {}
    for name, body in (("forward", case.own_forward), ("both", case.own_both)):
        rt.warm_up(body)
        with rt.capture() as graph:
            static[name] = graph.outputs(body())
        arms[name]["replay"], graphs[name] = graph.replay, graph
    if case.peer is not None:
        arms["forward"]["fla"], arms["both"]["fla"] = case.peer_forward, case.peer_both
    eager = case.own_both()
    graphs["both"].replay()
    rt.synchronize()
    row["replay equals eager"] = all(torch.equal(a, b) for a, b in zip(static["both"], eager, strict=True))
    if case.peer is not None:
        theirs = case.peer_both()
        row["against fla"] = {"y": error(eager[0], theirs[0]), "dx": error(eager[1], theirs[1])}
        del theirs
    del eager
    clock = Clock(rt.device, samples)
    for name, which in arms.items():
        row[name] = clock.medians(which)
        if clock.cuda:
            counted = which if launches else {"replay": which["replay"]}
            row[f"{name} launches"] = {arm: host_launches(run) for arm, run in counted.items()}
            row[f"{name} bytes"] = {arm: peak_bytes(run) for arm, run in which.items() if arm != "replay"}
    if not row["replay equals eager"]:
        raise AssertionError("a replay differs from eager")
    if case.peer is not None and not max(row["against fla"].values()) < 0.03:
        raise AssertionError("the layers differ")


def compile_own(kind: str, shape: str, device: str, small: bool) -> str:
    """Compile this project's kernels for one case, in a process of its own; what went wrong."""
    try:
        case = Case(kind, shape, gs.get_runtime(device), small=small, with_peer=False)
        case.own_forward()
        case.own_both()
        case.rt.synchronize()
    except Exception as problem:  # told here, and again where it is measured
        return f"{kind} {shape}: {problem!r}"[:300]
    return ""


def compile_peer(kind: str, device: str, small: bool, rank: int, of: int) -> str:
    """Compile the peer's choices, as one of several processes; what went wrong."""
    try:
        for shape in ("512x1", LONGEST):
            for call in Case(kind, shape, gs.get_runtime(device), small=small).peer_calls():
                peers.compile_choices(call, rank, of)
    except Exception as problem:
        return f"fla {kind} {rank}: {problem!r}"[:300]
    return ""


def compile_all(processes: int, kinds: list[str], shapes: list[str], args: argparse.Namespace) -> list[str]:
    """Fill the compiler's cache by several processes at once; what went wrong."""
    results = os.environ.get("FLA_CACHE_RESULTS")
    os.environ["FLA_CACHE_RESULTS"] = "0"  # of the processes below: nothing they measure is worth keeping
    try:
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
            found = [pool.apply_async(compile_own, (k, s, args.device, args.small)) for k in kinds for s in shapes]
            if not args.no_peer:
                found += [pool.apply_async(compile_peer, (k, args.device, args.small, r, processes))
                          for r in range(processes) for k in kinds]
            return [problem for problem in (f.get() for f in found) if problem]
    finally:
        if results is None:
            del os.environ["FLA_CACHE_RESULTS"]
        else:
            os.environ["FLA_CACHE_RESULTS"] = results


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="milliseconds (host launches)")
    for column in ("layer", "shape", "", "eager", "replay", "fla eager", "eager / replay", "replay / fla"):
        table.add_column(column, justify="left" if column in ("layer", "shape", "") else "right")
    for row in rows:
        for name in ("forward", "both"):
            t, n = row.get(name), row.get(f"{name} launches", {})
            if t is None:
                continue
            cells = [f"{t[a]:.3f} ({n.get(a, '-')})" if a in t else "-" for a in ("eager", "replay", "fla")]
            share = f"{t['replay'] / t['fla']:.3f}" if "fla" in t else "-"
            table.add_row(row["kind"], row["shape"], name, *cells, f"{t['eager'] / t['replay']:.2f}", share)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--no-peer", action="store_true", help="leave flash-linear-attention out; always on a CPU")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile everything beforehand")
    parser.add_argument("--warm-only", action="store_true", help="compile and stop")
    parser.add_argument("--small", action="store_true", help="tiny sizes in fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.no_peer = args.no_peer or args.device == "cpu"
    kinds, shapes = args.kind or list(KINDS), args.shape or list(SHAPES)
    began = time.time()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"[{time.time() - began:4.0f}s]", json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))

    if args.warm:
        keep({"warm": compile_all(args.warm, kinds, shapes, args)})
    if args.warm_only:
        return
    if not args.no_peer:
        peers.choose_briefly()
    rt = gs.get_runtime(args.device)
    keep({"device": torch.cuda.get_device_name() if args.device == "cuda" else args.device, "torch": torch.__version__})
    failed = False
    for kind, with_peer in itertools.product(kinds, (False,) if args.no_peer else (False, True)):
        for shape in sorted(shapes, key=lambda s: s != LONGEST):  # the peer chooses at the longest
            row: dict[str, Any] = {"kind": kind, "shape": shape, "peer": with_peer}
            try:
                case = Case(kind, shape, rt, small=args.small, with_peer=with_peer)
                samples = args.samples if with_peer or args.no_peer else 5
                measure(case, row, samples, launches=shape in ("1024x4", shapes[0]))
            except Exception as problem:  # the other cases are worth their time
                traceback.print_exc()
                row["problem"], failed = repr(problem)[:300], True
            keep(row)
            gc.collect()
    show([row for row in rows if row.get("peer") == (not args.no_peer)])
    sys.exit(failed)


if __name__ == "__main__":
    main()
