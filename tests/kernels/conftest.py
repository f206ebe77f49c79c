"""Where the kernel tests run: on the device under test: ``cpu`` (Triton's interpreter, the default), ``cuda``, ``npu``.

The same tests run on all, at sizes that suit each. An unknown or absent device fails; it never skips. Triton decides
where a kernel is decorated whether it is interpreted, so one session tests kernels on one device; the environment says
"interpret" while these tests are collected and run, and not while others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphsafe.runtime import get_runtime
from graphsafe.testing.plugin import devices

_ENVIRONMENT = pytest.MonkeyPatch()


def _interprets(config: pytest.Config) -> bool:
    return devices(config) not in (["cuda"], ["npu"])


def pytest_configure(config: pytest.Config) -> None:
    if _interprets(config):
        _ENVIRONMENT.setenv("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    _ENVIRONMENT.undo()


@pytest.fixture(autouse=True)
def _interpret(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    if _interprets(pytestconfig):
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device under test."""
    names = devices(pytestconfig)
    if names not in (["cpu"], ["cuda"], ["npu"]):
        pytest.fail(f"kernels are tested on cpu, cuda or npu, one in a session; the devices are {', '.join(names)}")
    if names == ["npu"]:
        return get_runtime("npu").device
    if names == ["cuda"]:
        assert torch.cuda.is_available(), "there is no CUDA device"
        return torch.device("cuda", torch.cuda.current_device())
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from graphsafe_kernels import _interpreter
        from graphsafe_kernels.tables.kernels import chunk_tables_kernel

    assert _interpreter.interpreted(chunk_tables_kernel), "kernels were imported before TRITON_INTERPRET was set"
    return torch.device("cpu")


@pytest.fixture(scope="session")
def large(device: torch.device) -> bool:
    """Whether the sizes of a device are affordable."""
    return device.type == "cuda"


@pytest.fixture
def launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels launched so far, in order, as Triton itself tells them."""
    seen: list[str] = []
    if device.type == "cpu":
        from triton.runtime import interpreter

        original = interpreter.GridExecutor.__call__

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.fn.__name__)
            # what the interpreter does with the operands is no operator of the caller's
            with _disable_current_modes():
                return original(self, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield seen
        return
    import triton

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"].split()[0])  # Triton-Ascend says which unit runs it, too

    if not hasattr(triton, "knobs"):  # Triton-Ascend 3.2
        monkeypatch.setattr(triton.compiler.CompiledKernel, "launch_enter_hook", hook)
        yield seen
        return
    runtime = triton.knobs.runtime
    if hasattr(runtime.launch_enter_hook, "add"):
        runtime.launch_enter_hook.add(hook)
        yield seen
        runtime.launch_enter_hook.remove(hook)
    else:
        monkeypatch.setattr(runtime, "launch_enter_hook", hook)
        yield seen


class Replayable:
    """A captured body: ``value`` holds the static outputs, ``replay()`` writes them anew."""

    def __init__(self, device: torch.device, body: Callable[[], Any]) -> None:
        body()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self._graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.value = body()
            return
        with get_runtime(device.type).capture() as self._graph:
            self.value = body()
            self._graph.outputs(self.value)

    def replay(self) -> Any:
        self._graph.replay()
        return self.value


@pytest.fixture
def capture(device: torch.device) -> Callable[[Callable[[], Any]], Replayable]:
    """Warm up and capture a body: ``capture(body).replay()``."""
    return lambda body: Replayable(device, body)
