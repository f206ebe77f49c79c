"""Probes of capture and replay themselves: addresses, updates, pools, streams, random numbers, failure, dtypes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from graphsafe.capabilities.probe import Missing, check, data, probe, replays
from graphsafe.compare import differences
from graphsafe.errors import GraphSafeError


@probe("capture.replay", "a body is captured once and replayed")
def _replay(rt: Any) -> str:
    x, w = data(rt, 8, 4), data(rt, 4, 4, seed=1)
    graph, _ = replays(rt, lambda: torch.softmax(x @ w, -1))
    return f"{graph.launches} launches a replay"


@probe("capture.copy-updates", "inputs written with copy_() are what the next replay reads")
def _copy_updates(rt: Any) -> None:
    x = data(rt, 64)
    replays(rt, lambda: x * 2 + 1, [functools.partial(_renew, rt, x, seed) for seed in (1, 2, 3)])


def _renew(rt: Any, x: torch.Tensor, seed: int) -> None:
    x.copy_(data(rt, *x.shape, seed=seed, dtype=x.dtype))


@probe("capture.addresses", "results stay at their address over replays, allocations and collections")
def _addresses(rt: Any) -> None:
    x = data(rt, 1024)
    graph, y = replays(rt, lambda: x.sin())
    address = y.data_ptr()
    for seed in range(5):
        others = [torch.full((1024,), float(seed), device=rt.device) for _ in range(8)]
        x.copy_(data(rt, 1024, seed=seed))
        graph.replay()
        rt.synchronize()
        check(y.data_ptr() == address, "a result moved")
        check(not differences(y, x.sin()), "a result was overwritten by memory made outside the graph")
        del others
        gc.collect()


@probe("capture.dead-input", "an input that died, its memory given to another tensor, is refused before the replay")
def _dead_input(rt: Any) -> None:
    held = [data(rt, 1024)]
    rt.warm_up(lambda: held[0] * 2)
    with rt.capture() as graph:
        graph.outputs(held[0] * 2)
    held.clear()
    gc.collect()
    reborn = [torch.zeros(1024, device=rt.device) for _ in range(4)]
    check(_refused("input-died", graph.replay), "a replay on memory of another tensor was not refused")
    del reborn


@probe("capture.shared-pool", "two graphs share a pool and replay by turns")
def _shared_pool(rt: Any) -> None:
    x = data(rt, 64)
    rt.warm_up(lambda: (x * 2, x.cos()))
    with rt.capture() as first:
        y = first.outputs(x * 2)
    with rt.capture(pool=first) as second:
        z = second.outputs(x.cos())
    for seed in range(3):
        x.copy_(data(rt, 64, seed=seed))
        for graph, got, want in ((first, y, x * 2), (second, z, x.cos())):
            graph.replay()
            rt.synchronize()
            check(not differences(got, want), "graphs of one pool disturb each other")


@probe("capture.side-stream", "the body runs on a side stream, and the caller's stream comes back")
def _side_stream(rt: Any) -> None:
    module = _streams(rt)
    before = module.current_stream()
    with rt.capture():
        inside = module.current_stream()
    check(inside != before, "the capture ran on the caller's stream")
    check(module.current_stream() == before, "another stream is current after the capture")


@probe("capture.forked-streams", "a stream forked and joined inside the body is recorded")
def _forked_streams(rt: Any) -> None:
    module = _streams(rt)
    x, side = data(rt, 4096), module.Stream()

    def body() -> torch.Tensor:
        here = module.current_stream()
        side.wait_stream(here)
        with module.stream(side):
            y = x * 2
        z = x + 1
        here.wait_stream(side)
        return y + z

    replays(rt, body, [functools.partial(_renew, rt, x, 1)])


@probe("capture.unjoined-stream", "a stream that is not joined back is refused by name, and the next capture works")
def _unjoined_stream(rt: Any) -> str:
    module = _streams(rt)
    x, side, y = data(rt, 64), module.Stream(), torch.empty(64, device=rt.device)
    try:
        with rt.capture():
            side.wait_stream(module.current_stream())
            with module.stream(side):
                torch.mul(x, 2, out=y)
    except GraphSafeError as problem:
        replays(rt, lambda: x + 1)
        return f"{problem.rule}"
    check(False, "the capture took a stream that nobody waits for")
    return ""


@probe("capture.events", "a replay is timed by events of the device")
def _events(rt: Any) -> None:
    x = data(rt, 64)
    graph, _ = replays(rt, lambda: x + 1)
    begin, end = rt.event(), rt.event()
    begin.record()
    graph.replay()
    end.record()
    rt.synchronize()
    check(begin.elapsed_time(end) > 0, "the time between two events is not positive")


@probe("capture.random-numbers", "replays draw what eager would have drawn next; a registered generator too")
def _random_numbers(rt: Any) -> None:
    own = torch.Generator(rt.device)
    rt.register_generator(own)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(8, device=rt.device), torch.rand(8, device=rt.device, generator=own)

    def seed() -> None:
        for generator in rt.generators:
            generator.manual_seed(7)

    seed()
    eager = [[t.clone() for t in body()] for _ in range(3)]
    graph, result = replays(rt, body)
    seed()
    for want in eager:
        graph.replay()
        rt.synchronize()
        check(not differences(list(result), want), "a replay drew other numbers than eager")


@probe("capture.state-put-back", "warm-up and capture leave tensors, gradients and generators as they were")
def _state_put_back(rt: Any) -> None:
    total, w = data(rt, 16), torch.nn.Parameter(data(rt, 16, seed=1))
    w.grad = torch.zeros_like(w)

    def body() -> None:
        total.add_(torch.rand(16, device=rt.device))
        (w * total).sum().backward()

    before = [total.clone(), w.grad.clone(), *(g.get_state() for g in rt.generators)]
    rt.warm_up(body)
    with rt.capture():
        body()
    after = [total, w.grad, *(g.get_state() for g in rt.generators)]
    check(not differences(after, before), "a tensor, a gradient or a generator was changed")


@probe("capture.recovery", "after a failed capture streams, memory and generators are as before, and the next works")
def _recovery(rt: Any) -> None:
    x = data(rt, 64)
    replays(rt, lambda: x + 1)
    rt.synchronize()
    gc.collect()
    before = rt.memory().held
    for _ in range(3):
        check(_refused("host-read", lambda: _fail(rt, x)), "a host read was not refused")
    gc.collect()
    check(rt.memory().held <= before, f"{rt.memory().held - before} bytes are left of failed captures")
    replays(rt, lambda: torch.nn.functional.dropout(x, 0.5))


def _fail(rt: Any, x: torch.Tensor) -> None:
    with rt.capture():
        big = torch.ones(1 << 20, device=rt.device) + torch.rand(1, device=rt.device)
        (x.sum() + big.sum()).item()


@probe("capture.memory-returned", "the memory of a graph comes back when it is closed")
def _memory_returned(rt: Any) -> None:
    x = data(rt, 1 << 18)

    def use() -> None:
        rt.warm_up(lambda: x * 2)
        with rt.capture() as graph:
            y = graph.outputs(x * 2)
        graph.replay()
        check(graph.pool_bytes >= y.numel() * 4, "a graph does not count its own results")
        del y
        graph.close()

    use()
    gc.collect()
    before = rt.memory().held
    for _ in range(3):
        use()
    gc.collect()
    check(rt.memory().held <= before, "closed graphs hold memory")


@probe("capture.canaries", "a write past an arena's tensor is found")
def _canaries(rt: Any) -> None:
    from graphsafe.bucket import Bucket

    with rt.arena(Bucket(8), canaries=True) as arena:
        x = arena.tensor("x", (4,), torch.float32)
        arena.check_canaries()
        x.as_strided((5,), (1,)).fill_(1.0)
        rt.synchronize()
        check(_refused("canary", arena.check_canaries), "the canary did not notice")


def _dtype(dtype: torch.dtype) -> Callable[[Any], str | None]:
    def run(rt: Any) -> None:
        if dtype.is_floating_point and dtype.itemsize > 1:
            x, w = data(rt, 8, 16, dtype=dtype), data(rt, 16, 16, seed=1, dtype=dtype)
            replays(rt, lambda: (x @ w).relu().sum(0), [functools.partial(_renew, rt, x, 2)])
            return
        x = (data(rt, 64) * 4).to(dtype)

        def body() -> torch.Tensor:
            if dtype is torch.bool:
                return x ^ x.flip(0)
            return x.to(torch.float32) * 2 if dtype.is_floating_point else (x * 2 + x.flip(0))

        replays(rt, body, [lambda: x.copy_((data(rt, 64, seed=2) * 4).to(dtype))])

    return run


for _one in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
):  # fmt: skip
    _name = str(_one).removeprefix("torch.")
    probe(f"dtypes.{_name}", f"operators of {_name} in a graph")(_dtype(_one))


def _streams(rt: Any) -> Any:
    if rt.device.type == "cpu":
        raise Missing("a CPU runs one thing after another and has no streams")
    return torch.get_device_module(rt.device)


def _refused(rule: str, action: Callable[[], Any]) -> bool:
    """Whether the action raises the error of this rule; any other error comes out."""
    try:
        action()
    except GraphSafeError as problem:
        if problem.rule.name != rule:
            raise
        return True
    return False
