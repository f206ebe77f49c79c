"""Checks and times the gated delta rule on one GPU: whole operator, its kernels one by one, variants, and peers.

    python benchmarks/gdn.py --check --time --parts --variants all --json out.json
    python benchmarks/gdn.py --hard --time --peer fla flashqla --warm-peer 15 --json peers.json
    python benchmarks/gdn.py --seeds 16 --only 1024x4 "8192x1 2/8" --peer fla --json seeds.json

Times are medians of replays of a captured graph, in microseconds, 256 MB written before each sample: first with the
device idle at the launch (host launch latency is in it), then queued behind the write. Errors are relative rms against
the fp64 reference. With peers, all results and gradients of every arm are compared with fp64 at each shape before it is
timed, the arms are replayed in turn, and what the peers choose at their first call they choose at the longest shape of
its heads. ``ratio`` is this project's time over the peer's; ``worse`` names the results in which this project's error
is above the peer's. With ``--seeds`` errors are averaged over so many seeds, at the shapes, on the hard inputs and
in each form of the operator (``seeds``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import seeds
import torch
import torch.nn.functional as F
from peers import capture, compile_choices, gated_delta_rule, race

from graphsafe_kernels import backend
from graphsafe_kernels.gdn import backward, chunk_gated_delta_rule, configurations, forward
from graphsafe_kernels.gdn.problem import Operands, Problem
from graphsafe_kernels.tables import build_tables

DEVICE = "cuda"
SHAPES = {
    "8192x1": (8192, 1, 16, 32),
    "4096x32": (4096, 32, 16, 32),
    "4096x1": (4096, 1, 16, 32),
    "1024x4": (1024, 4, 16, 32),
    "8192x1 4/8": (8192, 1, 4, 8),
    "8192x1 2/8": (8192, 1, 2, 8),
    "8192x1 16/64": (8192, 1, 16, 64),
    "8192x1 32/32": (8192, 1, 32, 32),
    "1024x8 2/8": (1024, 8, 2, 8),
    "1024x8 16/64": (1024, 8, 16, 64),
    "1024x8 32/32": (1024, 8, 32, 32),
    "4096x32 ragged": (4096, 32, 16, 32),
    "4096x6 ragged": (4096, 6, 16, 32),
    "8192x4 4/8 ragged": (8192, 4, 4, 8),
}
"""Name -> tokens, sequences, heads, value heads; sequences are equally long, or random with "ragged"."""
VARIANTS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "recompute": {"keep_states": False},
    "keep": {"keep_states": True},
    "wide": {"chain_block": 128, "chain_warps": 8, "chain_stages": 3},
    "pointers": {"tiles": False, "chain_stages": 2, "keep_stages": 2, "reverse_stages": 2, "state_stages": 2,
                 "gradient_stages": 1},
    "three stages": {"chain_stages": 3, "keep_stages": 3, "reverse_stages": 3},
    "prepare 128": {"prepare_registers": 128},
    "prepare 168": {"prepare_registers": 168},
    "apart": {"overlap": False},
    "in turn": {"beside": False},
    "uncut": {"span": 0, "reverse_span": 0, "beside": False},
    "rounded beta": {"exact_beta": False},
    "rounded N": {"even_correction": False},
}  # fmt: skip
TOUCHED = {
    "shipped": ("tables", "prepare", "cut", "prepare, cut", "chain", "reverse", "gradients", "finish"),
    "wide": ("chain",),
    "prepare 128": ("prepare",),
    "prepare 168": ("prepare",),
    "apart": ("prepare",),
    "in turn": (),
    "uncut": ("chain",),
    "rounded beta": ("gradients",),
    "rounded N": ("prepare",),
}
"""The parts that a variant changes; chain and reverse where nothing is said."""
WHOLE = ("shipped", "three stages", "apart", "in turn", "uncut", "recompute", "keep", "rounded beta", "rounded N")
"""The variants timed as whole operators."""
CHOSEN = configurations.configuration
NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")


def use(variant: dict[str, Any]) -> None:
    """Serve the operator with kernels, with these fields of the configuration replaced."""
    backend.TRITON["chunk_gated_delta_rule"] = "graphsafe_kernels.gdn.autograd"

    def configuration(*key: Any) -> configurations.Configuration:
        return dataclasses.replace(CHOSEN(*key), **variant)

    configurations.configuration = configuration


class Case:
    """One shape's inputs: bf16 q, k, v; fp32 g (log sigmoid of normal numbers), beta (uniform) and states.

    ``hard``: one of HARD or FAMILIES; or ``form``, one of FORMS, where what a kernel makes g or beta of is normal.
    """

    def __init__(self, tokens: int, sequences: int, heads: int, value_heads: int, width: Any = 128, *, seed: int = 0,
                 ragged: bool = False, dtype: torch.dtype = torch.bfloat16, hard: str = "",
                 chunk_size: int = 64, form: str = "") -> None:  # fmt: skip
        self.options = {} if chunk_size == 64 else {"chunk_size": chunk_size}
        assert not (hard and form), "a form has its own gates and beta"
        self.form = FORMS[form] if form else {"use_qk_l2norm_in_kernel": True}
        gen = torch.Generator(DEVICE).manual_seed(seed)
        r = lambda *s: torch.randn(*s, device=DEVICE, generator=gen)  # noqa: E731
        width, value_width = width if isinstance(width, tuple) else (width, width)
        self.q, self.k = r(1, tokens, heads, width).to(dtype), r(1, tokens, heads, width)
        self.v = r(1, tokens, value_heads, value_width).to(dtype)
        self.g = F.logsigmoid(r(1, tokens, value_heads))
        self.beta = torch.rand(1, tokens, value_heads, device=DEVICE, generator=gen)
        self.h0 = r(sequences, value_heads, width, value_width)
        if hard:
            alike, beta, gate = (HARD | FAMILIES)[hard]
            if alike:
                self.k = r(1, 1, heads, width) + alike * self.k
            if beta == "mixed":
                self.beta = 2 * self.beta
                self.beta[:, ::7] = 0
            elif beta == "spread":
                self.beta = 1.7 + 0.3 * self.beta
            elif beta == "family":
                self.beta = torch.full_like(self.beta, 1.7 + 0.3 * self.beta[0, 0, 0].item())
            elif beta is not None:
                self.beta = torch.full_like(self.beta, beta)
            if gate is not None:
                self.g = torch.full_like(self.g, gate)
        if not self.form.get("use_qk_l2norm_in_kernel"):
            self.q, self.k = (F.normalize(t.float(), dim=-1).to(dtype) for t in (self.q, self.k))
        if self.form.get("use_beta_sigmoid_in_kernel"):
            self.beta = r(*self.beta.shape)
        self.gate = {}
        if self.form.get("use_gate_in_kernel"):
            self.g = r(*self.g.shape)
            self.gate = {"A_log": (1 + 15 * torch.rand(value_heads, device=DEVICE, generator=gen)).log(),
                         "dt_bias": r(value_heads)}  # fmt: skip
        self.k = self.k.to(dtype)
        cuts = torch.linspace(0, tokens, sequences + 1)
        if ragged and sequences > 1:
            inner = tokens * torch.rand(sequences - 1, generator=torch.Generator().manual_seed(seed))
            cuts = torch.cat([cuts[:1], torch.sort(inner)[0], cuts[-1:]])
        self.cu = cuts.round().to(DEVICE, torch.int32)
        self.do, self.dht = r(*self.v.shape).to(dtype), r(*self.h0.shape)

    def call(self, op: Callable[..., Any], *, grad: bool, dtype: torch.dtype | None = None) -> list[Any]:
        """[o, ht], or with ``grad`` those and the gradients."""
        ins = [self.q, self.k, self.v, self.g, self.beta, self.h0, *self.gate.values()]
        ins = [t.to(dtype or t.dtype).detach().requires_grad_(grad) for t in ins]
        o, ht = op(*ins[:3], g=ins[3], beta=ins[4], initial_state=ins[5], output_final_state=True,
                   cu_seqlens=self.cu, **self.form, **dict(zip(self.gate, ins[6:], strict=True)))  # fmt: skip
        if not grad:
            return [o, ht]
        return [o, ht, *torch.autograd.grad([o, ht], ins, [self.do.to(o.dtype), self.dht.to(ht.dtype)])]


FORMS: dict[str, dict[str, Any]] = {
    "no l2norm": {},
    "gate in kernel": {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True},
    "gate and sigmoid in kernel": {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
                                   "use_beta_sigmoid_in_kernel": True},
    "negative eigenvalues": {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
                             "allow_neg_eigval": True},
}  # fmt: skip
"""Name -> options of the operator, for ``--seeds``; l2norm in the kernel alone where none is named. Without it q and k
are given normalised."""
HARD: dict[str, tuple[float, Any, float | None]] = {
    "random": (0.0, None, None), "beta 0..2, some 0": (0.0, "mixed", None), "g 0": (0.0, None, 0.0),
    "99.9% alike, beta 1, g -.01": (0.03, 1.0, -0.01), "beta 1.9, g 0": (0.0, 1.9, 0.0),
    "90% alike, beta 1.9, g -.01": (0.33, 1.9, -0.01), "99.9% alike, beta 1.9, g -.01": (0.03, 1.9, -0.01),
    "90% alike, g -.1": (0.33, None, -0.1),
    "g -5": (0.0, None, -5.0), "g -20": (0.0, None, -20.0),
}  # fmt: skip
"""Name -> (spread of the keys around a common one, beta, gate)."""
FAMILIES = {"99.9% alike, a beta of 1.7..2, g -.01": (0.03, "family", -0.01),
            "99.9% alike, betas of 1.7..2, g 0": (0.03, "spread", 0.0)}  # fmt: skip
"""More of them for ``--seeds``: one beta a seed, and one a token."""


CHECKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ragged": ((700, 5, 2, 4), {"ragged": True}),
    "one": ((512, 1, 2, 2), {}),
    "fp16": ((300, 3, 1, 2), {"dtype": torch.float16, "ragged": True}),
    "fp32": ((300, 3, 1, 2), {"dtype": torch.float32, "ragged": True}),
    "width 64": ((300, 3, 1, 2, 64), {"ragged": True}),
    "width 100": ((300, 3, 1, 2, 100), {"ragged": True}),
    "width 256": ((300, 3, 1, 2, 256), {"ragged": True}),
    "width 32": ((300, 3, 1, 2, 32), {"ragged": True}),
    "width 24": ((300, 3, 1, 2, 24), {"ragged": True}),
    "widths 32, 128": ((300, 3, 1, 2, (32, 128)), {"ragged": True}),
    "widths 128, 32": ((300, 3, 1, 2, (128, 32)), {"ragged": True}),
    "widths 256, 64": ((300, 3, 1, 2, (256, 64)), {"ragged": True}),
    "widths 64, 256": ((300, 3, 2, 2, (64, 256)), {"ragged": True}),
    "width 192": ((300, 3, 1, 2, 192), {"ragged": True}),
    "cut": ((8192, 2, 1, 2), {"ragged": True}),
    "lone": ((1000, 1, 1, 2), {}),
    "chunk 32": ((300, 3, 1, 2), {"chunk_size": 32, "ragged": True}),
    "chunk 16": ((300, 3, 1, 2), {"chunk_size": 16, "ragged": True}),
}
"""Name -> arguments of :class:`Case` for a comparison with the reference."""


def shaped(name: str, seed: int = 0) -> Case:
    """The case of a shape's name."""
    return Case(*SHAPES[name], ragged="ragged" in name, seed=seed)


def relative(out: list[Any], ref: list[Any]) -> dict[str, float]:
    """Relative rms errors by name; NaN stays NaN."""
    rms = lambda t: float(t.detach().double().pow(2).mean().sqrt())  # noqa: E731
    return {name: rms(a.double() - b) / (rms(b) + 1e-8) for name, a, b in zip(NAMES[: len(ref)], out, ref, strict=True)}


def told(found: dict[str, float]) -> str:
    return " ".join(f"{name} {error:.1e}" for name, error in found.items())


def errors(out: list[Any], ref: list[Any]) -> str:
    return told(relative(out, ref))


def exact(case: Case) -> list[Any]:
    """Results and gradients of the reference, in fp64."""
    with backend.reference_only():
        return case.call(chunk_gated_delta_rule, grad=True, dtype=torch.float64)


def compared(
    case: Case, arms: dict[str, Callable[..., Any]], note: Callable[..., None], **what: str
) -> dict[str, Callable[..., Any]]:
    """Note every arm's errors against fp64, and where this project's are above a peer's; the arms that could run."""
    ref = exact(case)
    found = {}
    for name, op in arms.items():
        try:
            found[name] = relative(case.call(op, grad=True), ref)
        except Exception as e:  # a peer that cannot run a shape is a figure too
            note(**what, arm=name, failed=repr(e)[:300])
            if name == "graphsafe":
                raise
            continue
        note(**what, arm=name, errors=told(found[name]))
    able = {name: arms[name] for name in found}
    own = found.pop("graphsafe")
    for name, theirs in found.items():
        above = {n: own[n] / theirs[n] for n in own if not own[n] <= theirs[n]}
        note(**what, against=name, worse=" ".join(f"{n} x{r:.2f}" for n, r in above.items()) or "nothing")
    return able


def replay_times(step: Callable[[], Any], samples: int) -> tuple[float, float]:
    """(device idle at the launch, queued behind other work), medians in us."""
    graph = capture(step)
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    medians = []
    for queued in (False, True):
        times = []
        for _ in range(samples):
            flush.zero_()
            if not queued:
                torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        medians.append(round(statistics.median(times), 1))
    return medians[0], medians[1]


def parts(case: Case) -> dict[str, Callable[[], Any]]:
    """The launches of forward and backward, each on its own."""
    tables = build_tables(case.cu, case.q.shape[1], 64)
    x = Operands(case.q, case.k, case.v, case.g, case.beta, None, None, case.h0)
    _, tokens, heads, width = case.q.shape
    hv = case.v.shape[2]
    problem = Problem(1, tokens, heads, hv, width, width, case.h0.shape[0], 64, width**-0.5, True)
    c = configurations.configuration(problem, case.q.device, case.q.dtype)
    o, ht = torch.empty_like(case.v), torch.empty_like(case.h0)
    prepared = forward.prepare_buffers(problem, tables, x.q)._replace(**forward.segment_buffers(problem, c, x.q))
    if c.keep_states:
        prepared = prepared._replace(**forward.state_buffers(problem, tables, c, x.q))
    forward.prepare(problem, tables, c, x, prepared, o)
    if c.span:
        forward.segment_states(problem, tables, c, x, prepared)
    forward.chain(problem, tables, c, x, prepared, o, ht)
    full = prepared
    if full.states is None:
        full = full._replace(**forward.state_buffers(problem, tables, c, x.q))
    w = backward.work(problem, tables, c, x, full.states)
    common = (problem, tables, c, x, full, case.do)

    def reverse() -> None:
        backward.segment_gradients(*common, None, w)
        backward.chains(*common, None, w, recompute=prepared.states is None)

    reverse()
    steps = {
        "tables": lambda: build_tables(case.cu, tokens, 64),
        "prepare": lambda: forward.prepare(problem, tables, c, x, prepared, o),
        "cut": lambda: forward.segment_states(problem, tables, c, x, prepared),
        "prepare, cut": lambda: forward.prepare_beside(problem, tables, c, x, prepared, o),
        "chain": lambda: forward.chain(problem, tables, c, x, prepared, o, ht),
        "reverse": reverse,
        "gradients": lambda: backward.gradients(*common, w),
        "finish": lambda: backward.finish(problem, tables, c, x, w),
    }
    if not c.span:
        del steps["cut"], steps["prepare, cut"]
    return steps


def first_calls(peers: dict[str, Callable[..., Any]], shapes: list[str], note: Callable[..., None]) -> None:
    """Call each peer at the longest shape of each number of heads: what it chooses by timing, it chooses there."""
    longest = {SHAPES[s][2:]: s for s in sorted(shapes, key=lambda s: SHAPES[s][0])}
    for shape in longest.values():
        case = shaped(shape)
        for name, op in peers.items():
            began = time.time()
            try:
                for call in calls(case, op).values():
                    call()
                torch.cuda.synchronize()
            except Exception as e:  # told here, and again where its errors are looked for
                note(first_calls=name, shape=shape, failed=repr(e)[:300])
            else:
                note(first_calls=name, shape=shape, seconds=round(time.time() - began, 1))


def compile_peer(name: str, shape: str, rank: int, of: int) -> str:
    """Compile a peer's choices, as one of several processes."""
    try:
        case, op = shaped(shape), gated_delta_rule(name)
        for call in (*calls(case, op).values(), lambda: case.call(op, grad=True)):
            compile_choices(call, rank, of)
    except Exception as e:  # the peer is compiled again, and reported, where it is timed
        return f"{name} {shape}: {e!r}"[:300]
    return ""


def compile_peers(names: list[str], shapes: list[str], processes: int) -> list[str]:
    """Compile what the peers need at these shapes; what went wrong."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # of the processes below: nothing they measure is worth keeping
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        work = [(n, s, r, processes) for r in range(processes) for s in shapes for n in names if n == "fla" or not r]
        found = [pool.apply_async(compile_peer, w) for w in work]
        told = sorted({f.get() for f in found} - {""})
    os.environ["FLA_CACHE_RESULTS"] = "1"
    return told


def compile_apart(variants: list[str], arguments: argparse.Namespace) -> None:
    """Compile each variant in a process of its own, all at once: the cache is shared."""
    me = [sys.executable, __file__, "--compile", "--only", *arguments.only]
    processes = [subprocess.Popen([*me, "--variants", v], stdout=subprocess.DEVNULL) for v in variants]
    for process in processes:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="errors of each variant on a small ragged batch")
    parser.add_argument("--hard", action="store_true", help="errors on hard inputs, peers beside it")
    parser.add_argument("--replay", action="store_true", help="random layouts replayed in one bucket, bit for bit")
    parser.add_argument("--host", action="store_true", help="host time of an eager call")
    parser.add_argument("--time", action="store_true", help="times of forward and forward + backward")
    parser.add_argument("--parts", action="store_true", help="times of each launch")
    parser.add_argument("--compile", action="store_true", help="compile only, variants side by side")
    parser.add_argument("--variants", nargs="*", default=["shipped"], help="names, or all")
    parser.add_argument("--only", nargs="*", default=list(SHAPES), help="shapes")
    parser.add_argument("--cases", nargs="*", default=list(CHECKS), help="which checks")
    parser.add_argument("--peer", nargs="*", default=[], choices=["fla", "flashqla"])
    parser.add_argument("--warm-peer", type=int, default=0, help="processes that compile the peers' choices before")
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--seeds", type=int, default=0, help="mean errors over so many seeds, shapes and hard inputs")
    parser.add_argument("--json", default="", help="where to write every figure")
    a = parser.parse_args()
    names = list(VARIANTS) if a.variants == ["all"] else a.variants
    record: list[dict[str, Any]] = []
    began = time.time()

    def note(**row: Any) -> None:
        record.append(row)
        print(f"[{time.time() - began:5.0f}s]", " ".join(f"{k}={v}" for k, v in row.items()), flush=True)
        if a.json:
            Path(a.json).write_text(json.dumps(record, indent=1))

    if a.compile and len(names) > 1:
        compile_apart(names, a)
        return
    if a.compile:
        use(VARIANTS[names[0]])
        for shape in a.only:
            case = shaped(shape)
            whole(case, chunk_gated_delta_rule, shape, names[0], 1, lambda **row: None)
            for step in parts(case).values():
                step()
        return
    if a.warm_peer:
        for problem in compile_peers(a.peer, a.only, a.warm_peer):
            note(warm=problem)
    peers = {name: gated_delta_rule(name) for name in a.peer}
    if peers:
        first_calls(peers, a.only, note)
    arms = {"graphsafe": chunk_gated_delta_rule, **peers}
    if a.check:
        for label in a.cases:
            case = Case(*CHECKS[label][0], **CHECKS[label][1])
            ref = exact(case)
            for name in names:
                use(VARIANTS[name])
                backend._load.cache_clear()
                first = case.call(chunk_gated_delta_rule, grad=True)
                others = (case.call(chunk_gated_delta_rule, grad=True) for _ in range(99))
                same = 1 + sum(all(map(torch.equal, first, other)) for other in others)
                note(check=label, variant=name, runs_with_the_same_bits=same, errors=errors(first, ref))
    if a.hard:
        use({})
        backend._load.cache_clear()
        for hard in HARD:
            compared(Case(300, 3, 16, 32, ragged=True, hard=hard), arms, note, hard=hard)
    if a.seeds:
        use({})
        backend._load.cache_clear()
        over = functools.partial(seeds.compare, arms=arms, exact=exact, relative=relative, seeds=a.seeds, note=note)
        for hard in HARD | FAMILIES:
            over(lambda seed, h=hard: Case(300, 3, 16, 32, ragged=True, hard=h, seed=seed), hard=hard)
        for form in FORMS:
            over(lambda seed, f=form: Case(1024, 4, 16, 32, form=f, seed=seed), form=form)
        for shape in a.only:
            over(lambda seed, s=shape: shaped(s, seed), shape=shape)
    if a.replay:
        use({})
        backend._load.cache_clear()
        note(replay=replays(Case(1024, 8, 2, 4, ragged=True)))
        note(replay_cut=replays(Case(4096, 2, 1, 2, ragged=True), 10))
    if a.host:
        use({})
        backend._load.cache_clear()
        note(host_us=host_time(Case(128, 2, 2, 4)))
    for shape in a.only:
        if not (a.time or a.parts):
            break
        case = shaped(shape)
        for name in names:
            use(VARIANTS[name])
            backend._load.cache_clear()
            try:
                if a.parts:
                    steps = parts(case)
                    for part in TOUCHED.get(name, ("chain", "reverse")):
                        if part in steps:
                            note(shape=shape, variant=name, part=part, us=replay_times(steps[part], a.samples))
                if a.time and name in WHOLE and not (peers and name == "shipped"):
                    whole(case, chunk_gated_delta_rule, shape, name, a.samples, note)
            except Exception as e:  # a variant that cannot run is a figure too
                note(shape=shape, variant=name, failed=repr(e)[:300])
        if a.time and peers:
            use({})
            backend._load.cache_clear()
            beside(case, compared(case, arms, note, shape=shape), shape, a.samples, note)


class Born:
    """Collects what is allocated uninitialised, so that it can be filled with NaN before a replay."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __enter__(self) -> Born:
        self._originals = [(o, n, getattr(o, n)) for o, n in ((torch, "empty_like"), (torch.Tensor, "new_empty"))]
        for owner, name, original in self._originals:

            def kept(*args: Any, original: Callable[..., torch.Tensor] = original, **kwargs: Any) -> torch.Tensor:
                self.tensors.append(original(*args, **kwargs))
                return self.tensors[-1]

            setattr(owner, name, kept)
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    def poison(self) -> None:
        for t in self.tensors:
            if t.is_floating_point():
                t.detach().fill_(float("nan"))


def replays(case: Case, layouts: int = 50) -> str:
    """Capture forward and backward at the bucket of ``case``; replay random layouts with padding, outputs and every
    intermediate filled with NaN before."""
    tokens, sequences = case.q.shape[1], case.h0.shape[0]
    step = lambda: case.call(chunk_gated_delta_rule, grad=True)  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), Born() as born:
        out = step()
    wrong = []
    for seed in range(layouts):
        gen = torch.Generator().manual_seed(seed)
        live = int(torch.randint(0, tokens + 1, (1,), generator=gen))
        cuts = torch.sort(torch.randint(0, live + 1, (sequences - 1,), generator=gen))[0].tolist()
        case.cu.copy_(torch.tensor([0, *cuts, live]))
        fresh = Case(tokens, sequences, case.q.shape[2], case.v.shape[2], seed=seed)
        for name in ("q", "k", "v", "g", "beta", "do", "h0", "dht"):
            getattr(case, name).copy_(getattr(fresh, name))
        for t in (case.q, case.k, case.v, case.g, case.beta, case.do):
            t[:, live:] = float("nan")
        born.poison()
        graph.replay()
        eager = step()
        same = all(torch.equal(x, y) for x, y in zip(out, eager, strict=True))
        clear = all(bool((t[:, live:] == 0).all()) for t in (out[0], *out[2:7]))
        if not (same and clear):
            wrong.append(f"seed {seed}: same bits {same}, padding zero {clear}")
    return "; ".join(wrong) or f"{layouts} layouts: the same bits, padding zero"


def host_time(case: Case, calls: int = 200) -> dict[str, float]:
    """Microseconds of the host for an eager forward, and forward + backward, of a small batch."""
    ins = [t.detach().requires_grad_() for t in (case.q, case.k, case.v, case.g, case.beta)]

    def forward() -> Any:
        return chunk_gated_delta_rule(*ins[:3], g=ins[3], beta=ins[4], initial_state=case.h0, output_final_state=True,
                                      use_qk_l2norm_in_kernel=True, cu_seqlens=case.cu)  # fmt: skip

    def inference() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward()[0], ins, case.do)

    found = {}
    for name, step in (("forward", inference), ("forward+backward", both)):
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            step()
        found[name] = round((time.perf_counter() - began) / calls * 1e6, 1)
        torch.cuda.synchronize()
    return found


def calls(case: Case, op: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """The forward without gradients, and forward and backward, that are timed."""
    ins = [t.detach().requires_grad_() for t in (case.q, case.k, case.v, case.g, case.beta)]

    def forward() -> Any:
        return op(*ins[:3], g=ins[3], beta=ins[4], initial_state=case.h0, output_final_state=True,
                  use_qk_l2norm_in_kernel=True, cu_seqlens=case.cu)  # fmt: skip

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    def both() -> None:
        for t in ins:
            t.grad = None
        forward()[0].backward(case.do)

    return {"forward": inference, "forward+backward": both}


def whole(case: Case, op: Callable[..., Any], shape: str, name: str, samples: int, note: Callable[..., None]) -> None:
    for what, step in calls(case, op).items():
        note(shape=shape, arm=name, what=what, us=replay_times(step, samples))


def beside(case: Case, arms: dict[str, Callable[..., Any]], shape: str, samples: int, note: Any) -> None:
    """Time the arms in turn, and note this project's time over each peer's."""
    steps = {name: calls(case, op) for name, op in arms.items()}
    for what in ("forward", "forward+backward"):
        times = race({name: found[what] for name, found in steps.items()}, samples)
        for name, us in times.items():
            note(shape=shape, arm=name, what=what, us=us)
        own = times.pop("graphsafe")
        ratios = {name: "{:.3f} idle, {:.3f} queued".format(*(o / t for o, t in zip(own, us, strict=True)))
                  for name, us in times.items()}  # fmt: skip
        note(shape=shape, what=what, ratio=ratios)


if __name__ == "__main__":
    main()
