"""Small programs that each break one rule in one way, and next to each the twin that keeps it.

The program must be refused with the rule's class, category and id, at the file and line of the statement that breaks
it, which is marked ``# BREAKS``. The twin must run.
"""

from __future__ import annotations

import gc
import inspect
import random
import threading
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe.rules import RULES
from graphsafe.testing.layouts import boundaries

KEPT = []
CASES = []


def case(rule, cls):
    """Register a function of the runtime that returns (breaking program, twin)."""

    def register(make):
        CASES.append(pytest.param(rule, cls, make, id=make.__name__))
        return make

    return register


def line_of(make):
    """The line marked in the source of a case."""
    lines, first = inspect.getsourcelines(make)
    (found,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# BREAKS")]
    return found


def capture(rt, body):
    """Run the body in a capture and replay it."""
    rt.warm_up(body)
    with rt.capture() as graph:
        graph.outputs(body())
    graph.replay()
    rt.synchronize()


def bodies(rt, breaking, twin):
    return lambda: capture(rt, breaking), lambda: capture(rt, twin)


def data(rt, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(rt.device)


def leaf(rt, *shape):
    """A parameter whose gradient exists."""
    p = torch.nn.Parameter(data(rt, *shape))
    p.grad = torch.zeros_like(p)
    return p


# Host reads.


@case("host-read", gs.UnsupportedError)
def item(rt):
    x = data(rt, 4)

    def breaking():
        return x * x.sum().item()  # BREAKS

    return bodies(rt, breaking, lambda: x * x.sum())


@case("host-read", gs.UnsupportedError)
def tolist(rt):
    cu = boundaries([3, 4], device=rt.device)
    x = data(rt, 7)

    def breaking():
        lengths = cu.diff().tolist()  # BREAKS
        return [part.sum() for part in x.split(lengths)]

    def twin():
        sequence = torch.searchsorted(cu[1:].contiguous(), torch.arange(7, device=rt.device).int(), right=True)
        return torch.zeros(2, device=rt.device).scatter_add(0, sequence, x)

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def numpy_view(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(x.detach().numpy(force=True).max())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.max())


@case("host-read", gs.UnsupportedError)
def numpy_conversion(rt):
    x = data(rt, 4)

    def breaking():
        numpy.asarray(x)  # BREAKS
        return x * 2

    return bodies(rt, breaking, lambda: x * 2)


@case("host-read", gs.UnsupportedError)
def copy_to_the_host(rt):
    x = data(rt, 4)

    def breaking():
        return x.cpu() * 2  # BREAKS

    return bodies(rt, breaking, lambda: x.to(rt.device) * 2)


@case("host-read", gs.UnsupportedError)
def printing(rt):
    x = data(rt, 4)

    def breaking():
        print("x is", x)  # BREAKS
        return x * 2

    def twin():
        print("x has", x.shape, x.dtype, x.device)
        return x * 2

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def formatting(rt):
    x = data(rt, 4)

    def breaking():
        message = f"norm {x.norm():.3f}"  # BREAKS
        return x * len(message)

    return bodies(rt, breaking, lambda: x * len(f"shape {tuple(x.shape)}"))


@case("host-read", gs.UnsupportedError)
def truth_value(rt):
    x = data(rt, 4)

    def breaking():
        if (x > 0).all():  # BREAKS
            return x
        return -x

    return bodies(rt, breaking, lambda: torch.where((x > 0).all(), x, -x))


@case("host-read", gs.UnsupportedError)
def assertion(rt):
    x = data(rt, 4)

    def breaking():
        assert torch.isfinite(x).all(), "not finite"  # BREAKS
        return x * 2

    def twin():
        assert x.dim() == 1
        return x * 2

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def as_int(rt):
    x = data(rt, 4)

    def breaking():
        return x * int(x.abs().sum())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.abs().sum().floor())


@case("host-read", gs.UnsupportedError)
def as_float(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(x.max())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.max())


@case("host-read", gs.UnsupportedError)
def as_index_of_a_list(rt):
    x = data(rt, 3)

    def breaking():
        return x * [1.0, 2.0, 3.0][x.argmax()]  # BREAKS

    choices = torch.tensor([1.0, 2.0, 3.0]).to(rt.device)
    return bodies(rt, breaking, lambda: x * choices.index_select(0, x.argmax(0, keepdim=True)))


@case("host-read", gs.UnsupportedError)
def as_end_of_a_slice(rt):
    cu = boundaries([3, 4], device=rt.device, sequences=4)
    x = data(rt, 9)

    def breaking():
        return x[: cu[-1]] * 2  # BREAKS

    def twin():
        return torch.where(torch.arange(9, device=rt.device) < cu[-1], x * 2, 0 * x)

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def membership(rt):
    x = data(rt, 4)

    def breaking():
        return x * 2 if 1.0 in x else x  # BREAKS

    return bodies(rt, breaking, lambda: torch.where((x == 1.0).any(), x * 2, x))


@case("host-read", gs.UnsupportedError)
def equality(rt):
    x = data(rt, 4)

    def breaking():
        return x * 2 if torch.equal(x, x) else x  # BREAKS

    return bodies(rt, breaking, lambda: torch.where((x == x).all(), x * 2, x))


@case("host-read", gs.UnsupportedError)
def split_by_a_tensor(rt):
    x, cuts = data(rt, 6), torch.tensor([2, 4])

    def breaking():
        return torch.tensor_split(x, cuts)  # BREAKS

    return bodies(rt, breaking, lambda: torch.tensor_split(x, (2, 4)))


@case("host-read", gs.UnsupportedError)
def inside_a_backward(rt):
    w, x = leaf(rt, 4), data(rt, 4)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()  # BREAKS

    def trains(function):
        def body():
            w.grad.zero_()
            (function(w) * x).sum().backward()
            return w.grad

        return body

    return bodies(rt, trains(Reads.apply), trains(lambda w: w * 2))


@case("host-read", gs.UnsupportedError)
def inside_a_module_hook(rt):
    x = data(rt, 2, 3)
    watched, plain = (torch.nn.Linear(3, 3).to(rt.device).requires_grad_(False) for _ in range(2))

    def hook(module, inputs, output):
        return output / output.abs().max().item()  # BREAKS

    watched.register_forward_hook(hook)
    plain.register_forward_hook(lambda module, inputs, output: output / output.abs().max())
    return bodies(rt, lambda: watched(x), lambda: plain(x))


@case("host-read", gs.UnsupportedError)
def swallowed(rt):
    x = data(rt, 4)

    def breaking():
        try:
            scale = x.sum().item()  # BREAKS
        except Exception:
            scale = 1.0
        return x * scale

    return bodies(rt, breaking, lambda: x * 1.0)


@case("host-read", gs.UnsupportedError)
def inside_an_optimizer(rt):
    def step(**options):
        model = torch.nn.Linear(3, 2).to(rt.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if options:
            optimizer.register_step_pre_hook(lambda *_: print(model.weight.grad.norm()))
        return gs.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, runtime=rt)

    x = data(rt, 4, 3)
    breaking = step(reads=True)
    return lambda: breaking(x), lambda: step()(x)  # BREAKS


# Shapes.


@case("data-dependent-shape", gs.UnsupportedError)
def nonzero(rt):
    x = data(rt, 6)

    def breaking():
        return x[(x > 0).nonzero().squeeze(1)].sum()  # BREAKS

    return bodies(rt, breaking, lambda: torch.where(x > 0, x, 0 * x).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def masked_select(rt):
    x = data(rt, 6)

    def breaking():
        return x.masked_select(x > 0).sum()  # BREAKS

    return bodies(rt, breaking, lambda: x.masked_fill(x <= 0, 0.0).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def boolean_index(rt):
    x = data(rt, 6)

    def breaking():
        return x[x > 0].sum()  # BREAKS

    return bodies(rt, breaking, lambda: (x * (x > 0)).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def boolean_assignment(rt):
    x, new = data(rt, 6), data(rt, 6)

    def breaking():
        y = x.clone()
        y[x > 0] = new[:positive]  # BREAKS
        return y

    positive = int((x > 0).sum())
    return bodies(rt, breaking, lambda: torch.where(x > 0, new, x))


@case("data-dependent-shape", gs.UnsupportedError)
def unique(rt):
    x = data(rt, 6)

    def breaking():
        return x.unique().sum()  # BREAKS

    return bodies(rt, breaking, lambda: x.sort().values.sum())


@case("data-dependent-shape", gs.UnsupportedError)
def repeats_without_a_size(rt):
    x, repeats = data(rt, 3), torch.tensor([1, 0, 2]).to(rt.device)

    def breaking():
        return x.repeat_interleave(repeats)  # BREAKS

    return bodies(rt, breaking, lambda: x.repeat_interleave(repeats, output_size=3))


# Host data.


@case("host-data", gs.UnsupportedError)
def tensor_of_a_list(rt):
    x = data(rt, 2)

    def breaking():
        return x + torch.tensor([1.0, 2.0], device=rt.device)  # BREAKS

    made = torch.tensor([1.0, 2.0], device=rt.device)
    return bodies(rt, breaking, lambda: x + made)


@case("host-data", gs.UnsupportedError)
def as_tensor_of_a_list(rt):
    x = data(rt, 2)

    def breaking():
        return x + torch.as_tensor([1.0, 2.0])  # BREAKS

    return bodies(rt, breaking, lambda: x + torch.as_tensor(x))


@case("host-data", gs.UnsupportedError)
def tensor_of_an_array(rt):
    x, array = data(rt, 2), numpy.ones(2, dtype=numpy.float32)

    def breaking():
        return x + torch.from_numpy(array)  # BREAKS

    made = torch.from_numpy(array).to(rt.device)
    return bodies(rt, breaking, lambda: x + made)


@case("host-data", gs.UnsupportedError)
def array_as_an_argument(rt):
    x, array = data(rt, 2), numpy.ones(2)
    call = gs.graphed(lambda x, table: x * float(table[0]), runtime=rt)
    breaking = lambda: call(x, array)  # noqa: E731  # BREAKS
    return breaking, lambda: call(x, [1.0, 2.0])


# Random numbers.


@case("unregistered-generator", gs.UnsupportedError)
def generator_of_ones_own(rt):
    own, known = torch.Generator(rt.device), torch.Generator(rt.device)
    rt.register_generator(known)

    def breaking():
        return torch.rand(3, device=rt.device, generator=own)  # BREAKS

    return bodies(rt, breaking, lambda: torch.rand(3, device=rt.device, generator=known))


@case("rng-state", gs.UnsupportedError)
def seeding(rt):
    def breaking():
        torch.manual_seed(0)  # BREAKS
        return torch.rand(3, device=rt.device)

    def twin():
        torch.manual_seed(0)
        capture(rt, lambda: torch.rand(3, device=rt.device))

    return lambda: capture(rt, breaking), twin


@case("rng-state", gs.UnsupportedError)
def checkpoint_that_keeps_the_rng(rt):
    w, x = leaf(rt, 4), data(rt, 4)

    def trains(preserve):
        def body():
            w.grad.zero_()
            y = checkpoint(lambda v: (v * w).sin(), x, use_reentrant=False, preserve_rng_state=preserve)  # BREAKS
            y.sum().backward()
            return w.grad

        return body

    return bodies(rt, trains(True), trains(False))


@case("host-randomness", gs.MetadataError)
def python_random(rt):
    x = data(rt, 4)

    def breaking():
        return x * random.random()  # BREAKS

    return bodies(rt, breaking, lambda: x * torch.rand(1, device=rt.device))


@case("host-randomness", gs.MetadataError)
def numpy_random(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(numpy.random.uniform())  # BREAKS

    return bodies(rt, breaking, lambda: x * torch.rand(1, device=rt.device))


# Work that is not recorded.


@case("other-device", gs.UnsupportedError)
def copy_to_another_device(rt):
    x = data(rt, 4)

    def breaking():
        return x.to("meta")  # BREAKS

    return bodies(rt, breaking, lambda: x.to(rt.device))


@case("other-device", gs.UnsupportedError)
def copy_into_another_device(rt):
    x, other, own = data(rt, 4), torch.empty(4, device="meta"), torch.empty(4, device=rt.device)

    def breaking():
        other.copy_(x)  # BREAKS

    return bodies(rt, breaking, lambda: own.copy_(x))


@case("not-capturable", gs.UnsupportedError)
def work_in_a_thread(rt):
    x = data(rt, 4)

    def breaking():
        thread = threading.Thread(target=lambda: x.mul_(2))
        thread.start()  # BREAKS
        thread.join()
        return x + 1

    return bodies(rt, breaking, lambda: x.mul_(2) + 1)


@case("not-capturable", gs.UnsupportedError)
def sparse(rt):
    x = data(rt, 4)

    def breaking():
        return x.relu().to_sparse()  # BREAKS

    return bodies(rt, breaking, lambda: x.relu())


# Addresses and lifetimes.


@case("tensor-escapes", gs.LifetimeError)
def escape_to_a_list(rt):
    x = data(rt, 4)

    def breaking():
        KEPT.append(x * 2)  # BREAKS
        return x + 1

    return bodies(rt, breaking, lambda: (x * 2, x + 1))


@case("tensor-escapes", gs.LifetimeError)
def escape_to_an_attribute(rt):
    x = data(rt, 4)
    module = torch.nn.Module()
    own = torch.empty_like(x)

    def breaking():
        module.last = x * 2  # BREAKS
        return x + 1

    def twin():
        module.last = own.copy_(x * 2)
        return x + 1

    return bodies(rt, breaking, twin)


@case("tensor-escapes", gs.LifetimeError)
def escape_to_a_closure(rt):
    x = data(rt, 4)

    def counter(keep):
        last = None

        def body():
            nonlocal last
            y = x * 2  # BREAKS
            last = y if keep else y.shape
            return x + 1

        return body

    return bodies(rt, counter(True), counter(False))


@case("tensor-escapes", gs.LifetimeError)
def escape_as_a_gradient(rt):
    x = data(rt, 4)
    fresh, owned = torch.nn.Parameter(data(rt, 4)), leaf(rt, 4)

    def breaking():
        fresh.grad = None
        (fresh * x).sum().backward()  # BREAKS

    def twin():
        owned.grad.zero_()
        (owned * x).sum().backward()

    return bodies(rt, breaking, twin)


@case("tensor-escapes", gs.LifetimeError)
def buffer_made_lazily(rt):
    """A workspace that is first made inside the capture (aiter 5393)."""
    x = data(rt, 4)

    class Lazy(torch.nn.Module):
        def __init__(self, workspace):
            super().__init__()
            self.workspace = workspace

        def forward(self, x):
            if self.workspace is None:
                self.workspace = torch.zeros(4, device=x.device)  # BREAKS
            self.workspace.copy_(x)
            return self.workspace * 2

    lazy, eager = Lazy(None), Lazy(torch.zeros(4, device=rt.device))

    def breaking():
        with rt.capture() as graph:
            graph.outputs(lazy(x))

    return breaking, lambda: capture(rt, lambda: eager(x))


@case("arena-sealed", gs.LifetimeError)
def growth_of_a_sealed_arena(rt):
    def grow(seal):
        with rt.arena(gs.Bucket(8)) as arena:
            arena.tokens("x", (2,), torch.float32)
            if seal:
                arena.seal()
            return arena.tokens("y", (2,), torch.float32)  # BREAKS

    return lambda: grow(True), lambda: grow(False)


@case("arena-sealed", gs.LifetimeError)
def growth_of_an_arena_inside_a_capture(rt):
    arena, made = rt.arena(gs.Bucket(8)), rt.arena(gs.Bucket(8))
    made.tokens("y", (2,), torch.float32)

    def breaking():
        with rt.capture():
            arena.tokens("y", (2,), torch.float32).fill_(1.0)  # BREAKS

    return breaking, lambda: capture(rt, lambda: made["y"].fill_(1.0))


@case("arena-closed", gs.LifetimeError)
def use_of_a_closed_arena(rt):
    arena = rt.arena(gs.Bucket(8))
    arena.tokens("x", (2,), torch.float32)

    def breaking():
        arena.close()
        arena.update(x=data(rt, 1, 8, 2))  # BREAKS

    return breaking, lambda: rt.arena(gs.Bucket(8)).close()


@dataclass
class Batch:
    x: torch.Tensor


def rebound(rt, place):
    """A bound argument exchanged (vllm 53915), at one place of a call."""
    w, other = data(rt, 4), data(rt, 4)
    path = {"positional": "w", "keyword": "w", "dict": "w['x']", "dataclass": "w.x"}[place]
    call = gs.graphed(
        lambda w: (w["x"] if isinstance(w, dict) else getattr(w, "x", w)) * 2, runtime=rt, inputs={path: "bound"}
    )
    wrap = {"dict": lambda t: {"x": t}, "dataclass": Batch}.get(place, lambda t: t)
    use = (lambda t: call(w=wrap(t))) if place == "keyword" else (lambda t: call(wrap(t)))
    use(w)
    return call, wrap, w, other


@case("input-rebound", gs.LifetimeError)
def rebound_positional(rt):
    call, _, w, other = rebound(rt, "positional")
    breaking = lambda: call(other)  # noqa: E731  # BREAKS
    return breaking, lambda: call(w.copy_(other))


@case("input-rebound", gs.LifetimeError)
def rebound_keyword(rt):
    call, _, w, other = rebound(rt, "keyword")
    breaking = lambda: call(w=other)  # noqa: E731  # BREAKS
    return breaking, lambda: call(w=w.copy_(other))


@case("input-rebound", gs.LifetimeError)
def rebound_in_a_dict(rt):
    call, _, w, other = rebound(rt, "dict")
    breaking = lambda: call({"x": other})  # noqa: E731  # BREAKS
    return breaking, lambda: call({"x": w.copy_(other)})


@case("input-rebound", gs.LifetimeError)
def rebound_in_a_dataclass(rt):
    call, _, w, other = rebound(rt, "dataclass")
    breaking = lambda: call(Batch(other))  # noqa: E731  # BREAKS
    return breaking, lambda: call(Batch(w.copy_(other)))


@case("input-died", gs.LifetimeError)
def input_died(rt):
    """An input deleted before the replay (pytorch 174649)."""

    def replay(delete):
        held = [data(rt, 100)]
        rt.warm_up(lambda: held[0] * 2)
        with rt.capture() as graph:
            graph.outputs(held[0] * 2)
        if delete:
            held.clear()
            gc.collect()
        graph.replay()  # BREAKS

    return lambda: replay(True), lambda: replay(False)


@case("input-written", gs.LifetimeError)
def copied_input_written_in_place(rt):
    x = data(rt, 4)

    def breaking(x):
        x.mul_(2)  # BREAKS
        return x + 1

    return lambda: gs.graphed(breaking, runtime=rt)(x), lambda: gs.graphed(lambda x: x * 2 + 1, runtime=rt)(x)


@case("storage-replaced", gs.LifetimeError)
def storage_replaced_inside(rt):
    x, new = data(rt, 4), data(rt, 4)

    def breaking():
        with rt.capture():
            x.data = new  # BREAKS

    return breaking, lambda: capture(rt, lambda: x.copy_(new))


@case("storage-replaced", gs.LifetimeError)
def storage_replaced_between_replays(rt):
    def replay(replace):
        x = data(rt, 100)
        with rt.capture() as graph:
            graph.outputs(x * 2)
        old = x.view(10, 10)
        if replace:
            x.data = torch.zeros_like(x)
        else:
            x.copy_(torch.zeros_like(x))
        graph.replay()  # BREAKS
        return old

    return lambda: replay(True), lambda: replay(False)


@case("concurrent-capture", gs.LifetimeError)
def capture_inside_a_capture(rt):
    x = data(rt, 4)

    def breaking():
        with rt.capture():
            with rt.capture():  # BREAKS
                x.mul_(2)

    return breaking, lambda: capture(rt, lambda: x.mul_(2))


@case("out-of-order", gs.LifetimeError)
def replay_of_a_closed_graph(rt):
    def replay(close):
        x = data(rt, 4)
        with rt.capture() as graph:
            graph.outputs(x * 2)
        if close:
            graph.close()
        graph.replay()  # BREAKS

    return lambda: replay(True), lambda: replay(False)


# Values, metadata, capacity.


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
    assert (problem.where.file, problem.where.line) == (__file__, line_of(make)), problem
    assert problem.remedy


@pytest.mark.parametrize(("rule", "cls", "make"), CASES)
def test_the_twin_runs(runtime, rule, cls, make):
    _, twin = make(runtime)
    twin()


def test_there_are_enough_and_they_cover_the_categories():
    assert len(CASES) >= 50
    assert {RULES[c.values[0]].id[2] for c in CASES} >= {"1", "2", "3", "4", "5"}
