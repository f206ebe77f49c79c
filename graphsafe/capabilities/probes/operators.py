"""Probes of this project's operators: each dtype, each option, the layers.

Requirements
------------
1. A row captures forward and backward once, replays it over several layouts with NaN in all padding, and holds each
   replay against eager (bit for bit), against zero (padding) and against the fp64 reference on the host (a bound by
   dtype).
2. Every parameter of a public operator is an operand or is covered by a row.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsafe.bucket import Bucket
from graphsafe.capabilities.probe import check, data, probe, replays
from graphsafe.verify import check_padding, verify_replay

__all__ = ["OPERATORS", "Operator", "Option"]

_BUCKET = Bucket(128, 4, 64)
_LAYOUTS = ([70, 3, 0, 20], [128], [0, 0, 0])
_HEADS, _VALUE_HEADS, _WIDTH = 1, 2, 32
_BOUNDS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_GRAPH = ("use_graph", "max_num_seqs", "cu_seqlens", "chunk_indices", "chunk_offsets")


@dataclass(frozen=True)
class Option:
    """A row: what is passed beyond the operands. ``operands``: optional ones that are passed too. ``covers``:
    parameters that it shows, those of ``options`` and ``operands`` besides. ``tables``: whether the bucket's tables
    are passed. ``packed``: whether there are boundaries. ``inference``: in inference mode, without a backward."""

    what: str
    options: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    tables: bool = True
    packed: bool = True
    backward: bool = True
    inference: bool = False

    def parameters(self) -> set[str]:
        return {*self.options, *self.operands, *self.covers}


@dataclass(frozen=True)
class Operator:
    """A public operator. Shapes behind the tokens (``tokens``), the sequences (``sequences``), or whole (``fixed``);
    ``required``: operands of every call."""

    module: str
    tokens: Mapping[str, tuple[int, ...]]
    sequences: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, tuple[int, ...]]
    required: tuple[str, ...]
    rows: Mapping[str, Option]


_STATE = (_VALUE_HEADS, _WIDTH, _WIDTH)
_DELTA = {"q": (_HEADS, _WIDTH), "k": (_HEADS, _WIDTH), "v": (_VALUE_HEADS, _WIDTH), "beta": (_VALUE_HEADS,)}
_GATE = {"use_gate_in_kernel": True}
_DTYPES = {str(d).removeprefix("torch."): Option(f"operands of {d}", dtype=d) for d in _BOUNDS}
_COMMON = {
    "forward": Option("forward alone", backward=False),
    "packed": Option("forward and backward, packed, with the bucket's tables", covers=_GRAPH),
    "own-tables": Option("packed, tables built by the operator", tables=False),
    "dense": Option("a dense batch", packed=False, tables=False),
    **_DTYPES,
    "initial_state": Option("states handed in", operands=("initial_state",)),
    "provider": Option("an implementation chosen by name", {"provider": "reference"}),
    "cu_seqlens_cpu": Option("boundaries on the host", {"cu_seqlens_cpu": torch.tensor([0, 1])}),
    "cp_context": Option("context parallelism", {"cp_context": object()}),
}
_DELTA_ROWS = {
    **_COMMON,
    "scale": Option("a scale of the caller's", {"scale": 0.25}),
    "output_final_state": Option("states handed out", {"output_final_state": True}),
    "use_qk_l2norm_in_kernel": Option("q and k normalised", {"use_qk_l2norm_in_kernel": True}),
    "use_beta_sigmoid_in_kernel": Option("beta through a sigmoid", {"use_beta_sigmoid_in_kernel": True}),
    "allow_neg_eigval": Option(
        "beta up to 2", {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True}
    ),
    "state_v_first": Option(
        "states [N, HV, V, K]", {"state_v_first": True, "output_final_state": True}, ("initial_state",)
    ),
    "use_gate_in_kernel": Option("the gate made in the operator", _GATE, ("A_log",)),
    "dt_bias": Option("the gate with a bias", _GATE, ("A_log", "dt_bias")),
    "chunk_size-32": Option("chunks of 32", {"chunk_size": 32}, tables=False),
    "chunk_size-64": Option("chunks of 64", {"chunk_size": 64}),
}
_KDA_ROWS = {
    **_DELTA_ROWS,
    "A_log-omitted": Option("the gate with a unit scale", _GATE),
    "lower_bound": Option("a bounded gate", {**_GATE, "lower_bound": -5.0}, ("A_log",)),
    "safe_gate": Option("a gate known to be bounded", {**_GATE, "lower_bound": -5.0, "safe_gate": True}, ("A_log",)),
    "disable_recompute": Option("intermediates kept for the backward", {"disable_recompute": True}),
    "return_intermediate_states": Option(
        "the state of every chunk, in inference mode", {"return_intermediate_states": True}, inference=True
    ),
}
_CHANNELS, _TAPS = 48, 4

OPERATORS: dict[str, Operator] = {
    "chunk_gated_delta_rule": Operator(
        "graphsafe_kernels.gdn", {**_DELTA, "g": (_VALUE_HEADS,)}, {"initial_state": _STATE},
        {"A_log": (_VALUE_HEADS,), "dt_bias": (_VALUE_HEADS,)}, ("q", "k", "v", "g", "beta"),
        {**_DELTA_ROWS, "chunk_size-16": Option("chunks of 16", {"chunk_size": 16}, tables=False)},
    ),
    "chunk_kda": Operator(
        "graphsafe_kernels.kda", {**_DELTA, "g": (_VALUE_HEADS, _WIDTH)}, {"initial_state": _STATE},
        {"A_log": (_VALUE_HEADS,), "dt_bias": (_VALUE_HEADS * _WIDTH,)}, ("q", "k", "v", "g", "beta"), _KDA_ROWS,
    ),
    "causal_conv1d": Operator(
        "graphsafe_kernels.conv", {"x": (_CHANNELS,), "residual": (_CHANNELS,)},
        {"initial_state": (_CHANNELS, _TAPS)}, {"weight": (_CHANNELS, _TAPS), "bias": (_CHANNELS,)}, ("x", "weight"),
        {
            **_COMMON,
            "output_final_state": Option("states handed out", {"output_final_state": True}),
            "bias": Option("a bias", operands=("bias",)),
            "residual": Option("a residual", operands=("residual",)),
            "activation": Option("silu", {"activation": "silu"}),
            "chunk_size": Option("tables of chunks of 32", {"chunk_size": 32}, tables=False),
            "backend": Option("another library's backend", {"backend": "cuda"}),
        },
    ),
}  # fmt: skip


class _Case:
    """One row's memory: operands in an arena, NaN in their padding, upstream gradients of the results."""

    def __init__(self, rt: Any, name: str, option: Option) -> None:
        self.rt, self.name, self.option = rt, name, option
        self.operator = OPERATORS[name]
        self.function = getattr(importlib.import_module(self.operator.module), name)
        self.names = [*self.operator.required, *option.operands]
        self.arena = rt.arena(_BUCKET, canaries=True)
        for operand in self.names:
            if operand in self.operator.tokens:
                self.arena.tokens(operand, self.operator.tokens[operand], option.dtype, pad=math.nan)
            elif operand in self.operator.sequences:
                self.arena.sequences(operand, self.operator.sequences[operand], self._state_dtype)
            else:
                self.arena.tensor(operand, self.operator.fixed[operand], option.dtype)
        self.arena.cu_seqlens()
        self.lengths: list[int] = []

    @property
    def _state_dtype(self) -> torch.dtype:
        if self.name == "causal_conv1d":
            return self.option.dtype
        return torch.float64 if self.option.dtype is torch.float64 else torch.float32

    def values(self, lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
        """New data on the host, in fp32, for a batch of these lengths."""
        host = _Host()
        found = {}
        for i, operand in enumerate(self.names):
            o = self.operator
            front = (1, sum(lengths)) if operand in o.tokens else (len(lengths),) if operand in o.sequences else ()
            shape = (*front, *{**o.tokens, **o.sequences, **o.fixed}[operand])
            t = data(host, *shape, seed=100 * seed + i)
            if operand in ("q", "k"):
                t = torch.nn.functional.normalize(t, dim=-1)
            if operand == "g" and not self.option.options.get("use_gate_in_kernel"):
                t = -t.abs() / 8
            if operand == "beta" and not self.option.options.get("use_beta_sigmoid_in_kernel"):
                t = t.sigmoid()
            found[operand] = t.to(self.arena[operand].dtype)
        return found

    def update(self, lengths: list[int], seed: int) -> None:
        if not self.option.packed:
            lengths = [_BUCKET.tokens]
        self.lengths, self.host = lengths, self.values(lengths, seed)
        sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.arena.update({**self.host, "cu_seqlens": torch.tensor(sums, dtype=torch.int32)})

    def call(self, operands: Mapping[str, torch.Tensor], cu: torch.Tensor, bucket: Bucket, tables: Any) -> list[Any]:
        """Results, then the gradients of all operands."""
        options = dict(self.option.options)
        if self.option.packed:
            options["cu_seqlens"] = cu
        if tables is not None:
            built = tables.build(cu)
            options |= {"chunk_indices": built.chunk_indices, "chunk_offsets": built.chunk_offsets}
        options |= {"use_graph": True, "max_num_seqs": bucket.sequences if self.option.packed else 1}
        if not self.option.packed and "initial_state" in operands:
            operands = {**operands, "initial_state": operands["initial_state"][:1]}
        if self.option.inference or not self.option.backward:
            with torch.inference_mode() if self.option.inference else contextlib.nullcontext():
                return [t for t in self.function(**operands, **options) if t is not None]
        leaves = {name: t.detach().requires_grad_() for name, t in operands.items()}
        results = [t for t in self.function(**leaves, **options) if t is not None]
        upstream = [_ramp(t) for t in results]
        grads = torch.autograd.grad(results, list(leaves.values()), upstream)
        return [*(t.detach() for t in results), *grads]

    def body(self) -> list[Any]:
        tables = self.rt.tables(_BUCKET) if self.option.tables else None
        return self.call({n: self.arena[n] for n in self.names}, self.arena["cu_seqlens"], _BUCKET, tables)

    def reference(self) -> list[Any]:
        """The same batch in fp64 at its own size, by the reference on the host."""
        from graphsafe_kernels.backend import reference_only

        live = Bucket(max(sum(self.lengths), 1), len(self.lengths), _BUCKET.chunk_size)
        sums = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        with reference_only():
            operands = {name: t.double() for name, t in self.host.items()}
            return self.call(operands, torch.tensor(sums), live, None)

    def error(self, got: list[Any]) -> float:
        """The largest error of a result, relative to the reference's largest element; padding rows must be zero."""
        worst = 0.0
        total = sum(self.lengths)
        for a, b in zip(got, self.reference(), strict=True):
            a = a.detach().double().cpu()
            if a.dim() >= 2 and a.shape[:2] == (1, _BUCKET.tokens):
                check_padding("a result", a, total)
                a = a[:, :total]
            if a.shape != b.shape:  # states of unused sequences, slots of unused chunks
                a = a[tuple(slice(0, n) for n in b.shape)]
            if b.numel():
                worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)))
            check(bool(a.isfinite().all()), "a result is not finite")
        return worst


class _Host:
    device = torch.device("cpu")


def _ramp(t: torch.Tensor) -> torch.Tensor:
    """An upstream gradient that does not depend on the result's padding: it differs from channel to channel only."""
    return torch.linspace(-1, 1, t.shape[-1], device=t.device).to(t.dtype).expand_as(t)


def _row(name: str, option: Option) -> Callable[[Any], str | None]:
    def run(rt: Any) -> str:
        from graphsafe_kernels.backend import implementation

        case = _Case(rt, name, option)
        case.update(_LAYOUTS[0], 0)
        rt.warm_up(case.body)
        with rt.capture() as graph:
            result = graph.outputs(case.body())
        worst = 0.0
        for seed, lengths in enumerate(_LAYOUTS):
            case.update(lengths, seed)
            verify_replay(rt, graph, case.body, result)
            graph.replay()
            rt.synchronize()
            worst = max(worst, case.error(result) if sum(lengths) else 0.0)
        case.arena.check_canaries()
        bound = _BOUNDS[option.dtype]
        check(worst <= bound, f"an error of {worst:.1e} against the fp64 reference; {bound:.0e} is allowed")
        served = implementation(name, rt.device)
        return f"{graph.launches} launches, served by the {'kernels' if served == 'triton' else 'reference'}, " + (
            f"error {worst:.0e}"
        )

    return run


for _name, _operator in OPERATORS.items():
    for _row_name, _option in _operator.rows.items():
        probe(f"{_name}.{_row_name}", _option.what)(_row(_name, _option))


@probe("operators.fused_kda_gate", "the gate by itself, forward and backward")
def _gate(rt: Any) -> None:
    from graphsafe_kernels.kda import fused_kda_gate

    g, a = data(rt, 1, 16, 2, 8).requires_grad_(), data(rt, 2, seed=1).requires_grad_()

    def body(lower_bound: float | None) -> Any:
        return torch.autograd.grad(fused_kda_gate(g, a, lower_bound=lower_bound).sum(), [g, a])

    for bound in (None, -5.0):
        replays(rt, functools.partial(body, bound))


@probe("operators.rms_norm_gated", "the gated norm, forward and backward")
def _norm(rt: Any) -> None:
    from graphsafe_kernels.norm.op import rms_norm_gated

    x, g = (data(rt, 1, 16, 2, 8, seed=seed).requires_grad_() for seed in range(2))
    w = data(rt, 8)

    def body(activation: str) -> Any:
        return torch.autograd.grad(rms_norm_gated(x, g, w, activation=activation).square().sum(), [x, g])

    for activation in ("swish", "sigmoid"):
        replays(rt, functools.partial(body, activation))


def _recurrent(module: str, name: str, gate: tuple[int, ...]) -> Callable[[Any], None]:
    def run(rt: Any) -> None:
        function = getattr(importlib.import_module(module), name)
        q, k, v = (data(rt, 1, 8, 2, 8, seed=i) for i in range(3))
        g, beta = -data(rt, 1, 8, 2, *gate, seed=3).abs(), data(rt, 1, 8, 2, seed=4).sigmoid()
        replays(rt, lambda: function(q, k, v, g=g, beta=beta, use_graph=True))

    return run


for _name, _module, _gate_shape in (
    ("fused_recurrent_gated_delta_rule", "graphsafe_kernels.gdn", ()),
    ("fused_recurrent_kda", "graphsafe_kernels.kda", (8,)),
):
    probe(f"operators.{_name}", "token by token, for decoding")(_recurrent(_module, _name, _gate_shape))


def _layer(name: str, training: bool) -> Callable[[Any], str]:
    def run(rt: Any) -> str:
        from graphsafe.graphed import graphed
        from graphsafe.train import TrainStep

        torch.manual_seed(0)
        layer = getattr(importlib.import_module("graphsafe_kernels.layers"), name)(
            hidden_size=32, num_heads=2, head_dim=16
        ).to(rt.device)

        def forward(x: Any, cu_seqlens: Any, tables: Any) -> Any:
            return layer(x, cu_seqlens=cu_seqlens, tables=tables, use_graph=True)[0]

        def loss_of(model: Any, batch: Any, tables: Any) -> torch.Tensor:
            y = model(batch["x"], cu_seqlens=batch["cu_seqlens"], tables=tables, use_graph=True)[0]
            loss: torch.Tensor = y.square().sum()
            return loss

        def batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)]).to(rt.device)
            return data(rt, 1, sum(lengths), 32, seed=len(lengths)), cu

        layouts = [lengths for lengths in _LAYOUTS if sum(lengths)]
        if training:
            sgd = torch.optim.SGD(layer.parameters(), lr=0.01)
            step = TrainStep(layer, loss_of, sgd, runtime=rt, bucket=_BUCKET)
            for x, cu in map(batch, layouts):
                step({"x": x, "cu_seqlens": cu})
                step.verify({"x": x, "cu_seqlens": cu})
            return f"{step.stats.graphs[0].launches} launches a step"
        call = graphed(forward, runtime=rt, buckets=[_BUCKET])
        for x, cu in map(batch, layouts):
            call(x, cu)
            call.verify(x, cu)
        return f"{call.stats.graphs[0].launches} launches"

    return run


for _name in ("GatedDeltaNet", "KimiDeltaAttention"):
    probe(f"layers.{_name}", "the whole layer, forward")(_layer(_name, False))
    probe(f"layers.{_name}-training", "the whole layer: forward, backward and SGD")(_layer(_name, True))
