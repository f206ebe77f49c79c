"""Rules are numbered once, by category; errors say what, where, why and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import graphsafe as gs
from graphsafe.errors import Location, error
from graphsafe.rules import RULES, Category, rule

CLASSES = {
    1: gs.UnsupportedError, 2: gs.LifetimeError, 3: gs.MetadataError, 4: gs.PaddingError, 5: gs.BackendError,
    6: gs.DistributedError,
}  # fmt: skip


def test_ids_are_unique_and_in_order():
    ids = [r.id for r in RULES.values()]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)
    assert all(re.fullmatch(r"GS[1-6]\d\d", i) for i in ids)


def test_names_are_unique_and_each_is_looked_up_by_name_and_id():
    for name, r in RULES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert rule(name) is rule(r.id) is r


@pytest.mark.parametrize("name", RULES)
def test_the_hundreds_digit_is_the_category(name):
    assert list(Category).index(RULES[name].category) == int(RULES[name].id[2]) - 1


def test_there_is_a_rule_in_each_of_the_six_categories():
    assert {r.category for r in RULES.values()} == set(Category)
    assert len(Category) == 6


@pytest.mark.parametrize("name", RULES)
def test_each_rule_says_what_why_and_what_to_do(name):
    r = RULES[name]
    for text in (r.demand, r.why, r.remedy):
        assert text[0].isupper()
        assert text.endswith(".")
        assert len(text) > 20


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no rule 'GS999'; known: GS101 host-read, .*GS601 collective"):
        rule("GS999")


@pytest.mark.parametrize("name", RULES)
def test_each_error_has_the_class_of_its_category(name):
    made = error(name, "seven")
    assert isinstance(made, CLASSES[int(RULES[name].id[2])])
    assert isinstance(made, gs.GraphSafeError)
    assert isinstance(made, RuntimeError)
    assert made.rule is RULES[name]
    assert made.category is RULES[name].category


@pytest.mark.parametrize(
    ("name", "cls", "builtin"),
    [
        ("argument", gs.ArgumentError, ValueError),
        ("runtime-missing", gs.RuntimeMissingError, LookupError),
        ("capacity", gs.CapacityError, gs.MetadataError),
    ],
)
def test_some_rules_have_a_class_of_their_own(name, cls, builtin):
    assert type(error(name, "seven")) is cls
    assert isinstance(error(name, "seven"), builtin)


def test_the_text_has_what_rule_where_why_and_remedy():
    made = error("host-read", "seven reads eight", where=Location("model.py", 12, "forward"))
    assert str(made).split("\n") == [
        "seven reads eight",
        "  rule:   GS101 host-read (unsupported graph operator)",
        "  where:  model.py:12 in forward",
        f"  why:    {RULES['host-read'].why}",
        f"  remedy: {RULES['host-read'].remedy}",
    ]


def test_why_and_remedy_can_be_those_of_the_case():
    made = error("host-read", "seven", why="Because.", remedy="Do this.")
    assert (made.why, made.remedy) == ("Because.", "Do this.")
    assert "Because." in str(made)
    assert "Do this." in str(made)


def test_where_is_the_line_that_asked():
    made = error("host-read", "seven")
    assert made.where == Location(__file__, made.where.line, "test_where_is_the_line_that_asked")
    assert 'error("host-read", "seven")' in Path(__file__).read_text().split("\n")[made.where.line - 1]


def test_a_finding_names_its_tensor_an_input_or_what_made_it(runtime):
    def reads_its_input(x):
        return x * x[0].item()

    def reads_what_it_made(x):
        return x * (x + 1).sum().item()

    x = torch.ones(3, device=runtime.device)
    for body, says in ((reads_its_input, "(the input 'x')"), (reads_what_it_made, "(made by aten::sum at ")):
        with pytest.raises(gs.UnsupportedError) as caught:
            gs.graphed(body, runtime=runtime)(x)
        assert says in caught.value.what
