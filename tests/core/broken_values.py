"""Programs with stale values, wrong sizes, wrong padding, or an eager failure (rules GS3xx to GS5xx)."""

from __future__ import annotations

import torch
from broken_programs import capture, case, data

import graphsafe as gs
from graphsafe.testing.layouts import boundaries


@case("frozen-scalar", gs.MetadataError)
def python_number_that_changes(rt):
    x = data(rt, 4)

    def calls(**options):
        call = gs.graphed(lambda x, scale: x * scale, runtime=rt, **options)
        call(x, 2.0)
        call(x, 3.0)  # BREAKS

    return calls, lambda: calls(static_argnames=("scale",))


@case("frozen-scalar", gs.MetadataError)
def learning_rate_that_changes(rt):
    x = data(rt, 4, 3)

    def steps(change):
        model = torch.nn.Linear(3, 2).to(rt.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = gs.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, runtime=rt)
        step(x)
        optimizer.param_groups[0]["lr"] *= change
        step(x)  # BREAKS

    return lambda: steps(0.5), lambda: steps(1.0)


@case("structure", gs.MetadataError)
def argument_that_is_new(rt):
    x = data(rt, 4)
    call = gs.graphed(lambda x, options: x * options.get("scale", 1.0), runtime=rt)
    call(x, {})
    breaking = lambda: call(x, {"scale": 2.0})  # noqa: E731  # BREAKS
    return breaking, lambda: call(x, {})


@case("capacity", gs.CapacityError)
def batch_that_is_too_long(rt):
    """One token over the capacity is never eager without a word (imp 1709)."""

    def calls(tokens):
        bucket = gs.Bucket(64, 2, 16)
        call = gs.graphed(lambda x, cu_seqlens: x * 2, runtime=rt, buckets=[bucket], on_overflow="error")
        call(data(rt, 1, 9, 2), boundaries([9], device=rt.device))
        call(data(rt, 1, tokens, 2), boundaries([tokens], device=rt.device))  # BREAKS

    return lambda: calls(65), lambda: calls(64)


@case("replay-differs", gs.PaddingError)
def state_that_is_stale(rt):
    held = {"scale": 2.0}

    def verify(change):
        call = gs.graphed(lambda x: x * held["scale"], runtime=rt)
        call(data(rt, 4))
        held["scale"] += change
        call.verify(data(rt, 4))  # BREAKS

    return lambda: verify(1.0), lambda: verify(0.0)


@case("canary", gs.PaddingError)
def write_past_the_end(rt):
    def write(elements):
        with rt.arena(gs.Bucket(8), canaries=True) as arena:
            x = arena.tensor("x", (4,), torch.float32)
            x.as_strided((elements,), (1,)).fill_(1.0)
            rt.synchronize()
            arena.check_canaries()  # BREAKS

    return lambda: write(5), lambda: write(4)


@case("eager-failed", gs.BackendError)
def failure_without_any_graph(rt):
    x = data(rt, 4)

    def body(columns):
        return x @ torch.zeros(columns, 2, device=rt.device)  # BREAKS

    return lambda: capture(rt, lambda: body(5)), lambda: capture(rt, lambda: body(4))
