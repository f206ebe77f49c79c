"""What the parts of the suite share: data, captures, bitwise comparison, the state of a process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsafe._storage import key_of
from graphsafe.compare import differences
from graphsafe.errors import GraphSafeError
from graphsafe.tree import map_leaves, tensors

__all__ = [
    "ProcessState",
    "Worker",
    "captured",
    "clone",
    "data",
    "grad_storage",
    "refused",
    "same",
]


def data(runtime: Any, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, drawn on the CPU so that every device sees the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(runtime.device)


def captured(runtime: Any, body: Callable[[], Any], *, pool: Any = None) -> tuple[Any, Any]:
    """(graph, static result) of a body that was warmed up."""
    runtime.warm_up(body)
    with runtime.capture(pool=pool) as graph:
        result = graph.outputs(body())
    return graph, result


def clone(runtime: Any, value: Any) -> Any:
    """A copy of all tensors of a value, once the device has written them."""
    runtime.synchronize()
    return map_leaves(lambda _, leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def same(runtime: Any, got: Any, want: Any, name: str = "result") -> None:
    """Fail unless both hold the same bits."""
    runtime.synchronize()
    assert len(tensors(got)) == len(tensors(want)), f"{name}: {len(tensors(got))} tensors, want {len(tensors(want))}"
    found = differences(got, want, name)
    assert not found, "; ".join(map(str, found))


def refused(rule: str, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> GraphSafeError:
    """The typed error that ``run(*args, **kwargs)`` raises, which must be of ``rule`` (or of one: ``"a or b"``)."""
    with pytest.raises(GraphSafeError) as caught:
        run(*args, **kwargs)
    problem = caught.value
    assert problem.rule.name in rule.split(" or "), f"want {rule}, got:\n{problem}"
    del caught
    return problem.with_traceback(None)  # its frames would keep the tensors of the failed run


class Worker:
    """A thread that exists before a capture and runs a function when told; a capture refuses to start one."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._go = threading.Event()
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._go.wait(60)
        try:
            self._run()
        except BaseException as problem:  # handed to the test
            self._raised = problem

    def result(self) -> BaseException | None:
        """Let it run, wait, and return what it raised."""
        self._go.set()
        self._thread.join(60)
        return self._raised


class ProcessState:
    """What a failed capture may not change: generators, collector, memory, and the tensors named."""

    def __init__(self, runtime: Any, **watched: torch.Tensor) -> None:
        self.runtime = runtime
        self.watched = watched
        runtime.synchronize()
        gc.collect()
        self.values = {name: t.detach().clone() for name, t in watched.items()}
        self.storages = {name: key_of(t) for name, t in watched.items()}
        self.collects = gc.isenabled()
        self.generators = [g.get_state() for g in runtime.generators]
        self.held = runtime.memory().held

    def check(self) -> None:
        """Fail unless everything is as it was."""
        gc.collect()
        self.runtime.synchronize()
        assert gc.isenabled() == self.collects, "the collector was not put back"
        for generator, state in zip(self.runtime.generators, self.generators, strict=True):
            assert torch.equal(generator.get_state(), state), f"the generator on {generator.device} was not put back"
        for name, t in self.watched.items():
            assert key_of(t) == self.storages[name], f"{name} has another storage"
            same(self.runtime, t.detach(), self.values[name], name)
        # autograd's own threads let go of a backward that failed a little after they told of it
        until = time.monotonic() + 5
        while (held := self.runtime.memory().held) != self.held and time.monotonic() < until:
            time.sleep(0.01)
        assert held == self.held, f"{held - self.held} bytes did not come back"


def grad_storage(p: torch.Tensor) -> int:
    """The identity of a gradient's storage."""
    assert p.grad is not None
    return key_of(p.grad)
