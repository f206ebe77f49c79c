"""Small programs that each break one rule in one way, and next to each the twin that keeps it.

The program must be refused with the rule's class, category and id, at the file and line of the statement that breaks
it. The twin must run. The programs are in ``broken_operators.py``, ``broken_lifetimes.py`` and ``broken_values.py``.
"""

from __future__ import annotations

import broken_lifetimes
import broken_operators
import broken_values
import pytest
from broken_programs import CASES, KEPT, line_of

import graphsafe as gs
from graphsafe.rules import RULES

PROGRAMS = (broken_lifetimes, broken_operators, broken_values)


@pytest.mark.parametrize(("rule", "cls", "make"), CASES)
def test_the_broken_rule_is_named_at_its_line(runtime, rule, cls, make):
    breaking, _ = make(runtime)
    with pytest.raises(gs.GraphSafeError) as caught:
        breaking()
    KEPT.clear()
    problem = caught.value
    assert problem.rule is RULES[rule], problem
    assert isinstance(problem, cls)
    assert problem.category is RULES[rule].category
    assert (problem.where.file, problem.where.line) == line_of(make), problem
    assert problem.remedy


@pytest.mark.parametrize(("rule", "cls", "make"), CASES)
def test_the_twin_runs(runtime, rule, cls, make):
    _, twin = make(runtime)
    twin()


def test_there_are_enough_and_they_cover_the_categories():
    assert len(CASES) >= 50
    assert {RULES[c.values[0]].id[2] for c in CASES} >= {"1", "2", "3", "4", "5"}
