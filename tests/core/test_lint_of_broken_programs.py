"""Lint finds the programs whose bodies break a rule, at the same line, and finds nothing in their twins."""

from __future__ import annotations

import inspect

import broken_guard
import broken_lifetimes
import broken_operators
import broken_programs
import broken_values
import pytest

import graphsafe as gs
from graphsafe.rules import RULES

PROGRAMS = (broken_guard, broken_lifetimes, broken_operators, broken_values)


class Bodies:
    """Takes the place of ``capture`` and keeps the body instead."""

    def __init__(self):
        self.bodies = []

    def __call__(self, rt, body):
        self.bodies.append(body)


def body_of(program, monkeypatch):
    """The body that a program captures, or None where it does not break the rule in a body."""
    kept = Bodies()
    for module in (broken_programs, *PROGRAMS):
        monkeypatch.setattr(module, "capture", kept, raising=False)
    program()
    return kept.bodies[0] if kept.bodies else None


IN_BODIES = [
    c
    for c in broken_programs.CASES
    if "bodies(rt" in inspect.getsource(c.values[2]) and not c.id.startswith("buffer_made_lazily")
]


@pytest.fixture
def cpu():
    return gs.get_runtime("cpu")


@pytest.mark.parametrize(("rule", "cls", "make"), IN_BODIES)
def test_the_broken_rule_is_found_at_its_line(cpu, monkeypatch, rule, cls, make):
    breaking, _ = make(cpu)
    report = gs.lint(body_of(breaking, monkeypatch))
    broken_programs.KEPT.clear()
    found = [(f.rule.name, f.where.file, f.where.line) for f in report.findings]
    assert (rule, *broken_programs.line_of(make)) in found, str(report)
    assert all(f.remedy and f.rule is RULES[f.rule.name] for f in report.findings)


@pytest.mark.parametrize(("rule", "cls", "make"), IN_BODIES)
def test_the_twin_is_clean(cpu, monkeypatch, rule, cls, make):
    _, twin = make(cpu)
    report = gs.lint(body_of(twin, monkeypatch))
    broken_programs.KEPT.clear()
    assert report.clean, str(report)


def test_there_are_enough():
    assert len(IN_BODIES) >= 35
