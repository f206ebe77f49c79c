"""The pytest plugin: captured tests, known failures, failures by category."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
pytest_plugins = ["graphsafe.testing.plugin"]
"""

CAPTURED = """
import pytest
import torch
import graphsafe as gs
from graphsafe.testing.layouts import boundaries


def batch_of(runtime, seen):
    def batch(lengths):
        seen.append(lengths)
        x = torch.randn(1, sum(lengths), 2, generator=torch.Generator().manual_seed(sum(lengths)))
        return {"x": x.to(runtime.device), "cu_seqlens": boundaries(lengths, device=runtime.device)}
    return batch


SEEN = []


@pytest.mark.graphsafe_captured(layouts=7)
def test_right(runtime, bucket):
    def forward(x, cu_seqlens, tables):
        return torch.where(tables.live(x.shape[1]).view(1, -1, 1), x * 2, 0.0)
    return forward, batch_of(runtime, SEEN)


def test_it_ran_over_the_layouts(bucket):
    assert len(SEEN) == 7
    assert max(map(sum, SEEN)) == bucket.tokens == 96


@pytest.mark.graphsafe_captured(layouts=3)
def test_train_step(runtime, bucket):
    model = torch.nn.Linear(2, 2).to(runtime.device)
    def loss_fn(model, batch, tables):
        live = tables.live(batch["x"].shape[1]).view(1, -1, 1)
        return torch.where(live, model(torch.where(live, batch["x"], 0.0)), 0.0).square().sum()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return gs.TrainStep(model, loss_fn, sgd, runtime=runtime, bucket=bucket), batch_of(runtime, [])


@pytest.mark.graphsafe_captured(layouts=3)
def test_reads_padding(runtime, bucket):
    return lambda x, cu_seqlens: x / x.sum(), batch_of(runtime, [])


@pytest.mark.graphsafe_captured(layouts=3)
def test_reads_the_host(runtime, bucket):
    return lambda x, cu_seqlens: x * cu_seqlens[-1].item(), batch_of(runtime, [])


@pytest.mark.graphsafe_captured
def test_returns_nothing(runtime, bucket):
    pass


def test_of_the_driver():
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_unrelated():
    assert 1 == 2
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.delenv("GRAPHSAFE_DEVICE", raising=False)
    pytester.makeconftest(CONFTEST)
    return lambda *options: pytester.runpytest("-q", "-p", "no:cacheprovider", "--strict-markers", *options)


def test_a_marked_test_is_captured_and_replayed_over_layouts(run, pytester):
    pytester.makepyfile(test_mine=CAPTURED)
    result = run("test_mine.py")
    result.assert_outcomes(passed=3, failed=5)
    summary = result.stdout.str().partition("graphsafe: failures by category")[2]
    categories = ["unsupported graph operator: 3", "sentinel, offset or padding correctness: 1", "of no category: 1"]
    assert [line for line in summary.splitlines() if line in categories] == categories
    result.stdout.fnmatch_lines(
        [
            "  test_mine.py::test_of_the_driver: GS110 not-capturable: CUDA error: *",
            "  test_mine.py::test_reads_the_host[[]cpu[]]: GS101 host-read at *test_mine.py:* in <lambda>",
            "  test_mine.py::test_returns_nothing[[]cpu[]]: GS108 argument at *",
            "  test_mine.py::test_reads_padding[[]cpu[]]: GS404 padding-read at *test_mine.py:* in *",
            "  test_mine.py::test_unrelated: AssertionError: assert 1 == 2",
        ]
    )


def test_a_marked_test_needs_its_fixtures(run, pytester):
    pytester.makepyfile(
        test_mine="import pytest\n@pytest.mark.graphsafe_captured\ndef test_bare():\n    return print, print\n"
    )
    result = run("test_mine.py")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*test_mine.py::test_bare*asks for 'runtime' and 'bucket'*"])


KNOWN = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_of_the_runtime(runtime, n):
    assert n == 2

def test_of_no_device():
    assert False
"""


@pytest.mark.parametrize("how", ["workers", "option", "ini"])
def test_known_failures_have_reasons_and_an_unexpected_pass_fails(run, pytester, how):
    pytester.makepyfile(test_mine=KNOWN)
    folder = pytester.mkdir("known")
    (folder / "cpu.txt").write_text(
        "# of this device\n"
        "test_mine.py::test_of_the_runtime[*]: the device counts from two\n"
        "test_mine.py::test_of_no_device: not written yet\n"
        "test_mine.py::test_gone: it was removed\n"
    )
    (folder / "cuda.txt").write_text("test_mine.py::*: nothing works there\n")
    if how == "ini":
        pytester.makeini("[pytest]\ngraphsafe_known_failures = known\n")
    options = [] if how == "ini" else ["--graphsafe-known-failures", "known"]
    if how == "workers":
        pytest.importorskip("xdist", reason="pytest-xdist is not here")
        options += ["-n", "2"]
    result = run("test_mine.py", "-rx", *options)
    result.assert_outcomes(xfailed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*[[]XPASS(strict)[]] the device counts from two*",
            "of no category: 1",
            "  test_mine.py::test_of_the_runtime[[]cpu-2[]]: an unexpected pass",
            "  cpu.txt:4: test_mine.py::test_gone",
            "XFAIL test_mine.py::test_of_no_device - not written yet",
        ]
    )


@pytest.mark.parametrize("line", ["test_mine.py::test_of_no_device", "test_mine.py::test_of_no_device:  "])
def test_a_known_failure_without_a_reason_ends_the_run(run, pytester, line):
    pytester.makepyfile(test_mine=KNOWN)
    (pytester.mkdir("known") / "cpu.txt").write_text(line + "\n")
    result = run("test_mine.py", "--graphsafe-known-failures", "known")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "'test id: reason' is needed" in result.stderr.str()


def test_a_folder_that_is_not_there_ends_the_run(run, pytester):
    pytester.makepyfile(test_mine=KNOWN)
    assert run("--graphsafe-known-failures", "nowhere").ret == pytest.ExitCode.USAGE_ERROR
