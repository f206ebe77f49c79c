"""Whole layers on kernels: equal to the reference, packed equal to separate, indifferent to padding, captured."""

from __future__ import annotations

import pytest
import torch

from graphsafe_kernels import backend
from graphsafe_kernels.backend import reference_only
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention, LayerState
from graphsafe_kernels.tables import build_tables

HIDDEN, PADDING = 32, 12
LENGTHS = [5, 0, 23]
OTHERS = ([0, 0, 0], [40, 0, 0], [1, 35, 3])
LAYERS = {
    "gdn": (GatedDeltaNet, {"num_heads": 1, "expand_v": 1}),
    "kda": (KimiDeltaAttention, {"num_heads": 1, "safe_gate": True, "lower_bound": -5.0}),
}
each_kind = pytest.mark.parametrize("kind", LAYERS)
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
"""Relative RMS between two ways to the same numbers; a GPU's products round to tf32 at most."""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """All kernels, whether or not they serve by default."""
    for operator in ("chunk_gated_delta_rule", "chunk_kda"):
        monkeypatch.delitem(backend.DEVICES, operator, raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


class Batch:
    """A layer, a packed batch with padding behind it, its states, and the gradients that arrive."""

    def __init__(self, kind, device, fill=float("nan")):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        # small in the interpreter; on a device what models use there
        small = device.type == "cpu"
        self.dtype, self.chunk_size = (torch.float32, 32) if small else (torch.bfloat16, 64)
        make, options = LAYERS[kind]
        torch.manual_seed(0)
        self.layer = make(hidden_size=HIDDEN, head_dim=16 if small else 128, **options).to(device, self.dtype)
        shape = (1, sum(LENGTHS) + PADDING, HIDDEN)
        self.x, self.dy = randn(*shape).to(self.dtype), randn(*shape).to(self.dtype)
        for t in (self.x, self.dy):
            t[:, sum(LENGTHS) :] = fill
        zero = self.layer.zero_state(len(LENGTHS))
        self.state, self.dstate = (LayerState(*(0.3 * randn(*t.shape).to(t.dtype) for t in zero)) for _ in range(2))
        self.cu = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()

    def run(self, x=None, dy=None, state=None, dstate=None, **layout):
        """Output, new states and every gradient, by name."""
        x, dy = (self.x, self.dy) if x is None else (x, dy)
        state, dstate = (self.state, self.dstate) if state is None else (state, dstate)
        leaf, start = x.detach().requires_grad_(), LayerState(*(t.detach().requires_grad_() for t in state))
        y, _, new = self.layer(leaf, past_key_values=start, use_cache=True, use_graph=True, **layout)
        inputs = {"x": leaf, "recurrent": start[0], "conv": start[1], **dict(self.layer.named_parameters())}
        grads = torch.autograd.grad([y, *new], list(inputs.values()), [dy, *dstate])
        return {"y": y.detach(), "new recurrent": new[0].detach(), "new conv": new[1].detach(),
                **{f"d {name}": g for name, g in zip(inputs, grads, strict=True)}}

    def tables(self):
        return build_tables(self.cu, self.x.shape[1], self.chunk_size)

    def packed(self):
        return self.run(tables=self.tables())


def close(got, want, dtype):
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name].double()
        assert torch.isfinite(g).all(), name
        error = ((g - w.double()).square().mean().sqrt() / (w.double().square().mean().sqrt() + 1e-6)).item()
        assert error <= TOLERANCE[dtype], f"{name}: {error}"


@each_kind
def test_a_layer_on_kernels(device, kind):
    """One test, since a run costs seconds in the interpreter; every claim has its own assertion."""
    batch = Batch(kind, device)
    got = batch.packed()
    with reference_only():
        close(got, batch.packed(), batch.dtype)
    for name in ("y", "d x"):
        assert torch.count_nonzero(got[name][:, sum(LENGTHS) :]) == 0, name
    plain = Batch(kind, device, fill=0.0).packed()
    assert all(torch.equal(got[name], t) for name, t in plain.items()), "what padding holds changes a bit"

    # packed equals separate: outputs, states, and every gradient, those of parameters summed over the samples
    alone, start = [], 0
    for n, length in enumerate(LENGTHS):
        if length:  # a dense sequence has a token
            rows = slice(start, start + length)
            one = [LayerState(*(t[n : n + 1] for t in s)) for s in (batch.state, batch.dstate)]
            alone.append((n, batch.run(batch.x[:, rows], batch.dy[:, rows], *one)))
        start += length
    live, want = [n for n, _ in alone], {}
    for name, t in got.items():
        parts = [run[name] for _, run in alone]
        if name in ("y", "d x"):
            want[name], got[name] = torch.cat(parts, 1), t[:, : sum(LENGTHS)]
        elif name in ("new recurrent", "new conv", "d recurrent", "d conv"):
            want[name], got[name] = torch.cat(parts), t[live]
        else:
            want[name] = torch.stack(parts).sum(0)
    close(got, want, batch.dtype)


@each_kind
def test_replays_of_other_layouts_have_the_bits_of_eager(device, large, capture, kind):
    """On a device with the backward; in the interpreter, where the operators' own tests replay theirs, without."""
    batch = Batch(kind, device)

    def body():
        if large:
            return tuple(batch.packed().values())
        with torch.no_grad():
            return batch.layer(batch.x, past_key_values=batch.state, tables=batch.tables(), use_graph=True)[0]

    graph = capture(body)
    for lengths in OTHERS if large else OTHERS[2:]:
        live = sum(lengths)
        batch.cu.copy_(torch.tensor([0, *lengths], device=device).cumsum(0))
        for t in (batch.x, batch.dy):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(live)))
            t[:, live:] = float("nan")
        replayed = [t.clone() for t in graph.replay()]
        want = body()
        assert all(torch.equal(a, b) for a, b in zip(replayed, want, strict=True)), lengths
        assert all(torch.isfinite(t).all() for t in replayed), lengths
