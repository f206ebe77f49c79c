"""What the guard costs at a replay: off, normal and strict, by the number of tensors that the graph reads from outside.

``python benchmarks/guard.py [cpu|cuda|npu]`` prints one line a case. The times are of the host, from the call of
``graph.replay()`` to its return, of a graph of one small kernel for each tensor read; "the device's own" is the replay
of torch's graph without this project. Medians of many samples, each of many replays; the device is idle in between.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import graphsafe as gs

_SAMPLES, _REPLAYS = 31, 20


def microseconds(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Median time of one call, in microseconds."""
    samples = []
    for _ in range(_SAMPLES):
        synchronize()
        begin = time.perf_counter()
        for _ in range(_REPLAYS):
            call()
        samples.append((time.perf_counter() - begin) / _REPLAYS * 1e6)
    return statistics.median(samples)


def check_of(graph: Any) -> Callable[[], None]:
    """What the guard adds to a replay on a device: the state of the graph, and what it reads from outside."""
    outside = getattr(graph, "_outside", None) or graph.outside

    def check() -> None:
        graph._ready()
        outside.check(strict=graph.strict)

    return check


def main(device: str) -> None:
    """Print the table."""
    rt = gs.get_runtime(device)
    print(f"{rt.environment()}, torch {torch.__version__}; microseconds a replay")
    print(f"{'reads':<8} {'device own':>11} {'off':>8} {'normal':>8} {'strict':>8}   check alone: normal, strict")
    for count in (1, 8, 32, 128, 512):
        tensors = [torch.full((16,), float(i), device=rt.device) for i in range(count)]
        body = lambda tensors=tensors: [t * 2 for t in tensors][-1]  # noqa: E731
        rt.warm_up(body)
        graphs = {}
        for guard in ("off", "normal", "strict"):
            with rt.capture(guard=guard) as graph:
                graph.outputs(body())
            graph.replay()
            graphs[guard] = graph
        times = {guard: microseconds(graph.replay, rt.synchronize) for guard, graph in graphs.items()}
        raw, alone = "-", "-"
        if device != "cpu":
            raw = f"{microseconds(graphs['normal'].raw.replay, rt.synchronize):.2f}"
            both = (microseconds(check_of(graphs[guard]), rt.synchronize) for guard in ("normal", "strict"))
            alone = ", ".join(f"{t:.2f}" for t in both)
        print(f"{count:<8} {raw:>11} " + " ".join(f"{t:8.2f}" for t in times.values()) + f"   {alone}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else gs.get_runtime().name)
