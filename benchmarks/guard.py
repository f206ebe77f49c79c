"""What the guard costs at a replay: off, normal and strict, by the number of tensors that the graph reads from outside.

``python benchmarks/guard.py [cpu|cuda|npu]`` prints one line a case. The times are of the host, from the call of
``graph.replay()`` to its return, of a graph of one small kernel for each tensor read; "own" is the replay of torch's
graph without this project. "Check" is what the guard of a device adds: host work, the same beside any device. On a CPU
a replay finds its memory anew each time, so its guard costs nothing more. Medians of many samples, each of many
calls; the device is idle in between.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import graphsafe as gs
from graphsafe._outside import OutsideTensors
from graphsafe._storage import StorageRef, key_of
from graphsafe._watch import Outside

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


def check_of(tensors: list[torch.Tensor]) -> OutsideTensors:
    """What the guard of a device checks at a replay of a graph that reads these: host work alone."""
    outside = OutsideTensors()
    read = {
        key_of(t): Outside(weakref.ref(t), StorageRef(t), tuple(t.shape), None, "aten::mul.Tensor") for t in tensors
    }
    outside.remember(SimpleNamespace(outside=read, born={}))
    return outside


def main(device: str) -> None:
    """Print the table."""
    rt = gs.get_runtime(device)
    print(f"{rt.environment()}, torch {torch.__version__}; microseconds a replay")
    print("reads     own off normal strict: replays; check alone: normal, normal without the tensors, strict")
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
        own = [] if device == "cpu" else [microseconds(graphs["normal"].raw.replay, rt.synchronize)]
        replays = [*own, *(microseconds(graph.replay, rt.synchronize) for graph in graphs.values())]
        kept, gone = check_of(tensors), check_of([t.detach() for t in tensors])
        checks = [kept.check, gone.check, lambda kept=kept: kept.check(strict=True)]
        alone = [microseconds(check, rt.synchronize) for check in checks]
        print(f"{count:<5}", *(f"{t:9.2f}" for t in replays), "  check:", *(f"{t:7.2f}" for t in alone), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else gs.get_runtime().name)
