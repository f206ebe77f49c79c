"""A whole training step: :class:`graphsafe.TrainStep` beside the plain loop it replaces.

Requirements
------------
1. The eager-live arm is the loop that a user has without this project: loss, backward, optimizer step, zero_grad, at
   the batch's own size.
2. Every arm trains a model of its own, from the same parameters, with a learning rate so small that its work stays what
   it was.
3. The oracle is the same model's gradients in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from graphsafe.bench.cases import Case
from graphsafe.bench.layers import Stack, squared_error
from graphsafe.bench.modes import CONTROLS, MODES, GraphFacts, Prepared
from graphsafe.bench.timing import timed_once
from graphsafe.bench.workloads import Operand, Tensors, Workload
from graphsafe.bucket import Bucket
from graphsafe.train import TrainStep

__all__ = ["Step", "prepare_step"]

_LEARNING_RATE = 1e-7


class Step(Workload):
    """The batch of a training step; its body is made by :func:`prepare_step`."""

    outputs: Mapping[str, str] = {}
    cotangents: Mapping[str, str] = {}

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        row = Operand("tokens", (case.hidden,), self.dtype, gradient=False)
        self.operands = {"x": row, "target": row}
        self.model = Stack(case).to(device, self.dtype)

    def forward(self, function: Any, tensors: Tensors, arguments: Any) -> Tensors:
        return {"loss": function(tensors)}

    def oracle(self, tensors: Tensors, device: torch.device) -> Tensors:
        from graphsafe_kernels.backend import reference_only

        model = copy.deepcopy(self.model).to(device, torch.float64)
        wide = {n: (t.double() if t.is_floating_point() else t).to(device) for n, t in tensors.items()}
        with reference_only():
            loss = squared_error(model, wide)
            loss.backward()
        return {"loss": loss.detach()} | _gradients(model)


def _gradients(model: torch.nn.Module) -> Tensors:
    return {f"d{name}": p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _optimizer(model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    how: Any = {"fused": True} if device.type == "cpu" else {"capturable": True}
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, **how)


def prepare_step(workload: Step, provider: str, runtime: Any) -> Prepared:
    """The arms of a training step; see :mod:`graphsafe.bench.modes` for their meaning."""
    made = Prepared()
    if provider != "graphsafe":
        reason = "a layer and a step are measured with this project's kernels"
        made.refusals = dict.fromkeys((*MODES, *CONTROLS), reason)
        return made
    case, batch = workload.case, workload.batch(0)
    made.live_bytes = sum(t.numel() * t.element_size() for t in batch.values())
    model = copy.deepcopy(workload.model)
    optimizer = _optimizer(model, workload.device)

    def live() -> torch.Tensor:
        loss = squared_error(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    made.first_call_s = timed_once(runtime, live)
    made.arms["eager-live"] = live

    step, made.facts = _captured_step(made, workload, batch, case.bucket, runtime)
    served = step.captured(batch)
    values = {f"batch[{name!r}]": t for name, t in batch.items()}
    made.arms |= {
        "eager-fixed": lambda: step.eager(batch),
        "graph-replay": served.graph.replay,
        "graph-update-replay": lambda: step(batch),
        "update": lambda: served.arena.update(values),
    }
    made.verify = lambda: (step.verify(workload.batch(1)), step.verify(batch))
    loss = step(batch).clone()
    made.results["graph-replay"] = {"loss": loss} | {
        f"d{name}": p.grad.detach().clone() for name, p in step.model.named_parameters() if p.grad is not None
    }
    live_bucket = Bucket(case.live_tokens, case.live_sequences, case.chunk_size)
    tight, _ = _captured_step(made, workload, batch, live_bucket, runtime)
    made.arms["graph-live"] = tight.captured(batch).graph.replay
    tight(batch)
    made.refusals |= dict.fromkeys(("eager-off", "eager-on"), "a step has no switch")
    return made


def _captured_step(
    made: Prepared, workload: Step, batch: Tensors, bucket: Bucket, runtime: Any
) -> tuple[TrainStep, GraphFacts]:
    model = copy.deepcopy(workload.model)
    step = TrainStep(model, squared_error, _optimizer(model, workload.device), runtime=runtime, bucket=bucket)
    made.closers.append(step.close)
    figures = step.capture(batch)[0]
    arena_bytes = figures.arena_bytes + step.gradients.bytes
    facts = GraphFacts(
        figures.warm_up_s, figures.capture_s, figures.launches, arena_bytes, step.price().bytes, figures.pool_bytes
    )
    return step, facts
