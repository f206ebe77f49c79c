"""Nested arguments: paths as a caller writes them, the same structure around new leaves."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import graphsafe as gs
from graphsafe.tree import leaves, map_leaves, tensors


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Batch:
    ids: Any
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    ids: Any
    derived: Any = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "derived", ("derived", self.ids))


VALUES = {
    "leaf": (3, [("x", 3)]),
    "dict": ({"a": 1, 2: 3}, [("x['a']", 1), ("x[2]", 3)]),
    "list and tuple": ([1, (2, 3)], [("x[0]", 1), ("x[1][0]", 2), ("x[1][1]", 3)]),
    "named tuple": (Pair(1, [2]), [("x.a", 1), ("x.b[0]", 2)]),
    "dataclass": (Batch(1, {"m": Batch(2)}), [("x.ids", 1), ("x.extra['m'].ids", 2), ("x.extra['m'].extra", None)]),
    "empty": ({"a": [], "b": ()}, []),
    "none": (None, [("x", None)]),
    "string": ("abc", [("x", "abc")]),
    "a class is a leaf": (Batch, [("x", Batch)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_leaves_have_paths_as_a_caller_writes_them(name):
    value, want = VALUES[name]
    assert list(leaves(value, "x")) == want


def test_without_a_root_the_path_starts_at_the_first_name():
    assert [p for p, _ in leaves(Batch(1, [2]))] == ["ids", "extra[0]"]


@pytest.mark.parametrize("name", VALUES)
def test_mapping_the_identity_gives_an_equal_structure(name):
    value, _ = VALUES[name]
    made = map_leaves(lambda path, leaf: leaf, value, "x")
    assert made == value
    assert type(made) is type(value)


CONTAINERS = {
    "dict": lambda x: {"a": x}, "ordered": lambda x: OrderedDict(a=x), "list": lambda x: [x], "tuple": lambda x: (x,),
    "default": lambda x: defaultdict(list, a=x), "counter": lambda x: Counter(a=x), "named tuple": lambda x: Pair(x, x),
    "proxy": lambda x: MappingProxyType({"a": x}), "dataclass": Batch, "frozen": Frozen,
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_new_leaves_in_a_container_of_the_same_type(name):
    value = CONTAINERS[name](1)
    before = list(leaves(value, "x"))
    made = map_leaves(lambda path, leaf: f"{path}={leaf}", value, "x")
    assert type(made) is type(value)
    assert list(leaves(made, "x")) == [(path, f"{path}={leaf}") for path, leaf in before]
    assert list(leaves(value, "x")) == before, "the original was changed"


def test_a_default_factory_is_kept():
    value = defaultdict(list, a=1)
    assert map_leaves(lambda _, leaf: leaf, value)["missing"] == []


def test_a_derived_field_is_taken_from_the_leaves_not_computed_again():
    made = map_leaves(lambda path, leaf: leaf + 1 if path == "ids" else leaf, Frozen(2))
    assert made.ids == 3
    assert made.derived == ("derived", 2)


def test_results_of_torch_are_opened():
    x = torch.arange(6.0).view(2, 3)
    assert [p for p, _ in leaves(x.max(0), "x")] == ["x[0]", "x[1]"]
    made = map_leaves(lambda _, leaf: leaf + 1, x.max(0))
    assert torch.equal(made.values, x.max(0).values + 1)
    assert map_leaves(lambda _, leaf: leaf, x.shape) == x.shape


def test_tensors_in_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in tensors({"x": [a, 1, (b,)], "y": Batch("no", c)})] == [1, 2, 3]


def test_a_container_that_contains_itself_is_refused():
    loop = [1]
    loop.append({"again": loop})
    for use in (lambda: list(leaves(loop, "xs")), lambda: tensors(loop)):
        with pytest.raises(gs.MetadataError, match="contains itself"):
            use()
    shared = [1]
    assert len(list(leaves([shared, shared], "xs"))) == 2
