"""The libraries that this project's operators are timed beside, and compiling their choices beforehand.

Requirements
------------
1. A peer's operator is its public function, from its own package; where that is not installed, ImportError says so.
2. ``compile_choices`` compiles every choice of the peer's autotuners for one call and times none, so that several
   processes, each beginning elsewhere in the lists, fill Triton's cache together. Nothing they measure is kept.
3. ``choose_briefly`` has autotuners time each choice for a quarter of the time that they would by themselves.
4. ``race`` captures every arm, replays them in turn (A B C C B A), and gives the median of each: with the device idle
   at the launch, and queued behind other work.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch


def flash_linear_attention() -> None:
    """Let flash-linear-attention use its Triton kernels, also in the backward of GDN on Hopper."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True  # lifts its refusal of Hopper: its K = 128 backward is right there


def gated_delta_rule(name: str) -> Callable[..., Any]:
    """``chunk_gated_delta_rule`` of "fla" or "flashqla"."""
    if name == "fla":
        flash_linear_attention()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op
    else:
        from flash_qla import chunk_gated_delta_rule as op
    return op


def compile_choices(call: Callable[[], object], rank: int = 0, of: int = 1) -> None:
    """Make ``call`` in this process with its autotuners compiling each choice, beginning at share ``rank / of``."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def rotated(self: Any, kwargs: Any) -> list[Any]:
        configs = prune(self, kwargs)
        first = len(configs) * rank // of
        return [*configs[first:], *configs[:first]]

    def once(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            self.fn.run(*args, **(meta | config.all_kwargs()))
        except Exception:  # a choice that does not fit the device is the peer's to skip
            return [float("inf")] * 3
        return [1.0] * 3

    Autotuner.prune_configs, Autotuner._bench = rotated, once
    try:
        call()
        torch.cuda.synchronize()
    finally:
        Autotuner.prune_configs, Autotuner._bench = prune, bench


def choose_briefly() -> None:
    """Let autotuners time each choice for 25 ms: a peer's layer has some twenty kernels with a dozen choices each."""
    import triton

    driver: Any = triton.runtime.driver.active
    driver.get_benchmarker = lambda: functools.partial(triton.testing.do_bench, warmup=5, rep=25)


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ``call``, which was made twice on another stream before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()  # type: ignore[attr-defined]
    return graph


def race(arms: dict[str, Callable[[], Any]], samples: int) -> dict[str, tuple[float, float]]:
    """Arm -> (device idle at the launch, queued behind other work), medians of replays in us."""
    graphs = {name: capture(call) for name, call in arms.items()}
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    found: dict[tuple[str, bool], list[float]] = {}
    for turn, queued in itertools.product(range(samples), (False, True)):
        for name in list(graphs)[:: -1 if turn % 2 else 1]:
            flush.zero_()
            if not queued:
                torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found.setdefault((name, queued), []).append(start.elapsed_time(end) * 1e3)
    median = {key: round(statistics.median(times), 1) for key, times in found.items()}
    return {name: (median[name, False], median[name, True]) for name in graphs}
