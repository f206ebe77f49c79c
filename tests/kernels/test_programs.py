"""A recorded call: allocates and launches as the function did, anew at each run, and holds nothing."""

from __future__ import annotations

import weakref

import pytest
import torch

from graphsafe_kernels import launch, programs

CPU = torch.device("cpu")


class Kernel:
    """Stands in for a kernel: notes what it is launched with."""

    __name__ = "kernel"

    @staticmethod
    def fn(x, y, tile, n, BLOCK):
        """The parameters."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


@pytest.fixture
def kernel(monkeypatch):
    programs._prepared.cache_clear()
    yield Kernel()
    programs._prepared.cache_clear()


def call(kernel, start, x, absent):
    from triton.tools.tensor_descriptor import TensorDescriptor

    y = x.new_empty((3, 8), dtype=torch.float16)
    unused = torch.empty_like(x)
    start(kernel, 5, (x, absent, TensorDescriptor(y, [3, 8], [8, 1], [1, 8]), 7), {"BLOCK": 16}, warps=2)
    start(kernel, 0, (x, absent, None, 7), {"BLOCK": 16}, warps=2)
    return y, None, unused, x


def test_a_run_allocates_and_launches_as_recorded(kernel):
    program = programs.record(lambda start, *inputs: call(kernel, start, *inputs), CPU, [((2, 8), torch.float32), None])
    assert not kernel.launched
    x = torch.zeros(2, 8)
    y, absent, unused, same = program.run([x, None])
    ((grid, (first, second, tile, number), constants),) = kernel.launched
    assert (grid, number, second, absent) == ((5, 1, 1), 7, None, None)
    assert constants == {"BLOCK": 16, "num_warps": 2, "num_stages": 1}
    assert first is same is x
    assert tile.base is y
    assert (tile.shape, tile.strides, tile.block_shape) == ([3, 8], [8, 1], [1, 8])
    assert (y.shape, y.dtype, unused.shape, unused.dtype) == ((3, 8), torch.float16, (2, 8), torch.float32)
    assert y.device == x.device


def test_runs_share_nothing_and_hold_nothing(kernel):
    program = programs.record(lambda start, *inputs: call(kernel, start, *inputs), CPU, [((2, 8), torch.float32), None])
    x = torch.zeros(2, 8)
    first, second = program.run([x, None]), program.run([x, None])
    assert first[0].data_ptr() != second[0].data_ptr()
    kernel.launched.clear()
    seen = weakref.ref(x)
    del x, first, second
    assert seen() is None


def test_a_constant_that_the_kernel_does_not_have_is_noticed(kernel):
    with pytest.raises(AssertionError, match="BLOCKS"):
        programs.record(lambda start, x: start(kernel, 1, (x, None, None, 7), {"BLOCKS": 16}, warps=2) or (), CPU,
                        [((2,), torch.float32)])  # fmt: skip


def test_absent_numbers_are_no_large_ones(kernel, monkeypatch):
    monkeypatch.setattr(launch._interpreter, "interpreted", lambda kernel: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch.PreparedLaunch(kernel, {"BLOCK": 16}).bind(torch.device("cuda", 0), 1, (3, None))
