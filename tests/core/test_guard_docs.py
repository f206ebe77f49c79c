"""docs/guard.md names every rule that a capture can break and every program that breaks one."""

from __future__ import annotations

import re
from pathlib import Path

import broken_guard
import broken_lifetimes
import broken_operators
import broken_values
from broken_programs import CASES

from graphsafe.base import GUARDS
from graphsafe.rules import RULES

PROGRAMS = (broken_guard, broken_lifetimes, broken_operators, broken_values)
PAGE = (Path(__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Invariants")[2]
ROWS = [line.strip("|").split("|") for line in TABLE.splitlines() if re.match(r"\| \d+ \|", line)]


def test_invariants_are_numbered():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert all(len(row) == 6 for row in ROWS)


def test_every_program_is_named_beside_its_rule():
    named = {name: row[2] for row in ROWS for name in re.findall(r"`(\w+)`", row[5])}
    assert set(named) == {c.id for c in CASES}
    assert [c.id for c in CASES if RULES[c.values[0]].id not in named[c.id]] == []


def test_every_rule_about_a_capture_has_an_invariant():
    assert set(re.findall(r"GS\d+", " ".join(row[2] for row in ROWS))) == {RULES[c.values[0]].id for c in CASES}


def test_every_level_is_described():
    assert re.findall(r"^\| (\w+) \| (?:`|the default)", PAGE, re.M)[: len(GUARDS)] == list(GUARDS)
