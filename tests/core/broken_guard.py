"""Programs that the guard's stricter checks find, and those that need kernels, streams or a failure (all hundreds)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools

import pytest
import torch
from broken_programs import bodies, capture, case, data

import graphsafe as gs
from graphsafe.testing.layouts import boundaries
from graphsafe.verify import check_padding
from graphsafe_kernels.gdn import chunk_gated_delta_rule

BUCKET = gs.Bucket(64, 4, 16)
ACCELERATORS = ("cuda", "npu")


def packed(rt, *lengths):
    """Rows that are not zero, and their boundaries."""
    return data(rt, 1, sum(lengths), 2).abs() + 1, boundaries(list(lengths), device=rt.device)


def kernels(rt):
    """Triton decides where a kernel is decorated whether it is interpreted."""
    with pytest.MonkeyPatch.context() as environment:
        if rt.device.type == "cpu":
            environment.setenv("TRITON_INTERPRET", "1")
            # a first launch imports it, and asserts that triton's own functions are still decorated as they were
            importlib.import_module("triton.experimental.gluon")
        return importlib.import_module("guard_kernels")


# Kernels.


@case("frozen-scalar", gs.MetadataError)
def grid_that_changes_between_layouts(rt):
    kernel = kernels(rt).scale_rows

    def calls(rows):
        def body(x, cu_seqlens):
            y = torch.zeros_like(x)
            kernel[(next(rows),)](x, y, 3.0, 2, BLOCK=2, TWICE=False)  # BREAKS
            return y

        gs.graphed(body, runtime=rt, buckets=[BUCKET], guard="strict")(*packed(rt, 9, 3))

    return lambda: calls(itertools.count(1)), lambda: calls(itertools.repeat(8))


@case("frozen-scalar", gs.MetadataError)
def constexpr_that_changes_between_layouts(rt):
    kernel = kernels(rt).scale_rows

    def calls(twice):
        def body(x, cu_seqlens):
            y = torch.zeros_like(x)
            kernel[(8,)](x, y, 3.0, 2, BLOCK=2, TWICE=next(twice))  # BREAKS
            return y

        gs.graphed(body, runtime=rt, buckets=[BUCKET], guard="strict")(*packed(rt, 9, 3))

    return lambda: calls(itertools.cycle([True, False])), lambda: calls(itertools.repeat(True))


@case("cold-kernel", gs.UnsupportedError)
def compiled_function(rt):
    x = data(rt, 4)
    compiled = torch.compile(lambda x: x.sin(), backend="eager")

    def body():
        return compiled(x)  # BREAKS

    return lambda: capture(rt, body), lambda: capture(rt, lambda: x.sin())


@case("cold-kernel", gs.UnsupportedError, devices=ACCELERATORS)
def cold_kernel(rt):
    kernel = kernels(rt).cold
    x, y = data(rt, 100), torch.empty(100, device=rt.device)

    def breaking():
        with rt.capture():
            kernel[(1,)](x, y, 100, BLOCK=256)  # BREAKS

    return breaking, lambda: capture(rt, lambda: kernel[(1,)](x, y, 100, BLOCK=128))


@case("cold-kernel", gs.UnsupportedError, devices=("cuda",))
def tuning_inside(rt):
    """A new key of an autotuner inside a capture (triton 10596)."""
    kernel = kernels(rt).tuned
    x, y = data(rt, 1024), torch.empty(1024, device=rt.device)
    kernel[(16,)](x, y, 1024)

    def breaking():
        with rt.capture():
            kernel[(16,)](x, y, 960)  # BREAKS

    return breaking, lambda: capture(rt, lambda: kernel[(16,)](x, y, 1024))


# Streams, the collector, failures.


@case("not-capturable", gs.UnsupportedError, devices=ACCELERATORS)
def unjoined_stream(rt):
    module = torch.get_device_module(rt.device)
    x, y, side = data(rt, 100), torch.empty(100, device=rt.device), module.Stream()

    def forked(join):
        def body():
            here = module.current_stream()
            side.wait_stream(here)
            with module.stream(side):
                torch.mul(x, 2, out=y)  # BREAKS
            if join:
                here.wait_stream(side)

        return body

    def breaking():
        with rt.capture():
            forked(False)()

    return breaking, lambda: capture(rt, forked(True))


@case("not-capturable", gs.UnsupportedError, devices=ACCELERATORS)
def default_stream(rt):
    module = torch.get_device_module(rt.device)
    x, y = data(rt, 100), torch.empty(100, device=rt.device)

    def breaking():
        with rt.capture():
            with module.stream(module.default_stream()):
                torch.mul(x, 2, out=y)  # BREAKS

    return breaking, lambda: capture(rt, lambda: torch.mul(x, 2, out=y))


@case("not-capturable", gs.UnsupportedError)
def collector_run_inside(rt):
    x = data(rt, 4)

    def breaking():
        gc.collect()  # BREAKS
        return x * 2

    def twin():
        assert not gc.isenabled()
        return x * 2

    def collected():
        rt.warm_up(lambda: x * 2)
        with rt.capture() as graph:
            graph.outputs(twin())
        gc.collect()
        graph.replay()

    return lambda: capture(rt, breaking), collected


@case("not-capturable", gs.UnsupportedError)
def collector_switched_on_inside(rt):
    x = data(rt, 4)

    def breaking():
        gc.enable()  # BREAKS
        return x * 2

    return bodies(rt, breaking, lambda: x * 2)


@case("capture-leftover", gs.LifetimeError)
def bytes_left_after_a_failure(rt):
    x, kept = data(rt, 4), []

    def fails(keep):
        with contextlib.suppress(ValueError):
            with rt.capture(guard="strict"):
                y = x * 2  # BREAKS
                if keep:
                    kept.append(y)
                raise ValueError("of the body's own")

    return lambda: fails(True), lambda: fails(False)


@case("capture-leftover", gs.LifetimeError)
def momentum_that_starts_as_the_gradient(rt):
    x = data(rt, 4, 3)

    def steps(eager_first):
        model = torch.nn.Linear(3, 2).to(rt.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = gs.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, runtime=rt)
        if eager_first:
            step.eager(x)
        step(x)  # BREAKS

    return lambda: steps(False), lambda: steps(True)


# Addresses and order.


@case("input-died", gs.LifetimeError)
def input_reborn_at_its_address(rt):
    def replay(reborn):
        held = [data(rt, 1000)]
        rt.warm_up(lambda: held[0].detach() * 2)
        with rt.capture() as graph:
            graph.outputs(held[0].detach() * 2)
        if reborn:
            held.clear()
            gc.collect()
            held.extend(torch.zeros(1000, device=rt.device) for _ in range(8))
        graph.replay()  # BREAKS

    return lambda: replay(True), lambda: replay(False)


@case("storage-replaced", gs.LifetimeError)
def one_of_many_parameters_moved(rt):
    """Found at once by the strict guard, within a few replays by the normal one."""

    def replay(move):
        held = [data(rt, 4) for _ in range(40)]
        old = [t.view(2, 2) for t in held]
        with rt.capture(guard="strict") as graph:
            graph.outputs(torch.stack(held).sum())
        if move:
            held[23].data = torch.zeros(4, device=rt.device)
        graph.replay()  # BREAKS
        return old

    return lambda: replay(True), lambda: replay(False)


@case("out-of-order", gs.LifetimeError)
def replay_inside_its_own_capture(rt):
    x = data(rt, 4)

    def replay(inside):
        with rt.capture() as graph:
            graph.outputs(x * 2)
            if inside:
                graph.replay()  # BREAKS
        graph.replay()

    return lambda: replay(True), lambda: replay(False)


# Tables.


@case("tensor-escapes", gs.LifetimeError)
def tables_cached_by_identity(rt):
    """The cache misses in the capture, as it does in eager, and then keeps what it made (fla 1274)."""
    cache = []

    def lengths(cu_seqlens, cached):
        if not cached:
            return cu_seqlens.diff()
        known = [made for tensor, made in cache if tensor is cu_seqlens]
        if not known:
            known = [cu_seqlens.diff()]  # BREAKS
            cache.append((cu_seqlens, known[0]))
        return known[0]

    def calls(cached):
        def body(x, cu_seqlens):
            return x * lengths(cu_seqlens, cached).sum()

        gs.graphed(body, runtime=rt, buckets=[BUCKET])(*packed(rt, 9, 3))
        cache.clear()

    return lambda: calls(True), lambda: calls(False)


@case("tables", gs.MetadataError)
def tables_of_another_bucket(rt):
    q = torch.nn.functional.normalize(data(rt, 1, 64, 1, 64), dim=-1)
    gate = torch.zeros(1, 64, 1, device=rt.device)
    cu = boundaries([20, 30], device=rt.device, sequences=4)

    def run(bucket):
        tables = rt.tables(bucket).build(cu)
        options = {"chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets, "use_graph": True}
        return chunk_gated_delta_rule(q, q, q, gate, gate, cu_seqlens=cu, **options)[0]  # BREAKS

    return lambda: run(gs.Bucket(128, 4)), lambda: capture(rt, lambda: run(gs.Bucket(64, 4)))


@case("metadata-changed", gs.MetadataError)
def boundaries_written_before_the_backward(rt):
    q = torch.nn.functional.normalize(data(rt, 1, 64, 1, 64), dim=-1).requires_grad_()
    gate = torch.zeros(1, 64, 1, device=rt.device)

    def trains(change):
        cu = boundaries([20, 30], device=rt.device, sequences=4)
        o, _ = chunk_gated_delta_rule(q, q, q, gate, gate, cu_seqlens=cu, use_graph=True)
        if change:
            cu.copy_(boundaries([50], device=rt.device, sequences=4))
        torch.autograd.grad(o.sum(), q)  # BREAKS

    return lambda: trains(True), lambda: trains(False)


# Padding, results, random numbers.


@case("padding-nonzero", gs.PaddingError)
def padding_that_is_not_cleared(rt):
    x = data(rt, 1, 8, 2)
    live = torch.arange(8, device=rt.device).view(1, 8, 1) < 5

    def replay(clear):
        with rt.capture() as graph:
            y = graph.outputs(torch.where(live, x, 0.0) if clear else x * 2)
        graph.replay()
        rt.synchronize()
        check_padding("y", y, 5)  # BREAKS

    return lambda: replay(False), lambda: replay(True)


@case("padding-read", gs.PaddingError)
def padding_that_is_read(rt):
    def calls(masked):
        def body(x, cu_seqlens, tables):
            live = tables.live(x.shape[1]).view(1, -1, 1)
            return x / (torch.where(live, x, 0.0) if masked else x).sum()

        call = gs.graphed(body, runtime=rt, buckets=[BUCKET], guard="strict")
        call(*packed(rt, 9, 3))  # BREAKS

    return lambda: calls(False), lambda: calls(True)


@case("padding-read", gs.PaddingError)
def padding_that_reaches_a_gradient(rt):
    """Garbage at padded rows reached weight gradients (TransformerEngine 2898)."""

    def steps(masked):
        model = torch.nn.Linear(2, 2, bias=False).to(rt.device)

        def loss_of(model, batch, tables):
            x = batch["x"]
            return model(torch.where(tables.live(x.shape[1]).view(1, -1, 1), x, 0.0) if masked else x).square().sum()

        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        step = gs.TrainStep(model, loss_of, sgd, runtime=rt, bucket=BUCKET, guard="strict")
        x, cu = packed(rt, 9, 3)
        step({"x": x, "cu_seqlens": cu})  # BREAKS

    return lambda: steps(False), lambda: steps(True)


@case("canary", gs.PaddingError)
def write_past_an_input(rt):
    def calls(elements):
        def body(x, cu_seqlens):
            return x + x.new_zeros(elements).sum()

        call = gs.graphed(body, runtime=rt, buckets=[BUCKET], guard="strict")
        x, cu = packed(rt, 9, 3)
        call(x, cu)
        (entry,) = call._entries.values()
        entry.arena["x"].as_strided((elements,), (1,)).fill_(1.0)  # as a kernel with a wrong offset would
        call(x, cu)  # BREAKS

    return lambda: calls(129), lambda: calls(128)


@case("replay-differs", gs.PaddingError)
def output_that_is_not_written(rt):
    x = data(rt, 4)

    def verify(whole):
        def body(x):
            y = torch.empty_like(x)
            y[: 4 if whole else 2] = x[: 4 if whole else 2]
            return y

        call = gs.graphed(body, runtime=rt)
        call(x)
        call.verify(x)  # BREAKS

    return lambda: verify(False), lambda: verify(True)


@case("replay-differs", gs.PaddingError)
def host_schedule_that_is_frozen(rt):
    """Metadata that the caller computes on the host before each call, and the graph keeps as it was."""
    schedule = {"rows": 2}

    def calls(change):
        call = gs.graphed(lambda x: x[: schedule["rows"]].sum(), runtime=rt, guard="strict")
        call(data(rt, 4))
        schedule["rows"] += change
        call(data(rt, 4))  # BREAKS

    return lambda: calls(1), lambda: calls(0)


@case("replay-differs", gs.PaddingError)
def generator_that_does_not_advance(rt):
    def verify(put_back):
        call = gs.graphed(lambda: torch.rand(4, device=rt.device), runtime=rt)
        call()
        (entry,) = call._entries.values()
        if put_back:
            entry.graph = _PutsBack(rt, entry.graph)
        call.verify()  # BREAKS

    return lambda: verify(True), lambda: verify(False)


class _PutsBack:
    """A replay that draws the right numbers and leaves the generators where they were."""

    def __init__(self, rt, graph):
        self.rt, self.graph = rt, graph

    def poison(self):
        self.graph.poison()

    def replay(self):
        states = [g.get_state() for g in self.rt.generators]
        self.graph.replay()
        self.rt.synchronize()
        for generator, state in zip(self.rt.generators, states, strict=True):
            generator.set_state(state)
