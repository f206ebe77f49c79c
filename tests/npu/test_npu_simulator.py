"""The simulated Ascend: it says that it is one, refuses what a capture forbids by CANN's codes, and computes."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from npu_kernels import double_on_npu, rows_by_slot, scores, too_large

import graphsafe as gs
from graphsafe_npu import sim

if not sim.present():
    pytest.skip("this device is real", allow_module_level=True)

from graphsafe_npu.sim import streams


def recorded(body, **options):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = body()
    return graph, result


def fresh(code):
    """A process of its own, with a time limit: some errors leave torch_npu's task queue dead."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_it_says_that_it_is_simulated():
    assert gs.get_runtime("npu").simulated
    assert torch.npu.get_device_name().endswith("(simulated)")
    done = fresh("import torch; from graphsafe_npu import sim; sim.activate(); sim.activate(); torch.ones(2).npu() + 1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(sim.NOTICE) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.activate()  # a second time it does nothing


REFUSED = {
    "a synchronisation of the device": (lambda x: torch.npu.synchronize(), "107027"),
    "a synchronisation of the stream": (lambda x: torch.npu.current_stream().synchronize(), "107027"),
    "item": (lambda x: x.sum().item(), "107027"),
    "equal": (lambda x: torch.equal(x, x), "107027"),
    "a blocking copy from the host": (lambda x: x.copy_(torch.ones(8)), "107030"),
    "a copy to the host": (lambda x: x.cpu(), "107030"),
    "a shape that depends on values": (lambda x: x.nonzero(), "depends on values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_forbids_is_refused_and_the_next_capture_works(name):
    body, code = REFUSED[name]
    x = torch.ones(8, device="npu")
    with pytest.raises(RuntimeError, match=code):
        recorded(lambda: body(x))
    assert not torch.npu.is_current_stream_capturing()
    graph, y = recorded(lambda: x + 1)
    graph.replay()
    assert (y == 2).all()


def test_a_replay_inside_a_capture_and_the_default_stream_are_refused():
    x = torch.ones(8, device="npu")
    graph, _ = recorded(lambda: x + 1)
    with pytest.raises(RuntimeError, match="107027"):
        recorded(graph.replay)
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.npu.NPUGraph().capture_begin()


def test_a_stream_that_is_not_joined_is_refused():
    x, side = torch.ones(8, device="npu"), torch.npu.Stream()

    def fork():
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return x * 2

    with pytest.raises(RuntimeError, match="107025"):
        recorded(fork)
    torch.npu.set_stream(torch.npu.default_stream())  # torch_npu leaves the capture stream current


def test_a_copy_from_pageable_memory_kills_the_queue_as_on_a_device():
    done = fresh(
        "import torch\nfrom graphsafe_npu import sim\nsim.activate()\n"
        "x, h = torch.ones(8, device='npu'), torch.ones(8)\n"
        "g = torch.npu.NPUGraph()\n"
        "try:\n    with torch.npu.graph(g): x.copy_(h, non_blocking=True)\n"
        "except RuntimeError as problem: print(problem, flush=True)\n"
        "import os; os._exit(0)"
    )
    assert "process exits for this inner error" in done.stdout, done.stdout + done.stderr
    assert "task queue" in gs.get_runtime("npu").explain(done.stdout)


def test_a_pinned_copy_is_recorded_and_reads_the_host_at_each_replay():
    x, pinned = torch.zeros(8, device="npu"), torch.ones(8).pin_memory()
    graph, _ = recorded(lambda: x.copy_(pinned, non_blocking=True))
    for value in (5.0, 6.0):
        pinned.fill_(value)
        graph.replay()
        assert (x == value).all()


def test_queued_copies_and_launches_stay_in_order():
    x, zero, one = (torch.full((256,), v, device="npu") for v in (0.0, 0.0, 1.0))
    y = torch.empty_like(x)
    for i in range(100):
        x.copy_(one if i % 2 else zero)
        double_on_npu[(2,)](x, y, 256, BLOCK=128)
        assert y[7].item() == 2 * (i % 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_recorded_kernel_follows_its_table_and_skips_sentinels(dtype):
    x = torch.randn(6, 64).to(dtype)
    here, y = x.npu(), torch.full((6, 64), 7.0, dtype=dtype, device="npu")
    slots = torch.tensor([0, -1, -1, -1], dtype=torch.int32, device="npu")

    def launch():
        rows_by_slot[(4,)](here, y, slots, D=64)

    graph, _ = recorded(launch)
    assert (y == 7).all(), "the launch ran while it was captured"
    for live in ([3], [5, 0], [1, 2, 4, 5], []):
        slots.copy_(torch.tensor(live + [-1] * (4 - len(live)), dtype=torch.int32))
        y.fill_(7.0)
        graph.replay()
        want = torch.full_like(x, 7.0)
        want[live] = x[live] * 2
        assert torch.equal(y.cpu(), want)


def test_a_kernel_of_both_units_has_a_workspace_and_the_right_values():
    a, b = (torch.randn(32, 32) * 0.1).half(), torch.randn(32, 32).half()
    c = torch.empty(32, 32, device="npu")
    compiled = scores[(1,)](a.npu(), b.npu(), c, M=32)
    assert compiled.metadata.mix_mode == "mix"
    assert compiled.metadata.workspace_size > 0
    want = (a.double() @ b.double()).exp() @ b.double()
    torch.testing.assert_close(c.cpu().double(), want, rtol=1e-2, atol=1e-1)


def test_what_does_not_fit_or_is_too_large_a_grid_is_refused():
    x = torch.ones(512 * 512, device="npu")
    with pytest.raises(Exception, match=r"(?i)overflow"):
        too_large[(1,)](x, B=512)
    with pytest.raises(RuntimeError, match="less than 65536"):
        double_on_npu[(65536,)](x, x, 8, BLOCK=64)


def test_the_seed_of_the_device_decides_what_is_drawn():
    def draw():
        return torch.rand(4, device="npu"), torch.nn.functional.dropout(torch.ones(64, device="npu"))

    host = torch.get_rng_state()
    torch.npu.manual_seed(3)
    first, second = draw(), draw()
    torch.npu.manual_seed(3)
    again = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(torch.get_rng_state(), host), "the host's generator was used"


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_networks_compute_what_the_host_computes(kind):
    torch.manual_seed(0)
    net, x = kind(3, 4), torch.randn(5, 2, 3)
    want = net(x)[0].detach()
    torch.testing.assert_close(net.npu()(x.npu())[0].detach().cpu(), want)


def test_a_job_that_fails_is_reported_and_a_reset_graph_holds_no_job():
    handle = streams.current_handle()
    with pytest.raises(ZeroDivisionError):
        streams.submit(lambda: 1 / 0, handle)
    x = torch.ones(8, device="npu")
    before = streams.recorded()
    graph, _ = recorded(lambda: x + 1)
    assert streams.recorded() > before
    graph.reset()
    assert streams.recorded() == before
