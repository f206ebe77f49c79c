"""Probes of what tables are made of: each operator on boundaries that change between replays, and whole tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsafe.capabilities.probe import check, data, probe, replays
from graphsafe.compare import differences

_LAYOUTS = ([3, 4, 0, 9], [16, 0, 0, 0], [0, 1, 1, 1], [4, 4, 4, 4], [0, 0, 0, 0])
_Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

# (boundaries [5], positions [16], floats [16]) -> a result of fixed shape
_OPERATORS: dict[str, _Operator] = {
    "arange": lambda cu, at, x: torch.arange(16, device=cu.device) < cu[-1],
    "argsort": lambda cu, at, x: torch.argsort(x, stable=True),
    "bincount": lambda cu, at, x: torch.bincount(at, minlength=16),
    "bucketize": lambda cu, at, x: torch.bucketize(at, cu[1:], right=True),
    "cat": lambda cu, at, x: torch.cat([cu, at]),
    "clamp": lambda cu, at, x: cu.clamp(max=8),
    "cummax": lambda cu, at, x: torch.cummax(cu.diff(), 0).values,
    "cumsum": lambda cu, at, x: torch.cumsum(cu.diff(), 0, dtype=cu.dtype),
    "diff": lambda cu, at, x: cu.diff(),
    "div-floor": lambda cu, at, x: torch.div(cu + 63, 64, rounding_mode="floor"),
    "flip": lambda cu, at, x: cu.flip(0),
    "gather": lambda cu, at, x: x.gather(0, cu.clamp(max=15).long()),
    "index-copy": lambda cu, at, x: x.clone().index_copy_(0, at[:4].long(), x[:4] + cu[-1]),
    "index-put": lambda cu, at, x: x.clone().index_put_((at[:4].long(),), x[4:8] * cu[-1]),
    "index-select": lambda cu, at, x: x.index_select(0, cu.clamp(max=15)),
    "isin": lambda cu, at, x: torch.isin(at, cu),
    "masked-fill": lambda cu, at, x: x.masked_fill(at >= cu[-1], 0.0),
    "masked-select": lambda cu, at, x: x.masked_select(at < cu[-1]),
    "max": lambda cu, at, x: cu.diff().max(),
    "nonzero": lambda cu, at, x: (at < cu[-1]).nonzero(),
    "nonzero-static": lambda cu, at, x: torch.nonzero_static(at < cu[-1], size=16, fill_value=-1),
    "pad": lambda cu, at, x: torch.nn.functional.pad(cu, (0, 3), value=-1),
    "repeat-interleave": lambda cu, at, x: torch.arange(4, device=cu.device).repeat_interleave(cu.diff()),
    "repeat-interleave-sized": lambda cu, at, x: torch.arange(5, device=cu.device).repeat_interleave(
        torch.cat([cu.diff(), 16 - cu[-1:]]), output_size=16
    ),
    "roll": lambda cu, at, x: cu.roll(1),
    "scatter-add": lambda cu, at, x: torch.zeros(17, device=cu.device).scatter_add(0, cu.long(), x[:5].abs().ceil()),
    "searchsorted": lambda cu, at, x: torch.searchsorted(cu[1:].contiguous(), at, right=True),
    "sort": lambda cu, at, x: torch.sort(cu.diff()).values,
    "stack": lambda cu, at, x: torch.stack([cu[:-1], cu[1:]], 1),
    "topk": lambda cu, at, x: torch.topk(x, 3).values,
    "unique": lambda cu, at, x: torch.unique(cu),
    "where": lambda cu, at, x: torch.where(at < cu[-1], at, torch.full_like(at, -1)),
}


def _boundaries(rt: Any, lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(sums, dtype=dtype).to(rt.device)


def _operator(operator: _Operator) -> Callable[[Any], None]:
    def run(rt: Any) -> None:
        cu, at, x = _boundaries(rt, _LAYOUTS[0]), torch.arange(16).int().to(rt.device), data(rt, 16)
        updates = [lambda lengths=lengths: cu.copy_(_boundaries(rt, lengths)) for lengths in _LAYOUTS[1:]]
        replays(rt, lambda: operator(cu, at, x), updates)

    return run


for _name, _run in _OPERATORS.items():
    probe(f"metadata.{_name}", f"{_name} on boundaries that change between replays")(_operator(_run))


def _tables(dtype: torch.dtype) -> Callable[[Any], str | None]:
    def run(rt: Any) -> str:
        from graphsafe.bucket import Bucket
        from graphsafe.metadata import build_tables

        bucket = Bucket(200, 4, 16)
        cu = _boundaries(rt, [100, 3, 0, 17], dtype)
        tables = rt.tables(bucket)

        def body() -> tuple[torch.Tensor, torch.Tensor]:
            built = tables.build(cu)
            return built.chunk_indices, built.chunk_offsets

        graph, result = replays(rt, body)
        for lengths in ([200, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [50, 50, 50, 50], [0, 199, 0, 1]):
            cu.copy_(_boundaries(rt, lengths, dtype))
            graph.replay()
            rt.synchronize()
            want = build_tables(cu.cpu(), bucket.tokens, bucket.chunk_size)
            got = [t.cpu() for t in result]
            check(not differences(got, [want.chunk_indices, want.chunk_offsets]), f"wrong tables of {lengths}")
        return f"{graph.launches} launches a build"

    return run


for _dtype in (torch.int32, torch.int64):
    _name = str(_dtype).removeprefix("torch.")
    probe(f"tables.{_name}", f"chunk tables of {_name} boundaries, built in the graph, over six layouts")(
        _tables(_dtype)
    )


@probe("tables.lowest-level", "a graph of the caller's own: arena, tables, update, replay; padding stays zero")
def _lowest_level(rt: Any) -> None:
    from graphsafe.bucket import Bucket

    bucket = Bucket(64, 4, 16)
    with rt.arena(bucket) as arena:
        x, cu = arena.tokens("x", (2,), torch.float32), arena.cu_seqlens()

        def body() -> torch.Tensor:
            live = rt.tables(bucket).build(cu).live(bucket.tokens)
            return torch.where(live.view(1, -1, 1), x * 2, 0.0)

        graph, y = replays(rt, body)
        for tokens in (64, 10, 0):
            arena.update(x=data(rt, 1, tokens, 2), cu_seqlens=_boundaries(rt, [tokens]))
            graph.replay()
            rt.synchronize()
            check(not differences(y[:, :tokens], x[:, :tokens] * 2), "a live row is wrong")
            check(not bool(y[:, tokens:].any()), "a padding row is not zero")
