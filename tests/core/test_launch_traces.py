"""Lint compares launches of Triton kernels: grids, scalars and constexprs that differ between runs."""

from __future__ import annotations

import itertools

import broken_guard
import pytest
import torch

import graphsafe as gs
from graphsafe._launches import traced_launches


@pytest.fixture
def kernel():
    return broken_guard.kernels(gs.get_runtime("cpu")).scale_rows


@pytest.mark.parametrize(
    ("grids", "factors", "says"),
    [
        (itertools.count(2), itertools.repeat(3.0), "the Python value grid=(3,) in one run and grid=(4,) in the next"),
        (itertools.repeat(4), itertools.count(1), "factor=2 in one run and factor=3 in the next"),
        (itertools.repeat(4), itertools.repeat(3.0), None),
    ],
    ids=["grid", "scalar", "equal"],
)
def test_lint_names_what_differs_between_two_launches(kernel, grids, factors, says):
    x = torch.ones(8, 2)

    def body(x):
        y = torch.zeros_like(x)
        kernel[lambda meta: (next(grids),)](x, y, next(factors), 2, BLOCK=2, TWICE=False)
        return y

    report = gs.lint(body, x)
    assert report.clean == (says is None), str(report)
    if says is not None:
        (finding,) = report.findings
        assert finding.rule.id == "GS301"
        assert "the triton kernel 'scale_rows'" in finding.what
        assert says in finding.what
        assert (finding.where.file, finding.where.function) == (__file__, "body")


def test_a_trace_ends_with_its_block(kernel):
    seen = []
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    with traced_launches(lambda name, values: seen.append((name, values))):
        kernel[(4,)](x, y, 3.0, 2, BLOCK=2, TWICE=True)
    kernel[(4,)](x, y, 3.0, 2, BLOCK=2, TWICE=True)
    assert seen == [("scale_rows", {"grid": (4,), "factor": 3.0, "width": 2, "BLOCK": 2, "TWICE": True})]
    assert torch.equal(y, torch.full((4, 2), 6.0))
