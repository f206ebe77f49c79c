"""When a prepared launch goes through Triton, through the compiled kernel, or straight to its launcher."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphsafe_kernels import _interpreter, launch

DEVICE = torch.device("cuda", 0)


class Kernel:
    """Stands in for a compiled kernel's whole life and notes what it is asked for."""

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **constants):
            self.log.append("compile")
            return Compiled(self.log)

        return compile_and_launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append("with hooks")

    def run(self, *arguments):
        self.log.append("direct")
        Compiled.last = arguments


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_interpreter, "interpreted", lambda kernel: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "_stream_of", lambda: lambda index: 77)
    monkeypatch.setattr(launch, "_knobs", SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))
    return Kernel()


def aligned(offset=0):
    return torch.empty(64, dtype=torch.uint8)[offset:]


def test_the_first_launch_compiles_and_the_next_goes_straight(kernel):
    prepared = launch.PreparedLaunch(kernel, {"BT": 64}, num_warps=2)
    run = prepared.bind(DEVICE, 5, (3, 4))
    x = aligned()
    run(x, None)
    run(x, None)
    assert kernel.log == ["compile", "direct"]
    assert Compiled.last == (5, 1, 1, 77, "function", "metadata", None, None, None, x.data_ptr(), 0, 3, 4, 64)


def test_a_descriptor_goes_to_the_launcher_as_it_is(kernel):
    run = launch.PreparedLaunch(kernel, {}).bind(DEVICE, 5, (3,))
    x, descriptor = aligned(), SimpleNamespace(base=aligned(1))
    run(x, descriptor)
    run(x, descriptor)
    assert kernel.log == ["compile", "direct"]
    assert descriptor in Compiled.last


def test_another_grid_or_integer_is_the_same_kernel(kernel):
    prepared = launch.PreparedLaunch(kernel, {})
    prepared.bind(DEVICE, 5, (3,))(aligned())
    prepared.bind(DEVICE, 6, (4,))(aligned())
    assert kernel.log == ["compile", "direct"]


def test_what_triton_specialises_on_is_another_kernel(kernel):
    """A pointer off 16 bytes, in its own place; an integer beyond 32 bits; another device."""
    prepared = launch.PreparedLaunch(kernel, {})
    run = prepared.bind(DEVICE, 5, (3,))
    run(aligned(), aligned())
    run(aligned(1), aligned())
    run(aligned(), aligned(1))
    prepared.bind(DEVICE, 5, (2**31,))(aligned(), aligned())
    prepared.bind(torch.device("cuda", 1), 5, (3,))(aligned(), aligned())
    assert kernel.log == ["compile"] * 5
    run(aligned(2), aligned())
    assert kernel.log[5:] == ["direct"]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", [lambda metadata: None, SimpleNamespace(calls=[print])], ids=["one", "chain"])
def test_hooks_see_every_launch(kernel, monkeypatch, name, hook):
    run = launch.PreparedLaunch(kernel, {}).bind(DEVICE, 5, (3,))
    run(aligned())
    monkeypatch.setattr(launch._knobs, name, hook)
    run(aligned())
    monkeypatch.setattr(launch._knobs, name, SimpleNamespace(calls=[]))
    run(aligned())
    assert kernel.log == ["compile", "with hooks", "direct"]


def test_no_programs_no_launch(kernel):
    launch.PreparedLaunch(kernel, {}).bind(DEVICE, 0, (3,))(aligned())
    assert kernel.log == []


def test_the_device_is_made_current(kernel, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", _Entered(entered))
    launch.PreparedLaunch(kernel, {}).bind(DEVICE, 5, (3,))(aligned())
    assert entered == [0]
    launch.PreparedLaunch(kernel, {}).bind(torch.device("cuda", 1), 5, (3,))(aligned())
    assert entered == [0]


class _Entered:
    """``torch.cuda.device`` that notes the devices entered."""

    def __init__(self, entered):
        self.entered = entered

    def __call__(self, index):
        self.index = index
        return self

    def __enter__(self):
        self.entered.append(self.index)

    def __exit__(self, *error):
        return False
