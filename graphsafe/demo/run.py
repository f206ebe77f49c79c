"""Train the same model twice, captured and eager, and compare them.

Requirements
------------
1. Both arms see the same batches, start from the same parameters and the same random state, and run on static memory of
   the same shapes; the only difference is the graph.
2. Every figure is measured in this run. Times are those of whole steps by the host clock, after a synchronisation.
3. The host's operator calls are counted, not estimated: torch operators that the step's Python calls, one more for a
   replay.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe.bucket import Bucket
from graphsafe.demo.corpus import IGNORED, Batch, functions, packed
from graphsafe.demo.model import ByteModel, loss_of
from graphsafe.errors import error
from graphsafe.inputs import Input
from graphsafe.runtime import get_runtime
from graphsafe.train import TrainStep

__all__ = ["DemoFigures", "StepFigures", "run_demo"]


@dataclass(frozen=True)
class StepFigures:
    """One step: both losses (nats per byte), both times in seconds, and what the batch used of the bucket."""

    loss_captured: float
    loss_eager: float
    seconds_captured: float
    seconds_eager: float
    tokens: int
    sequences: int
    slots: int


@dataclass(frozen=True)
class DemoFigures:
    """Everything the demo measured; ``steps`` in order. Bytes are of the captured arm."""

    device: str
    layer: str
    seed: int
    bucket_tokens: int
    bucket_sequences: int
    bucket_slots: int
    parameters: int
    text_bytes: int
    documents: int
    captures: int
    layouts: int
    losses_bitwise_equal: bool
    parameters_bitwise_equal: bool
    host_calls_eager: int
    host_calls_replayed: int
    operations_in_graph: int
    arena_bytes: int
    price_bytes: int
    pool_bytes: int
    warm_up_seconds: float
    capture_seconds: float
    steps: tuple[StepFigures, ...]

    def percentile(self, arm: str, percent: int) -> float:
        """Seconds of a step of ``arm`` ("captured" or "eager")."""
        times: list[float] = [getattr(s, f"seconds_{arm}") for s in self.steps]
        return times[0] if len(times) == 1 else statistics.quantiles(times, n=100, method="inclusive")[percent - 1]

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values, with the percentiles."""
        times = {f"seconds_{arm}_p{p}": self.percentile(arm, p) for arm in ("captured", "eager") for p in (50, 95)}
        return {**asdict(self), **times}


class _HostCalls(TorchDispatchMode):
    """Counts the operators that Python calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def run_demo(
    layer: str = "gdn",
    device: str | None = None,
    steps: int = 30,
    seed: int = 0,
    *,
    bucket: Bucket | None = None,
    progress: Callable[[int, StepFigures], None] | None = None,
) -> DemoFigures:
    """Train for ``steps`` steps and return the figures; ``progress`` is called after each step."""
    if layer not in ("gdn", "kda"):
        raise error("argument", f"layer {layer!r}: 'gdn' or 'kda' is needed")
    if steps < 1:
        raise error("argument", f"steps={steps}: at least one is needed")
    runtime = get_runtime(device)
    bucket = bucket or Bucket(tokens=1024, sequences=8)
    documents = functions((steps + 1) * bucket.tokens, seed)
    batches = list(packed(documents, bucket, runtime.device))[:steps]
    torch.manual_seed(seed)
    model = ByteModel(layer).to(runtime.device)
    captured, eager = _step(model, runtime, bucket), _step(copy.deepcopy(model), runtime, bucket)
    figures = captured.capture(batches[0])[0]
    done: list[StepFigures] = []
    for number, batch in enumerate(batches):
        first, second = (captured, eager.eager) if number % 2 == 0 else (eager.eager, captured)
        times = [_timed(first, batch, runtime), _timed(second, batch, runtime)]  # alternately first: caches are warm
        (loss_c, seconds_c), (loss_e, seconds_e) = times if number % 2 == 0 else reversed(times)
        done.append(StepFigures(loss_c, loss_e, seconds_c, seconds_e, *_used(batch, bucket)))
        if progress is not None:
            progress(number, done[-1])
    calls_replayed = _host_calls(captured, batches[0]) + 1
    calls_eager = _host_calls(eager.eager, batches[0])
    pairs = zip(captured.model.parameters(), eager.model.parameters(), strict=True)
    return DemoFigures(
        device=str(runtime.device),
        layer=layer,
        seed=seed,
        bucket_tokens=bucket.tokens,
        bucket_sequences=bucket.sequences,
        bucket_slots=bucket.slots,
        parameters=sum(p.numel() for p in model.parameters()),
        text_bytes=sum(s.tokens for s in done),
        documents=sum(s.sequences for s in done),
        captures=captured.stats.captures,
        layouts=len({_layout(b) for b in batches}),
        losses_bitwise_equal=all(s.loss_captured == s.loss_eager for s in done),
        parameters_bitwise_equal=all(torch.equal(a, b) for a, b in pairs),
        host_calls_eager=calls_eager,
        host_calls_replayed=calls_replayed,
        operations_in_graph=figures.launches,
        arena_bytes=captured.stats.arena_bytes + captured.gradients.bytes,
        price_bytes=captured.price().bytes,
        pool_bytes=figures.pool_bytes,
        warm_up_seconds=figures.warm_up_s,
        capture_seconds=figures.capture_s,
        steps=tuple(done),
    )


def _step(model: ByteModel, runtime: Any, bucket: Bucket) -> TrainStep:
    capturable = {"fused": True} if runtime.device.type == "cpu" else {"capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, **capturable)  # type: ignore[arg-type]
    targets = {"batch.targets": Input("tokens", pad=IGNORED)}
    return TrainStep(model, loss_of, optimizer, runtime=runtime, bucket=bucket, inputs=targets, max_grad_norm=1.0)


def _timed(arm: Callable[[Batch], torch.Tensor], batch: Batch, runtime: Any) -> tuple[float, float]:
    runtime.synchronize()
    begin = time.perf_counter()
    loss = arm(batch)
    runtime.synchronize()
    seconds = time.perf_counter() - begin
    return float(loss), seconds


def _host_calls(arm: Callable[[Batch], torch.Tensor], batch: Batch) -> int:
    with _HostCalls() as counter:
        arm(batch)
    counted: int = counter.count
    return counted


def _used(batch: Batch, bucket: Bucket) -> tuple[int, int, int]:
    lengths = batch.cu_seqlens.diff().tolist()
    slots = sum(-(-length // bucket.chunk_size) for length in lengths)
    return int(batch.ids.shape[1]), len(lengths), slots


def _layout(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.cu_seqlens.tolist())
