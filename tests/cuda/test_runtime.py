"""What the CUDA runtime adds to the contract suite: streams, pools, triton kernels, driver errors."""

from __future__ import annotations

import gc

import pytest
import torch
from cuda_kernels import double, tuned

import graphsafe as gs


@pytest.fixture(scope="module")
def rt():
    return gs.get_runtime("cuda")


@pytest.fixture
def x(rt):
    return torch.randn(1000, device=rt.device)


def state():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "stream": torch.cuda.current_stream().cuda_stream, "reserved": torch.cuda.memory_reserved(),
        "rng": torch.cuda.get_rng_state().tolist(), "gc": gc.isenabled(), "sync": torch.cuda.get_sync_debug_mode(),
    }  # fmt: skip


def good_capture_works(rt, x):
    with rt.capture() as graph:
        y = torch.nn.functional.dropout(x, 0.5) + 1
    graph.replay()
    rt.synchronize()
    assert ((y == 1) | ((y - 1 - 2 * x).abs() < 1e-5)).all()
    assert torch.rand(4, device=rt.device).shape == (4,)


def test_the_body_runs_on_a_side_stream_and_the_stream_comes_back(rt, x):
    seen = []
    before = torch.cuda.current_stream()
    with rt.capture():
        seen.append(torch.cuda.current_stream())
    assert seen[0] != before
    assert seen[0] != torch.cuda.default_stream()
    assert torch.cuda.current_stream() == before


FAILURES = {
    "synchronize": (lambda x: torch.cuda.synchronize(), "GS110"),
    "stream synchronize": (lambda x: torch.cuda.current_stream().synchronize(), "GS101"),
    "event query": (lambda x: torch.cuda.Event().synchronize() or x.nonzero(), "GS102"),
    "pageable copy": (lambda x: x.copy_(torch.ones(1000)), None),
    "out of memory": (lambda x: torch.empty(1 << 50, dtype=torch.uint8, device=x.device), "GS501"),
    "item": (lambda x: x.sum().item(), "GS101"),
    "user error": (lambda x: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_capture_leaves_nothing(rt, x, name):
    body, rule = FAILURES[name]
    good_capture_works(rt, x)
    before = state()

    def fail():  # a function of its own: what it makes dies with it
        with rt.capture():
            y = torch.rand(1 << 20, device=rt.device) + 1  # noqa: F841
            body(x)

    with pytest.raises(Exception) as caught:
        fail()
    if rule == "ZeroDivisionError":
        assert isinstance(caught.value, ZeroDivisionError)
    else:
        assert isinstance(caught.value, gs.GraphSafeError), repr(caught.value)
        assert rule is None or caught.value.rule.id == rule, str(caught.value)
        assert caught.value.where.function in ("fail", "<lambda>"), str(caught.value)
    del caught
    assert state() == before
    good_capture_works(rt, x)


def test_a_cold_kernel_is_refused_by_name_and_a_warm_one_is_counted(rt, x):
    y = torch.empty_like(x)

    def body():
        double[(8,)](x, y, 1000, BLOCK=128)

    with pytest.raises(gs.UnsupportedError, match="double") as caught:
        with rt.capture():
            body()
    assert caught.value.rule.id == "GS111"
    rt.warm_up(body)
    y.zero_()
    with rt.capture() as graph:
        body()
        body()
    assert graph.launches == 2
    assert [n.split("_")[0] for n in graph.kernel_names] == ["double", "double"]
    assert not y.any()
    graph.replay()
    rt.synchronize()
    assert torch.equal(y, 2 * x)


def test_tuning_inside_a_capture_is_refused_by_name(rt, x):
    y = torch.empty_like(x)
    tuned[(16,)](x, y, 1000)
    with pytest.raises(gs.UnsupportedError, match="tuned") as caught:
        with rt.capture():
            tuned[(16,)](x[:999], y, 999)
    assert caught.value.rule.id == "GS111"
    good_capture_works(rt, x)


def test_graphs_of_one_callable_share_a_pool(rt):
    @gs.graphed(runtime=rt, buckets=[gs.Bucket(64, 2), gs.Bucket(128, 4)])
    def f(x, cu_seqlens):
        return (x * 2).relu()

    f.capture(torch.randn(1, 60, 32, device=rt.device), torch.tensor([0, 60], device=rt.device))
    pools = {tuple(e.graph.pool) for e in f._entries.values()}
    assert len(pools) == 1
    small, large = (torch.randn(1, n, 32, device=rt.device) for n in (60, 100))
    cu = [torch.tensor([0, n], device=rt.device) for n in (60, 100)]
    for t, c in ((small, cu[0]), (large, cu[1]), (small, cu[0])):
        assert torch.equal(f(t, c), (t * 2).relu())


def test_pool_bytes_come_back_when_graphs_close(rt, x):
    good_capture_works(rt, x)
    before = state()["reserved"]
    with rt.capture() as graph:
        y = torch.empty(64 << 20, dtype=torch.uint8, device=rt.device).fill_(1)
    assert graph.pool_bytes >= 64 << 20
    del y
    graph.close()
    assert state()["reserved"] == before
    with pytest.raises(gs.LifetimeError):
        graph.replay()


def test_launches_are_the_nodes_of_the_graph(rt, x):
    with rt.capture() as graph:
        y = x + 1
        z = y * 2  # noqa: F841
    assert graph.launches == 2


def test_poison_reaches_results_and_replay_repairs_them(rt, x):
    with rt.capture() as graph:
        y = x + 1
    graph.replay()
    graph.poison()
    assert torch.isnan(y).all()
    graph.replay()
    rt.synchronize()
    assert torch.equal(y, x + 1)


def test_the_error_mode_is_passed_on(rt, x, monkeypatch):
    used = []
    original = torch.cuda.graph.__init__

    def spy(self, *args, **kwargs):
        used.append(kwargs.get("capture_error_mode"))
        original(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.graph, "__init__", spy)
    monkeypatch.setattr(rt, "capture_error_mode", "thread_local")
    with rt.capture():
        x + 1
    assert used == ["thread_local"]


def test_memory_and_events(rt, x):
    begin, end = rt.event(), rt.event()
    begin.record()
    y = x.repeat(100)
    end.record()
    rt.synchronize()
    assert begin.elapsed_time(end) > 0
    assert rt.memory().peak >= rt.memory().held >= y.numel() * 4
