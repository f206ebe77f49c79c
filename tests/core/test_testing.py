"""The tools of the tests themselves: layouts, poison, the plugin's devices."""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe as gs
from graphsafe.testing.layouts import boundaries, corner_lengths, layouts, naive_tables, random_lengths
from graphsafe.testing.poison import poison, poisoned_memory, poisoned_padding, watched_arena

pytest_plugins = ["pytester"]

SIZES = [(96, 5), (1, 1), (3, 7), (1000, 1), (64, 64)]


@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_layouts_are_within_the_capacity_and_reach_its_edges(tokens, sequences):
    found = layouts(200, tokens, sequences, seed=5)
    assert len(found) == 200
    assert all(1 <= len(one) <= sequences and min(one) >= 0 and sum(one) <= tokens for one in found)
    assert any(sum(one) == tokens for one in found)
    assert any(sum(one) == 0 for one in found)
    assert any(len(one) == sequences for one in found)


def test_corners_have_empty_sequences_everywhere():
    found = corner_lengths(96, 5)
    assert len(set(map(tuple, found.values()))) == len(found)
    assert found["empty in front"][0] == 0 < found["empty in front"][-1]
    assert found["empty at the end"][-1] == 0 < found["empty at the end"][0]
    middle = found["empty in the middle"]
    assert middle[0] > 0
    assert not any(middle[1:-1])
    assert middle[-1] > 0


def test_layouts_are_the_same_on_every_machine():
    assert random_lengths(0, 96, 5) == random_lengths(0, 96, 5)
    assert [random_lengths(seed, 96, 5) for seed in range(3)] == [[16], [47, 45], [0, 12]]
    assert len({tuple(random_lengths(seed, 96, 5)) for seed in range(50)}) > 40


def test_boundaries_and_tables_of_a_known_layout():
    assert boundaries([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert boundaries([3, 0, 2], sequences=5, dtype=torch.int64).tolist() == [0, 3, 3, 5, 5, 5]
    assert naive_tables([33, 0, 16], 64, 4, 16) == (
        [[0, 0], [0, 1], [0, 2], [2, 0], [-1, 0], [-1, 0], [-1, 0]],
        [0, 3, 3, 4, 4],
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool], ids=str
)
def test_poison_cannot_pass_for_a_result(dtype):
    t = poison(torch.zeros(3, dtype=dtype))
    if dtype.is_floating_point or dtype.is_complex:
        assert t.isnan().all()
    else:
        assert (t == (True if dtype is torch.bool else torch.iinfo(dtype).max)).all()


def test_padding_is_poisoned_behind_the_live_rows():
    x = poisoned_padding(torch.ones(1, 5, 2), 3)
    assert torch.equal(x[:, :3], torch.ones(1, 3, 2))
    assert x[:, 3:].isnan().all()
    assert poisoned_padding(torch.ones(4, 2), 1, dim=0)[1:].isnan().all()


def test_uninitialised_memory_is_poisoned_in_forward_and_backward():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.empty_like(grad))
            return grad

    with poisoned_memory():
        made = [torch.empty(3), torch.empty(2, dtype=torch.int64), torch.ones(2).new_empty(4), torch.empty(2, 2).t()]
        x = torch.ones(3, requires_grad=True)
        Function.apply(x).sum().backward()
        assert torch.equal(torch.zeros(3), torch.zeros(3))
    assert all(poisoned.isnan().all() for poisoned in (made[0], made[2], made[3], seen[0]))
    assert (made[1] == torch.iinfo(torch.int64).max).all()


def test_a_graph_of_a_body_that_reads_uninitialised_memory_shows_it(runtime):
    def body():
        return torch.empty(3, device=runtime.device) * 0

    with poisoned_memory(), runtime.capture() as graph:
        y = graph.outputs(body())
    graph.replay()
    runtime.synchronize()
    assert y.isnan().all()


def test_the_watched_arena_checks_at_the_end(runtime):
    def write(elements):
        with watched_arena(runtime, gs.Bucket(8)) as arena:
            arena.tensor("x", (2,), torch.float32).as_strided((elements,), (1,)).fill_(math.pi)

    write(2)
    with pytest.raises(gs.PaddingError, match="'x'"):
        write(3)


PLUGIN = """
pytest_plugins = ["graphsafe.testing.plugin"]
"""
ASKS = """
import torch

def test_asks(runtime, poisoned_memory):
    assert torch.empty(2, device=runtime.device).isnan().all()

def test_does_not_ask():
    pass
"""
OWN = """
import pytest
from graphsafe_cpu import CpuRuntime

@pytest.fixture
def runtime():
    return CpuRuntime()

def test_own(runtime):
    assert runtime.name == "cpu"
"""


@pytest.fixture
def session(pytester, monkeypatch):
    monkeypatch.delenv("GRAPHSAFE_DEVICE", raising=False)
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(test_asks=ASKS)
    return lambda *options: pytester.runpytest("-q", "-p", "no:cacheprovider", *options)


def test_the_default_device_is_the_cpu(session):
    session().assert_outcomes(passed=2)


@pytest.mark.parametrize("name", ["no-such-device", "npu"])
def test_an_unknown_or_unavailable_device_fails_and_never_skips(session, monkeypatch, name):
    result = session("--graphsafe-device", f"cpu,{name}")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*RuntimeMissingError: *{name}*"])
    monkeypatch.setenv("GRAPHSAFE_DEVICE", name)
    session().assert_outcomes(passed=1, errors=1)
    session("--graphsafe-device", "cpu").assert_outcomes(passed=2)


def test_no_device_at_all_is_an_error(session):
    assert session("--graphsafe-device", " , ").ret != 0


def test_a_runtime_fixture_of_ones_own_runs_once(session, pytester):
    pytester.makepyfile(test_own=OWN)
    session("--graphsafe-device", "cpu,npu", "test_own.py").assert_outcomes(passed=1)
