"""TrainStep: forward, backward and optimizer in one graph.

Requirements
------------
1. One call is one training step: gradients cleared, every micro-batch forward and backward, clipping, optimizer; with
   ``accumulate`` of k, k micro-batches in one graph, their gradients summed.
2. Gradients are static tensors that the step's arena owns; ``p.grad`` is that tensor for each parameter. A parameter
   that a batch does not use has a gradient of zero.
3. Capture changes nothing: parameters, optimizer state and generators are afterwards what they were; state that the
   first step makes goes back to its value from before it.
4. What a step would freeze (learning rate and other options, train/eval mode, which parameters there are and which of
   them train) is compared at each call and refused by name when it changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphsafe._storage import key_of
from graphsafe.arena import Arena
from graphsafe.bucket import Bucket
from graphsafe.errors import GraphSafeError, error
from graphsafe.graphed import Captured, GraphedCallable
from graphsafe.inputs import Input
from graphsafe.pricing import Price
from graphsafe.runtime import get_runtime
from graphsafe.stats import CaptureFigures, Stats
from graphsafe.verify import Verification

__all__ = ["TrainStep"]


class TrainStep:
    """A captured training step: ``loss = step(batch)``.

    ``loss_fn(model, batch)``, or ``loss_fn(model, batch, tables)`` where it names a parameter ``tables``, gives a
    scalar loss. ``batch``: any nesting of tensors; packed batches carry their ``cu_seqlens`` and need a ``bucket``.
    ``optimizer`` must be capturable: on a GPU ``capturable=True`` where it exists, on a CPU Adam and AdamW with
    ``fused=True``; a learning rate that changes must be a tensor. ``accumulate``: micro-batches in one step; ``step``
    then takes a list of that length and returns the losses ``[accumulate]``. ``max_grad_norm``: clip the summed
    gradients to this 2-norm.
    ``on_overflow``, ``inputs``, ``warm_up``, ``guard``: as in :func:`graphsafe.graphed`; inputs are named from
    ``batch`` on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        runtime: Any = None,
        bucket: Bucket | None = None,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        on_overflow: str = "eager",
        inputs: Mapping[str, Input | str] | None = None,
        warm_up: int = 1,
        guard: str = "normal",
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise error("argument", f"accumulate={accumulate!r}: a positive integer is needed")
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.runtime: Any = runtime if runtime is not None else get_runtime()
        self.accumulate = accumulate
        self.max_grad_norm = max_grad_norm
        self._parameters = _named_parameters(model, optimizer)
        self.guard = guard
        self.gradients = self._own_gradients(bucket or Bucket(1))
        self._host_values: dict[str, Any] | None = None
        self._captured_state: dict[str, torch.Tensor] = {}
        takes_tables = "tables" in inspect.signature(loss_fn).parameters
        body = self._body_with_tables if takes_tables else self._body_without_tables
        self._graphed = GraphedCallable(
            body,
            self.runtime,
            [] if bucket is None else [bucket],
            on_overflow,
            inputs or {},
            (),
            warm_up,
            keep=self._optimizer_state,
            guard=guard,
        )

    # Use.

    def __call__(self, batch: Any) -> torch.Tensor:
        """One step: update, replay. Returns the loss, a static tensor that the next step overwrites."""
        self._check(batch)
        loss: torch.Tensor = self._graphed(batch)
        if self.guard == "strict":
            self.gradients.check_canaries()
        self._remember()
        return loss

    def capture(self, batch: Any) -> list[CaptureFigures]:
        """Warm up and capture with this example; nothing is trained."""
        self._check(batch)
        figures = self._graphed.capture(batch)
        self._remember()
        return figures

    def captured(self, batch: Any) -> Captured:
        """The graph and the static memory that serve this batch; see :meth:`GraphedCallable.captured`."""
        self._check(batch)
        found = self._graphed.captured(batch)
        self._remember()
        return found

    def eager(self, batch: Any) -> torch.Tensor:
        """One real step on the same static memory without a graph."""
        self._check_batch(batch)
        self._attach_gradients()
        loss: torch.Tensor = self._graphed.eager(batch)
        return loss

    def verify(self, batch: Any) -> Verification:
        """Prove that a replayed step changes parameters, state and losses as an eager one does, bit for bit."""
        self._check(batch)
        found = self._graphed.verify(batch)
        self._remember()
        return found

    @property
    def stats(self) -> Stats:
        return self._graphed.stats

    def price(self) -> Price:
        """Bytes of static memory, gradients first: what is held once the step's bucket is prepared."""
        return Price(self.gradients.price().lines + self._graphed.price().lines)

    def close(self) -> None:
        """Give graph and memory back; gradients become None."""
        self._graphed.close()
        for p in self._parameters.values():
            p.grad = None
        self.gradients.close()

    # The step itself.

    def _body_with_tables(self, batch: Any, tables: Any) -> torch.Tensor:
        micro = batch if self.accumulate > 1 else [batch]
        each = tables if isinstance(tables, tuple) else (tables,) * len(micro)
        losses = [functools.partial(self.loss_fn, self.model, b, tables=t) for b, t in zip(micro, each, strict=True)]
        return self._step(losses)

    def _body_without_tables(self, batch: Any) -> torch.Tensor:
        micro = batch if self.accumulate > 1 else [batch]
        return self._step([functools.partial(self.loss_fn, self.model, b) for b in micro])

    def _step(self, losses: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
        torch._foreach_zero_([self.gradients[name] for name in self.gradients])
        values = []
        for loss_of in losses:
            loss = loss_of()
            loss.backward()
            values.append(loss.detach())
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), self.max_grad_norm)
        self._update_parameters()
        return values[0] if self.accumulate == 1 else torch.stack(values)

    def _update_parameters(self) -> None:
        try:
            self.optimizer.step()
        except GraphSafeError as problem:
            if problem.rule.name != "host-read":
                raise
            raise error(
                "host-read",
                f"{type(self.optimizer).__name__} reads its own state on the host: {problem.what}",
                remedy="Make it with fused=True, or with capturable=True on an accelerator, whichever it has.",
            ) from problem

    # Gradients and host values.

    def _own_gradients(self, bucket: Bucket) -> Arena:
        arena: Arena = self.runtime.arena(bucket, canaries=self.guard == "strict")
        for name, p in self._parameters.items():
            p.grad = arena.tensor(f"grad.{name}", tuple(p.shape), p.dtype)
        arena.seal()
        return arena

    def _attach_gradients(self) -> None:
        for name, p in self._parameters.items():
            own = self.gradients[f"grad.{name}"]
            if p.grad is None:
                p.grad = own
            elif key_of(p.grad) != key_of(own):
                raise error(
                    "input-rebound",
                    f"the gradient of {name!r} is no longer the arena's",
                    remedy="Leave p.grad alone, or set it to None; the step clears it in place.",
                )

    def _named_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state tensors by name."""
        names = {id(p): name for name, p in self._parameters.items()}
        return {
            f"optimizer.state[{names.get(id(p), '?')}][{key!r}]": t
            for p, state in self.optimizer.state.items()
            for key, t in state.items()
            if isinstance(t, torch.Tensor)
        }

    def _optimizer_state(self) -> list[torch.Tensor]:
        return list(self._named_state().values())

    def _remember(self) -> None:
        """Note, once captured, what the graph has frozen."""
        if self._host_values is None and self.stats.captures:
            self._host_values = self._present_host_values()
            self._captured_state = self._named_state()

    def _present_host_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i, group in enumerate(self.optimizer.param_groups):
            for option, value in group.items():
                if option != "params":
                    values[f"optimizer.param_groups[{i}][{option!r}]"] = value
        for name, module in self.model.named_modules():
            values[f"{name or 'model'}.training"] = module.training
        return values

    def _check(self, batch: Any) -> None:
        self._check_batch(batch)
        self._check_parameters()
        self._attach_gradients()
        if self._host_values is None:
            return
        self._check_state()
        for name, value in self._present_host_values().items():
            old = self._host_values.get(name)
            if value is not old and (isinstance(value, torch.Tensor) or isinstance(old, torch.Tensor) or value != old):
                raise error(
                    "frozen-scalar",
                    f"{name} was {old!r} at capture and is {value!r} now",
                    remedy="Make a new TrainStep; a learning rate may be a tensor instead, changed in place.",
                )

    def _check_state(self) -> None:
        present = self._named_state()
        for name, captured in self._captured_state.items():
            if present.get(name) is not captured:
                raise error(
                    "storage-replaced",
                    f"{name} is another tensor than at capture; load_state_dict makes new ones",
                    remedy="Load the optimizer's state before the first step, or make a new TrainStep after it.",
                )

    def _check_parameters(self) -> None:
        present = _named_parameters(self.model, self.optimizer)
        for name in (*self._parameters, *present):
            old, new = self._parameters.get(name), present.get(name)
            if old is new:
                continue
            if old is not None and new is not None:
                raise error("input-rebound", f"the parameter {name!r} is another tensor than when the step was made")
            change = "no longer trains, or is gone" if new is None else "is new, or trains now"
            raise error(
                "frozen-scalar",
                f"the parameter {name!r} {change} since the step was made",
                remedy="Make a new TrainStep after changing what trains.",
            )

    def _check_batch(self, batch: Any) -> None:
        if self.accumulate > 1 and (not isinstance(batch, (list, tuple)) or len(batch) != self.accumulate):
            got = f"{len(batch)} of them" if isinstance(batch, (list, tuple)) else f"a {type(batch).__name__}"
            raise error("structure", f"accumulate={self.accumulate} needs a list of micro-batches; got {got}")


def _named_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Every parameter that gets a gradient, by name, each once."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, torch.nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in names and p.requires_grad:
                found[f"param_groups[{i}].params[{j}]"] = p
    return found
