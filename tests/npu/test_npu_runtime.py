"""What the Ascend runtime adds to the contract suite: streams, pools, settings, triton kernels, device errors."""

from __future__ import annotations

import gc

import pytest
import torch
from npu_kernels import double_on_npu, tuned_on_npu

import graphsafe as gs
from graphsafe_npu import compat


@pytest.fixture(scope="module")
def rt():
    return gs.get_runtime("npu")


@pytest.fixture
def x(rt):
    return torch.randn(1000, device=rt.device)


def state():
    torch.npu.synchronize()
    gc.collect()
    torch.npu.empty_cache()
    return {
        "stream": torch.npu.current_stream().npu_stream, "reserved": torch.npu.memory_reserved(),
        "rng": torch.npu.get_rng_state().tolist(), "gc": gc.isenabled(), "sync": torch.npu.get_sync_debug_mode(),
    }  # fmt: skip


def good_capture_works(rt, x):
    with rt.capture() as graph:
        y = torch.nn.functional.dropout(x, 0.5) + 1
    graph.replay()
    rt.synchronize()
    assert ((y == 1) | ((y - 1 - 2 * x).abs() < 1e-5)).all()
    assert torch.rand(4, device=rt.device).shape == (4,)


def test_the_body_runs_on_a_side_stream_and_the_stream_comes_back(rt):
    seen = []
    before = torch.npu.current_stream()
    with rt.capture():
        seen.append(torch.npu.current_stream())
    assert seen[0] != before
    assert seen[0] != torch.npu.default_stream()
    assert torch.npu.current_stream() == before


def leave_a_stream_unjoined(x):
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.mul(2)


FAILURES = {
    "synchronize": (lambda x: torch.npu.synchronize(), "GS110"),
    "stream synchronize": (lambda x: torch.npu.current_stream().synchronize(), None),
    "pageable copy": (lambda x: x.copy_(torch.ones(1000)), "GS107"),
    "out of memory": (lambda x: torch.empty(1 << 50, dtype=torch.uint8, device=x.device), "GS501"),
    "item": (lambda x: x.sum().item(), "GS101"),
    "an unjoined stream": (leave_a_stream_unjoined, None),
    "user error": (lambda x: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_npu_capture_leaves_nothing(rt, x, name):
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
    elif rule is not None:
        assert isinstance(caught.value, gs.GraphSafeError), repr(caught.value)
        assert caught.value.rule.id == rule, str(caught.value)
        assert caught.value.where.function in ("fail", "<lambda>"), str(caught.value)
    del caught
    assert state() == before
    good_capture_works(rt, x)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TASK_QUEUE_ENABLE", "2"),
        ("ASCEND_LAUNCH_BLOCKING", "1"),
        ("TRITON_ENABLE_TASKQUEUE", "false"),
        ("PYTORCH_NPU_ALLOC_CONF", "pin_memory_expandable_segments:True"),
    ],
)
def test_a_setting_that_forbids_captures_is_refused_by_name(rt, x, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    before = state()
    with pytest.raises(gs.UnsupportedError, match=f"{variable}={value}"):
        with rt.capture():
            x.mul_(2)
    monkeypatch.undo()
    assert state() == before
    good_capture_works(rt, x)


def test_a_cold_kernel_is_refused_by_name_and_a_warm_one_is_counted(rt, x):
    y = torch.empty_like(x)

    def body():
        double_on_npu[(8,)](x, y, 1000, BLOCK=128)

    with pytest.raises(gs.UnsupportedError, match="double_on_npu") as caught:
        with rt.capture():
            body()
    assert caught.value.rule.id == "GS111"
    rt.warm_up(body)
    y.zero_()
    with rt.capture() as graph:
        body()
        body()
    assert graph.launches == 2
    assert [n.removesuffix("_0d1d") for n in graph.kernel_names] == [graph.kernel_names[0]] * 2
    assert graph.kernel_names[0].startswith("double_on_npu")
    assert not y.any()
    graph.replay()
    rt.synchronize()
    assert torch.equal(y, 2 * x)


def test_tuning_inside_a_capture_is_refused_by_name(rt, x):
    y = torch.empty_like(x)
    tuned_on_npu[(16,)](x, y, 1000)
    with pytest.raises(gs.UnsupportedError, match="tuned_on_npu") as caught:
        with rt.capture():
            tuned_on_npu[(16,)](x[:999], y, 999)
    assert caught.value.rule.id == "GS111"
    good_capture_works(rt, x)


@pytest.mark.parametrize(("loaded", "locks", "rule"), [(True, 2, "GS110"), (False, 0, "GS111")])
def test_a_kernel_with_locks_or_not_yet_loaded_is_refused_by_name(rt, x, monkeypatch, loaded, locks, rule):
    """The compiler gives no kernel of this project locks: the hook is told of one that has them."""
    y = torch.empty_like(x)
    double_on_npu[(8,)](x, y, 1000, BLOCK=128)
    hook = compat.launch_hook
    monkeypatch.setattr(compat, "launch_hook", lambda tell: hook(lambda name, *_: tell(name, loaded, locks)))
    with pytest.raises(gs.UnsupportedError, match="double_on_npu") as caught:
        with rt.capture():
            double_on_npu[(8,)](x, y, 1000, BLOCK=128)
    assert caught.value.rule.id == rule
    monkeypatch.undo()
    good_capture_works(rt, x)


def test_graphs_of_one_callable_share_a_pool(rt):
    @gs.graphed(runtime=rt, buckets=[gs.Bucket(64, 2), gs.Bucket(128, 4)])
    def f(x, cu_seqlens):
        return (x * 2).relu()

    f.capture(torch.randn(1, 60, 32, device=rt.device), torch.tensor([0, 60], device=rt.device))
    assert len({tuple(e.graph.pool) for e in f._entries.values()}) == 1
    for n in (60, 100, 60):
        t, cu = torch.randn(1, n, 32, device=rt.device), torch.tensor([0, n], device=rt.device)
        assert torch.equal(f(t, cu), (t * 2).relu())


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


def test_launches_are_what_computes(rt, x):
    with rt.capture() as graph:
        y = torch.empty_like(x).view(10, 100)
        z = (x + 1).view(10, 100).t() * 2  # noqa: F841
        del y
    assert graph.launches == 2, graph.operator_names


def test_poison_reaches_results_and_replay_repairs_them(rt, x):
    with rt.capture() as graph:
        y = x + 1
    graph.replay()
    graph.poison()
    assert torch.isnan(y).all()
    graph.replay()
    rt.synchronize()
    assert torch.equal(y, x + 1)


def test_a_graph_that_dies_inside_a_capture_is_dropped_after_it(rt, x):
    collect = gc.collect  # the function itself: by its name the guard refuses it inside a capture

    def capture():
        with rt.capture() as graph:
            y = x + 1
        return graph, y

    graph, _ = capture()
    with rt.capture() as second:
        del graph
        collect()
        z = x * 3
    second.replay()
    rt.synchronize()
    assert torch.equal(z, x * 3)


def test_a_side_stream_that_joins_is_part_of_the_graph(rt, x):
    side = torch.npu.Stream()
    with rt.capture() as graph:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 2
        main.wait_stream(side)
        z = y + 1
    x.fill_(4)
    graph.replay()
    rt.synchronize()
    assert (z == 9).all()


def test_the_pool_must_be_a_graph_of_this_runtime(rt):
    with pytest.raises(gs.ArgumentError):
        with rt.capture(pool=object()):
            raise AssertionError("the body must not run")


def test_an_event_measures_and_an_error_is_explained(rt):
    first, second = rt.event(), rt.event()
    first.record()
    second.record()
    rt.synchronize()
    assert first.elapsed_time(second) >= 0
    assert "107025" in rt.explain(107025)
    assert rt.explain("something else") == "something else"
