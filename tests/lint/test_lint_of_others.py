"""What lint found in code of others, in small rewrites: every host read at its line, and nothing in the twins."""

from __future__ import annotations

import inspect

import lint_bodies as bodies
import pytest
import torch

import graphsafe as gs


def marked(source):
    """(rule, line) of the statements marked in a source."""
    lines, first = inspect.getsourcelines(source)
    return {(rule.strip(), max(first, 1) + i) for i, text in enumerate(lines) for rule in text.split("# FINDS ")[1:]}


def packed():
    return torch.randn(1, 9, 8), torch.tensor([0, 2, 6, 9])


def grid():
    return (torch.tensor([[1, 2, 4], [2, 2, 2]]),)


def graphs():
    edges = torch.tensor([[0, 1, 2, 2, 4], [1, 2, 2, 0, 5]])
    return torch.randn(6, 8), edges, torch.tensor([0, 0, 0, 1, 1, 2])


CASES = {
    "attention": (bodies.SplitAttention, bodies.MaskedAttention, packed),
    "grids": (bodies.grid_boundaries, lambda grid: bodies.grid_boundaries_of_a_capacity(grid, 4), grid),
    "graphs": (bodies.GraphLayer, bodies.PaddedGraphLayer, graphs),
}


def made(body):
    return body() if inspect.isclass(body) else body


@pytest.mark.parametrize("name", CASES)
def test_every_fault_is_found_at_its_line(name):
    body, _, arguments = CASES[name]
    report = gs.lint(made(body), *arguments())
    assert {(f.rule.id, f.where.line) for f in report.findings} == marked(body), str(report)
    assert {f.where.file for f in report.findings} == {bodies.__file__}


@pytest.mark.parametrize("name", CASES)
def test_the_twin_is_clean_and_gives_the_same(name):
    body, twin, arguments = CASES[name]
    given = arguments()
    report = gs.lint(made(twin), *given)
    assert report.clean, str(report)
    one, other = made(body), made(twin)
    if isinstance(one, torch.nn.Module):
        other.load_state_dict(one.state_dict())
        assert torch.allclose(one(*given), other(*given), atol=1e-5)
    else:
        frames = one(*given)[0]
        assert torch.equal(frames, other(*given)[: len(frames)])
