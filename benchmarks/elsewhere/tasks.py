"""The calls that the benchmarks make, by task, to be compiled or tuned before they are timed.

A task is ``BENCHMARK:ARM[:SHAPE,SHAPE...]`` with ``gdn``, ``kda``, ``layers`` or ``models`` (of ``benchmarks/``) and
``graphsafe``, ``fla`` or, for gdn, ``flashqla``; ``gdn_correct:graphsafe[:CASE,CASE...]``; or
``bench:PROVIDER:PRESET,PRESET...[:TEXT...]`` for ``graphsafe bench``, of its cases those whose label contains each
TEXT: ``bench:fla:peers:gdn:16/32x128``. Shapes of kda begin with its heads: ``kda:fla:32/8192x1``. A task of no shape
is all that the benchmark has.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks are scripts, not a package

Calls = Iterator[tuple[str, Callable[[], Any]]]


def calls(task: str, device: str) -> Calls:
    """Label and call, of each thing that a task compiles; ``device`` is "cpu" for a pretended GPU."""
    kind, arm, *shapes = task.split(":")
    named = shapes[0].split(",") if shapes else []
    more = [shapes[1:]] if kind == "bench" else []
    source: dict[str, Any] = {"gdn": gdn, "gdn_correct": gdn_correct, "kda": kda, "layers": layers,
                              "models": models, "bench": bench}  # fmt: skip
    if kind not in source:
        raise SystemExit(f"no task {task!r}: it begins with none of {', '.join(source)}")
    for label, call in source[kind](arm, named, device, *more):
        yield f"{kind} {arm} {label}", call


def gdn(arm: str, shapes: list[str], device: str) -> Calls:
    import gdn as script
    import peers

    script.DEVICE = device
    op = script.chunk_gated_delta_rule if arm == "graphsafe" else peers.gated_delta_rule(arm)
    if arm == "graphsafe":
        script.use({})
    cases = {s: functools.partial(script.shaped, s) for s in shapes or script.SHAPES}
    if not shapes:
        cases["hard"] = functools.partial(script.Case, 300, 3, 16, 32, ragged=True, hard="random")
    for shape, make in cases.items():
        case = make()
        for what, call in script.calls(case, op).items():
            yield f"{shape} {what}", call
        yield f"{shape} compared", functools.partial(case.call, op, grad=True)


def gdn_correct(arm: str, named: list[str], device: str) -> Calls:
    import gdn as script
    import gdn_correct as cases

    script.DEVICE = device
    script.use({})
    known = cases.cases()
    for name in named or known:
        yield name, functools.partial(known[name]().call, script.chunk_gated_delta_rule, grad=True)


def kda(arm: str, shapes: list[str], device: str) -> Calls:
    import kda as script

    named = shapes or [f"{h}/{s}" for h in (32, 8, 96) for s in (script.SHAPES if h == 32 else ["8192x1"])]
    for shape, safe in itertools.product(named, (True, False)):
        heads, sizes = shape.split("/")
        case = script.Case(*map(int, sizes.split("x")), int(heads), safe=safe)
        if arm == "graphsafe":
            leaves = case.leaves()
            each = [functools.partial(case.forward, case.operands), functools.partial(case.both, leaves),
                    functools.partial(case.public_both, leaves)]  # fmt: skip
        else:
            each = script.peer_calls(case)
        for number, call in enumerate(each):
            yield f"{shape} safe={safe} {number}", call


def runtime(device: str) -> Any:
    import graphsafe as gs
    from graphsafe_cpu import CpuRuntime

    return CpuRuntime() if device == "cpu" else gs.get_runtime(device)


def layers(arm: str, shapes: list[str], device: str) -> Calls:
    import layers as script

    for kind, shape in itertools.product(script.KINDS, shapes or script.SHAPES):
        case = script.Case(kind, shape, runtime(device), with_peer=arm == "fla")
        for call in case.peer_calls() if arm == "fla" else (case.own_forward, case.own_both):
            yield f"{kind} {shape} {call.__name__}", call


def models(arm: str, shapes: list[str], device: str) -> Calls:
    """One layer of each kind trained, and three of a prefill: the others are the same kernels."""
    import models as script

    rt = runtime(device)
    for kind in script.KINDS if arm == "graphsafe" else ():
        bucket, (_, *sizes, _) = script.sizes_of(False)
        model = script.Stack(kind, 1, *sizes, 64).to(rt.device, torch.bfloat16)  # the vocabulary's products are torch's
        batch = script.batches(1, bucket, 64, rt.device)[0]

        def train(model: Any = model, batch: Any = batch, bucket: Any = bucket) -> None:
            script.loss_fn(model, batch, rt.tables(bucket).build(batch["cu_seqlens"])).backward()

        yield f"train {kind}", train
    model = script.qwen(False, rt.device, 3)
    if arm == "graphsafe":
        script.adapt(model)
    for tokens, ids in script.prompts(False, rt.device).items():
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=rt.device)
        options = {"cu_seqlens": cu} if arm == "graphsafe" else {"use_cache": False}
        yield f"prefill {tokens}", functools.partial(script.last_logits, model, ids, **options)


def bench(provider: str, presets: list[str], device: str, texts: Sequence[str] = ()) -> Calls:
    """The bodies of the cases, the longest first: at the batch's size and, of this project, the bucket's.

    A training step launches what its layers do.
    """
    from graphsafe.bench.presets import preset
    from graphsafe.bench.workloads import workload_of
    from graphsafe.metadata import build_tables
    from graphsafe_kernels.providers import get_provider

    served = get_provider(provider).services
    other = ("-step",) if provider == "graphsafe" else ("-step", "-layer")
    found = {c.label: c for name in presets for c in preset(name)
             if not c.operator.endswith(other) and all(text in c.label for text in texts)}  # fmt: skip
    for case in sorted(found.values(), key=lambda c: -c.tokens):
        work = workload_of(case, torch.device(device))
        if work.operator not in served and not case.is_layer:
            continue
        batch = work.batch(0)
        narrow = case.key_dim == 128 and set(case.options) <= {"use_qk_l2norm_in_kernel"}
        if (provider == "flash_qla" and not narrow) or (device != "cpu" and work.refusal(provider, batch, {})):
            continue  # on a pretended GPU a refusal would be of the CPU
        function = work.function(provider)
        yield case.label, functools.partial(work.run, function, batch, {})
        if provider == "graphsafe":
            held = {n: _held(t, work.operands[n].kind if n in work.operands else "", case) for n, t in batch.items()}
            tables = build_tables(held["cu_seqlens"], case.tokens, case.chunk_size)
            yield f"{case.label} graph", functools.partial(work.run, function, held, work.graph_arguments(tables))


def _held(t: torch.Tensor, kind: str, case: Any) -> torch.Tensor:
    """An operand, or the boundaries, at the bucket's size."""
    axis, size, value = {"tokens": (1, case.tokens, 0), "sequences": (0, case.sequences, 0),
                         "": (0, case.sequences + 1, case.live_tokens)}.get(kind, (0, t.shape[0], 0))  # fmt: skip
    return torch.nn.functional.pad(t, (0, 0) * (t.dim() - 1 - axis) + (0, size - t.shape[axis]), value=value)
