"""The three operators in a graph: captured once, forward and backward, replayed over many layouts with new data.

For every layout: bitwise equal to eager on the same static memory, close to eager at the batch's own size, padding
exactly zero, and the same bits when all padding holds NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda

BUCKET = gs.Bucket(tokens=96, sequences=5, chunk_size=32)
LAYOUTS = 20
HEADS, VALUE_HEADS, KEY, VALUE, CHANNELS, TAPS = 2, 4, 6, 5, 7, 4


@dataclass(frozen=True)
class Case:
    """Operands by name: shape behind tokens or sequences, or a fixed shape; and the call."""

    tokens: dict[str, tuple[int, ...]]
    sequences: dict[str, tuple[int, ...]]
    fixed: dict[str, tuple[int, ...]]
    result: tuple[int, ...]

    def call(self, x, tables):
        raise NotImplementedError


def _graph(tables):
    return {
        "cu_seqlens": tables.cu_seqlens, "chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets,
        "use_graph": True, "max_num_seqs": tables.max_num_seqs, "output_final_state": True,
    }  # fmt: skip


class Gdn(Case):
    def call(self, x, tables):
        return chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], A_log=x["A_log"], dt_bias=x["dt_bias"],
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            chunk_size=BUCKET.chunk_size, **_graph(tables),
        )  # fmt: skip


class Kda(Case):
    def call(self, x, tables):
        return chunk_kda(
            x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], A_log=x["A_log"], dt_bias=x["dt_bias"],
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            lower_bound=-5.0, chunk_size=BUCKET.chunk_size, **_graph(tables),
        )  # fmt: skip


class Conv(Case):
    def call(self, x, tables):
        return causal_conv1d(
            x["x"], x["weight"], x["bias"], residual=x["residual"], initial_state=x["state"], activation="silu",
            chunk_size=BUCKET.chunk_size, **_graph(tables),
        )  # fmt: skip


_DELTA = {"q": (HEADS, KEY), "k": (HEADS, KEY), "v": (VALUE_HEADS, VALUE), "beta": (VALUE_HEADS,)}
_STATE = {"state": (VALUE_HEADS, KEY, VALUE)}
CASES = {
    "gdn": Gdn({**_DELTA, "g": (VALUE_HEADS,)}, _STATE, {"A_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,)},
               (VALUE_HEADS, VALUE)),
    "kda": Kda({**_DELTA, "g": (VALUE_HEADS, KEY)}, _STATE,
               {"A_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS * KEY,)}, (VALUE_HEADS, VALUE)),
    "conv": Conv({"x": (CHANNELS,), "residual": (CHANNELS,)}, {"state": (CHANNELS, TAPS)},
                 {"weight": (CHANNELS, TAPS), "bias": (CHANNELS,)}, (CHANNELS,)),
}  # fmt: skip


def forward_backward(case, x, upstream, state_upstream, tables):
    """(output, final state, gradients by name)"""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    output, state = case.call(leaves, tables)
    grads = torch.autograd.grad([output, state], list(leaves.values()), [upstream, state_upstream])
    return output.detach(), state.detach(), dict(zip(leaves, grads, strict=True))


class Captured:
    """A case in one arena and one graph; ``pad`` fills all rows that belong to nobody."""

    def __init__(self, case, runtime, dtype, pad):
        self.case, self.runtime = case, runtime
        self.arena = runtime.arena(BUCKET, canaries=True)
        for name, shape in case.tokens.items():
            self.arena.tokens(name, shape, dtype, pad=pad)
        self.arena.tokens("upstream", case.result, dtype, pad=pad)
        for name, shape in case.sequences.items():
            self.arena.sequences(name, shape, dtype)
        self.arena.sequences("state_upstream", case.sequences["state"], dtype)
        for name, shape in case.fixed.items():
            self.arena.tensor(name, shape, dtype)
        self.arena.cu_seqlens(torch.int32)
        self.operands = [*case.tokens, *case.sequences, *case.fixed]
        self.update(batch_of(case, [BUCKET.tokens], dtype, runtime.device, seed=0))
        runtime.warm_up(self.run)
        with runtime.capture() as graph:
            self.results = graph.outputs(self.run())
        self.graph = graph

    def update(self, batch):
        self.arena.update(batch)

    def run(self):
        arena = self.arena
        tables = self.runtime.tables(BUCKET).build(arena["cu_seqlens"])
        x = {name: arena[name] for name in self.operands}
        return forward_backward(self.case, x, arena["upstream"], arena["state_upstream"], tables)


def batch_of(case, lengths, dtype, device, seed):
    """A batch of the given lengths, drawn on the CPU so that every device sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    total, n = sum(lengths), len(lengths)
    batch = {name: draw(1, total, *shape) for name, shape in case.tokens.items()}
    batch["upstream"] = draw(1, total, *case.result)
    for name, shape in case.sequences.items():
        batch[name] = draw(n, *shape)
    batch["state_upstream"] = draw(n, *case.sequences["state"])
    for name, shape in case.fixed.items():
        batch[name] = draw(*shape)
    batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return batch


@pytest.fixture
def dtype(runtime):
    """fp64 where the operators have it: the reference on a CPU."""
    interpreted = __import__("os").environ.get("TRITON_INTERPRET") == "1"
    return torch.float64 if runtime.device.type == "cpu" and not interpreted else torch.float32


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_eager_over_random_layouts(runtime, dtype, name):
    case = CASES[name]
    zeros, nans = (Captured(case, runtime, dtype, pad) for pad in (0.0, math.nan))
    tolerance = 1e-10 if dtype is torch.float64 else 1e-3
    for seed in range(LAYOUTS):
        lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
        batch = batch_of(case, lengths, dtype, runtime.device, seed + 1)
        label = f"{name}, layout {lengths}, seed {seed + 1}"
        for held in (zeros, nans):
            held.update(batch)
            held.graph.poison()
            held.graph.replay()
            runtime.synchronize()
        eager = nans.run()
        assert not differences(nans.results, eager, label), differences(nans.results, eager, label)
        assert not differences(nans.results, zeros.results, f"{label}, NaN padding")
        check_padding(case, zeros.results, lengths)
        check_live(case, runtime, zeros.results, batch, lengths, tolerance, label)
    for held in (zeros, nans):
        held.arena.check_canaries()
        assert held.graph.launches > 0


def check_padding(case, results, lengths):
    output, _, grads = results
    total, n = sum(lengths), len(lengths)
    for t in (output, *(grads[name] for name in case.tokens)):
        assert torch.equal(t[:, total:], torch.zeros_like(t[:, total:]))
    assert torch.isfinite(grads["state"][:n]).all()


def check_live(case, runtime, results, batch, lengths, tolerance, label):
    """Against the operator at the batch's own size."""
    output, state, grads = results
    total, n = sum(lengths), len(lengths)
    live = gs.Bucket(max(total, 1), n, BUCKET.chunk_size)
    tables = runtime.tables(live).build(batch["cu_seqlens"])
    x = {k: batch[k] for k in (*case.tokens, *case.sequences, *case.fixed)}
    if total == 0:
        assert torch.equal(state[:n], batch["state"])
        return
    want = forward_backward(case, x, batch["upstream"], batch["state_upstream"], tables)
    pairs = [("output", output[:, :total], want[0]), ("state", state[:n], want[1])]
    for name, t in grads.items():
        cut = t[:, :total] if name in case.tokens else t[:n] if name in case.sequences else t
        pairs.append((f"d{name}", cut, want[2][name]))
    for name, got, expected in pairs:
        worst = (got - expected).abs().max().item() if got.numel() else 0.0
        scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
        assert worst <= tolerance * scale, f"{label}: {name} differs from eager-live by {worst}"
