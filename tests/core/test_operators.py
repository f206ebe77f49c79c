"""What an operator does to a graph, read from its schema and tags."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe._operators import facts_of, violation, written

aten = torch.ops.aten


def calls(run):
    """(facts, args, kwargs) of each operator that ``run`` calls."""
    found = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append((facts_of(func), args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Mode():
        run()
    return found


def violations(run):
    return [v[0] for facts, args, kwargs in calls(run) if (v := violation(facts, args, kwargs)) is not None]


X = torch.arange(6.0)
MASK = X > 2

SHAPES = {
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(X),
    "masked_select": lambda: X.masked_select(MASK),
    "boolean index": lambda: X[MASK],
    "byte index": lambda: aten.index(X, [MASK.to(torch.uint8)]),
    "boolean index of a row": lambda: X.view(2, 3)[:, torch.tensor([True, False, True])],
    "boolean assignment of values": lambda: X.clone().__setitem__(MASK, torch.zeros(3)),
    "boolean accumulation": lambda: X.clone().index_put_((MASK,), torch.tensor(1.0), accumulate=True),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "repeat_interleave": lambda: X.repeat_interleave(torch.ones(6, dtype=torch.long)),
    "bincount": lambda: torch.bincount(X.long()),
}
READS = {
    "item": lambda: X.sum().item(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "is_nonzero": lambda: torch.is_nonzero(X.sum()),
    "one_hot": lambda: torch.nn.functional.one_hot(X.long()),
}
FREE = {
    "masked_fill": lambda: X.masked_fill(MASK, 3.0),
    "boolean assignment of one value": lambda: X.clone().__setitem__(MASK, X[0]),
    "where with values": lambda: torch.where(MASK, X, 0.0),
    "integer index": lambda: X[X.long()],
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "repeat_interleave with a size": lambda: X.repeat_interleave(torch.ones_like(X).long(), output_size=6),
    "masked_scatter": lambda: X.masked_scatter(MASK, X),
    "searchsorted": lambda: torch.searchsorted(X, X),
    "scatter": lambda: X.scatter_add(0, X.long(), X),
    "topk": lambda: X.topk(2),
    "factories": lambda: (torch.zeros(3), torch.arange(3), torch.full((2,), 1.0), torch.rand(2), X.new_empty(3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_data_is_found(name):
    assert "data-dependent-shape" in violations(SHAPES[name])


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_found(name):
    assert "host-read" in violations(READS[name])


def test_host_data_is_found():
    for make in (lambda: torch.tensor([1.0]), lambda: torch.tensor(3), lambda: torch.as_tensor([1, 2])):
        assert violations(make) == ["host-data"]


@pytest.mark.parametrize("name", FREE)
def test_what_has_a_fixed_shape_is_free(name):
    assert not [v for v in violations(FREE[name]) if v != "host-data"]


@pytest.mark.parametrize(
    ("run", "want"),
    [
        (lambda x: x.add_(1), 1),
        (lambda x: torch.add(x, 1, out=x), 1),
        (lambda x: x.copy_(X), 1),
        (lambda x: torch._foreach_mul_([x, x.clone()], 2.0), 2),
        (lambda x: x.mul(2), 0),
        (lambda x: torch.nn.functional.batch_norm(x.view(3, 2), torch.zeros(2), torch.ones(2), training=True), 2),
        (lambda x: torch.nn.functional.batch_norm(x.view(3, 2), torch.zeros(2), torch.ones(2), training=False), 0),
    ],
)
def test_what_is_written_in_place(run, want):
    found = [len(list(written(facts, args, kwargs))) for facts, args, kwargs in calls(lambda: run(X.clone()))]
    assert max(found) == want


def test_facts_of_random_uninitialised_and_geometry_changing_operators():
    assert facts_of(aten.bernoulli.default).random
    assert facts_of(aten.native_dropout.default).random
    assert not facts_of(aten.mul.Tensor).random
    assert facts_of(aten.empty.memory_format).fills_nothing
    assert not facts_of(aten.zeros.default).fills_nothing
    assert all(facts_of(f).changes_geometry for f in (aten.set_.source_Tensor, aten.resize_.default, aten.t_.default))
    assert not facts_of(aten.view.default).changes_geometry


def test_an_operator_that_this_project_never_saw_is_classified():
    library = torch.library.Library("graphsafe_test_operators", "FRAGMENT")
    library.define("fill(Tensor(a!) x, Tensor y, Tensor(b!) out) -> ()")
    facts = facts_of(torch.ops.graphsafe_test_operators.fill.default)
    assert facts.writes == ((0, "x"), (2, "out"))
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in written(facts, (a, b), {"out": c})] == [1, 3]
