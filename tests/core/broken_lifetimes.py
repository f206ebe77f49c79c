"""Programs whose tensors, arenas or graphs are not where or when they should be (rules GS2xx)."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from broken_programs import KEPT, bodies, capture, case, data, leaf

import graphsafe as gs


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
