"""graphed(): buckets, overflow, inputs of every shape, results cut to the batch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import CapacityError, GraphSafeError, UnsupportedError
from graphsafe.graphed import GraphedCallable, graphed
from graphsafe.inputs import Input
from graphsafe.testing.layouts import boundaries, layouts
from graphsafe.testing.suite.checks import ProcessState, Worker, clone, data, refused, same

__all__ = ["GraphedSuite"]

_BUCKET = Bucket(64, 4, 16)


def _batch(runtime: Any, lengths: list[int], seed: int = 0, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return data(runtime, 1, sum(lengths), width, seed=seed), boundaries(lengths, device=runtime.device)


def _sums(x: torch.Tensor, cu_seqlens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A varlen operator of plain torch: running sums within each sequence, started by its state; and their ends."""
    tokens, n = x.shape[1], cu_seqlens.shape[0] - 1
    place = torch.arange(tokens, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), place.to(cu_seqlens.dtype), right=True)
    live = (place < cu_seqlens[-1]).view(1, -1, 1)
    clean = torch.where(live, x, torch.zeros_like(x))
    total = torch.cat([torch.zeros_like(clean[:, :1]), clean.cumsum(1)], 1)
    start = total[0, cu_seqlens[:-1].long()]
    held = sequence.clamp(max=n - 1)
    sums = total[:, 1:] - start[held] + state[held]
    ends = total[0, cu_seqlens[1:].long()] - start + state
    return torch.where(live, sums, torch.zeros_like(sums)), ends


def _sums_in_order(x: torch.Tensor, lengths: list[int], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on the host, sequence by sequence, in float64."""
    rows, ends, at = [], [], 0
    for i, length in enumerate(lengths):
        part = x[0, at : at + length].double().cumsum(0) + state[i].double()
        rows.append(part)
        ends.append(part[-1] if length else state[i].double())
        at += length
    return torch.cat(rows)[None], torch.stack(ends)


@dataclass
class _Batch:
    ids: torch.Tensor
    scale: float
    extra: dict[str, Any]


class _Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class GraphedSuite:
    """One callable over one or several buckets."""

    def test_one_capture_serves_every_layout(self, runtime: Any) -> None:
        call = graphed(_sums, runtime=runtime, buckets=[_BUCKET], inputs={"x": Input("tokens", pad=float("nan"))})
        for seed, lengths in enumerate(layouts(24, 64, 4)):
            x, cu = _batch(runtime, lengths, seed)
            state = data(runtime, len(lengths), 3, seed=seed + 100)
            got = clone(runtime, call(x, cu, state=state))
            same(runtime, got, call.eager(x, cu, state=state), f"{lengths} against eager-fixed")
            want = _sums_in_order(x, lengths, state)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape, f"{lengths}"
                torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        assert call.stats.captures == 1
        assert call.stats.replays == 24
        assert not call.stats.overflows
        assert call.stats.tokens_held == 24 * 64
        assert call.stats.tokens_used == sum(map(sum, layouts(24, 64, 4)))

    def test_a_call_uses_the_smallest_bucket_that_fits(self, runtime: Any) -> None:
        buckets = [Bucket(64, 2, 16), Bucket(16, 2, 16), Bucket(16, 4, 16)]
        call = graphed(lambda x, cu_seqlens: x * 2, runtime=runtime, buckets=buckets, on_overflow="error")
        for lengths, used in (([10], 1), ([16], 1), ([3, 3, 3], 2), ([17], 3), ([60, 4], 3), ([1], 3)):
            x, cu = _batch(runtime, lengths)
            same(runtime, call(x, cu), x * 2)
            assert call.stats.captures == used, f"{lengths}"
        figures = call.capture(*_batch(runtime, [30, 1]))
        assert [f.bucket for f in figures] == ["16x2 (BT 16)", "16x4 (BT 16)", "64x2 (BT 16)"]
        assert all(f.arena_bytes == f.price_bytes > 0 for f in figures)
        assert call.stats.captures == 3

    @pytest.mark.parametrize(
        ("lengths", "reason"), [([65], "tokens"), ([1] * 5, "sequences"), ([20] * 5, "tokens")], ids=str
    )
    def test_an_overflow_is_eager_and_counted_or_an_error(self, runtime: Any, lengths: list[int], reason: str) -> None:
        state = data(runtime, len(lengths), 3)
        batch = (*_batch(runtime, lengths), state)
        for first in (True, False):
            eager = graphed(_sums, runtime=runtime, buckets=[_BUCKET], on_overflow="eager")
            strict = graphed(_sums, runtime=runtime, buckets=[_BUCKET], on_overflow="error")
            if not first:
                for call in (eager, strict):
                    call(*_batch(runtime, [5, 5]), state[:1].expand(2, 3).contiguous())
            same(runtime, eager(*batch), _sums(*batch))
            assert dict(eager.stats.overflows) == {reason: 1}
            problem = refused("capacity", strict, *batch)
            assert isinstance(problem, CapacityError)
            assert str(sum(lengths)) in problem.what
            assert str(_BUCKET) in problem.what

    def test_results_carry_no_autograd_graph(self, runtime: Any) -> None:
        linear = torch.nn.Linear(3, 3).to(runtime.device)
        call = graphed(lambda x, cu_seqlens: linear(x), runtime=runtime, buckets=[_BUCKET])
        for lengths in ([5], [65]):
            assert not call(*_batch(runtime, lengths)).requires_grad
            assert not call.eager(*_batch(runtime, lengths)).requires_grad

    def test_results_are_cut_where_they_follow_the_batch_and_nowhere_else(self, runtime: Any) -> None:
        fixed = data(runtime, 64, 4)  # sizes that merely equal the bucket's

        def body(x: torch.Tensor, cu_seqlens: torch.Tensor, tables: Any) -> dict[str, Any]:
            return {
                "tokens": x, "shifted": x[:, 1:], "transposed": x.transpose(1, 2), "sum": x.sum(1), "fixed": fixed,
                "boundaries": cu_seqlens, "lengths": cu_seqlens.diff(), "slots": tables.chunk_indices,
                "offsets": tables.chunk_offsets,
            }  # fmt: skip

        for chunk_size in (1, 2, 4, 16, 64):
            bucket = Bucket(64, 4, chunk_size)
            call = graphed(body, runtime=runtime, buckets=[bucket])
            for lengths in ([9, 0, 11], [64]):
                x, cu = _batch(runtime, lengths)
                t, n = sum(lengths), len(lengths)
                shapes = {name: list(v.shape) for name, v in call(x, cu).items()}
                assert shapes == {
                    "tokens": [1, t, 3], "shifted": [1, t - 1, 3], "transposed": [1, 3, t], "sum": [1, 3],
                    "fixed": [64, 4], "boundaries": [n + 1], "lengths": [n], "slots": [bucket.slots, 2],
                    "offsets": [n + 1],
                }, f"chunk size {chunk_size}, {lengths}"  # fmt: skip
                same(runtime, call(x, cu)["tokens"], x)

    def test_a_bound_state_of_the_buckets_size_stays_in_place(self, runtime: Any) -> None:
        """A recurrent state that the graph updates in place: its size is the capacity's, and so is what follows it."""
        for chunk_size in (1, 16):
            state = torch.zeros(4, 3, device=runtime.device)

            def body(x: torch.Tensor, state: torch.Tensor, cu_seqlens: torch.Tensor, tables: Any) -> Any:
                sums, ends = _sums(x, cu_seqlens, state)
                state.copy_(ends)
                return sums, ends, tables.chunk_indices

            bucket = Bucket(64, 4, chunk_size)
            call = graphed(body, runtime=runtime, buckets=[bucket], inputs={"state": "bound"})
            want = torch.zeros(4, 3, device=runtime.device)
            for seed, lengths in enumerate(([5, 0, 7], [64], [1, 2, 3, 4])):
                x, cu = _batch(runtime, lengths, seed)
                sums, ends, slots = call(x, state, cu)
                full = boundaries(lengths, device=runtime.device, sequences=4)
                want_sums, want = _sums(x, full, want)
                torch.testing.assert_close(sums[:, : sum(lengths)], want_sums)
                torch.testing.assert_close(state, want)
                assert (ends.shape, slots.shape) == ((4, 3), (bucket.slots, 2))
                assert sums.shape[1] == (64 if chunk_size == 1 else sum(lengths))
            assert call.stats.captures == 1

    def test_bound_tokens_of_the_buckets_size_stay_in_place(self, runtime: Any) -> None:
        x = data(runtime, 1, 64, 3)
        call = graphed(
            lambda x, cu_seqlens, tables: x.view(tables.slots - tables.max_num_seqs + 1, 16, 3).view_as(x) * 2,
            runtime=runtime,
            buckets=[_BUCKET],
            inputs={"x": "bound"},
        )
        for lengths in ([5, 6], [64]):
            x.mul_(0.5)
            same(runtime, call(x, boundaries(lengths, device=runtime.device)), x * 2)

    def test_a_body_may_own_a_buffer_that_ends_at_the_capacity(self, runtime: Any) -> None:
        positions = data(runtime, 1, 64, 3)
        call = graphed(lambda x, cu_seqlens: x + positions[:, : x.shape[1]], runtime=runtime, buckets=[_BUCKET])
        x, cu = _batch(runtime, [9, 11])
        same(runtime, call(x, cu), x + positions[:, :20])

    def test_nested_arguments_are_inputs(self, runtime: Any) -> None:
        def body(batch: _Batch, pair: _Pair, *rest: torch.Tensor, named: Any = None, **more: torch.Tensor) -> Any:
            total = batch.ids * batch.scale + batch.extra["deep"][0] + pair.a * pair.b + rest[0] + more["m"]
            return OrderedDict(total=total, named=named["n"] * 2)

        def arguments(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            t = [data(runtime, 4, seed=10 * seed + i) for i in range(7)]
            named: Any = defaultdict(list)
            named["n"] = t[6]
            batch = _Batch(t[0], 2.0, {"deep": [t[1], "text"]})
            return (batch, _Pair(t[2], t[3]), t[4]), {"named": named, "m": t[5]}

        call = graphed(body, runtime=runtime)
        for seed in range(3):
            args, kwargs = arguments(seed)
            got = call(*args, **kwargs)
            assert type(got) is OrderedDict
            same(runtime, got, body(*args, **kwargs))
        assert call.stats.captures == 1

    def test_several_packed_batches_in_one_call(self, runtime: Any) -> None:
        def body(batches: list[dict[str, torch.Tensor]], tables: Any) -> list[torch.Tensor]:
            assert len(tables) == 2
            return [b["x"] * 2 for b in batches]

        call = graphed(body, runtime=runtime, buckets=[_BUCKET])
        for lengths in (([5, 6], [1, 2, 3]), ([64], [7])):
            batches = []
            for i, one in enumerate(lengths):
                x, cu = _batch(runtime, one, seed=i)
                batches.append({"x": x, "cu_seqlens": cu})
            got = call(batches)
            for y, b in zip(got, batches, strict=True):
                same(runtime, y[:, : b["x"].shape[1]], b["x"] * 2)
        assert call.stats.captures == 1

    def test_strided_inputs_are_copied_by_value(self, runtime: Any) -> None:
        call = graphed(lambda x: x + 1, runtime=runtime)
        x = data(runtime, 6, 4)
        for view in (x[:4], x[:4].clone().t(), data(runtime, 1, 4).expand(4, 4), data(runtime, 8, 4)[::2]):
            same(runtime, call(view), view + 1)

    def test_a_decorated_function_keeps_its_name(self, runtime: Any) -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            """Twice."""
            return x * 2

        doubled = graphed(runtime=runtime)(double)  # as a decorator with options does
        assert isinstance(doubled, GraphedCallable)
        assert (doubled.__name__, doubled.__doc__) == ("double", "Twice.")  # type: ignore[attr-defined]
        same(runtime, doubled(data(runtime, 3)), data(runtime, 3) * 2)

    def test_a_module_and_two_callables_that_share_it(self, runtime: Any) -> None:
        linear = torch.nn.Linear(3, 3).to(runtime.device)
        plain, doubled = graphed(linear, runtime=runtime), graphed(lambda x: linear(x) * 2, runtime=runtime)
        x = data(runtime, 2, 3)
        for value in (0.5, 2.0):
            with torch.no_grad():
                linear.weight.fill_(value)
            same(runtime, plain(x), linear(x).detach())
            same(runtime, doubled(x), linear(x).detach() * 2)
            same(runtime, plain(x), linear(x).detach())

    def test_capture_changes_no_state(self, runtime: Any) -> None:
        norm = torch.nn.BatchNorm1d(3).to(runtime.device)
        watched = {name.replace(".", "_"): t for name, t in norm.state_dict().items()}
        state = ProcessState(runtime, **watched)
        call = graphed(lambda x: torch.nn.functional.dropout(norm(x), 0.5), runtime=runtime, warm_up=3)
        call.capture(data(runtime, 5, 3))
        call.close()
        state.check()

    def test_close_gives_all_memory_back(self, runtime: Any) -> None:
        x, cu = _batch(runtime, [30])
        state = ProcessState(runtime)
        call = graphed(lambda x, cu_seqlens: (x * 2).exp(), runtime=runtime, buckets=[_BUCKET, Bucket(128, 2, 16)])
        call.capture(x, cu)
        assert call.price().bytes == sum(f.arena_bytes for f in call.stats.graphs)
        call.close()
        state.check()
        same(runtime, call(x, cu), (x * 2).exp())

    @pytest.mark.parametrize(
        "options",
        [{"on_overflow": "maybe"}, {"warm_up": 0}, {"inputs": {"x": "sideways"}}, {"static_argnames": ("y",)}],
        ids=str,
    )
    def test_a_wrong_option_is_refused(self, runtime: Any, options: dict[str, Any]) -> None:
        refused("argument", graphed, lambda x: x, runtime=runtime, **options)

    def test_what_runs_nothing_or_hides_its_parameters_is_refused(self, runtime: Any) -> None:
        def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x * 2

        async def later(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        for function in (steps, later, torch.relu):
            refused("argument", graphed, function, runtime=runtime)

    def test_a_second_call_while_one_runs_is_refused(self, runtime: Any) -> None:
        x = data(runtime, 3)
        seen: list[BaseException | None] = []

        def body(x: torch.Tensor) -> torch.Tensor:
            if not seen:  # the first warm-up: another thread, then this one again
                seen.append(worker.result())
                refused("out-of-order", call, x)
            return x * 2

        call = graphed(body, runtime=runtime)
        worker = Worker(lambda: call(x))
        same(runtime, call(x), x * 2)
        assert isinstance(seen[0], GraphSafeError)
        assert seen[0].rule.name == "out-of-order"
        assert Worker(lambda: call(x)).result() is None

    def test_tokens_and_sequences_in_another_dimension(self, runtime: Any) -> None:
        inputs = {"x": Input("tokens", dim=0), "state": Input("sequences", dim=1)}
        call = graphed(
            lambda x, state, cu_seqlens: (x * 2, state + 1), runtime=runtime, buckets=[_BUCKET], inputs=inputs
        )
        for lengths in ([5], [20, 7], [64]):
            x, state = data(runtime, sum(lengths), 3), data(runtime, 2, len(lengths))
            same(runtime, call(x, state, boundaries(lengths, device=runtime.device)), (x * 2, state + 1))
        assert call.stats.captures == 1
        wrong = graphed(
            lambda x, cu_seqlens: x, runtime=runtime, buckets=[_BUCKET], inputs={"x": Input("tokens", dim=2)}
        )
        refused("argument", wrong, x, boundaries([64], device=runtime.device))

    def test_a_function_that_takes_tables_needs_boundaries_and_buckets(self, runtime: Any) -> None:
        x, cu = _batch(runtime, [5])
        refused("structure", graphed(lambda x, tables: x, runtime=runtime, buckets=[_BUCKET]), x)
        refused("capacity", graphed(lambda x, cu_seqlens: x, runtime=runtime), x, cu)

    def test_a_graph_inside_a_graph_is_refused(self, runtime: Any) -> None:
        inner = graphed(lambda x: x * 2, runtime=runtime)
        outer = graphed(lambda x: inner(x) + 1, runtime=runtime)
        refused("out-of-order", outer, data(runtime, 3))
        same(runtime, inner(data(runtime, 3)), data(runtime, 3) * 2)

    def test_inputs_of_another_device_are_refused(self, runtime: Any) -> None:
        call = graphed(lambda x: x * 2, runtime=runtime)
        problem = refused("other-device", call, torch.empty(3, device="meta"))
        assert isinstance(problem, UnsupportedError)
        assert "'x'" in problem.what
