"""What a graphed callable refuses by name: frozen values, rebound tensors, another structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import LifetimeError, MetadataError
from graphsafe.graphed import graphed
from graphsafe.testing.layouts import boundaries
from graphsafe.testing.suite.checks import clone, data, refused, same

__all__ = ["InputSuite"]


@dataclass
class _Options:
    x: torch.Tensor
    scale: Any


def _places(runtime: Any, x: torch.Tensor, value: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The same value at different places of a call, by the path that an error must quote."""
    return {
        "'scale'": ((x, value), {}),
        "'keyword'": ((x,), {"keyword": value}),
        "options['scale']": ((x,), {"options": {"scale": value}}),
        "'more.scale'": ((x,), {"more": _Options(x, value)}),
        "'rest[0]'": ((x,), {"rest": [value]}),
    }


def _body(x: Any, scale: Any = 1, keyword: Any = 1, options: Any = None, more: Any = None, rest: Any = ()) -> Any:
    result = x * scale * keyword
    for value in ((options or {}).get("scale", 1), getattr(more, "scale", 1), *rest):
        result = result * value
    return result


_PATHS = ["'scale'", "'keyword'", "options['scale']", "'more.scale'", "'rest[0]'"]


class InputSuite:
    """Nothing the host passes is frozen, exchanged or dropped without a word."""

    @pytest.mark.parametrize("path", _PATHS)
    def test_a_host_value_that_changes_is_refused_by_name(self, runtime: Any, path: str) -> None:
        x = data(runtime, 4)
        call = graphed(_body, runtime=runtime)
        args, kwargs = _places(runtime, x, 2.0)[path]
        same(runtime, call(*args, **kwargs), x * 2)
        same(runtime, call(*args, **kwargs), x * 2)
        for other in (3.0, 2, -2.0):
            args, kwargs = _places(runtime, x, other)[path]
            problem = refused("frozen-scalar", call, *args, **kwargs)
            assert isinstance(problem, MetadataError)
            assert path.strip("'") in problem.what
            assert "2.0" in problem.what
            assert str(other) in problem.what
        args, kwargs = _places(runtime, x, 2.0)[path]
        same(runtime, call(*args, **kwargs), x * 2)

    @pytest.mark.parametrize("path", _PATHS)
    def test_a_bound_tensor_that_is_exchanged_is_refused_by_name(self, runtime: Any, path: str) -> None:
        x, w = data(runtime, 4), data(runtime, 4, seed=1)
        call = graphed(_body, runtime=runtime, inputs={path.strip("'"): "bound"})
        args, kwargs = _places(runtime, x, w)[path]
        same(runtime, call(*args, **kwargs), x * w)
        w.fill_(3.0)
        same(runtime, call(*args, **kwargs), x * 3)
        for other in (w.clone(), w.flip(0)[:4], w[:3]):
            args, kwargs = _places(runtime, x, other)[path]
            problem = refused("structure" if other.shape != w.shape else "input-rebound", call, *args, **kwargs)
            assert path.strip("'") in problem.what
        args, kwargs = _places(runtime, x, w)[path]
        same(runtime, call(*args, **kwargs), x * 3)

    def test_a_bound_input_is_written_in_place(self, runtime: Any) -> None:
        total = torch.zeros(4, device=runtime.device)
        call = graphed(lambda x, total: total.add_(x), runtime=runtime, inputs={"total": "bound"})
        x = torch.ones(4, device=runtime.device)
        for i in range(3):
            call(x, total)
            same(runtime, total, torch.full_like(total, i + 1.0))

    def test_a_copied_input_is_not_written_in_place(self, runtime: Any) -> None:
        x = data(runtime, 4)
        for body in (lambda x: x.mul_(2), lambda x: x[1:].add_(1), lambda x: torch.relu_(x.view(2, 2))):
            problem = refused("input-written", graphed(body, runtime=runtime), x)
            assert isinstance(problem, LifetimeError)
            assert "'x'" in problem.what
        same(runtime, x, data(runtime, 4))

    def test_an_input_that_requires_grad_is_refused_where_grad_is_enabled(self, runtime: Any) -> None:
        call = graphed(lambda x, w: x * w, runtime=runtime, inputs={"w": "bound"})
        x, w = data(runtime, 4), torch.nn.Parameter(data(runtime, 4, seed=1))
        same(runtime, call(x, w), x * w.detach())
        leaf = clone(runtime, x).requires_grad_()
        for argument in (leaf, leaf * 2):
            problem = refused("unsupported", call, argument, w)
            assert "'x' requires grad" in problem.what
        with torch.no_grad():
            same(runtime, call(leaf * 2, w), 2 * x * w)

    def test_static_values_select_a_graph(self, runtime: Any) -> None:
        call = graphed(
            lambda x, mode, scale: x * scale if mode == "times" else x + scale,
            runtime=runtime,
            static_argnames=("mode", "scale"),
        )
        x = torch.arange(4, device=runtime.device)
        for mode, scale in [("times", 2), ("plus", 2), ("times", 2.0), ("times", 2), ("times", True), ("times", -0.0)]:
            want = x * scale if mode == "times" else x + scale
            same(runtime, call(x, mode, scale), want, f"{mode} {scale!r}")
            same(runtime, call(x, mode, scale=scale), want, f"{mode} {scale!r} again")
        same(runtime, call(x, "times", 0.0), x * 0.0, "0.0 is not -0.0")
        assert call.stats.captures == 6
        refused("frozen-scalar", call, x, "times", scale={1, 2})
        refused("argument", call, x, "times", scale=x)

    def test_another_structure_is_refused(self, runtime: Any) -> None:
        def body(x: Any, y: Any = None, options: Any = None) -> torch.Tensor:
            total: torch.Tensor = x + 1 if y is None else x + y
            return total

        x = data(runtime, 4)
        call = graphed(body, runtime=runtime)
        call(x, options={"a": 1})
        wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((x, x), {"options": {"a": 1}}), ((x,), {}), ((x,), {"options": {"a": 1, "b": 2}}),
            ((x,), {"options": {"a": 1, "b": x}}), ((data(runtime, 5),), {"options": {"a": 1}}),
            ((x.double(),), {"options": {"a": 1}}), ((x.view(2, 2),), {"options": {"a": 1}}),
            (([x],), {"options": {"a": 1}}), ((), {"options": {"a": 1}}), ((x,), {"z": 1}),
        ]  # fmt: skip
        for args, kwargs in wrong:
            refused("structure", call, *args, **kwargs)
        same(runtime, call(x, options={"a": 1}), x + 1)
        assert call.stats.captures == 1

    def test_what_would_be_frozen_without_a_trace_is_refused(self, runtime: Any) -> None:
        call = graphed(lambda x, table: x * float(table[0]), runtime=runtime)
        problem = refused("host-data", call, data(runtime, 4), numpy.ones(3))
        assert "'table'" in problem.what
        loop: list[Any] = [data(runtime, 4)]
        loop.append(loop)
        refused("structure", graphed(lambda xs: xs[0], runtime=runtime), loop)

    def test_autocast_around_a_call_is_part_of_it(self, runtime: Any) -> None:
        linear = torch.nn.Linear(4, 4).to(runtime.device)
        x = data(runtime, 2, 4)
        call = graphed(lambda x: linear(x), runtime=runtime)
        for _ in range(2):
            with torch.autocast(runtime.device.type, torch.bfloat16):
                want = linear(x).detach()
                same(runtime, call(x), want)
            with torch.no_grad():
                linear.weight.mul_(2)
        problem = refused("frozen-scalar", call, x)
        assert "autocast" in problem.what

    def test_arguments_of_one_packed_batch_agree(self, runtime: Any) -> None:
        call = graphed(lambda x, y, state, cu_seqlens: x + y, runtime=runtime, buckets=[Bucket(64, 4, 16)])
        x, y, state = data(runtime, 1, 9, 2), data(runtime, 1, 9, 2), data(runtime, 2, 3)
        cu = boundaries([4, 5], device=runtime.device)
        want = clone(runtime, call(x, y, state, cu))
        problem = refused("structure", call, x, y[:, :8], state, cu)
        assert "x: 9, y: 8" in problem.what
        refused("structure", call, x, y, state[:1], cu)
        same(runtime, call(x, y, state, cu), want)

    def test_boundaries_of_the_wrong_kind_are_refused(self, runtime: Any) -> None:
        x = data(runtime, 1, 9, 2)
        for cu in (torch.zeros(1), torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32)):
            call = graphed(lambda x, cu_seqlens: x, runtime=runtime, buckets=[Bucket(64, 4, 16)])
            refused("structure", call, x, cu.to(runtime.device))
        bound = graphed(lambda x, cu_seqlens: x, runtime=runtime, buckets=[Bucket(64)], inputs={"cu_seqlens": "bound"})
        refused("argument", bound, x, boundaries([9], device=runtime.device))
        unknown = graphed(lambda x: x, runtime=runtime, inputs={"y": "bound"})
        refused("argument", unknown, x)

    def test_a_capture_follows_data_that_it_was_not_captured_with(self, runtime: Any) -> None:
        """The example's values do not matter: a batch of zeros captures what any other batch replays."""
        call = graphed(lambda x: torch.where(x > 0, x.sqrt(), -x), runtime=runtime)
        call.capture(torch.zeros(8, device=runtime.device))
        for seed in range(3):
            x = data(runtime, 8, seed=seed)
            same(runtime, call(x), torch.where(x > 0, x.sqrt(), -x))
