"""Checks KDA's kernels against fp64 and times them on one GPU, next to flash-linear-attention where it is installed.

    python benchmarks/kda.py --json kda.json                  # checks, kernels one by one, replays of every shape
    python benchmarks/kda.py --sections check,kernels --shape 4096x32 --vary gradient_warps=4,8
    python benchmarks/kda.py --sections check --gates safe --seeds 16         # errors beside the peer's, over seeds

Sections: stages (what the preparation writes, against fp64: a miscompiled kernel shows here first), check, kernels,
replay, eager (the operator called eagerly at the batch's own size, waited for after each call / until it returns; by
itself, and in turn with the others).

Times are microseconds. Replays: medians of a captured graph, 256 MB written before each sample, the arms of a shape
in turn; *idle* waits for the device before a replay is asked for, *queued* asks for it behind the write. Before a
shape is replayed, the results and gradients of its first and last head are compared with fp64, the peer's beside
them. What the peer chooses at its first call it chooses at ``--peer-first``, the longest shape unless said.
``ratio``: this project's time over the peer's. Kernels one by one: the device's own times in the profiler, means over
eager calls. H = HV, K = V = 128, bf16, l2norm and gate in the kernel, lower bound -5, safe gate or not, initial and
final state.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import seeds
import torch
import triton
from peers import compile_choices, flash_linear_attention, race

from graphsafe_kernels.delta_rule import make_options
from graphsafe_kernels.kda import autograd, launch, op
from graphsafe_kernels.policy import device_kind
from graphsafe_kernels.reference import kda as reference
from graphsafe_kernels.tables import build_tables

try:
    flash_linear_attention()
    from fla.ops.kda import chunk_kda as fla_chunk_kda
except ImportError:
    fla_chunk_kda = None

WIDTH = 128
SHAPES = ("512x1", "1024x4", "4096x1", "4096x32", "8192x1")
INPUTS = ("usual", "alike", "doubled", "mirrored", "open", "bound", "silent")
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
HEAD_AXIS = {"o": 2, "ht": 1, "q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}
"""The axis of the heads in each tensor and its gradient (in dt_bias: of its rows of one head)."""


def layout(tokens: int, sequences: int, seed: int = 0) -> list[int]:
    """Random cuts of ``tokens`` into ``sequences``."""
    rng = random.Random(seed)
    return [0, *sorted(rng.sample(range(1, tokens), sequences - 1)), tokens]


class Case:
    """One call: operands, gradients of the outputs, and options.

    ``inputs``: "usual"; "alike": keys 99.9 % alike; "doubled": beta up to 2, keys 90 % alike; "mirrored": beta 2,
    keys 99.9 % alike; "open" and "bound": gates
    at 0 and at -5; "silent": every seventh beta exactly 0.
    """

    def __init__(self, tokens: int, sequences: int, heads: int, *, safe: bool = True, inputs: str = "usual",
                 dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)
        shape = (1, tokens, heads, WIDTH)
        q, k, v, g, do = (self.normal(*shape).to(dtype) for _ in range(5))
        beta = torch.rand(shape[:3], device="cuda", generator=self.generator)
        share = {"alike": 0.999, "doubled": 0.9, "mirrored": 0.999}.get(inputs)
        if share is not None:
            k = (share * self.normal(1, 1, heads, WIDTH) + (1 - share**2) ** 0.5 * k.float()).to(dtype)
        if inputs == "doubled":
            beta = 1.0 + 0.95 * beta
        if inputs == "mirrored":
            beta = torch.full_like(beta, 2.0)
        if inputs == "silent":
            beta[:, ::7] = 0
        if inputs in ("open", "bound"):
            g = torch.full_like(g, -30.0 if inputs == "open" else 30.0)
        A_log = torch.log(1 + 15 * torch.rand(heads, device="cuda", generator=self.generator))
        bias = self.normal(heads * WIDTH)
        state, dstate = (self.normal(sequences, heads, WIDTH, WIDTH) for _ in range(2))
        self.operands = [q, k, v, g, beta.to(dtype), A_log, bias, state]
        self.gradients = [do, dstate]
        self.cu_seqlens = torch.tensor(layout(tokens, sequences), device="cuda", dtype=torch.int32)
        self.cu_seqlens64 = self.cu_seqlens.long()
        self.options = make_options(scale=None, key_width=WIDTH, use_beta_sigmoid=False, allow_neg_eigval=False,
                                    output_final_state=True, qk_l2norm=True, gate_in_kernel=True, lower_bound=-5.0,
                                    safe_gate=safe, use_graph=True)  # fmt: skip

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator)

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in self.operands]

    def forward(self, operands: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tables = build_tables(self.cu_seqlens, operands[0].shape[1])
        return autograd.chunk_kda(*operands, tables, self.options)

    def both(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = self.forward(operands)
        return [*outputs, *torch.autograd.grad(outputs, operands, self.gradients)]

    def exact(self, heads: list[int] | None = None) -> list[torch.Tensor]:
        """Outputs and gradients in fp64, of these heads alone."""
        operands = [t.detach().requires_grad_() for t in of_heads(NAMES, self.leaves(torch.float64), heads)]
        gradients = of_heads(("o", "ht"), [g.double() for g in self.gradients], heads)
        tables = build_tables(self.cu_seqlens, operands[0].shape[1])
        outputs = reference.chunk_kda(*operands, tables, self.options)
        found = torch.autograd.grad(outputs, operands, gradients)
        return [*(t.detach() for t in outputs), *found]

    def peer_forward(self, operands: list[torch.Tensor], use_graph: bool = True) -> tuple[torch.Tensor, ...]:
        """The forward by flash-linear-attention, in its own graph mode or eager."""
        q, k, v, g, beta, A_log, dt_bias, state = operands
        more = {"use_graph": True, "max_num_seqs": self.cu_seqlens.shape[0] - 1} if use_graph else {}
        found: tuple[torch.Tensor, ...] = fla_chunk_kda(
            q, k, v, g, beta, initial_state=state, output_final_state=True, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=self.options.safe_gate, lower_bound=-5.0,
            cu_seqlens=self.cu_seqlens64, **more,
        )[:2]
        return found

    def peer(self, operands: list[torch.Tensor], use_graph: bool = True) -> list[torch.Tensor]:
        """Outputs and gradients by flash-linear-attention."""
        outputs = self.peer_forward(operands, use_graph)
        return [*outputs, *torch.autograd.grad(outputs, operands, self.gradients)]

    def call(self, arm: Callable[[Case, list[torch.Tensor]], list[torch.Tensor]], grad: bool) -> list[torch.Tensor]:
        """Outputs and gradients by ``Case.both``, ``Case.peer`` or ``Case.public_both``."""
        assert grad
        return arm(self, self.leaves())

    def public(self, operands: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The forward as a caller writes it: checks, tables and launches."""
        q, k, v, g, beta, A_log, dt_bias, state = operands
        found: tuple[torch.Tensor, ...] = op.chunk_kda(
            q, k, v, g, beta, initial_state=state, output_final_state=True, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=self.options.safe_gate, lower_bound=-5.0,
            cu_seqlens=self.cu_seqlens,
        )  # type: ignore[assignment]
        return found

    def public_both(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = self.public(operands)
        return [*outputs, *torch.autograd.grad(outputs, operands, self.gradients)]


def of_heads(names: Sequence[str], tensors: list[torch.Tensor], heads: list[int] | None) -> list[torch.Tensor]:
    """The part of each named tensor that belongs to these heads; all of it if none are named."""
    if heads is None:
        return tensors
    found = []
    for name, t in zip(names, tensors, strict=True):
        each = t.view(-1, WIDTH) if name == "dt_bias" else t
        picked = each.index_select(HEAD_AXIS[name], torch.tensor(heads, device=t.device))
        found.append(picked.flatten() if name == "dt_bias" else picked)
    return found


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative root mean square; NaN stays NaN."""
    return ((got.double() - want).norm() / (want.norm() + 1e-30)).item()


def each_relative(got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, float]:
    """The relative errors of outputs and gradients, by name."""
    names = ("o", "ht", *(f"d{n}" for n in NAMES))
    return {n: relative(a, b) for n, a, b in zip(names, got, want, strict=True)}


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, str]:
    return {n: f"{e:.1e}" for n, e in each_relative(got, want).items()}


def stages(case: Case) -> dict[str, str]:
    """The worst error of each intermediate of the preparation over all slots, against the formulas in fp64."""
    x = launch.Operands(*case.operands)
    tables = build_tables(case.cu_seqlens, x.q.shape[1])
    problem = autograd._problem(x.q, x.v, tables, case.options)
    c = launch.choose(problem, device_kind(x.q.device), x.q.dtype)  # type: ignore[attr-defined]
    kept = launch._prepare(problem, tables, c, launch.start, x, None, torch.empty_like(x.v), None)
    heads, boundaries = x.v.shape[2], case.cu_seqlens.tolist()
    q, k = x.q[0].double(), x.k[0].double()
    qh, kh = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    z = x.g[0].double() + x.dt_bias.double().view(heads, WIDTH)
    g = -5 * torch.sigmoid(x.A_log.double().exp()[:, None] * z)
    worst: dict[str, float] = {}
    for slot, (n, chunk) in enumerate(tables.chunk_indices.tolist()):
        if n < 0:
            continue
        first = boundaries[n] + chunk * case.options.chunk_size
        rows = slice(first, min(boundaries[n + 1], first + case.options.chunk_size))
        G, ks, qs, kn, qn = (t[rows].transpose(0, 1) for t in (g.cumsum(0) - g[:first].sum(0), k, q, kh, qh))
        between = (G[:, :, None] - G[:, None]).clamp(max=0).exp()
        P = case.options.scale * torch.einsum("hik,hjk,hijk->hij", qn, kn, between).tril()
        C = torch.einsum("hik,hjk,hijk->hij", kn, kn, between).tril(-1)
        size = C.shape[-1]
        system = torch.eye(size, device="cuda", dtype=torch.float64) + C * x.beta[0, rows].double().t()[:, None]
        want = {"kg": ks * G.exp(), "qg": qs * G.exp(), "kd": ks * (G[:, -1:] - G).exp(), "scores": P,
                "correction": -torch.linalg.solve(system, C)}  # fmt: skip
        for name, w in want.items():
            got = getattr(kept, name)[slot][:, :size]
            error = relative(got[..., :size] if name in ("scores", "correction") else got, w)
            worst[name] = max(worst.get(name, 0.0), error) if error == error else error
    return {n: f"{e:.1e}" for n, e in worst.items()}


def kernel_times(call: Any, repeats: int = 5) -> dict[str, float]:
    """Median device time of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    seen: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seen.setdefault(event.name[:40], []).append(event.device_time)
    return {n: round(sum(t) / repeats, 1) for n, t in sorted(seen.items(), key=lambda x: -sum(x[1]))}


def eager_times(calls: dict[str, Any], samples: int = 50) -> dict[str, str]:
    """Median wall time of each call from an idle device to an idle device, and to its return: one call after the
    other, then in turn with the others', whose code takes the host's caches."""
    orders = [("alone", [name]) for name in calls] + [("in turn", list(calls))]
    found: dict[str, list[tuple[float, float]]] = {f"{name}, {how}": [] for how, names in orders for name in names}
    for (how, names), turn in itertools.product(orders, range(samples + 5)):
        for name in names:
            torch.cuda.synchronize()
            began = time.perf_counter()
            calls[name]()
            returned = time.perf_counter() - began
            torch.cuda.synchronize()
            if turn >= 5:
                found[f"{name}, {how}"].append((time.perf_counter() - began, returned))
    medians = {name: (statistics.median(column) * 1e6 for column in zip(*t, strict=True)) for name, t in found.items()}
    return {name: "{:.1f} / {:.1f}".format(*both) for name, both in medians.items()}


def without_gradients(call: Any) -> Any:
    def inner() -> Any:
        with torch.no_grad():
            return call()

    return inner


def with_choices(choices: dict[str, Any]) -> None:
    """Let every later call use these fields of the configuration instead of the table's."""
    launch.choose = lambda *args: dataclasses.replace(_choose(*args), **choices)  # type: ignore[attr-defined]


_choose = launch.choose  # type: ignore[attr-defined]


def variants(vary: list[str]) -> list[dict[str, Any]]:
    """The table's choice, then each value of each ``field=value,value`` by itself."""
    found: list[dict[str, Any]] = [{}]
    for item in vary:
        name, values = item.split("=")
        found += [dict(zip(name.split("+"), [None if x == "None" else int(x) for x in v.split("+")], strict=True))
                  for v in values.split(",")]  # fmt: skip
    return found


def warm(choices: dict[str, Any], safe: bool, tokens: int, sequences: int, heads: int) -> str:
    """Compile a variant's kernels, in a process of its own."""
    try:
        with_choices(choices)
        case = Case(tokens, sequences, heads, safe=safe)
        case.both(case.leaves())
        torch.cuda.synchronize()
    except Exception as e:  # a variant that does not compile is reported where it is timed
        return f"{choices} safe={safe} {tokens}x{sequences} heads={heads}: {e!r}"[:300]
    return ""


def warm_peer(rank: int, of: int, safe: bool, heads: int, shapes: list[tuple[int, int]]) -> str:
    """Compile the peer's kernels as one of several processes."""
    try:
        for tokens, sequences in shapes:
            for call in peer_calls(Case(tokens, sequences, heads, safe=safe)):
                compile_choices(call, rank, of)
    except Exception as e:  # the peer is compiled again, and reported, where it is timed
        return f"peer {rank} safe={safe} heads={heads}: {e!r}"[:300]
    return ""


def peer_calls(case: Case) -> list[Callable[[], Any]]:
    """The peer's calls that are compared or timed."""
    found: list[Callable[[], Any]] = []
    for use_graph in (True, False):
        found.append(without_gradients(functools.partial(case.peer_forward, case.operands, use_graph)))
        found.append(functools.partial(case.peer, case.leaves(), use_graph))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default="stages,check,kernels,replay")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--heads", type=int, action="append")
    parser.add_argument("--gates", default="safe,unsafe")
    parser.add_argument("--vary", action="append", default=[])
    parser.add_argument("--warm", type=int, default=0, help="processes that compile the variants beforehand")
    parser.add_argument("--warm-only", action="store_true", help="compile and stop")
    parser.add_argument("--warm-peer", action="store_true", help="compile the peer's choices beforehand too")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seeds", type=int, default=0, help="section check: mean errors over so many seeds")
    parser.add_argument("--peer-first", help="the shape of the peer's first call, at which it chooses")
    parser.add_argument("--json")
    args = parser.parse_args()
    began = time.time()
    records: list[dict[str, Any]] = []

    def emit(**record: Any) -> None:
        print(f"[{time.time() - began:5.0f}s]", *record.values(), flush=True)
        records.append(record)
        if args.json:
            Path(args.json).write_text(json.dumps(records, indent=1))

    chosen = variants(args.vary)
    gates = [name == "safe" for name in args.gates.split(",")]
    all_heads = args.heads or [32]
    shapes = [tuple(map(int, s.split("x"))) for s in args.shape or SHAPES]
    if args.warm:
        timed = "kernels" in args.sections or "replay" in args.sections or "eager" in args.sections
        work = [({}, s, *shape, h) for h in all_heads for s in gates for shape in shapes if timed]
        work += [({}, s, 1024, 4, 32) for s in gates if not timed]
        work += [(c, gates[0], *shapes[0], h) for c in chosen[1:] for h in all_heads]
        if args.warm_peer:
            os.environ["FLA_CACHE_RESULTS"] = "0"  # of the processes below: nothing they measure is worth keeping
        with multiprocessing.get_context("spawn").Pool(args.warm, maxtasksperchild=1) as pool:
            found = [pool.apply_async(warm, w) for w in work]
            if fla_chunk_kda is not None and args.warm_peer:
                heads = (all_heads if timed else []) + ([32] if "check" in args.sections else [])
                turns = itertools.product(sorted(set(heads)), gates, range(args.warm))
                found += [pool.apply_async(warm_peer, (r, args.warm, s, h, shapes)) for h, s, r in turns]
            for problem in filter(None, (f.get() for f in found)):
                emit(section="warm", problem=problem)
        emit(section="warm", done=True)
    if args.warm_only:
        return
    with_peer = fla_chunk_kda is not None and args.peer
    emit(section="device", name=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
         ptxas=os.environ.get("TRITON_PTXAS_PATH", "Triton's"), peer_first=args.peer_first or "longest")  # fmt: skip
    if with_peer:
        for heads, safe in itertools.product(all_heads, gates):
            first = tuple(map(int, args.peer_first.split("x"))) if args.peer_first else max(shapes)
            for call in peer_calls(Case(*first, heads, safe=safe)):
                call()
    if "stages" in args.sections:
        for choices, safe in itertools.product(chosen, gates):
            if not choices or safe == gates[0]:
                with_choices(choices)
                case = Case(192, 3, all_heads[0], safe=safe)
                emit(section="stages", choices=f"{choices} safe={safe}", errors=stages(case))
    if "check" in args.sections:
        with_choices({})
        for safe, inputs in itertools.product(gates, INPUTS):
            case = Case(1024, 4, 32, safe=safe, inputs=inputs)
            want = case.exact()
            emit(section="check", inputs=f"{inputs} safe={safe}", errors=errors(case.both(case.leaves()), want))
            if with_peer:
                emit(section="check", inputs=f"{inputs} safe={safe} fla", errors=errors(case.peer(case.leaves()), want))
        arms = {"graphsafe": Case.both} | ({"fla": Case.peer} if with_peer else {})
        for safe, inputs in itertools.product(gates, INPUTS if args.seeds else ()):
            make = functools.partial(Case, 1024, 4, 32, safe=safe, inputs=inputs)
            seeds.compare(lambda seed, make=make: make(seed=seed), arms, Case.exact, each_relative, args.seeds, emit,
                          section="seeds", inputs=f"{inputs} safe={safe}")  # fmt: skip
        for choices in chosen[1:]:
            with_choices(choices)
            case = Case(1024, 4, 32)
            emit(section="check", choices=choices, errors=errors(case.both(case.leaves()), case.exact()))
    if "kernels" in args.sections:
        for heads, (tokens, sequences), choices in itertools.product(all_heads, shapes, chosen):
            with_choices(choices)
            for safe in gates if not choices else gates[:1]:
                case = Case(tokens, sequences, heads, safe=safe)
                times = kernel_times(functools.partial(case.both, case.leaves()))
                shape = f"{tokens}x{sequences} H {heads} safe={safe}"
                emit(section="kernels", shape=shape, choices=choices, us=times)
    if "replay" in args.sections:
        with_choices({})
        for heads, (tokens, sequences), safe in itertools.product(all_heads, shapes, gates):
            case = Case(tokens, sequences, heads, safe=safe)
            # Leaves of its own for each arm: a leaf keeps the stream of its first use while a result of it lives.
            arms = {"forward": functools.partial(case.forward, case.operands),
                    "both": functools.partial(case.both, case.leaves())}  # fmt: skip
            if with_peer:
                arms["fla forward"] = functools.partial(case.peer_forward, case.operands)
                arms["fla both"] = functools.partial(case.peer, case.leaves())
            shape = f"{tokens}x{sequences} H {heads} safe={safe}"
            few = sorted({0, heads - 1})
            want = case.exact(few)
            for name, call in (("", case.both), (" fla", case.peer))[: 1 + with_peer]:
                found = of_heads(("o", "ht", *NAMES), call(case.leaves()), few)
                emit(section="errors", shape=f"{shape}{name}", errors=errors(found, want))
            us = race(arms, 21)
            emit(section="replay", shape=shape, us={n: f"{t[0]:.1f} / {t[1]:.1f}" for n, t in us.items()})
            if with_peer:
                ratio = {n: "{:.3f} / {:.3f}".format(*(a / b for a, b in zip(us[n], us[f"fla {n}"], strict=True)))
                         for n in ("forward", "both")}  # fmt: skip
                emit(section="ratio", shape=shape, ratio=ratio)
    if "eager" in args.sections:
        with_choices({})
        for heads, (tokens, sequences) in itertools.product(all_heads, shapes[:1]):
            case = Case(tokens, sequences, heads)
            leaves = case.leaves()
            calls = {"forward": without_gradients(functools.partial(case.public, case.operands)),
                     "both": functools.partial(case.public_both, leaves)}  # fmt: skip
            if with_peer:
                calls["fla forward"] = without_gradients(functools.partial(case.peer_forward, case.operands, False))
                calls["fla both"] = functools.partial(case.peer, leaves, False)
            emit(section="eager", shape=f"{tokens}x{sequences} H {heads}", us=eager_times(calls))


if __name__ == "__main__":
    main()
