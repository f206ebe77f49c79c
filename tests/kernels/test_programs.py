"""A recorded call: allocates and launches as the function did, anew at each run, and holds nothing."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

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


@pytest.fixture
def compiled(kernel, monkeypatch):
    """What the kernel was launched with once it was compiled for CUDA, by address (``ran``) and otherwise."""
    seen = SimpleNamespace(ran=[], hooked=[])

    class Compiled:
        function = packed_metadata = None

        def run(self, *arguments):
            seen.ran.append(arguments)

        def __getitem__(self, grid):
            return lambda *arguments: seen.hooked.append(arguments)

    first = lambda self, grid: lambda *a, **c: self.launched.append(a) or Compiled()  # noqa: E731
    monkeypatch.setattr(Kernel, "__getitem__", first)
    monkeypatch.setattr(launch._interpreter, "interpreted", lambda kernel: False)
    monkeypatch.setattr(launch, "_stream_of", lambda: lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return seen


def partly_returned(kernel, start, x):
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = x.shape[0]
    y, a, b = x.new_empty(3), x.new_empty((rows, 8), dtype=torch.float16), x.new_empty((rows, 8))
    start(kernel, 5, (a, y, TensorDescriptor(b, [3, 8], [8, 1], [1, 8]), 7), {"BLOCK": 16}, warps=2)
    return (y,)


def test_on_cuda_what_is_not_returned_is_one_allocation(kernel, compiled, monkeypatch):
    """Launches get addresses in it, and tensors there where Triton compiles or somebody listens."""
    record = lambda start, x: partly_returned(kernel, start, x)  # noqa: E731
    program = programs.record(record, torch.device("cuda", 0), [((2, 8), torch.float32)])
    x, allocated = torch.zeros(2, 8), []
    new_empty = torch.Tensor.new_empty
    noted = lambda *a, **k: allocated.append(new_empty(*a, **k)) or allocated[-1]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    (y,) = program.run([x])
    buffer, result = allocated
    assert result is y
    assert buffer.dtype == torch.uint8
    ((a, same, tile, number),) = kernel.launched
    assert (same, number) == (y, 7)
    for tensor, offset, dtype in ((a, 0, torch.float16), (tile.base, 512, torch.float32)):
        assert (tensor.data_ptr() - buffer.data_ptr(), tensor.dtype, tensor.shape) == (offset, dtype, (2, 8))
    assert (tile.shape, tile.strides, tile.block_shape) == ([3, 8], [8, 1], [1, 8])
    allocated.clear()
    (y,) = program.run([x])
    ((*_, a, same, tile, number, block),) = compiled.ran
    assert (a, same, number, block) == (allocated[0].data_ptr(), y.data_ptr(), 7, 16)
    assert tile.base.data_ptr() == allocated[0].data_ptr() + 512
    monkeypatch.setattr(launch, "_hooked", lambda: True)
    (y,) = program.run([x])
    ((a, same, tile, *_),) = compiled.hooked
    assert same is y
    assert isinstance(a, torch.Tensor)
    assert isinstance(tile.base, torch.Tensor)
    assert len(compiled.ran) == len(kernel.launched) == 1


def test_what_is_not_returned_may_be_empty(kernel, compiled):
    record = lambda start, x: partly_returned(kernel, start, x)  # noqa: E731
    program = programs.record(record, torch.device("cuda", 0), [((0, 8), torch.float32)])
    for _ in range(2):
        assert program.run([torch.zeros(0, 8)])[0].shape == (3,)
    ((a, _, tile, _),) = kernel.launched
    assert a.shape == tile.base.shape == (0, 8)
    assert len(compiled.ran) == 1


def test_a_constant_that_the_kernel_does_not_have_is_noticed(kernel):
    with pytest.raises(AssertionError, match="BLOCKS"):
        programs.record(lambda start, x: start(kernel, 1, (x, None, None, 7), {"BLOCKS": 16}, warps=2) or (), CPU,
                        [((2,), torch.float32)])  # fmt: skip


def test_absent_numbers_are_no_large_ones(kernel, monkeypatch):
    monkeypatch.setattr(launch._interpreter, "interpreted", lambda kernel: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch.PreparedLaunch(kernel, {"BLOCK": 16}).bind(torch.device("cuda", 0), 1, (3, None))
