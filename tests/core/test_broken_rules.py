"""Small programs that each break one rule in one way, and next to each the twin that keeps it.

The program must be refused with the rule's class, category and id, at the file and line of the statement that breaks
it. The twin must run. The programs are in the modules ``broken_*.py``, and what each rule and device has is in
docs/guard.md.
"""

from __future__ import annotations

import broken_guard
import broken_lifetimes
import broken_operators
import broken_values
import pytest
from broken_programs import CASES, KEPT, line_of

import graphsafe as gs
from graphsafe.rules import RULES

PROGRAMS = (broken_guard, broken_lifetimes, broken_operators, broken_values)


@pytest.fixture
def rt(runtime, request):
    """The runtime, where the case can be shown on its device."""
    devices = request.getfixturevalue("make").devices
    if runtime.device.type not in devices:
        pytest.skip(f"{runtime.device.type} cannot show it; {' and '.join(devices)} can")
    return runtime


@pytest.mark.parametrize(("rule", "cls", "make"), CASES)
def test_the_broken_rule_is_named_at_its_line(rt, rule, cls, make):
    breaking, _ = make(rt)
    with pytest.raises(gs.GraphSafeError) as caught:
        breaking()
    KEPT.clear()
    problem = caught.value
    if problem.rule is not RULES[rule]:
        raise AssertionError(f"rule {RULES[rule].id} was expected") from problem
    assert isinstance(problem, cls)
    assert problem.category is RULES[rule].category
    assert (problem.where.file, problem.where.line) == line_of(make), problem
    assert problem.remedy


@pytest.mark.parametrize(("rule", "cls", "make"), CASES)
def test_the_twin_runs(rt, rule, cls, make):
    _, twin = make(rt)
    twin()


def test_there_are_enough_and_they_cover_the_categories():
    assert len(CASES) >= 80
    assert {RULES[c.values[0]].id[2] for c in CASES} == {"1", "2", "3", "4", "5", "6"}
    # not about a capture: tested with what raises them
    elsewhere = {"argument", "runtime-missing", "unsupported", "bad-allowance"}
    assert set(RULES) - {c.values[0] for c in CASES} == elsewhere
