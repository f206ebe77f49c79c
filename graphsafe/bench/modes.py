"""The arms of a case: the four modes, and the controls beside them.

=====================  =====================================================================================
eager-live             the batch's own size, nothing said about graphs: what a caller has without this project
eager-fixed            the bucket's size, ``use_graph=True``, tables built inside, run eagerly
graph-replay           replay alone, of the graph captured from the eager-fixed body
graph-update-replay    new operands and boundaries copied into static memory, then replay
graph-live             control: the eager-live body captured at the batch's own size; serves this one layout alone
update                 control: the copies alone
eager-off              control: eager-live with ``use_graph=False`` said; its difference from eager-live is noise
eager-on               control: eager-live with ``use_graph=True``: what the graph path costs outside a graph
=====================  =====================================================================================

Requirements
------------
1. All arms of a case run the same body on the same batch; what they return is compared before any is timed.
2. An arm that a provider refuses, or that cannot be captured, is absent and its reason is kept. A provider that refuses
   ``use_graph=True`` has no such switch: it is never handed ``use_graph``. A library's function of ``torch.compile``,
   which the guard refuses because it cannot know it to be warm, is warm here: its graph-live is captured without guard.
3. Everything goes through the runtime's protocol: the same code measures every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from graphsafe.bench.timing import timed_once
from graphsafe.bench.workloads import Tensors, Workload
from graphsafe.errors import GraphSafeError
from graphsafe.verify import verify_replay

__all__ = ["CONTROLS", "MODES", "GraphFacts", "Prepared", "prepare", "reason_of"]

MODES = ("eager-live", "eager-fixed", "graph-replay", "graph-update-replay")
CONTROLS = ("graph-live", "update", "eager-off", "eager-on")
_GRAPH_MODES = ("eager-fixed", "graph-replay", "graph-update-replay", "update")


@dataclass(frozen=True)
class GraphFacts:
    """What one capture took. ``launches``: device operations of a replay. ``arena_bytes`` static operands, priced
    ``price_bytes`` before their allocation; ``pool_bytes`` memory born inside."""

    warm_up_s: float
    capture_s: float
    launches: int
    arena_bytes: int
    price_bytes: int
    pool_bytes: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass
class Prepared:
    """The arms of one provider, ready to run.

    ``results``: what each mode's arm returned for batch 0, by mode; replay's are its static tensors. ``verify``: proves
    a replay against eager, bit for bit, on another layout and then on batch 0.
    """

    arms: dict[str, Callable[[], Any]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    results: dict[str, Tensors] = field(default_factory=dict)
    facts: GraphFacts | None = None
    first_call_s: float = 0.0
    live_bytes: int = 0
    verify: Callable[[], Any] | None = None
    closers: list[Callable[[], Any]] = field(default_factory=list)

    def close(self) -> None:
        """Give graphs and arenas back."""
        self.arms.clear()
        self.results.clear()
        self.verify = None
        while self.closers:
            self.closers.pop()()


def reason_of(problem: BaseException) -> str:
    """The first line of an error, with its rule where it has one."""
    rule = getattr(problem, "rule", None)
    text = str(problem).strip().split("\n")[0] or type(problem).__name__
    return f"{rule}: {text}" if rule is not None else f"{type(problem).__name__}: {text}"


def prepare(workload: Workload, provider: str, runtime: Any) -> Prepared:
    """Build every arm of ``provider`` for a workload. A refused arm is absent, its reason in ``refusals``."""
    made = Prepared()
    batch = workload.batch(0)
    made.live_bytes = sum(t.numel() * t.element_size() for t in batch.values())
    reason = workload.refusal(provider, batch, {})
    if reason is not None:
        made.refusals = dict.fromkeys((*MODES, *CONTROLS), reason)
        return made
    function = workload.function(provider)

    def live() -> Tensors:
        return workload.run(function, batch, {})

    made.first_call_s = timed_once(runtime, live)
    made.arms["eager-live"] = live
    made.results["eager-live"] = live()
    try:
        _add_fixed(made, workload, provider, function, batch, runtime)
        _add_live_capture(made, live, runtime)
        _add_switches(made, workload, provider, function, batch)
    except BaseException:
        made.close()
        raise
    return made


def _add_fixed(
    made: Prepared,
    workload: Workload,
    provider: str,
    function: Callable[..., Any],
    batch: Tensors,
    runtime: Any,
) -> None:
    bucket = workload.case.bucket
    bound = runtime.tables(bucket)
    arena = runtime.arena(bucket)
    kinds = {name: operand.kind for name, operand in workload.operands.items()} | {"cu_seqlens": "boundaries"}
    for name, t in batch.items():
        if kinds[name] != "fixed":  # a parameter is used where it is, as a layer's is
            arena.like(name, tuple(t.shape), t.dtype, kinds[name], 1 if kinds[name] == "tokens" else 0, 0)
    arena.seal()
    changing = {name: t for name, t in batch.items() if name in arena}
    other = {name: t for name, t in workload.batch(1).items() if name in arena}
    arena.update(changing)
    static = {**batch, **{name: arena[name] for name in arena}}
    refused = workload.refusal(provider, static, workload.graph_arguments(bound.build(static["cu_seqlens"])))
    if refused is not None:
        arena.close()
        made.refusals |= dict.fromkeys(_GRAPH_MODES, refused)
        return

    def fixed() -> Tensors:
        tables = bound.build(static["cu_seqlens"])
        return workload.run(function, static, workload.graph_arguments(tables))

    warm_up_s = timed_once(runtime, lambda: runtime.warm_up(fixed))
    graph, result, capture_s = _captured(runtime, fixed)
    made.closers += [arena.close, graph.close]
    made.facts = GraphFacts(warm_up_s, capture_s, graph.launches, arena.bytes, arena.price().bytes, graph.pool_bytes)

    def update() -> None:
        arena.update(changing)

    def update_and_replay() -> None:
        arena.update(changing)
        graph.replay()

    def verify() -> Any:
        arena.update(other)
        verify_replay(runtime, graph, fixed, result)
        arena.update(changing)
        return verify_replay(runtime, graph, fixed, result)

    made.arms |= {
        "eager-fixed": fixed,
        "graph-replay": graph.replay,
        "graph-update-replay": update_and_replay,
        "update": update,
    }
    made.verify = verify
    graph.replay()
    made.results |= {"eager-fixed": fixed(), "graph-replay": result}


def _captured(runtime: Any, body: Callable[[], Tensors], guard: str = "normal") -> tuple[Any, Tensors, float]:
    kept: list[Any] = []

    def record() -> None:
        with runtime.capture(guard=guard) as graph:
            result = body()
            graph.outputs(result)
        kept.extend((graph, result))

    seconds = timed_once(runtime, record)
    return kept[0], kept[1], seconds


def _add_live_capture(made: Prepared, live: Callable[[], Tensors], runtime: Any) -> None:
    try:
        runtime.warm_up(live)
        try:
            graph, result, _ = _captured(runtime, live)
        except GraphSafeError as problem:
            if problem.rule.name != "cold-kernel":
                raise
            # A library's compiled function, which the guard cannot know to be warm, is: this layout alone is replayed.
            graph, result, _ = _captured(runtime, live, guard="off")
    except Exception as problem:  # whatever a library does inside a capture; the reason is reported
        made.refusals["graph-live"] = reason_of(problem)
        return
    made.closers.append(graph.close)
    made.arms["graph-live"] = graph.replay
    made.results["graph-live"] = result
    graph.replay()


def _add_switches(
    made: Prepared, workload: Workload, provider: str, function: Callable[..., Any], batch: Tensors
) -> None:
    if workload.case.operator == "tables":
        made.refusals |= dict.fromkeys(("eager-off", "eager-on"), "chunk tables have no switch")
        return
    reason = workload.refusal(provider, batch, {"use_graph": True})
    if reason is not None:
        made.refusals |= {"eager-off": "it has no use_graph to switch off", "eager-on": reason}
        return
    for arm, switch in (("eager-off", False), ("eager-on", True)):

        def switched(switch: bool = switch) -> Tensors:
            return workload.run(function, batch, {"use_graph": switch})

        made.arms[arm] = switched
        made.results[arm] = switched()
