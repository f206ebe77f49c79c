"""A kernel deliberately broken for Ascend is caught: by the compile check, by a refusal, or by a comparison."""

from __future__ import annotations

import kernels_broken_for_ascend as kernels
import pytest
import torch

import graphsafe as gs
from graphsafe_kernels import compilecheck
from graphsafe_kernels.launch import MOST_PROGRAMS, PreparedLaunch
from graphsafe_kernels.shipped import Shipped


@pytest.fixture(scope="module")
def rt():
    return gs.get_runtime("npu")


def checked(kernel, types, **constants):
    """The compile check's verdict on one kernel for 910B."""
    [figures] = compilecheck.check("ascend910b", [Shipped(kernel, "", types, constants, warps=1)])
    return figures


TASKS = {"x": "*fp32", "y": "*fp32", "slots": "*i32", "tasks": "i32"}


def test_a_return_inside_a_task_loop_does_not_compile(rt):
    assert "return" in checked(kernels.stop_at_a_sentinel, TASKS, D=64).problem
    assert checked(kernels.skip_sentinels, TASKS, D=64).ok


def rows_written(kernel, slots, device):
    x, y = torch.ones(8, 64, device=device), torch.zeros(8, 64, device=device)
    kernel[(2,)](x, y, slots, len(slots), D=64)
    torch.npu.synchronize()
    return sorted(y.cpu().any(1).nonzero().flatten().tolist())


def test_a_return_before_the_loop_leaves_tasks_undone_and_a_comparison_finds_it(rt):
    for layout in ([0, 1, 2, 3], [-1, 0, 3, 5], [-1, -1, 4, -1]):
        slots = torch.tensor(layout, dtype=torch.int32, device=rt.device)
        live = sorted(row for row in layout if row >= 0)
        assert rows_written(kernels.skip_sentinels, slots, rt.device) == live
        assert (rows_written(kernels.stop_before_the_loop, slots, rt.device) == live) == (layout[0] >= 0)


def test_a_grid_over_the_limit_is_refused_by_name_before_the_launch(rt):
    launch = PreparedLaunch(kernels.one_program_each, {})
    x = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=rt.device)
    launch.bind(rt.device, MOST_PROGRAMS, (0,))(x)
    assert int(x.sum()) == MOST_PROGRAMS * (MOST_PROGRAMS - 1) // 2 % 2**32
    with pytest.raises(gs.UnsupportedError, match="65536 programs of one_program_each"):
        launch.bind(rt.device, MOST_PROGRAMS + 1, (0,))
    with pytest.raises(RuntimeError, match=r"more than 65535 programs|less than 65536"):
        kernels.one_program_each[(MOST_PROGRAMS + 1,)](x, 0)


def test_an_overflow_of_the_unified_buffer_fails_the_compile_check(rt):
    assert "ub overflow" in checked(kernels.square_tile, {"x": "*fp32"}, D=256).problem
    fits = checked(kernels.square_tile, {"x": "*fp32"}, D=64)
    assert fits.ok
    assert 64 * 64 * 4 <= fits.unified <= 192 * 1024


def test_a_lock_fails_the_compile_check_and_is_refused_in_a_capture(rt):
    assert "locks" in checked(kernels.compare_and_swap, {"x": "*i32"}).problem
    x = torch.zeros(1, dtype=torch.int32, device=rt.device)
    kernels.compare_and_swap[(1,)](x)
    with pytest.raises(gs.UnsupportedError, match=r"compare_and_swap.*locks"):
        with rt.capture():
            kernels.compare_and_swap[(1,)](x)


def test_tf32_does_not_compile(rt):
    assert "tf32" in checked(kernels.product, {"x": "*fp32"}, D=16, PRECISION="tf32").problem
    assert checked(kernels.product, {"x": "*fp32"}, D=16, PRECISION="ieee").ok


def test_a_target_of_the_other_triton_is_refused(rt):
    with pytest.raises(SystemExit) as caught:
        compilecheck.app(["--target", "sm_90"], standalone_mode=True)
    assert caught.value.code == 2
