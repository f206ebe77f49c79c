"""Which arguments follow the batch, found from one example."""

from __future__ import annotations

import gc
import inspect
import json
import weakref

import pytest
import torch

import graphsafe as gs
from graphsafe.inputs import Input, InputPlan, _under, bind_call, static_key
from graphsafe.stats import CaptureFigures, Stats


def call_of(function, *args, injected=None, **kwargs):
    return bind_call(inspect.signature(function), args, kwargs, injected)


def plan_of(call, declared=None, static=(), capacities=(64,)):
    return InputPlan(call, declared or {}, tuple(static), list(capacities))


def kinds(plan):
    return {path: how.kind for path, how in plan.inputs.items()}


CU = torch.tensor([0, 5, 5, 20], dtype=torch.int32)


def f(x, y=None, state=None, cu_seqlens=None, w=None, scale=1.0):
    return x


@pytest.mark.parametrize("rows", [20, 64], ids=["live total", "capacity"])
def test_kinds_follow_from_the_shapes_of_the_example(rows):
    x, y = torch.zeros(1, rows, 4), torch.zeros(1, rows)
    plan = plan_of(call_of(f, x, y, torch.zeros(3, 2), CU, torch.zeros(7, 3)))
    assert kinds(plan) == {
        "x": "tokens", "y": "tokens", "state": "sequences", "cu_seqlens": "boundaries", "w": "fixed",
    }  # fmt: skip
    assert plan.frozen == {"scale": 1.0}


def test_a_vector_is_fixed_and_tokens_win_over_sequences():
    one = torch.tensor([0, 20])
    plan = plan_of(call_of(f, torch.zeros(1, 20), torch.zeros(3), torch.zeros(1, 9), one, torch.zeros(20)))
    assert kinds(plan) == {
        "x": "tokens", "y": "fixed", "state": "sequences", "cu_seqlens": "boundaries", "w": "fixed",
    }  # fmt: skip


def test_without_boundaries_everything_is_fixed():
    plan = plan_of(call_of(f, torch.zeros(1, 64), torch.zeros(3, 2)))
    assert set(kinds(plan).values()) == {"fixed"}
    assert plan.groups == []
    assert plan.sizes(call_of(f, torch.zeros(1, 64), torch.zeros(3, 2))) == (0, 0)


def test_what_is_declared_wins_also_for_all_that_it_contains():
    call = call_of(f, torch.zeros(1, 20), {"a": torch.zeros(1, 20), "b": torch.zeros(3, 2)}, None, CU)
    plan = plan_of(call, {"y": Input("fixed"), "y['b']": Input("bound")})
    assert kinds(plan) == {"x": "tokens", "y['a']": "fixed", "y['b']": "bound", "cu_seqlens": "boundaries"}


def test_each_container_with_boundaries_is_a_batch_of_its_own():
    other = torch.tensor([0, 7], dtype=torch.int32)
    call = call_of(
        lambda a, b: a, {"x": torch.zeros(1, 20), "cu_seqlens": CU}, {"x": torch.zeros(1, 7), "cu_seqlens": other}
    )
    plan = plan_of(call)
    assert kinds(plan) == {
        "a['x']": "tokens", "a['cu_seqlens']": "boundaries", "b['x']": "tokens", "b['cu_seqlens']": "boundaries",
    }  # fmt: skip
    assert plan.group_sizes(call) == [(20, 3), (7, 1)]
    assert plan.sizes(call) == (20, 3)


@pytest.mark.parametrize(
    ("path", "names", "want"),
    [
        ("x", ["x"], "x"), ("x.a", ["x"], "x"), ("x['a']", ["x"], "x"), ("x2", ["x"], None), ("x", ["x.a"], None),
        ("x.a.b", ["x", "x.a"], "x.a"), ("x.ab", ["x.a"], None), ("y", [], None),
    ],
)  # fmt: skip
def test_a_name_stands_for_what_it_contains(path, names, want):
    assert _under(path, names) == want


def test_a_plan_keeps_no_example_alive():
    x = torch.zeros(1, 20)
    died = weakref.ref(x)
    call = call_of(f, x, None, None, CU)
    plan = plan_of(call)
    template = plan.template(call)
    del x, call
    gc.collect()
    assert died() is None
    new = torch.ones(1, 20)
    assert plan.fill(template, lambda path: new)["x"] is new


def test_a_call_is_matched_to_parameters():
    call = call_of(lambda x, *rest, scale=2.0, **more: x, 1, 2, 3, other=4)
    assert call.values == {"x": 1, "rest[0]": 2, "rest[1]": 3, "scale": 2.0, "more['other']": 4}
    call = call_of(lambda x, tables: x, 1, injected="tables")
    assert call.arguments == {"x": 1}
    with pytest.raises(gs.MetadataError, match="missing a required argument: 'x'"):
        call_of(f)


def test_static_keys_tell_apart_what_compares_equal():
    keys = {static_key(call_of(f, None, scale=v), ("scale",)) for v in (1, 1.0, True, 0.0, -0.0, "1", None)}
    assert len(keys) == 7
    assert static_key(call_of(f, None, scale=1), ("scale",)) in keys
    assert static_key(call_of(f, None, scale=1), ()) == ()


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(gs.ArgumentError, match="one of tokens, sequences, boundaries, fixed, bound is needed"):
        Input("token")
    assert (Input("tokens").axis, Input("sequences").axis, Input("tokens", dim=0).axis) == (1, 0, 0)


def test_figures_are_json():
    stats = Stats()
    stats.graphs.append(CaptureFigures("64x4 (BT 16)", 3, 100, 100, 50, 0.1, 0.2))
    stats.graphs.append(CaptureFigures("96x4 (BT 16)", 2, 150, 150, 70, 0.1, 0.2))
    stats.overflows["tokens"] += 2
    found = json.loads(json.dumps(stats.as_dict()))
    assert (found["launches"], found["arena_bytes"], found["pool_bytes"]) == (3, 250, 120)
    assert found["overflows"] == {"tokens": 2}
    assert found["graphs"][0]["bucket"] == "64x4 (BT 16)"
    assert Stats().launches == 0


def test_one_bucket_in_place_of_a_list_is_refused_by_name():
    with pytest.raises(gs.ArgumentError, match=r"buckets=\[bucket\]"):
        gs.graphed(lambda x, cu_seqlens: x, runtime=gs.get_runtime("cpu"), buckets=gs.Bucket(8, 1))


def test_a_packed_function_without_a_bucket_is_told_what_to_pass():
    step = gs.graphed(lambda x, cu_seqlens, tables: x, runtime=gs.get_runtime("cpu"))
    with pytest.raises(gs.GraphSafeError, match=r"cu_seqlens.*needs a capacity") as refused:
        step(torch.ones(1, 4, 2), torch.tensor([0, 4]))
    assert "buckets=" in str(refused.value)
    assert "bucket=" in str(refused.value)
