"""The guard's levels: off checks nothing and restores everything, strict passes what is right, normal costs little."""

from __future__ import annotations

import pytest
import torch

import graphsafe as gs
from graphsafe import _outside
from graphsafe.testing.layouts import boundaries, layouts
from graphsafe.testing.suite.bodies import BODIES
from graphsafe.testing.suite.checks import captured, data, refused, same
from graphsafe.verify import check_padding, verify_replay
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

BUCKET = gs.Bucket(96, 4, 32)


def test_off_checks_no_rule_and_puts_state_back(runtime):
    x, total, kept = data(runtime, 8), torch.zeros(8, device=runtime.device), []
    drawn = [g.get_state() for g in runtime.generators]

    def body():
        total.add_(torch.rand(8, device=runtime.device))
        kept.append(x * 2)  # an escape
        return x + 1

    runtime.warm_up(body)
    with runtime.capture(guard="off") as graph:
        y = graph.outputs(body())
    assert not total.any()
    assert all(torch.equal(g.get_state(), s) for g, s in zip(runtime.generators, drawn, strict=True))
    graph.replay()
    same(runtime, y, x + 1)
    kept.clear()
    graph.close()
    refused("tensor-escapes", captured, runtime, body)
    kept.clear()


@pytest.mark.parametrize("use", ["capture", "graphed", "TrainStep"])
def test_an_unknown_level_is_refused(runtime, use):
    model = torch.nn.Linear(2, 2).to(runtime.device)
    uses = {
        "capture": lambda: runtime.capture(guard="loose"),
        "graphed": lambda: gs.graphed(lambda x: x, runtime=runtime, guard="loose"),
        "TrainStep": lambda: gs.TrainStep(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), runtime=runtime, guard="loose"
        ),
    }
    assert "'off', 'normal', 'strict'" in refused("argument", uses[use]).what


@pytest.mark.parametrize("name", BODIES)
def test_strict_passes_every_body_that_keeps_the_rules(runtime, name):
    body = BODIES[name](runtime)
    runtime.warm_up(body.run)
    with runtime.capture(guard="strict") as graph:
        result = graph.outputs(body.run())
    for _ in range(2):
        verify_replay(runtime, graph, body.run, result)
        graph.replay()
    runtime.synchronize()


@pytest.mark.parametrize("layer", [GatedDeltaNet, KimiDeltaAttention])
def test_strict_passes_layers_in_training_over_layouts(runtime, layer):
    torch.manual_seed(0)
    model = layer(hidden_size=32, num_heads=2, head_dim=16).to(runtime.device)

    def loss_of(model, batch, tables):
        return model(batch["x"], cu_seqlens=batch["cu_seqlens"], tables=tables, use_graph=True)[0].square().sum()

    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gs.TrainStep(model, loss_of, sgd, runtime=runtime, bucket=BUCKET, guard="strict")
    for lengths in [[40, 20, 3], *layouts(3, BUCKET.tokens, BUCKET.sequences, seed=2)]:
        step({"x": data(runtime, 1, sum(lengths), 32), "cu_seqlens": boundaries(lengths, device=runtime.device)})
    assert step.stats.captures == 1
    assert step.stats.replays == 4


def test_a_normal_replay_compares_a_bounded_number_of_addresses(runtime, monkeypatch):
    if runtime.device.type == "cpu":
        pytest.skip("a CPU compares all: it has to find its memory at each replay anyway")
    held = [data(runtime, 4) for _ in range(50)]
    counted = []
    original = _outside._Outside.check
    monkeypatch.setattr(_outside._Outside, "check", lambda self: counted.append(self) or original(self))
    for guard, most in (("off", 0), ("normal", _outside.EACH), ("strict", 50)):
        with runtime.capture(guard=guard) as graph:
            graph.outputs(torch.stack(held).sum())
        counted.clear()
        graph.replay()
        assert len(counted) == most, guard


def test_a_tensor_that_moved_among_many_is_found_by_a_normal_guard_within_its_turn(runtime):
    held = [data(runtime, 4) for _ in range(50)]
    old = [t.view(2, 2) for t in held]
    with runtime.capture() as graph:
        graph.outputs(torch.stack(held).sum())
    for _ in range(12):
        graph.replay()
    held[31].data = torch.zeros(4, device=runtime.device)

    def replays():
        for _ in range(-(-50 // _outside.EACH)):
            graph.replay()

    refused("storage-replaced", replays)
    assert len(old) == 50


def test_padding_that_is_not_zero_is_named_with_its_place(runtime):
    x = torch.zeros(1, 6, 2, device=runtime.device)
    check_padding("x", x, 0)
    x[0, 2] = 1.0
    check_padding("x", x, 3)
    x[0, 4, 1] = float("nan")
    problem = refused("padding-nonzero", check_padding, "x", x, 3)
    assert "1 elements of x beyond its 3 live rows are not zero: x[0, 4, 1] is nan" in problem.what
    check_padding("x", x[0, :, 0], 3, dim=0)


class _Holder:
    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("kept", [False, True], ids=["by frames", "by a closure"])
def test_strict_names_a_leftover_only_where_something_outlives_the_error(runtime, kept):
    """Objects in the frames of the error, here tables and a holder, are no reason to hide what broke."""
    cache = []

    def body(x, cu_seqlens, tables):
        held = _Holder(x * 2)
        if kept:
            cache.append(held)
        return held.tensor * int(cu_seqlens[-1]) * tables.chunk_offsets[0]

    call = gs.graphed(body, runtime=runtime, buckets=[gs.Bucket(64, 4)], guard="strict")
    with pytest.raises(gs.GraphSafeError) as caught:
        call(data(runtime, 1, 12, 4), boundaries([5, 7], device=runtime.device))
    assert caught.value.rule.name == ("capture-leftover" if kept else "host-read")
    cause = caught.value.__cause__ if kept else caught.value
    assert cause.rule.name == "host-read"
