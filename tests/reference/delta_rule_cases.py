"""Cases of both delta rules: random operands, running an operator forward and backward, and comparing results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from graphsafe_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda, fused_recurrent_kda

CHUNK = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
RECURRENT = {"gdn": fused_recurrent_gated_delta_rule, "kda": fused_recurrent_kda}
CHUNK_SIZES = {"gdn": (16, 32, 64), "kda": (32, 64)}
GATES = {
    "given": {},
    "in kernel": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True},
}
TOKEN_OPERANDS = ("q", "k", "v", "g", "beta")
RULES = ("gdn", "kda")


@dataclass(frozen=True)
class Case:
    """A call: sizes, and options as the chunk operator takes them. ``lengths`` None is a dense batch."""

    rule: str
    batch: int = 1
    tokens: int = 0
    lengths: tuple[int, ...] | None = None
    heads: int = 1
    group: int = 1
    key: int = 8
    value: int = 8
    gate: str = "mixed"
    state: bool = True
    bias: bool = True
    A_log: bool = True
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.tokens if self.lengths is None else sum(self.lengths)

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

def packed_case(rule: str, options=None, lengths=(0, 40, 0, 70, 3, 0), **sizes) -> Case:
    """A packed case with empty sequences in front, between and behind, and heads that are shared."""
    sizes = {"heads": 2, "group": 2, "key": 9, "value": 7, "gate": "usual", "seed": 13, **sizes}
    return Case(rule, lengths=lengths, options=dict(options or {}), **sizes)


def boundaries(lengths, dtype=torch.int64):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def _given_gate(kind: str, shape: tuple[int, ...], uniform) -> torch.Tensor:
    u = uniform(shape)
    if kind == "none":
        return torch.zeros(shape, dtype=u.dtype)
    if kind == "mixed":  # most tokens keep, some forget everything
        choice = uniform(shape)
        return torch.where(choice < 0.1, -1000 * u, torch.where(choice < 0.5, -u, -0.01 * u))
    return -{"weak": 0.05, "usual": 1.0, "strong": 1000.0}[kind] * u


def make(case: Case, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """The tensors of a call, by argument name."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    value_heads, rows = case.heads * case.group, (case.batch if case.lengths is None else 1, case.rows)
    in_kernel = case.options.get("use_gate_in_kernel", False)
    gate_shape = (*rows, value_heads) if case.rule == "gdn" else (*rows, value_heads, case.key)
    # without l2norm k is kept near unit length, as the delta rule grows without bound otherwise
    width = case.key**-0.5
    tensors = {
        "q": normal(*rows, case.heads, case.key),
        "k": normal(*rows, case.heads, case.key) * width,
        "v": normal(*rows, value_heads, case.value),
        "g": 4 * normal(*gate_shape) if in_kernel else _given_gate(case.gate, gate_shape, uniform),
        "beta": normal(*rows, value_heads)
        if case.options.get("use_beta_sigmoid_in_kernel")
        else uniform((*rows, value_heads)),
    }
    if in_kernel and (case.A_log or case.rule == "gdn"):
        spread = {"none": 0.0, "weak": 0.3, "usual": 1.0, "mixed": 3.0, "strong": 6.0}[case.gate]
        tensors["A_log"] = spread * (2 * uniform((value_heads,)) - 1)
    if in_kernel and case.bias:
        tensors["dt_bias"] = normal(value_heads * (1 if case.rule == "gdn" else case.key))
    if case.state:
        shape = (case.value, case.key) if case.options.get("state_v_first") else (case.key, case.value)
        tensors["initial_state"] = normal(case.sequences, value_heads, *shape)
    states = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(dtype if name in TOKEN_OPERANDS else states) for name, t in tensors.items()}


def output_gradients(case: Case, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of o and of the final state."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    batch, heads = case.batch if case.lengths is None else 1, case.heads * case.group
    shape = (case.value, case.key) if case.options.get("state_v_first") else (case.key, case.value)
    do = torch.randn((batch, case.rows, heads, case.value), generator=generator, dtype=torch.float64)
    dht = torch.randn((case.sequences, heads, *shape), generator=generator, dtype=torch.float64)
    return do.to(dtype), dht.to(torch.float64 if dtype == torch.float64 else torch.float32)


def run(operator, tensors, do, dht, **options) -> dict[str, torch.Tensor]:
    """Outputs ``o``, ``final_state`` and the gradient ``d<name>`` of every operand."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    o, final = operator(**leaves, output_final_state=True, **options)
    # without a token and without an initial state the recurrence's final state is a constant
    outputs, incoming = zip(*((y, dy) for y, dy in ((o, do), (final, dht)) if y.requires_grad), strict=True)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    return {"o": o.detach(), "final_state": final.detach(),
            **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def run_case(case: Case, operator, tensors=None, dtype=torch.float64, **extra) -> dict[str, torch.Tensor]:
    """Run a case by the chunk or the recurrent operator, leaving out the options the latter does not have."""
    tensors = make(case, dtype) if tensors is None else tensors
    options = {**case.options, **extra}
    if operator in RECURRENT.values():
        for name in ("chunk_size", "safe_gate", "disable_recompute"):
            options.pop(name, None)
    if case.lengths is not None:
        options.setdefault("cu_seqlens", boundaries(case.lengths))
    return run(operator, tensors, *output_gradients(case, dtype), **options)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    """Every element within ``tolerance`` of the largest element of its tensor, or of 1; NaN never passes."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert got[name].shape == w.shape, name
        assert got[name].dtype == w.dtype, name
        if w.numel():
            off = (got[name] - w).abs().max().item()
            assert off <= tolerance * max(1.0, w.abs().max().item()), f"{name} is off by {off}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    """Equal element by element; NaN fails."""
    assert torch.equal(got, want), f"{name} differs by {(got.double() - want.double()).abs().max().item()}"


def assert_same_live(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], case: Case) -> None:
    """Live rows, sequences and parameters have the bits of ``want``; the rows behind are zero."""
    for name, w in want.items():
        rows = name == "o" or name.removeprefix("d") in TOKEN_OPERANDS
        count = case.rows if rows else case.sequences
        if name in ("dA_log", "ddt_bias"):
            assert_same_bits(got[name], w, name)
        elif rows:
            assert_same_bits(got[name][:, :count], w, name)
            assert not got[name][:, count:].any(), f"{name} is not zero behind the live rows"
        else:
            assert_same_bits(got[name][:count], w, name)


def appended(t: torch.Tensor, rows: int, value: float) -> torch.Tensor:
    """``[1, T, ...]`` with ``rows`` rows of ``value`` behind it."""
    return torch.cat([t, torch.full((1, rows, *t.shape[2:]), value, dtype=t.dtype)], 1)


def in_bucket(case: Case, tensors, more_rows: int, more_sequences: int, value: float):
    """A packed case inside a bucket: padding rows and states of ``value``; with gradients and ``cu_seqlens``."""
    do, dht = output_gradients(case, tensors["v"].dtype)
    padded = {name: appended(t, more_rows, value) if name in TOKEN_OPERANDS else t for name, t in tensors.items()}
    states = torch.full((more_sequences, *dht.shape[1:]), value, dtype=dht.dtype)
    if "initial_state" in padded:
        padded["initial_state"] = torch.cat([padded["initial_state"], states])
    cu_seqlens = boundaries(case.lengths + (0,) * more_sequences)
    return padded, appended(do, more_rows, value), torch.cat([dht, states]), cu_seqlens


@st.composite
def cases(draw, rule: str) -> Case:
    """Any call: mostly few tokens, some up to 300; empty sequences; every option in every valid combination."""
    size = draw(st.sampled_from(["small", "small", "small", "medium", "large"]))
    limit = {"small": 24, "medium": 90, "large": 300}[size]
    options: dict[str, Any] = {
        "chunk_size": draw(st.sampled_from(CHUNK_SIZES[rule])),
        "use_qk_l2norm_in_kernel": draw(st.booleans()),
        "state_v_first": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
    }
    if draw(st.booleans()):
        options["use_beta_sigmoid_in_kernel"] = True
        # eigenvalues down to -1 need keys of unit length
        options["allow_neg_eigval"] = options["use_qk_l2norm_in_kernel"] and draw(st.booleans())
    if draw(st.booleans()):
        options["use_gate_in_kernel"] = True
        if rule == "kda":
            options["lower_bound"] = draw(st.sampled_from([None, -5.0, -1.0, -20.0]))
    if rule == "kda":
        options["disable_recompute"] = draw(st.booleans())
        bound = options.get("lower_bound")
        if not options.get("use_gate_in_kernel") or (bound is not None and bound >= -5):
            options["safe_gate"] = draw(st.booleans())
    gates = ["none", "weak", "usual", "strong", "mixed"]
    if options.get("safe_gate") and not options.get("use_gate_in_kernel"):
        gates = ["none", "weak", "usual"]
    case = Case(
        rule,
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        key=draw(st.sampled_from([1, 3, 8, 20, 33])),
        value=draw(st.sampled_from([1, 5, 8, 20])),
        gate=draw(st.sampled_from(gates)),
        state=draw(st.booleans()),
        bias=draw(st.booleans()),
        A_log=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        options=options,
    )
    if draw(st.booleans()):
        sequences = draw(st.integers(1, 9))
        cuts = sorted(draw(st.lists(st.integers(0, limit), min_size=sequences, max_size=sequences)))
        return replace(case, lengths=tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False)))
    return replace(case, batch=draw(st.integers(1, 3)), tokens=draw(st.integers(0, limit)))
